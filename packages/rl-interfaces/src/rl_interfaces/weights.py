"""Protocols for sending weights from a trainer to an inference engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


RefitInfo: TypeAlias = "dict[str, tuple[tuple[int, ...], torch.dtype]]"
"""`{name: (full shape, wire dtype)}` of every tensor that a refit sends, in order."""

DeviceHandles: TypeAlias = "dict[str, dict[str, dict[str, object]]]"
"""`{device id: {name: handle}}`; `rl_refit.compat.handles` makes a handle and opens it."""


class TensorSpec(Protocol):
    """Metadata of a tensor to be sent."""

    @property
    def name(self) -> str:
        """The name under which the engine loads it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape, not that of one rank's shard."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it has on the wire."""
        ...


@runtime_checkable
class WeightSource(Protocol):
    """The tensors of a model in a fixed order; iterable repeatedly.

    Structurally compatible with the weight source of vLLM's trainer-side transfer engines.
    """

    def metadata(self) -> Sequence[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return name, wire dtype and full shape of every tensor, without gathering any."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full tensor in the order of `metadata`. Collective."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """An inference engine that receives its weights from a trainer."""

    def init_collective(self, ip: str, port: int, world_size: int) -> list[object]:
        """Join the group for weight broadcasts; returns futures without waiting for them."""
        ...

    def prepare_refit_info(self, info: RefitInfo) -> None:
        """Record `{name: (shape, wire dtype)}` of the tensors to be received."""
        ...

    def update_weights(self, handles: DeviceHandles) -> bool:
        """Load the tensors behind one group of inter-process handles."""
        ...

    def update_weights_from_collective(self) -> list[object]:
        """Receive every tensor over the group; returns futures without waiting for them."""
        ...

    def begin_update(self, version: int) -> None:
        """Open a transaction: no sample is generated until it is committed."""
        ...

    def commit_update(self, version: int) -> None:
        """Close the transaction: samples carry this version from now on."""
        ...
