"""Where the completions of a recipe come from: the training workers, or inference engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rl_interfaces import GenerationInterface

from rl_policy.backends import load_engine
from rl_policy.config import RefitSection, RunConfig
from rl_policy.generation.state import INITIAL_VERSION
from rl_policy.generation.vllm import VllmGeneration
from rl_policy.policy import Policy
from rl_policy.ray.cluster import RayVirtualCluster
from rl_policy.refit import WeightLink, engines_on_device
from rl_policy.run.directory import RunState
from rl_policy.run.inputs import engine_section, keeps_weights
from rl_policy.run.session import AnySession


class Sampler(Protocol):
    """A source of completions that follows the policy's weights."""

    def after_step(self, step: int) -> AbstractContextManager[GenerationInterface]:
        """Give what samples from the weights that the policy has after `step`."""
        ...

    def report(self) -> dict[str, float]:
        """Return the numbers of the last refit, nothing where weights are not handed over."""
        ...


class WorkerSampler:
    """The training workers' own sampler.

    Args:
        policy: Samples.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @contextmanager
    def after_step(self, step: int) -> Iterator[GenerationInterface]:
        """Give the policy."""
        self._policy.prepare_for_generation()
        yield self._policy
        self._policy.finish_generation()

    def report(self) -> dict[str, float]:
        """Return nothing."""
        return {}


class EngineSampler:
    """Inference engines, which get the policy's weights when these have changed.

    Args:
        policy: Whose weights they are.
        engines: Sample.
        link: Hands the weights over.
        is_colocated: Whether policy and engines take turns on the same devices.
        keeps_weights: Whether engines that sleep still have their weights afterwards.
        last_version: The last that engines of the run had, where these ones go on for them. Weights
            that are lost and sent again count on from there, as they would have.
    """

    def __init__(
        self,
        policy: Policy,
        engines: VllmGeneration,
        link: WeightLink,
        *,
        is_colocated: bool,
        keeps_weights: bool,
        last_version: int = INITIAL_VERSION,
    ) -> None:
        self._policy = policy
        self._engines = engines
        self._link = link
        self._is_colocated = is_colocated
        self._keeps_weights = keeps_weights or not is_colocated
        self._first_version = 0 if self._keeps_weights else last_version + 1
        self._sent_step: int | None = None
        self._report: dict[str, float] = {}

    @contextmanager
    def after_step(self, step: int) -> Iterator[GenerationInterface]:
        """Give the engines, with the weights after `step` as that version.

        Engines that have lost their weights get them under a version of their own: a version
        counts once.
        """
        version = None
        if step != self._sent_step or not self._keeps_weights:
            version = max(step, self._engines.weight_version + 1, self._first_version)
        if self._is_colocated:
            with engines_on_device(
                self._policy, self._engines, self._link, version=version
            ) as report:
                self._record(step, report)
                yield self._engines
        else:
            self._record(step, None if version is None else self._link.refit(version))
            yield self._engines

    def report(self) -> dict[str, float]:
        """Return `refit_s`, `refit_bytes` and the other numbers, and `weight_version`."""
        return {**self._report, "weight_version": self._engines.weight_version}

    def _record(self, step: int, report: dict[str, float] | None) -> None:
        if report is not None:
            self._sent_step, self._report = step, report


@contextmanager
def open_sampler(
    session: AnySession, policy: Policy, *, model: str, start: RunState
) -> Iterator[Sampler]:
    """Give the source of completions that the configuration asks for, and end its processes.

    Args:
        session: The run.
        policy: What is trained.
        model: Name or directory of the model that the engines start from.
        start: Where the run stands.
    """
    config = session.config
    if not config.has_engines:
        yield WorkerSampler(policy)
        return
    refit = config.section(RefitSection)
    with _open_engine_cluster(session) as cluster:
        engine_class: Any = load_engine(config.policy["generation"]["backend"])
        engines: VllmGeneration = engine_class(
            cluster,
            engine_section(config, model=model),
            session.inputs.tokenizer,
            seed=config.policy["seed"],
            timeout_s=config.policy["timeout_s"],
        )
        try:
            link = WeightLink(
                policy,
                engines,
                is_paired=config.is_colocated,
                transport=_transport(config, policy),
                bucket_bytes=_bytes(refit.bucket_mib),
                # That of log-probabilities is for whoever has the trainer's: see `check_mismatch`.
                verify="digest" if refit.verify == "logprobs" else refit.verify,
            )
            if config.is_colocated:
                engines.finish_generation()
            yield EngineSampler(
                policy,
                engines,
                link,
                is_colocated=config.is_colocated,
                keeps_weights=keeps_weights(config),
                last_version=start.weight_version,
            )
        finally:
            engines.shutdown()


@contextmanager
def _open_engine_cluster(session: AnySession) -> Iterator[RayVirtualCluster]:
    config = session.config
    if config.is_colocated:
        yield session.cluster
        return
    cluster = RayVirtualCluster(
        config.engine_bundles,
        use_gpus=config.cluster.use_gpus,
        num_gpus_per_node=config.cluster.num_gpus_per_node,
        name="engines",
        # What is counted by node is on one, as an engine over several devices has to be.
        placement_group_strategy="STRICT_PACK",
    )
    try:
        yield cluster
    finally:
        cluster.shutdown()


def _transport(config: RunConfig, policy: Policy) -> str:
    """Return the configured transport, or the fastest that reaches the engines."""
    configured = config.section(RefitSection).transport
    if configured is not None:
        return configured
    if not config.is_colocated:
        return "collective"
    on_gpu = all(info["local_device_id"] is not None for info in policy.get_gpu_info())
    return "cuda_ipc" if on_gpu else "shm"


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * 2**20
