"""Broadcast over a process group of its own, to engines that may be on other machines.

The sender is rank 0 of the group, its receivers are the others in the order of their ranks. The
default process group of neither side is touched. NCCL is used where the sender's tensors are on a
GPU, gloo elsewhere. The control messages are authenticated; what the group itself sends is not,
nor are the addresses under which its members meet: the network between them must be trusted.
"""

# torch annotates its distributed classes only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import atexit
import datetime
import os
import secrets
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rl_refit.deadline import Deadline
from rl_refit.errors import RefitError
from rl_refit.transports.base import (
    ReceiverContext,
    ReceivingSide,
    SenderContext,
    SendingSide,
    Transport,
)
from rl_refit.transports.shm import split_buffers

_MARGIN_S = 5.0
"""How much longer than a refit its broadcasts may take, so that the control messages fail first."""

_EXIT_S = 5.0
"""How long the interpreter's end waits for groups to end."""

_ENDING: list[threading.Thread] = []

_ENVIRONMENT = threading.Lock()


class CollectiveTransport(Transport):
    """One broadcast per bucket; the next one is received while a bucket is loaded."""

    crosses_hosts = True

    def open_sender(self, context: SenderContext) -> SendingSide:
        """Return the end that broadcasts."""
        return _CollectiveSender(context)

    def open_receiver(self, context: ReceiverContext) -> ReceivingSide:
        """Return an end that receives."""
        return _CollectiveReceiver(context)


class _CollectiveSender(SendingSide):
    def __init__(self, context: SenderContext) -> None:
        assert context.host is not None
        self._context = context
        on_gpu = context.device.type == "cuda"
        self._backend = "nccl" if on_gpu else "gloo"
        self.digest = "keyed_sum" if on_gpu else "xxh3"
        device = context.device if on_gpu else torch.device("cpu")
        size = context.num_buffers * context.buffer_bytes
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.buffers = split_buffers(memory, context.num_buffers, context.buffer_bytes)
        self._device = memory.device
        listener = socket.create_server((context.host, 0))
        self._port = listener.getsockname()[1]
        # The store lets anybody in who reaches it, and lists its keys to them: the prefix only
        # keeps groups apart.
        self._prefix = secrets.token_hex(16)
        self._store: dist.Store | None = dist.TCPStore(
            context.host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=_timedelta(context.timeout_s),
            master_listen_fd=listener.detach(),
        )
        self._membership = _Membership()

    def grant(self, rank: int) -> tuple[dict[str, Any], list[int]]:
        return self._grant(self._context.ranks.index(rank) + 1), []

    def join(self, deadline: Deadline) -> None:
        self._membership.enter(_meet(self._grant(0), self._context, self._device, deadline))

    def _grant(self, group_rank: int) -> dict[str, Any]:
        return {
            "host": self._context.host,
            "port": self._port,
            "prefix": self._prefix,
            "backend": self._backend,
            "group_rank": group_rank,
            "group_size": len(self._context.ranks) + 1,
        }

    def publish(self, bucket: int, nbytes: int, deadline: Deadline) -> None:
        self._membership.broadcast(self.buffers[bucket % len(self.buffers)][:nbytes])

    def close(self) -> None:
        self._membership.leave()
        self._store = None
        self.buffers = []


class _CollectiveReceiver(ReceivingSide):
    def __init__(self, context: ReceiverContext) -> None:
        self._context = context
        self._grant = context.grant
        on_gpu = self._grant["backend"] == "nccl"
        if on_gpu and context.device.type != "cuda":
            raise RefitError(
                f"the sender broadcasts over NCCL and this receiver is on {context.device}; give "
                'the sender device="cpu" to broadcast over gloo',
                rank=context.rank,
            )
        size = context.num_buffers * context.buffer_bytes
        device = context.device if on_gpu else torch.device("cpu")
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.buffers = split_buffers(memory, context.num_buffers, context.buffer_bytes)
        self._device = memory.device
        self._expected: dict[int, Any] = {}
        self._membership = _Membership()

    def join(self, deadline: Deadline) -> None:
        self._membership.enter(_meet(self._grant, self._context, self._device, deadline))

    def expect(self, bucket: int, nbytes: int, deadline: Deadline) -> None:
        if len(self.buffers) > 1 or bucket == 0:
            buffer = self.buffers[bucket % len(self.buffers)][:nbytes]
            self._expected[bucket] = self._membership.broadcast(buffer)

    def fetch(self, bucket: int, nbytes: int, deadline: Deadline) -> torch.Tensor:
        data = self.buffers[bucket % len(self.buffers)][:nbytes]
        work = self._expected.pop(bucket, None) or self._membership.broadcast(data)
        if work is not None:
            work.wait(_timedelta(deadline.remaining("broadcast", bucket=bucket)))
        return data

    def release(self, bucket: int) -> None:
        if self._context.device.type == "cuda":
            torch.cuda.current_stream(self._context.device).synchronize()

    def close(self) -> None:
        self._expected.clear()
        self._membership.leave()
        self.buffers = []


class _Membership:
    """A side's part in a group. One that is entered late, after it was left, is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: ProcessGroup | None = None
        self._has_left = False

    def enter(self, group: ProcessGroup) -> None:
        with self._lock:
            if not self._has_left:
                self._group = group
                return
        group.close()

    def broadcast(self, data: torch.Tensor) -> Any:
        assert self._group is not None
        return self._group.broadcast(data)

    def leave(self) -> None:
        with self._lock:
            group, self._group = self._group, None
            self._has_left = True
        if group is not None:
            group.close()


class ProcessGroup:
    """A process group that no other part of the process knows of.

    Args:
        device: With the index of a GPU: the current one differs between threads.
        deadline: Of the construction. Over NCCL nothing keeps it.
        limit_s: The most seconds of one broadcast, in this refit or a later one.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        backend: str,
        host: str,
        device: torch.device,
        deadline: Deadline,
        *,
        limit_s: float,
    ) -> None:
        limit = _timedelta(deadline.remaining("process group"))
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            with torch.cuda.device(device):
                with _surviving_errors():
                    self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
                # Now, as whoever makes the group is watched, and the first broadcast is not.
                self._group.eager_connect_single_device(device)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = limit
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        self._group._set_default_timeout(_timedelta(limit_s))

    def broadcast(self, data: torch.Tensor) -> Any:
        """Start a broadcast from rank 0; return its work, or None if there is nothing to send."""
        return self._group.broadcast(data, 0) if len(data) else None

    def close(self) -> None:
        """Leave the group; may not be called twice."""
        # Its end waits for a broadcast that no other side takes part in any more.
        group, self._group = self._group, None
        thread = threading.Thread(target=_end, args=([group],), daemon=True)
        del group
        _ENDING[:] = [other for other in _ENDING if other.is_alive()] + [thread]
        thread.start()


@contextmanager
def _surviving_errors() -> Generator[None]:
    """Let a NCCL group that is made within be aborted when a peer is lost, and nothing else.

    Torch ends the process by default. The group's constructor reads this variable, see
    https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html

    Others wait meanwhile: nothing may be within that can hang.
    """
    name, abort_only = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
    with _ENVIRONMENT:
        kept = os.environ.get(name)
        os.environ[name] = abort_only
        try:
            yield
        finally:
            if kept is None:
                del os.environ[name]
            else:
                os.environ[name] = kept


def _meet(
    grant: dict[str, Any],
    context: SenderContext | ReceiverContext,
    device: torch.device,
    deadline: Deadline,
) -> ProcessGroup:
    """Return the group that `grant` lets into, once all its members are there."""
    assert context.host is not None
    limit = _timedelta(deadline.remaining("store of the process group"))
    # The sender connects too: the store that it serves ends with `close`, under whoever waits.
    store = dist.TCPStore(str(grant["host"]), int(grant["port"]), is_master=False, timeout=limit)
    return ProcessGroup(
        dist.PrefixStore(str(grant["prefix"]), store),
        int(grant["group_rank"]),
        int(grant["group_size"]),
        str(grant["backend"]),
        context.host,
        device,
        deadline,
        limit_s=context.timeout_s + _MARGIN_S,
    )


@atexit.register
def _wait_for_ends() -> None:
    """Let groups end: the process aborts where one does so while the interpreter goes down."""
    end = time.monotonic() + _EXIT_S
    for thread in _ENDING:
        thread.join(max(end - time.monotonic(), 0.0))


def _end(groups: list[Any]) -> None:
    group = groups.pop()
    group.abort()


def _timedelta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
