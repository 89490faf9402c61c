"""`MemoryPlan`: the phases of a step with what is on the device, as values and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_GIB = 2**30
_BAR = 44
# What a bar shows each part by.
_MARKS = {
    "parameters": "P",
    "optimizer state": "O",
    "gradients, activations, gathers": "a",
    "refit buffers": "b",
    "engine weights": "W",
    "engine activations": "e",
    "key-value cache": "K",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Something on the device: its name and its bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One phase of a step, at its peak.

    Attributes:
        name: `load`, `score`, `train`, `refit`, `wake` or `generate`.
        parts: What is on the device.
        place: Where the peak is, for example the backward pass of a layer.
    """

    name: str
    parts: tuple[Part, ...]
    place: str = ""

    @property
    def bytes(self) -> int:
        """The bytes at the peak."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShare:
    """What an inference engine holds on each of its devices.

    Attributes:
        weights_bytes: Its shard of the weights.
        activation_bytes: An estimate of what a forward pass takes.
        cache_bytes: The key-value cache.
        cache_tokens: Tokens that fit into it.
        cache_rows: Rows of the longest length that fit into it.
        longest: The longest length, in tokens.
        is_colocated: Whether it shares the policy's devices.
        gpu_memory_utilization: As configured.
        best_utilization: The largest that fits, in steps of 0.05.
    """

    weights_bytes: int
    activation_bytes: int
    cache_bytes: int
    cache_tokens: int
    cache_rows: float
    longest: int
    is_colocated: bool
    gpu_memory_utilization: float
    best_utilization: float

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.activation_bytes + self.cache_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The memory of each rank. All ranks have the same parts; the first has the largest shards.

    Attributes:
        phases: Of a device of the policy, in the order of a step.
        engine_phases: Of a device of the engines, where those are others.
        memory: Bytes of a device.
        reserve: Bytes of it that no tensor has.
        layout: The parallel sizes, for example `dp 8 x cp 1 x tp 8`.
        num_parameters: Of the full model.
        bucket_bytes: Of each of the two refit buffers; None without engines.
        engine: What an inference engine holds; None without engines.
        host_bytes: What a rank holds on the host while its device is the engine's.
        traced_layers: The depths that were traced.
        num_layers: The layers of the model.
        why_all_layers: Why all layers were traced; empty if they were not.
        advice: What to change where it does not fit.
    """

    phases: tuple[Phase, ...]
    engine_phases: tuple[Phase, ...]
    memory: int
    reserve: int
    layout: str
    num_parameters: int
    bucket_bytes: int | None
    engine: EngineShare | None
    host_bytes: int
    traced_layers: tuple[int, ...]
    num_layers: int
    why_all_layers: str
    advice: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether every phase fits beside the reserve."""
        return all(self.has_room(phase) for phase in (*self.phases, *self.engine_phases))

    def has_room(self, phase: Phase) -> bool:
        """Return whether a phase fits beside the reserve."""
        return phase.bytes + self.reserve <= self.memory

    def phase(self, name: str) -> Phase:
        """Return a phase by name.

        Raises:
            KeyError: There is none.
        """
        for phase in (*self.phases, *self.engine_phases):
            if phase.name == name:
                return phase
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MemoryPlan:
        """Return the plan of `to_json`."""

        def phases(entries: Any) -> tuple[Phase, ...]:
            return tuple(
                Phase(**{**each, "parts": tuple(Part(**part) for part in each["parts"])})
                for each in entries
            )

        engine = values["engine"]
        return cls(
            **{
                **values,
                "phases": phases(values["phases"]),
                "engine_phases": phases(values["engine_phases"]),
                "engine": None if engine is None else EngineShare(**engine),
                "traced_layers": tuple(values["traced_layers"]),
                "advice": tuple(values["advice"]),
            }
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.num_parameters / 1e9:.2f} billion parameters in {self.num_layers} layers, "
            f"{self.layout}, {_gib(self.memory)} GiB a device, {_gib(self.reserve)} of it for "
            "driver and NCCL"
        )
        yield ""
        for phase in self.phases:
            yield from self._phase_lines(phase)
        if self.engine_phases:
            yield "on each device of the engines:"
            for phase in self.engine_phases:
                yield from self._phase_lines(phase)
        used = {part.name for each in (*self.phases, *self.engine_phases) for part in each.parts}
        yield "  ".join(f"{mark} {name}" for name, mark in _MARKS.items() if name in used)
        yield ""
        yield from self._choices()
        yield self._method()
        for line in self.advice:
            yield f"-> {line}"
        yield "it fits" if self.fits else "it does not fit"

    def _phase_lines(self, phase: Phase) -> Iterator[str]:
        bar = "".join(
            _MARKS[part.name] * round(part.bytes / self.memory * _BAR) for part in phase.parts
        )
        room = max(0, _BAR - len(bar))
        text = bar[:_BAR] + "." * room + "|" + bar[_BAR : 2 * _BAR]
        mark = "" if self.has_room(phase) else "  TOO MUCH"
        place = f"  {phase.place}" if phase.place else ""
        yield f"{phase.name:9}{_gib(phase.bytes):>7} GiB  {text}{place}{mark}"

    def _choices(self) -> Iterator[str]:
        if self.bucket_bytes is not None:
            yield f"refit: two buffers of {self.bucket_bytes / 2**20:.0f} MiB"
        engine = self.engine
        if engine is not None:
            yield (
                f"engine: {_gib(engine.weights_bytes)} GiB of weights, "
                f"{_gib(engine.cache_bytes)} GiB of cache for {engine.cache_tokens} tokens, "
                f"{engine.cache_rows:.1f} rows of {engine.longest}; gpu_memory_utilization="
                f"{engine.gpu_memory_utilization:g}, at most {engine.best_utilization:g} fits"
            )
        if self.host_bytes:
            yield f"host: {_gib(self.host_bytes)} GiB for each rank while it is offloaded"

    def _method(self) -> str:
        depths = " and ".join(str(each) for each in self.traced_layers)
        if len(self.traced_layers) == 1:
            return f"traced with all {depths} layers, as {self.why_all_layers}"
        return (
            f"traced with {depths} layers, and extrapolated along a line to {self.num_layers}: "
            "--all-layers traces all of them"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f}"
