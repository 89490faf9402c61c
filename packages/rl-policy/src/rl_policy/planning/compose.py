"""From traces and the engine's share to a `MemoryPlan`: who is on the device in which phase.

    on a device that policy and engines share, over one step:

    score    parameters                          scoring
    train    parameters, optimizer state         forward, backward, optimizer step
    refit    parameters                          gathers, engine weights
    wake     -                                   engine weights, key-value cache
    generate -                                   engine weights, key-value cache, a forward pass

The two buffers of a refit stay in all phases, also on devices of the engines' own. On a CPU nothing
moves: the policy keeps what it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_interfaces.backend.memory import extrapolate

from rl_policy.planning.result import EngineShare, MemoryPlan, Part, Phase

if TYPE_CHECKING:
    from rl_interfaces import ParallelLayout
    from rl_interfaces.backend.memory import Depths, WorkerTrace

_PARAMETERS, _STATE = "parameters", "optimizer state"
_WORK = "gradients, activations, gathers"
_BUFFERS, _WEIGHTS = "refit buffers", "engine weights"
_ENGINE_WORK, _CACHE = "engine activations", "key-value cache"
# More than half of the device in parameters, state and gradients: micro-batches do not help.
_LARGE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMemory:
    """What the phases are composed of.

    Attributes:
        traces: Of the worker, by depth.
        depths: How deep the traced models and the real one are.
        buffer_bytes: Of all refit buffers.
        on_gpu: Whether what is offloaded leaves the device.
        engine: None without engines.
    """

    traces: Mapping[int, WorkerTrace]
    depths: Depths
    buffer_bytes: int
    on_gpu: bool
    engine: EngineShare | None

    def of_model(self, values: Mapping[int, int]) -> int:
        """Return what a number by traced depth is in the real model."""
        return round(extrapolate(values, self.depths.num_layers))

    @property
    def parameters(self) -> int:
        """Bytes of parameters and buffers."""
        return self.of_model({depth: each.model_bytes for depth, each in self.traces.items()})

    def beside_engine(self, is_colocated: bool) -> tuple[Part, ...]:
        """Return what else is on the engine's device while it samples."""
        buffers = Part(name=_BUFFERS, bytes=self.buffer_bytes)
        if self.on_gpu or not is_colocated:
            return (buffers,)
        parameters = Part(name=_PARAMETERS, bytes=self.parameters)
        return (buffers, parameters, Part(name=_STATE, bytes=self.state))

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state."""
        return self.of_model({depth: each.optimizer_bytes for depth, each in self.traces.items()})

    def peak(self, name: str) -> tuple[int, str] | None:
        """Return the peak of a traced call and where it is; None if it was not traced."""
        found = {depth: each.phases.get(name) for depth, each in self.traces.items()}
        peaks = {depth: phase.peaks for depth, phase in found.items() if phase is not None}
        if not peaks:
            return None
        # Layers between the ends are in the deeper model alone, and never at the peak.
        places = set.intersection(*(set(each) for each in peaks.values()))
        return max(
            (self.of_model({depth: each[place] for depth, each in peaks.items()}), place)
            for place in places
        )


def compose(
    run: RunMemory,
    *,
    policy: Mapping[str, Any],
    layout: ParallelLayout,
    text: Any,
    memory: int,
    reserve: int,
    bucket_bytes: int | None,
    num_parameters: int,
) -> MemoryPlan:
    """Return the plan.

    Args:
        run: Traces and the engine's share.
        policy: The resolved policy config.
        layout: The parallel sizes.
        text: The text part of the model's config.
        memory: Bytes of a device.
        reserve: Bytes of it that no tensor has.
        bucket_bytes: Of a refit buffer.
        num_parameters: Of the full model.
    """
    shares = run.engine is not None and run.engine.is_colocated
    phases = tuple(_policy_phases(run))
    engine_phases = tuple(_engine_phases(run))
    if shares:
        phases, engine_phases = (*phases, *engine_phases), ()
    offloaded = run.on_gpu and shares
    advice = _Advice(
        run,
        policy=policy,
        layout=layout,
        text=text,
        limit=memory - reserve,
        bucket_bytes=bucket_bytes or 0,
    )
    return MemoryPlan(
        phases=phases,
        engine_phases=engine_phases,
        memory=memory,
        reserve=reserve,
        layout=(
            f"dp {layout.data_parallel} x cp {layout.context_parallel} x "
            f"tp {layout.tensor_parallel}"
        ),
        num_parameters=num_parameters,
        bucket_bytes=bucket_bytes,
        engine=run.engine,
        host_bytes=run.parameters + run.state if offloaded else 0,
        traced_layers=run.depths.traced,
        num_layers=run.depths.num_layers,
        why_all_layers=run.depths.reason,
        advice=tuple(dict.fromkeys(advice.lines((*phases, *engine_phases)))),
    )


def _policy_phases(run: RunMemory) -> Iterator[Phase]:
    """Yield the phases in which the policy works."""
    shares = run.engine is not None and run.engine.is_colocated
    # The engine sleeps until the refit, which loads its weights.
    waking = (Part(name=_WEIGHTS, bytes=run.engine.weights_bytes),) if run.engine and shares else ()
    for call, name in (("load", "load"), ("score", "score"), ("train", "train")):
        if (found := run.peak(call)) is not None:
            yield _phase(run, name, *found, has_state=call == "train", is_traced=call == "train")
    if (found := run.peak("gather")) is not None:
        yield _phase(run, "refit", *found, has_state=False, is_traced=True, others=waking)
    if (found := run.peak("generate")) is not None:
        yield _phase(run, "generate", *found, has_state=False, is_traced=True)


def _phase(
    run: RunMemory,
    name: str,
    peak: int,
    place: str,
    *,
    has_state: bool,
    is_traced: bool,
    others: tuple[Part, ...] = (),
) -> Phase:
    """Return a phase of the policy.

    Args:
        run: What it is composed of.
        name: Of the phase.
        peak: Of the traced call.
        place: Of the peak.
        has_state: Whether the optimizer's state is on the device even where it can leave it.
        is_traced: Whether the peak has the optimizer's state in it.
        others: What is on the device besides.
    """
    work = peak - run.parameters - (run.state if is_traced else 0)
    parts = [Part(name=_PARAMETERS, bytes=run.parameters)]
    if has_state or (not run.on_gpu and name != "load"):
        parts.append(Part(name=_STATE, bytes=run.state))
    parts.append(Part(name=_WORK, bytes=max(0, work)))
    if run.buffer_bytes and name != "load":
        parts.append(Part(name=_BUFFERS, bytes=run.buffer_bytes))
    shown = "" if place == "before" else place
    return Phase(name=name, parts=(*parts, *others), place=shown)


def _engine_phases(run: RunMemory) -> Iterator[Phase]:
    """Yield the phases in which an engine works."""
    engine = run.engine
    if engine is None:
        return
    staying = run.beside_engine(engine.is_colocated)
    weights = Part(name=_WEIGHTS, bytes=engine.weights_bytes)
    cache = Part(name=_CACHE, bytes=engine.cache_bytes)
    work = Part(name=_ENGINE_WORK, bytes=engine.activation_bytes)
    yield Phase(name="wake", parts=(*staying, weights, cache))
    yield Phase(name="generate", parts=(*staying, weights, cache, work))


class _Advice:
    """What to change where a phase does not fit."""

    def __init__(
        self,
        run: RunMemory,
        *,
        policy: Mapping[str, Any],
        layout: ParallelLayout,
        text: Any,
        limit: int,
        bucket_bytes: int,
    ) -> None:
        self._run = run
        self._policy = policy
        self._layout = layout
        self._text = text
        self._limit = limit
        self._bucket_bytes = bucket_bytes

    def lines(self, phases: tuple[Phase, ...]) -> Iterator[str]:
        """Yield a line for each change."""
        for phase in phases:
            if phase.bytes > self._limit:
                yield from self._of_phase(phase)
        engine = self._run.engine
        if engine is not None and engine.cache_rows < 1:
            yield (
                f"the engine's cache has room for {engine.cache_tokens} tokens, less than one row "
                f"of {engine.longest}: raise policy.generation.vllm_cfg.gpu_memory_utilization "
                f"towards {engine.best_utilization:g}, or its tensor_parallel_size"
            )

    def _of_phase(self, phase: Phase) -> Iterator[str]:
        engine = self._run.engine
        is_engine = any(part.name in (_WEIGHTS, _CACHE) for part in phase.parts)
        if phase.name in ("score", "train"):
            yield from self._smaller_batches(phase)
            yield from self._more_shards(phase)
        elif phase.name == "load":
            yield from self._more_shards(phase)
        elif phase.name == "refit":
            if is_engine:
                yield (
                    f"{phase.name}: raise policy.generation.vllm_cfg.tensor_parallel_size, so that "
                    "the engine's weights are smaller"
                )
            yield f"{phase.name}: set refit.bucket_mib below {self._bucket_bytes / 2**20:.0f}"
            yield from self._more_shards(phase)
        elif engine is not None and is_engine:
            yield (
                f"{phase.name}: policy.generation.vllm_cfg.gpu_memory_utilization="
                f"{engine.best_utilization:g} or less"
            )
        else:
            yield f"{phase.name}: halve policy.generation_batch_size, or sample with vLLM"

    def _smaller_batches(self, phase: Phase) -> Iterator[str]:
        policy, is_training = self._policy, phase.name == "train"
        if is_training and not policy["dtensor_cfg"]["activation_checkpointing"]:
            yield f"{phase.name}: policy.dtensor_cfg.activation_checkpointing=true"
        budget = "train_mb_tokens" if is_training else "logprob_mb_tokens"
        for section in ("sequence_packing", "dynamic_batching"):
            if policy[section]["enabled"]:
                tokens = max(policy[section][budget] // 2, policy["max_total_sequence_length"])
                if tokens < policy[section][budget]:
                    yield f"{phase.name}: policy.{section}.{budget}={tokens}"
                return
        key = "train_micro_batch_size" if is_training else "logprob_batch_size"
        if policy[key] > 1:
            yield f"{phase.name}: policy.{key}={policy[key] // 2}"

    def _more_shards(self, phase: Phase) -> Iterator[str]:
        layout, heads = self._layout, getattr(self._text, "num_key_value_heads", 1) or 1
        if self._run.parameters * 4 > _LARGE * self._limit:
            yield (
                f"{phase.name}: parameters, gradients and optimizer state take most of the device: "
                "more --gpus shard them further. What rl-policy plan cannot count: "
                "policy.dtensor_cfg.cpu_offload=true keeps them on the host, and "
                "policy.dtensor_cfg.lora.enabled=true trains a fraction of them"
            )
        tensor = 2 * layout.tensor_parallel
        if layout.data_parallel % 2 == 0 and heads % tensor == 0 and tensor <= 8:
            yield f"{phase.name}: policy.dtensor_cfg.tensor_parallel_size={tensor}"
        if layout.data_parallel % 2 == 0 and phase.name in ("score", "train"):
            context = 2 * layout.context_parallel
            yield f"{phase.name}: policy.dtensor_cfg.context_parallel_size={context}"
