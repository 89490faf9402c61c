"""A run while it is going on: its inputs, its files, its devices, and the policies it opens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_policy.config import RunConfig
from rl_policy.policy import Policy
from rl_policy.ray.cluster import RayVirtualCluster
from rl_policy.ray.session import SESSION
from rl_policy.recipes.checkpoints import Checkpoint, CheckpointManager
from rl_policy.recipes.inputs import RunInputs
from rl_policy.recipes.metrics import MetricsLog
from rl_policy.recipes.progress import RunDisplay
from rl_policy.recipes.run_directory import RunDirectory, sync_directory
from rl_policy.recipes.tiny_model import build_tiny_model, tiny_model_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A run that is going on."""

    inputs: RunInputs
    directory: RunDirectory
    cluster: RayVirtualCluster
    display: RunDisplay

    @property
    def config(self) -> RunConfig:
        """The configuration."""
        return self.inputs.config

    def checkpoints(self) -> CheckpointManager:
        """Return the checkpoints of the run's directory, without what an interruption left."""
        keep_last = self.config.checkpoint.keep_last
        manager = CheckpointManager(self.directory.checkpoints, keep_last=keep_last)
        manager.remove_partial()
        return manager

    def open_log(self, resumed_step: int | None) -> MetricsLog:
        """Return the measurements of the run's directory, up to the step it goes on from.

        Args:
            resumed_step: That step; None drops what an interrupted start has left.
        """
        if resumed_step is None and self.directory.metrics.exists():
            resumed_step = -1
        return MetricsLog(
            self.directory.metrics, self.directory.tensorboard, resumed_step=resumed_step
        )


@contextmanager
def open_cluster(config: RunConfig) -> Iterator[RayVirtualCluster]:
    """Give the devices of the policy, and take them back; leave room for engines beside them."""
    shares = config.has_engines and config.is_colocated
    cluster = RayVirtualCluster(
        **config.cluster.model_dump(), max_colocated_worker_groups=2 if shares else 1
    )
    apart = config.engine_bundles if config.has_engines and not shares else []
    # A Ray that is started here has the logical CPUs that its first user asks for.
    num_cpus = sum(config.cluster.bundle_ct_per_node_list) * (2 if shares else 1) + sum(apart)
    SESSION.enter(id(config), num_cpus=num_cpus)
    try:
        yield cluster
    finally:
        cluster.shutdown()
        SESSION.leave(id(config))


@contextmanager
def open_policy(
    session: Session,
    policy: Mapping[str, Any],
    *,
    model: str,
    has_reference: bool,
    checkpoint: Checkpoint | None,
) -> Iterator[Policy]:
    """Give a policy with an optimizer, and end its processes.

    Args:
        session: The run.
        policy: The section `policy` of the configuration.
        model: Name or directory of the model to start from, which is the reference too.
        has_reference: Whether to keep the reference.
        checkpoint: What to go on from.
    """
    config: Any = {**policy, "model_name": model}
    opened = Policy(
        session.cluster,
        config,
        session.inputs.tokenizer,
        weights_path=None if checkpoint is None else checkpoint.weights,
        optimizer_path=None if checkpoint is None else checkpoint.optimizer,
        init_reference_model=has_reference,
    )
    try:
        yield opened
    finally:
        opened.shutdown()


def base_model(session: Session) -> str:
    """Return name or directory of the model that the run starts from, which may be built now."""
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


def save_final(session: Session, policy: Policy) -> None:
    """Write the model as a Hugging Face directory, with its tokenizer; adapters alone, too."""

    def write(path: Path) -> None:
        policy.save_hf_checkpoint(path)
        session.inputs.tokenizer.save_pretrained(path)

    if policy.has_adapters:
        write_directory(session.directory.adapters, policy.save_adapters)
    write_directory(session.directory.final, write)


def write_directory(path: Path, write: Callable[[Path], None]) -> None:
    """Write a directory beside its place and move it there whole, replacing what is there."""
    partial = path.with_name(path.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    write(partial)
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    sync_directory(path.parent)
