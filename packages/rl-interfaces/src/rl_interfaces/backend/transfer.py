"""One trainer rank's side of weight transfer: the source, and the three ways to send from it.

`LayeredSource` is the base of a sharded backend's weights. `WeightTransfer` owns the stream, the
IPC handles and the broadcast group.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rl_refit import RefitSender, block_fp8
from rl_refit.compat.broadcast import BroadcastGroup
from rl_refit.compat.handles import HandleOwner
from rl_refit.protocol.endpoint import address_towards
from rl_refit.resharding import ReshardSender, Shard
from rl_refit.source import BlockwiseSource, WeightMeta, WeightSource

from rl_interfaces.weights import DeviceHandles


class GatheredSource(WeightSource, Protocol):
    """A weight source that can also gather tensors by name; every trainer rank takes part."""

    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full tensor of each of `names`. Collective."""
        ...

    def shards(self) -> Mapping[str, Shard | Sequence[Shard]]:
        """Return what this rank holds of each tensor, in the dtype of the parameter.

        They are views of the parameters, for a `rl_refit.resharding.ReshardSender`.

        Raises:
            ValueError: This rank does not hold the tensors that are sent, but others that they are
                computed from.
        """
        ...

    def quantized(self, names: Collection[str]) -> GatheredSource:
        """Return a source with the tensors `names` in block-FP8, and their scales after them.

        Raises:
            ValueError: There is no such tensor, or it is no matrix.
        """
        ...


class PendingGather(Protocol):
    """The gathers of one layer, in flight."""

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for them; yield name and full tensor. Collective."""
        ...


class LayeredSource(BlockwiseSource):
    """A `GatheredSource` whose tensors are gathered a layer at a time on all trainer ranks."""

    @abstractmethod
    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full tensor of each of `names`. Collective.

        Raises:
            ValueError: The model has no tensor of that name.
        """

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full tensor in the order of `metadata`. Collective."""
        return self.gather(meta.name for meta in self.metadata())

    def shards(self) -> Mapping[str, Shard | Sequence[Shard]]:
        """See `GatheredSource.shards`; by default there are none."""
        raise ValueError(f"{type(self).__name__} has no shards: send full tensors")

    def quantized(self, names: Collection[str]) -> LayeredSource:
        """See `GatheredSource.quantized`. A tensor is quantised when it has been gathered."""
        return QuantizedSource(self, names)


class QuantizedSource(LayeredSource):
    """A source of which some tensors are in block-FP8, see `rl_refit.block_fp8`.

    Args:
        source: What is quantised, after it was gathered.
        names: Which of its tensors.

    Raises:
        ValueError: There is no such tensor, or it is no matrix.
    """

    def __init__(self, source: LayeredSource, names: Collection[str]) -> None:
        check_blocks(names, source.metadata())
        self._source = source
        self._names = frozenset(names)

    def metadata(self) -> list[WeightMeta]:
        """See `LayeredSource.metadata`."""
        return [each for meta in self._source.metadata() for each in self._sent(meta)]

    @torch.no_grad()
    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See `LayeredSource.gather`; a tensor and its scales are gathered at once."""
        wanted = check_names(names, {meta.name: None for meta in self.metadata()})
        chosen = set(wanted)
        owners = dict.fromkeys(self._owner(name) for name in wanted)
        for name, tensor in self._source.gather(owners):
            if name not in self._names:
                yield name, tensor
                continue
            for each, part in quantized_pair(name, *block_fp8.quantize(tensor)):
                if each in chosen:
                    yield each, part

    def _sent(self, meta: WeightMeta) -> list[WeightMeta]:
        if meta.name not in self._names:
            return [meta]
        return quantized_metadata(meta)

    def _owner(self, name: str) -> str:
        owner = name.removesuffix(block_fp8.SCALES)
        return owner if owner in self._names else name


def check_blocks(names: Collection[str], metadata: Sequence[WeightMeta]) -> None:
    """Raise `ValueError` unless each of `names` is a tensor that has blocks."""
    shapes = {meta.name: meta.shape for meta in metadata}
    for name in check_names(names, shapes):
        if len(shapes[name]) < 2:
            raise ValueError(f"{name!r} of shape {list(shapes[name])} has no blocks to quantise")


def quantized_pair(
    name: str, values: torch.Tensor, scales: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    """Return a tensor in block-FP8 under the two names of a checkpoint."""
    return [(name, values), (name + block_fp8.SCALES, scales)]


def quantized_metadata(meta: WeightMeta) -> list[WeightMeta]:
    """Return what becomes of a tensor in block-FP8: its values and its scales."""
    return [
        WeightMeta(meta.name, block_fp8.DTYPE, meta.shape),
        WeightMeta(meta.name + block_fp8.SCALES, torch.float32, block_fp8.scales_shape(meta.shape)),
    ]


def overlap_gathers(layers: Iterable[PendingGather]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of each layer, in order, while the next one is being gathered.

    Args:
        layers: Starts a layer's gathers each time it is advanced.
    """
    # Two layers in flight, and no more: each holds full tensors.
    pending: PendingGather | None = None
    for following in layers:
        if pending is not None:
            yield from pending.finish()
        pending = following
    if pending is not None:
        yield from pending.finish()


def check_names(names: Iterable[str], known: Mapping[str, object]) -> list[str]:
    """Return `names` as a list.

    Raises:
        ValueError: A name is not one of `known`.
    """
    names = list(names)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no tensor {unknown[0]!r} in the model")
    return names


class WeightTransfer:
    """The sender, handles and broadcast group of one rank; `close` releases all of them.

    Args:
        source: The weights; every rank takes part in the all-gathers.
        rank: The trainer rank.
        device: Where the tensors are.
        device_id: Identifies the device, or the host on the CPU.
        timeout_s: Limit of each wait, in seconds.
    """

    def __init__(
        self,
        source: GatheredSource,
        *,
        rank: int,
        device: torch.device,
        device_id: str,
        timeout_s: float,
    ) -> None:
        self._source = source
        self._rank = rank
        self._device = device
        self._device_id = device_id
        self._timeout_s = timeout_s
        self._sender: RefitSender | ReshardSender | None = None
        self._handles = HandleOwner()
        self._group: BroadcastGroup | None = None

    def open(
        self,
        *,
        receivers_per_rank: list[int],
        source: GatheredSource | None = None,
        quantized: Collection[str] = (),
        slices: bool = False,
        **options: Any,
    ) -> Mapping[str, str | int] | None:
        """Return the address that this rank's receivers connect to, None if it has none.

        Args:
            receivers_per_rank: How many receivers each trainer rank sends to.
            source: What is sent to them; None: the weights.
            quantized: The names of the tensors that are sent in block-FP8.
            slices: Send from every rank what receivers consume of its own shards, and gather
                nothing. All receivers are then those of rank 0.
            options: Further arguments of `rl_refit.RefitSender`; with `slices` of
                `rl_refit.resharding.ReshardSender`.
        """
        self._close_sender()
        num_receivers = receivers_per_rank[self._rank]
        if slices:
            self._sender = self._slice_sender(receivers_per_rank[0], **options)
            return self._sender.address if num_receivers else None
        source = self._source if source is None else source
        self._sender = RefitSender(
            source.quantized(quantized) if quantized else source,
            num_receivers=num_receivers,
            timeout_s=self._timeout_s,
            device=self._device,
            host=_own_address(),
            **options,
        )
        return self._sender.address if num_receivers else None

    def _slice_sender(self, num_receivers: int, **options: Any) -> ReshardSender:
        return ReshardSender(
            self._source.shards,
            num_receivers=num_receivers,
            trainers=dist.group.WORLD if dist.get_world_size() > 1 else None,
            timeout_s=self._timeout_s,
            host=_own_address(),
            **options,
        )

    def send(
        self,
        version: int,
        *,
        adapters_only: bool = False,
        receivers: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """Stream every tensor to this rank's receivers; return the report's metrics. Collective.

        Args:
            version: Of the tensors.
            adapters_only: See `rl_refit.RefitSender.send`.
            receivers: See `rl_refit.RefitSender.send`.

        Raises:
            RefitError: A receiver failed or did not answer in time.
        """
        if self._sender is None:
            raise RuntimeError("no refit is open: call open_refit() first")
        if isinstance(self._sender, ReshardSender):
            return self._send_slices(self._sender, version, receivers)
        report = self._sender.send(version, adapters_only=adapters_only, receivers=receivers)
        return report.as_metrics()

    def _send_slices(
        self, sender: ReshardSender, version: int, receivers: Sequence[int] | None
    ) -> dict[str, float]:
        report = sender.send(version, receivers=receivers)
        if report is None:
            return {}
        assert sender.report is not None, "the exchange of a version that was sent has a report"
        whole = sum(num_bytes for _, num_bytes in self._tensor_sizes())
        metrics = report.as_metrics() | {
            "refit_bytes": whole,
            "refit_bytes_sent": sender.report.bytes_sent,
        }
        if sender.report.changed is not None:
            metrics["refit_changed"] = sender.report.changed
        return metrics

    def sizes(self) -> tuple[list[tuple[str, int]], float]:
        """Return name and wire bytes of every tensor, and the device's free bytes."""
        return self._tensor_sizes(), _free_bytes(self._device)

    def _tensor_sizes(self) -> list[tuple[str, int]]:
        return [
            (name, torch.Size(shape).numel() * dtype.itemsize)
            for name, dtype, shape in self._source.metadata()
        ]

    def export(self, names: Iterable[str]) -> DeviceHandles:
        """Return `{device id: {name: handle}}`; invalidates earlier handles. Collective."""
        self.drop_handles()
        handles = self._handles.export(dict(self._source.gather(names)))
        return {self._device_id: handles}

    def drop_handles(self) -> None:
        """Release the tensors behind all exported handles."""
        self._handles.close()

    def join(self, ip: str, port: int, world_size: int) -> None:
        """Join the broadcast group with `world_size - 1` inference ranks; trainer rank 0 only."""
        self._close_group()
        if self._rank == 0:
            self._group = BroadcastGroup(
                ip,
                port,
                rank=0,
                world_size=world_size,
                device=self._device,
                timeout_s=self._timeout_s,
            )

    def broadcast(self) -> None:
        """Broadcast every tensor to the group, in order. Collective."""
        if self._group is not None:
            self._group.send(self._source)
            return
        if self._rank == 0:
            raise RuntimeError("there is no broadcast group: call init_collective() first")
        # The other ranks are not in the group, and rank 0's all-gathers need their shards.
        for _ in self._source:
            pass

    def close(self) -> None:
        """Release sender, group and handles. Idempotent."""
        self._close_sender()
        self._close_group()
        self.drop_handles()

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _own_address() -> str:
    """Return the address of the interface over which this node reaches the master.

    Other nodes reach it by that; only transports that cross machines read it.
    """
    return address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
