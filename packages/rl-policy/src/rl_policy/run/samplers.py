"""Samplers of a recipe: the training workers themselves, or inference engines after a refit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, TypeAlias

from rl_interfaces import GenerationInterface
from rl_refit.report import Stopwatch

from rl_policy.backends import load_engine
from rl_policy.config import RefitSection, RunConfig
from rl_policy.generation.state import INITIAL_VERSION
from rl_policy.generation.vllm import VllmGeneration
from rl_policy.policy import Policy
from rl_policy.ray.cluster import RayVirtualCluster
from rl_policy.refit import WeightLink, engines_on_device, membership_of
from rl_policy.run.directory import RunState
from rl_policy.run.inputs import engine_section, keeps_weights, staging_mode
from rl_policy.run.session import AnySession, open_policy

StartEngines: TypeAlias = Callable[[], tuple[VllmGeneration, WeightLink[Any]]]
"""Starts engines, and opens the link by which they receive weights."""


class Sampler(Protocol):
    """A source of completions under the policy's current weights."""

    def after_step(self, step: int) -> AbstractContextManager[GenerationInterface]:
        """Yield what samples from the weights that the policy has after `step`."""
        ...

    def report(self) -> dict[str, float]:
        """Return the metrics of the last refit; empty where no weights are sent."""
        ...


class WorkerSampler:
    """The training workers' own sampler, which needs no refit."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @contextmanager
    def after_step(self, step: int) -> Iterator[GenerationInterface]:
        """Yield the policy."""
        self._policy.prepare_for_generation()
        yield self._policy
        self._policy.finish_generation()

    def report(self) -> dict[str, float]:
        """Return no metrics."""
        return {}


class EngineSampler:
    """Inference engines, which receive the policy's weights once these have changed.

    Args:
        policy: The source of the weights.
        engines: The engines that sample.
        link: Sends the weights.
        is_colocated: Whether policy and engines take turns on the same devices.
        keeps_weights: Whether engines keep their weights while they sleep.
        last_version: The last version that engines of the run had before it was resumed. Versions
            of engines that lose their weights continue from there, as if it had not been.
        restart: Starts other engines and a link to them. None: they are not replaced.
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
        restart: StartEngines | None = None,
    ) -> None:
        self._policy = policy
        self._restart = restart
        self._engines = engines
        self._link = link
        self._is_colocated = is_colocated
        self._keeps_weights = keeps_weights or not is_colocated
        self._first_version = 0 if self._keeps_weights else last_version + 1
        self._sent_step: int | None = None
        self._num_replaced = 0
        self._report: dict[str, float] = {}

    @contextmanager
    def after_step(self, step: int) -> Iterator[GenerationInterface]:
        """Yield the engines, with the weights after `step` under that version.

        Engines that lose their weights receive the same ones again under a newer version.
        """
        version = None
        # Engines refuse a version that is not newer than theirs, and samples depend on it: a
        # resumed run has to arrive at the versions of one that was never interrupted.
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

    def catch_up(self) -> None:
        """Bring engines that were started anew to the version that the others have.

        The policy's weights must still be those of that version.
        """
        membership = membership_of(self._engines)
        if membership is not None and membership.has_joined:
            self._link.refit(self._engines.weight_version, only_joined=True)

    @property
    def num_replaced(self) -> int:
        """How often one of several engines was started anew while the others went on."""
        membership = membership_of(self._engines)
        return self._num_replaced + (0 if membership is None else membership.num_replaced)

    def report(self) -> dict[str, float]:
        """Return `refit_s`, `refit_bytes` and the other numbers, and `weight_version`."""
        return {**self._report, "weight_version": self._engines.weight_version}

    @property
    def has_lost_engine(self) -> bool:
        """Whether an engine is known to have died."""
        return self._engines.has_lost_engine

    def replace_engines(self) -> None:
        """End all engines and start others, which receive weights before they sample.

        Raises:
            TimeoutError: They have not started in time.
        """
        assert self._restart is not None, "these engines are not replaced"
        self._num_replaced = self.num_replaced
        self._engines.shutdown()
        self._engines, self._link = self._restart()
        self._sent_step = None

    def close(self) -> None:
        """End the engines."""
        self._engines.shutdown()

    def _record(self, step: int, report: dict[str, float] | None) -> None:
        if report is not None:
            self._sent_step, self._report = step, report


def weight_version(sampler: Sampler) -> int:
    """Return the last weight version that engines had; -1 without engines."""
    return int(sampler.report().get("weight_version", RunState().weight_version))


@contextmanager
def counting_move(
    sampler: Sampler, moved: AbstractContextManager[GenerationInterface], watch: Stopwatch
) -> Iterator[GenerationInterface]:
    """Yield what samples; count what it takes to move there and back as `move_s`.

    Args:
        sampler: What samples.
        moved: Its `after_step`, or what enters that.
        watch: Counts.
    """
    version = weight_version(sampler)
    with ExitStack() as stack:
        with watch.phase("move_s"):
            source = stack.enter_context(moved)
        if weight_version(sampler) != version:
            # The refit has a column of its own, and phases do not overlap.
            watch.add("move_s", -sampler.report()["refit_s"])
        yield source
        with watch.phase("move_s"):
            stack.close()


@contextmanager
def open_sampler(
    session: AnySession, policy: Policy, *, model: str, start: RunState
) -> Iterator[Sampler]:
    """Yield the sampler that the configuration asks for, and end its processes afterwards.

    Args:
        session: The run.
        policy: What is trained.
        model: Name or directory of the model that the engines start from.
        start: The state that the run starts from.
    """
    config = session.config
    if not config.has_engines:
        yield WorkerSampler(policy)
        return
    if config.is_colocated:
        # An engine starts only if `gpu_memory_utilization` of the device is free.
        policy.offload_after_refit()
    with _open_engine_cluster(session) as cluster:

        def start_engines() -> tuple[VllmGeneration, WeightLink[Any]]:
            engines = _start_engines(session, cluster, model=model)
            try:
                return engines, _link(config, policy, engines)
            except BaseException:
                engines.shutdown()
                raise

        engines, link = start_engines()
        sampler = EngineSampler(
            policy,
            engines,
            link,
            is_colocated=config.is_colocated,
            keeps_weights=keeps_weights(config),
            last_version=start.weight_version,
            restart=start_engines,
        )
        try:
            if config.is_colocated:
                # The policy trains or scores first, and needs the memory of the shared devices.
                engines.finish_generation()
                policy.prepare_for_lp_inference()
            yield sampler
        finally:
            sampler.close()


@contextmanager
def open_source(session: AnySession, *, model: str) -> Iterator[GenerationInterface]:
    """Yield what samples from a model that is not trained, and end its processes afterwards.

    Args:
        session: The run.
        model: Name or directory of the model.
    """
    if session.config.has_engines:
        with _open_engine_cluster(session) as cluster:
            engines = _start_engines(session, cluster, model=model)
            try:
                yield engines
            finally:
                engines.shutdown()
        return
    with open_policy(
        session, session.config.policy, model=model, has_reference=False, is_trained=False
    ) as (policy, _):
        policy.prepare_for_generation()
        yield policy


def _start_engines(
    session: AnySession, cluster: RayVirtualCluster, *, model: str
) -> VllmGeneration:
    config = session.config
    engine_class: Any = load_engine(config.policy["generation"]["backend"])
    return engine_class(
        cluster,
        engine_section(config, model=model),
        session.inputs.tokenizer,
        seed=config.policy["seed"],
        timeout_s=config.policy["timeout_s"],
    )


def _link(config: RunConfig, policy: Policy, engines: VllmGeneration) -> WeightLink[Any]:
    refit = config.section(RefitSection)
    staging = staging_mode(config, type(engines))
    if refit.slices:
        return WeightLink(
            policy,
            engines,
            is_paired=config.is_colocated,
            # Of the invitations: these go on without an engine that is lost.
            transport="shm" if config.is_colocated else "chain",
            staging=staging,
            kv_cache=refit.kv_cache,
            slices=True,
            receivers_per_engine=engines.num_receivers // engines.num_engines,
            delta=refit.delta,
        )
    return WeightLink(
        policy,
        engines,
        is_paired=config.is_colocated,
        transport=_transport(config, policy),
        staging=staging,
        kv_cache=refit.kv_cache,
        bucket_bytes=None if refit.bucket_mib is None else refit.bucket_mib * 2**20,
        # `check_mismatch` verifies by log-probabilities, where the trainer's are known.
        verify="digest" if refit.verify == "logprobs" else refit.verify,
        delta=refit.delta,
        adapters=refit.adapters,
    )


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
        # `gpus_per_node` counts devices of one node, and an engine does not span nodes.
        placement_group_strategy="STRICT_PACK",
    )
    try:
        yield cluster
    finally:
        cluster.shutdown()


def _transport(config: RunConfig, policy: Policy) -> str:
    """Return the configured transport, or the one for where the engines are."""
    configured = config.section(RefitSection).transport
    if configured is not None:
        return configured
    if not config.is_colocated:
        return "collective"
    on_gpu = all(info["local_device_id"] is not None for info in policy.get_gpu_info())
    return "cuda_ipc" if on_gpu else "shm"
