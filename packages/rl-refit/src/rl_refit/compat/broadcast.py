"""One broadcast per tensor: the simplest refit to engines on other machines.

Trainer rank 0 and the inference ranks rendezvous at an address from the driver, and iterate over
the same tensors in the same order. Nothing is authenticated or verified: `RefitSender` with the
transport `collective` does both, and is faster.
"""

# torch annotates its distributed classes only in part.
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from rl_refit.protocol.endpoint import address_towards
from rl_refit.protocol.waiting import Closing, Deadline, run_bounded
from rl_refit.transports.collective import ProcessGroup

Info = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""`{name: (shape, dtype)}`, in the order in which the tensors are sent."""


class BroadcastGroup(Closing):
    """A separate process group: rank 0 sends, all others receive. Collective to construct.

    It uses NCCL if the device is a GPU, gloo otherwise.

    Args:
        ip: Address of rank 0.
        port: A free port there.
        rank: This process's rank; 0 is the trainer.
        world_size: The inference ranks plus one.
        device: Device of the tensors.
        timeout_s: Limit of the construction, and of each broadcast, in seconds.

    Raises:
        RefitError: The other ranks did not join in time, or the group cannot be constructed.
    """

    def __init__(
        self,
        ip: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        device: torch.device | str = "cpu",
        timeout_s: float = 300.0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not within world_size={world_size}")
        # With its index: the group is constructed in a thread, whose current GPU may differ.
        self._device = torch.empty(0, device=device).device
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._rank = rank
        deadline = Deadline(timeout_s)

        def join() -> ProcessGroup:
            store = dist.TCPStore(
                ip, port, is_master=rank == 0, wait_for_workers=False, timeout=self._timeout
            )
            return ProcessGroup(
                store,
                rank,
                world_size,
                "nccl" if self._device.type == "cuda" else "gloo",
                address_towards(ip, port),
                self._device,
                deadline,
                limit_s=timeout_s,
            )

        self._group: ProcessGroup | None = run_bounded(
            join, deadline, f"group of {world_size} ranks", discard=ProcessGroup.close
        )

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Broadcast every tensor, in order; return when all are sent or, on a GPU, enqueued.

        Raises:
            RuntimeError: A receiver did not join a broadcast in time.
        """
        for _, tensor in tensors:
            self._broadcast(tensor.detach().to(self._device).contiguous())

    def receive(self, info: Info) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of everything that rank 0 sends, each in new memory.

        Args:
            info: The tensors, in the order of sending.

        Raises:
            RuntimeError: The trainer did not join a broadcast in time.
        """
        for name, (shape, dtype) in info.items():
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
            self._broadcast(tensor)
            yield name, tensor

    def close(self) -> None:
        """Leave the group. May be called again."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self._group is None:
            raise RuntimeError("the group is closed")
        # As bytes, since not every backend supports every dtype.
        work = self._group.broadcast(tensor.flatten().view(torch.uint8))
        if work is not None:
            work.wait(self._timeout)
