"""Weights on their way from a trainer to an inference engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


class TensorSpec(Protocol):
    """What is known of a tensor before it is sent."""

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
    """The tensors of a model, in a fixed order, as often as wanted.

    The same in structure as the weight source of vLLM's trainer-side transfer engines.
    """

    def metadata(self) -> Sequence[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return name, wire dtype and full shape of every tensor, without moving any."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full tensor in the order of `metadata`. Every trainer rank takes part."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """An engine that gets its weights from a trainer."""

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        """Join the group over which weights are broadcast; the futures are not waited for."""
        ...

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        """Learn `{name: (shape, wire dtype)}` of what is going to be sent."""
        ...

    def update_weights(self, handles: dict[str, Any]) -> bool:
        """Load the tensors behind one group of inter-process handles."""
        ...

    def update_weights_from_collective(self) -> list[Any]:
        """Receive every tensor over the group; the futures are not waited for."""
        ...

    def begin_update(self, version: int) -> None:
        """Open a transaction: no sample is generated until it is committed."""
        ...

    def commit_update(self, version: int) -> None:
        """Close the transaction: samples carry this version from now on."""
        ...
