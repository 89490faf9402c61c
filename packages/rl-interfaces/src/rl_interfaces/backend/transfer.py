"""One trainer rank's part in handing the weights to inference engines, by whatever way."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from rl_refit import RefitSender
from rl_refit.compat.broadcast import BroadcastGroup
from rl_refit.compat.handles import HandleOwner
from rl_refit.protocol.endpoint import address_towards
from rl_refit.source import WeightSource


class GatheredSource(WeightSource, Protocol):
    """A source whose tensors can be asked for by name as well; every trainer rank takes part."""

    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole tensor of each of `names`."""
        ...


class WeightTransfer:
    """The senders, handles and groups of one rank; `close` lets go of all of them.

    Args:
        source: The weights; every rank takes part in gathering them.
        rank: The trainer rank that this is.
        device: Where its tensors are.
        device_id: What tells its device, or host, from others.
        timeout_s: The most seconds that one transfer may wait.
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
        self._sender: RefitSender | None = None
        self._handles = HandleOwner()
        self._group: BroadcastGroup | None = None

    # The stream

    def open(self, *, receivers_per_rank: list[int], **options: Any) -> dict[str, Any] | None:
        """Return the address at which this rank's receivers find it, None where it has none.

        Args:
            receivers_per_rank: How many receivers each trainer rank sends to.
            options: What else `rl_refit.RefitSender` takes.
        """
        self._close_sender()
        num_receivers = receivers_per_rank[self._rank]
        self._sender = RefitSender(
            self._source,
            num_receivers=num_receivers,
            timeout_s=self._timeout_s,
            device=self._device,
            # As the other nodes of the job reach this one; read by transports that cross machines.
            host=address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
            **options,
        )
        return self._sender.address if num_receivers else None

    def send(self, version: int) -> dict[str, float]:
        """Stream every tensor to this rank's receivers; return the report's numbers.

        Raises:
            RefitError: A receiver failed or did not answer in time.
        """
        if self._sender is None:
            raise RuntimeError("open_refit was not called: nobody receives the weights")
        return self._sender.send(version).as_metrics()

    # Handles that go through the driver

    def sizes(self) -> tuple[list[tuple[str, int]], float]:
        """Return name and bytes of every tensor as it is sent, and the device's free bytes."""
        sizes = [
            (name, torch.Size(shape).numel() * dtype.itemsize)
            for name, dtype, shape in self._source.metadata()
        ]
        return sizes, _free_bytes(self._device)

    def export(self, names: Iterable[str]) -> dict[str, Any]:
        """Return `{device id: {name: handle}}` of some tensors; those of the last call expire."""
        self.drop_handles()
        handles = self._handles.export(dict(self._source.gather(names)))
        return {self._device_id: handles}

    def drop_handles(self) -> None:
        """Let go of the tensors behind all handles."""
        self._handles.close()

    # The group that the driver names

    def join(self, ip: str, port: int, world_size: int) -> None:
        """Meet the inference ranks at an address; the first trainer rank alone takes part."""
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
        """Send every tensor to the group. All trainer ranks take part in the gathers."""
        if self._group is not None:
            self._group.send(self._source)
            return
        if self._rank == 0:
            raise RuntimeError("init_collective was not called: nobody receives the weights")
        for _ in self._source:
            pass

    def close(self) -> None:
        """Let go of everything. May be called again."""
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


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
