"""Broadcast over a separate process group, to engines that may be on other machines.

The sender is rank 0 of the group, its receivers are the others in the order of their ranks. Neither
side's default process group is touched. The group uses NCCL if the sender's tensors are on a GPU,
gloo otherwise. Control messages are authenticated; neither the group's own traffic nor its
rendezvous is: the network between the members must be trusted.
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

import msgspec
import torch
import torch.distributed as dist

from rl_refit.errors import RefitError
from rl_refit.protocol.waiting import Deadline
from rl_refit.transports import (
    Context,
    Grant,
    ReceiverContext,
    ReceivingSide,
    SenderContext,
    SendingSide,
    Transport,
)

_MARGIN_S = 5.0
"""Broadcasts may take this much longer than a refit, so that the control messages fail first."""

_EXIT_S = 5.0
"""How long the exit of the interpreter waits for groups to shut down."""

_ENDING: list[threading.Thread] = []

_ENVIRONMENT = threading.Lock()


class GroupGrant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments with which a member joins the group.

    Attributes:
        host: Address of the rendezvous store, which the sender serves.
        port: Its port.
        prefix: Of this group's keys in the store.
        backend: "gloo" or "nccl".
        group_rank: The member's; the sender is 0.
        group_size: The receivers and the sender.
    """

    host: str
    port: int
    prefix: str
    backend: str
    group_rank: int
    group_size: int


class CollectiveTransport(Transport):
    """One broadcast per bucket; the next one is received while a bucket is loaded."""

    crosses_hosts = True

    def open_sender(self, context: SenderContext) -> SendingSide:
        """Return the broadcasting end."""
        return _CollectiveSender(context)

    def open_receiver(self, context: ReceiverContext) -> ReceivingSide:
        """Return a receiving end."""
        return _CollectiveReceiver(context)


class _CollectiveSender(SendingSide):
    def __init__(self, context: SenderContext) -> None:
        assert context.host is not None
        self._context = context
        on_gpu = context.device.type == "cuda"
        self._backend = "nccl" if on_gpu else "gloo"
        self.digest = "keyed_sum" if on_gpu else "xxh3"
        self.buffers, self._device = _allocate(context, on_gpu=on_gpu)
        # No secret: whoever reaches the store can list its keys. It only separates groups.
        self._prefix = secrets.token_hex(16)
        store, self._port = serve_store(context.host, timeout_s=context.timeout_s)
        self._store: dist.Store | None = store
        self._membership = _Membership()

    def grant(self, rank: int) -> tuple[Grant, list[int]]:
        return msgspec.structs.asdict(self._grant(self._context.ranks.index(rank) + 1)), []

    def join(self, deadline: Deadline) -> None:
        self._membership.set(_join(self._grant(0), self._context, self._device, deadline))

    def _grant(self, group_rank: int) -> GroupGrant:
        assert self._context.host is not None
        return GroupGrant(
            host=self._context.host,
            port=self._port,
            prefix=self._prefix,
            backend=self._backend,
            group_rank=group_rank,
            group_size=len(self._context.ranks) + 1,
        )

    def publish(self, bucket: int, nbytes: int, deadline: Deadline) -> None:
        self._membership.broadcast(self.buffers[bucket % len(self.buffers)][:nbytes])

    def close(self) -> None:
        self._membership.close()
        self._store = None
        self.buffers = []


class _CollectiveReceiver(ReceivingSide):
    def __init__(self, context: ReceiverContext) -> None:
        self._context = context
        self._grant = msgspec.convert(context.grant, GroupGrant)
        on_gpu = self._grant.backend == "nccl"
        if on_gpu and context.device.type != "cuda":
            raise RefitError(
                f"the sender broadcasts over NCCL and this receiver is on {context.device}; give "
                'the sender device="cpu" to broadcast over gloo',
                rank=context.rank,
            )
        self.buffers, self._device = _allocate(context, on_gpu=on_gpu)
        self._posted: dict[int, dist.Work | None] = {}
        self._membership = _Membership()

    def join(self, deadline: Deadline) -> None:
        self._membership.set(_join(self._grant, self._context, self._device, deadline))

    def expect(self, bucket: int, nbytes: int, deadline: Deadline) -> None:
        # With a single buffer, the next bucket would overwrite the one that is being loaded.
        if len(self.buffers) > 1 or bucket == 0:
            buffer = self.buffers[bucket % len(self.buffers)][:nbytes]
            self._posted[bucket] = self._membership.broadcast(buffer)

    def fetch(self, bucket: int, nbytes: int, deadline: Deadline) -> torch.Tensor:
        data = self.buffers[bucket % len(self.buffers)][:nbytes]
        work = self._posted.pop(bucket, None) or self._membership.broadcast(data)
        if work is not None:
            work.wait(_timedelta(deadline.remaining("broadcast", bucket=bucket)))
        return data

    def release(self, bucket: int) -> None:
        if self._context.device.type == "cuda":
            torch.cuda.current_stream(self._context.device).synchronize()

    def close(self) -> None:
        self._posted.clear()
        self._membership.close()
        self.buffers = []


def _allocate(context: Context, *, on_gpu: bool) -> tuple[list[torch.Tensor], torch.device]:
    """Return a side's buffers, and their device with its index."""
    device = context.device if on_gpu else torch.device("cpu")
    memory = torch.empty(context.memory_bytes, dtype=torch.uint8, device=device)
    return context.buffers_of(memory), memory.device


class _Membership:
    """One side's process group, constructed in a thread that may outlive the side.

    `run_bounded` abandons a join that takes too long. If it completes after all, and after `close`,
    its group is closed at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: ProcessGroup | None = None
        self._is_closed = False

    def set(self, group: ProcessGroup) -> None:
        with self._lock:
            if not self._is_closed:
                self._group = group
                return
        group.close()

    def broadcast(self, data: torch.Tensor) -> dist.Work | None:
        assert self._group is not None
        return self._group.broadcast(data)

    def close(self) -> None:
        with self._lock:
            group, self._group = self._group, None
            self._is_closed = True
        if group is not None:
            group.close()


class ProcessGroup:
    """A process group that is not registered with `torch.distributed`. Collective to construct.

    Args:
        store: Rendezvous of the members.
        rank: Of this member.
        size: Number of members.
        backend: "gloo" or "nccl".
        host: This machine's address, for gloo.
        device: Of a GPU, with its index: the current device differs between threads.
        deadline: Of the construction. NCCL does not obey it.
        limit_s: Limit of one broadcast, in this refit or a later one, in seconds.
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
        self._group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL | None = None
        limit = _timedelta(deadline.remaining("process group"))
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            with torch.cuda.device(device):
                with _surviving_errors():
                    group = dist.ProcessGroupNCCL(store, rank, size, options)
                # Connect now, while `run_bounded` watches, and not in the first broadcast.
                group.eager_connect_single_device(device)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = limit
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            group = dist.ProcessGroupGloo(store, rank, size, options)
        group._set_default_timeout(_timedelta(limit_s))
        self._group = group

    @property
    def backend(self) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
        """The group itself, of torch; until `close`."""
        assert self._group is not None
        return self._group

    def broadcast(self, data: torch.Tensor) -> dist.Work | None:
        """Start a broadcast from rank 0; return its work, or None if `data` is empty."""
        assert self._group is not None
        return self._group.broadcast(data, 0) if len(data) else None

    def close(self) -> None:
        """Shut the group down, in the background. May not be called twice."""
        # In a thread, as it waits for a pending broadcast that no other member joins any more. In a
        # list, so that the thread drops the last reference: the destructor may block as well.
        group, self._group = self._group, None
        thread = threading.Thread(target=_end, args=([group],), daemon=True)
        del group
        _ENDING[:] = [other for other in _ENDING if other.is_alive()] + [thread]
        thread.start()


@contextmanager
def _surviving_errors() -> Generator[None]:
    """Make an NCCL group that is constructed in this block survive the loss of a peer.

    The group is then aborted, where torch would by default end the process. Its constructor reads
    the variable, see
    https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html

    Holds a lock, as the environment is shared by all threads: nothing in the block may hang.
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


def serve_store(host: str, *, timeout_s: float) -> tuple[dist.Store, int]:
    """Return a rendezvous store that is served at an address, until it is released, and its port.

    Args:
        host: This machine's address.
        timeout_s: Limit of the store's own waits, in seconds.
    """
    listener = socket.create_server((host, 0))
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_timedelta(timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_group(
    grant: GroupGrant, host: str, device: torch.device, deadline: Deadline, *, limit_s: float
) -> ProcessGroup:
    """Return the group of `grant`, once all of its members have joined.

    Args:
        grant: Names the group and this member.
        host: This machine's address, for gloo.
        device: Of a GPU, for NCCL.
        deadline: Of the construction, see `ProcessGroup`.
        limit_s: Limit of one operation of the group, in seconds.
    """
    limit = _timedelta(deadline.remaining("store of the process group"))
    # The sender connects as a client, too: the store that it serves is released in `close`, even if
    # an abandoned thread still waits in this one.
    store = dist.TCPStore(grant.host, grant.port, is_master=False, timeout=limit)
    return ProcessGroup(
        dist.PrefixStore(grant.prefix, store),
        grant.group_rank,
        grant.group_size,
        grant.backend,
        host,
        device,
        deadline,
        limit_s=limit_s,
    )


def _join(
    grant: GroupGrant, context: Context, device: torch.device, deadline: Deadline
) -> ProcessGroup:
    assert context.host is not None
    limit_s = context.timeout_s + _MARGIN_S
    return join_group(grant, context.host, device, deadline, limit_s=limit_s)


@atexit.register
def _wait_for_ends() -> None:
    """Wait for groups to shut down: doing so while the interpreter exits aborts the process."""
    end = time.monotonic() + _EXIT_S
    for thread in _ENDING:
        thread.join(max(end - time.monotonic(), 0.0))


def _end(groups: list[dist.ProcessGroupGloo | dist.ProcessGroupNCCL | None]) -> None:
    group = groups.pop()
    assert group is not None
    group.abort()


def _timedelta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
