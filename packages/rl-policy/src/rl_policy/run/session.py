"""A run in progress: its inputs, files and devices, and the policies that it opens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from rl_policy.config import RunConfig, Settings
from rl_policy.data.tiny_model import build_tiny_model, tiny_model_config
from rl_policy.policy import Policy
from rl_policy.ray.cluster import SESSION, RayVirtualCluster
from rl_policy.run.checkpoints import CheckpointManager, RunState
from rl_policy.run.directory import RunDirectory, sync_directory
from rl_policy.run.inputs import RunInputs
from rl_policy.run.metrics import MetricsLog
from rl_policy.run.progress import RunDisplay

InputsT = TypeVar("InputsT", bound=RunInputs, covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Session(Generic[InputsT]):
    """A run in progress.

    Attributes:
        inputs: What the recipe prepared.
        directory: The files.
        cluster: The devices of its policies.
        display: Shows the progress.
    """

    inputs: InputsT
    directory: RunDirectory
    cluster: RayVirtualCluster
    display: RunDisplay

    @property
    def config(self) -> RunConfig:
        """The configuration."""
        return self.inputs.config

    def checkpoints(self) -> CheckpointManager:
        """Return the checkpoints of the run's directory, less what an interruption left behind."""
        keep_last = self.config.checkpoint.keep_last
        manager = CheckpointManager(self.directory.checkpoints, keep_last=keep_last)
        manager.remove_partial()
        return manager

    def open_log(self, start: RunState) -> MetricsLog:
        """Return the log of the run's directory, with the measurements up to a state.

        Args:
            start: The state that the run starts from. A new run drops what an earlier start left
                that was interrupted before its first checkpoint.
        """
        resumed_step = start.step
        if start.is_new:
            resumed_step = -1 if self.directory.metrics.exists() else None
        return MetricsLog(
            self.directory.metrics, self.directory.tensorboard, resumed_step=resumed_step
        )


AnySession: TypeAlias = Session[RunInputs]
"""A run of whatever recipe."""


@contextmanager
def open_cluster(config: RunConfig) -> Iterator[RayVirtualCluster]:
    """Yield the devices of the policy and release them; colocated engines share them."""
    shares = config.has_engines and config.is_colocated
    cluster = RayVirtualCluster(
        **config.cluster.model_dump(), max_colocated_worker_groups=2 if shares else 1
    )
    apart = config.engine_bundles if config.has_engines and not shares else []
    # A local Ray is started with the logical CPUs that its first user asks for: a placement group
    # of more bundles would never be ready.
    num_cpus = sum(config.cluster.bundle_ct_per_node_list) * (2 if shares else 1) + sum(apart)
    SESSION.enter(id(config), num_cpus=num_cpus)
    try:
        yield cluster
    finally:
        cluster.shutdown()
        SESSION.leave(id(config))


@contextmanager
def open_policy(
    session: AnySession, policy: Settings, *, model: str, has_reference: bool
) -> Iterator[tuple[Policy, RunState]]:
    """Yield a policy with an optimizer, and the state of the run; end its processes afterwards.

    Both are those of the newest checkpoint of the run's directory, if there is one.

    Args:
        session: The run.
        policy: The section `policy` of the configuration.
        model: Name or directory of the model to start from, which is the reference too.
        has_reference: Whether to keep the reference.
    """
    checkpoint = session.checkpoints().latest()
    config: Any = {**policy, "model_name": model}  # a PolicyConfig, and third parties' sections
    opened = Policy(
        session.cluster,
        config,
        session.inputs.tokenizer,
        weights_path=None if checkpoint is None else checkpoint.weights,
        optimizer_path=None if checkpoint is None else checkpoint.optimizer,
        init_reference_model=has_reference,
    )
    try:
        yield opened, RunState() if checkpoint is None else checkpoint.state
    finally:
        opened.shutdown()


def base_model(session: AnySession) -> str:
    """Return name or directory of the model that the run starts from; the tiny one is built now."""
    config = session.config
    if not config.has_builtin_model:
        return config.policy["model_name"]
    shape = tiny_model_config(
        config.tiny_model, max_sequence_length=config.policy["max_total_sequence_length"]
    )

    def build(path: Path) -> None:
        build_tiny_model(path, config=shape, seed=config.seed)

    path = session.directory.tiny_model
    if not path.is_dir():
        write_directory(path, build)
    return str(path)


def save_final(session: AnySession, policy: Policy) -> None:
    """Write model and tokenizer as a Hugging Face directory, and adapters into another."""

    def write(path: Path) -> None:
        policy.save_hf_checkpoint(path)
        session.inputs.tokenizer.save_pretrained(path)

    if policy.has_adapters:
        write_directory(session.directory.adapters, policy.save_adapters)
    write_directory(session.directory.final, write)


def write_directory(path: Path, write: Callable[[Path], None]) -> None:
    """Write a directory under another name and rename it, replacing what is there."""
    partial = path.with_name(path.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    write(partial)
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    sync_directory(path.parent)
