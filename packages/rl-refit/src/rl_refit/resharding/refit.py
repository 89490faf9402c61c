"""A refit without a full gather, under the commit protocol of `rl_refit.protocol`.

Trainer rank 0 has a `RefitSender` whose only tensor is an invitation to a process group of all
trainers and engines. What the protocol promises holds: the receivers are authenticated, a version
is committed after all have loaded it, a failure is reported to all and poisons. The slices go
through an `Exchange` over that group, while the receivers load the invitation:

    trainer 0    send(v): begin, invite the receivers, invite the trainers, exchange, all loaded
    trainers     send(v): wait for the invitation, exchange
    engines      begin(v), receive(v, load), where `load` gets the invitation: exchange, load

A group and its exchange last until a refit fails; the next one is over a new group. Ranks in the
exchange's errors are those of the group: the trainers, then the receivers.
"""

# torch annotates its distributed functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import datetime
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from rl_refit.ends.outbound import Connections, OutboundStream
from rl_refit.errors import RefitError
from rl_refit.protocol.channel import Channel, ChannelClosed, Filled
from rl_refit.protocol.waiting import Closing, Deadline, run_bounded
from rl_refit.report import RefitReport
from rl_refit.resharding.bases import Bases, ShardCopies
from rl_refit.resharding.exchange import Exchange, ExchangeReport, Held, Wanted
from rl_refit.sender import RefitSender, check_delta
from rl_refit.source import WeightMeta
from rl_refit.transports.collective import (
    GroupGrant,
    ProcessGroup,
    join_group,
    serve_store,
)

INVITATION = "rl_refit.resharding.invitation"
"""The name of the tensor with which a refit by slices is announced to an engine."""

_BYTES = 1024
"""Of every invitation, so that it can be planned."""
_MARGIN_S = 5.0
"""Waits for another member may take so much longer than its own, so that its error comes first."""

Shards = Callable[[], Held]


class ReshardSender(Closing):
    """A trainer rank's end: sends the slices of its shards that engines consume.

    All trainer ranks make one, and call `send` for every version. The engines' `RefitReceiver`s get
    the address of rank 0; `rl_refit.vllm` knows what to do with it, another engine has a
    `SliceReceiver`. Not thread-safe.

    Args:
        shards: Returns what this rank holds, see `local_shards`; called once per refit. Names,
            shapes and boxes must stay what they are.
        num_receivers: Number of engine ranks, whose ranks are 0 to `num_receivers - 1`.
        trainers: The group of all trainer ranks; None if there is one.
        transport: Of the invitation: "shm" on one machine, "collective" between machines.
        host: The address at which others reach trainer rank 0.
        device: Of the messages: a GPU to exchange them over NCCL, the CPU for gloo.
        round_bytes: See `Exchange`; equal on all trainer ranks and receivers.
        timeout_s: Limit of one `send`, in seconds.
        delta: Send a slice that its receiver has as what has changed in it since the refit before,
            bit by bit. Each trainer rank then keeps a copy of its shards in host memory, if it has
            room for it; engines keep what has arrived in the places of their slices. Equal on all
            trainer ranks. Worth it where the network is slower than memory.

    Raises:
        ValueError: An argument is out of range, or `delta` is set with messages on a GPU.

    Attributes:
        report: Of the last exchange; None before.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        num_receivers: int,
        trainers: dist.ProcessGroup | None = None,
        transport: str = "shm",
        host: str = "127.0.0.1",
        device: torch.device | str = "cpu",
        round_bytes: int | None = None,
        timeout_s: float = 300.0,
        delta: bool = False,
    ) -> None:
        if num_receivers < 1:
            raise ValueError(f"num_receivers={num_receivers} is not positive")
        self._shards, self._trainers = shards, trainers
        self._num_trainers = 1 if trainers is None else trainers.size()
        self._rank = 0 if trainers is None else trainers.rank()
        self._num_receivers, self._host = num_receivers, host
        self._device, self._timeout_s = torch.device(device), timeout_s
        if delta:
            check_delta("digest", self._device)
        self._member = SliceMember(
            device=device, round_bytes=round_bytes, timeout_s=timeout_s, delta=delta
        )
        self.report: ExchangeReport | None = None
        self._sent_version: int | None = None
        self._control: RefitSender | None = None
        if self._rank == 0:
            self._control = _InvitingSender(
                _Invitations(self._invite),
                transport,
                num_receivers,
                host=host,
                timeout_s=timeout_s,
                exchange=self._lead,
                renew=self._leave,
            )
        # Where members meet; releasing it ends the wait of those who still do.
        self._store: dist.Store | None = None
        # Of rank 0, in the refit that is being sent.
        self._invitation: Invitation | None = None
        self._has_announced = False

    @property
    def address(self) -> dict[str, str | int]:
        """What receivers need, at trainer rank 0; see `RefitSender.address`.

        Raises:
            RefitError: This is another rank.
        """
        if self._control is None:
            raise RefitError(f"trainer rank {self._rank} has no address: take that of rank 0")
        return self._control.address

    def send(self, version: int) -> RefitReport | None:
        """Send the slices; return once every engine has verified and, at rank 0, loaded them.

        Collective over the trainers.

        Returns:
            At rank 0, the report of the control messages; `report` has the exchange's.

        Raises:
            RefitError: A receiver or a trainer failed, or did not answer in time. No version can be
                committed; call again, on all ranks.
        """
        self._sent_version, self._has_announced = None, False
        try:
            if self._control is None:
                self._follow(version)
                sent = None
            else:
                sent = self._control.send(version)
        except BaseException as error:
            self._leave()
            if isinstance(error, Exception) and self._control and not self._has_announced:
                self._announce(None)  # the other trainers wait for it
            raise
        self._sent_version = version
        return sent

    def commit(self, version: int) -> None:
        """Commit a version at all receivers; see `RefitSender.commit`. Other ranks only check it.

        Raises:
            RefitError: The version was not the last one sent, or a receiver is gone.
        """
        if version != self._sent_version:
            raise RefitError(
                f"version {version} was not sent: the last one was {self._sent_version}"
            )
        if self._control is not None:
            self._control.commit(version)

    def close(self) -> None:
        """Release the group, the connections and the endpoint. May be called again."""
        self._leave()
        self._member.bases.close()
        if self._control is not None:
            self._control.close()

    def _leave(self) -> None:
        self._member.close()
        self._store = None

    def _invite(self) -> Invitation:
        """Return the invitation to the group of this refit: the current one, if it is intact."""
        self._invitation = self._member.invitation or self._new_invitation()
        return self._invitation

    def _new_invitation(self) -> Invitation:
        self._store, port = serve_store(self._host, timeout_s=self._timeout_s)
        return Invitation(
            group=GroupGrant(
                host=self._host,
                port=port,
                prefix=secrets.token_hex(16),
                backend="nccl" if self._device.type == "cuda" else "gloo",
                group_rank=0,
                group_size=self._num_trainers + self._num_receivers,
            ),
            num_trainers=self._num_trainers,
        )

    def _lead(self, version: int, watch: Callable[[], None]) -> None:
        """Exchange at rank 0, once the receivers have been invited; `watch` raises if one fails."""
        assert self._invitation is not None
        self._has_announced = True
        self._announce(self._invitation)
        self._transfer(self._invitation, version, watch)

    def _follow(self, version: int) -> None:
        """Exchange at another rank, once rank 0 has its receivers."""
        self._transfer(self._await_invitation(), version)

    def _transfer(
        self, invitation: Invitation, version: int, watch: Callable[[], None] = lambda: None
    ) -> None:
        self.report = self._member.transfer(
            invitation, self._rank, version, held=self._shards(), watch=watch
        )

    def _announce(self, invitation: Invitation | None) -> None:
        """Send the invitation to the other trainers; None: this refit has failed."""
        if self._trainers is not None:
            self._broadcast(
                torch.zeros(_BYTES, dtype=torch.uint8)
                if invitation is None
                else invitation.encode()
            )

    def _await_invitation(self) -> Invitation:
        data = self._broadcast(torch.zeros(_BYTES, dtype=torch.uint8))
        if not data.any():
            raise RefitError("the refit has failed at trainer rank 0, before the exchange")
        return Invitation.decode(data)

    def _broadcast(self, data: torch.Tensor) -> torch.Tensor:
        data = data.to(self._device)
        work = dist.broadcast(data, group=self._trainers, group_src=0, async_op=True)
        assert work is not None
        try:
            work.wait(_timedelta(self._timeout_s + _MARGIN_S))
        except RuntimeError as error:
            raise RefitError(f"no invitation from trainer rank 0: {error}") from error
        return data.cpu()


class SliceReceiver(Closing):
    """An engine rank's end, beside its `RefitReceiver`: receives the slices that it consumes.

        receiver.begin(version)
        receiver.receive(version, lambda tensors: slices.receive(tensors, version, wanted))

    An engine that assembles its weights from the places of its slices does so behind that call, or
    in `check`. Not thread-safe, except for `close`.

    Args:
        rank: The rank of the `RefitReceiver`.
        device: Of the messages, as the sender's.
        round_bytes: As the sender's.
        timeout_s: Limit of one exchange, in seconds.
    """

    def __init__(
        self,
        rank: int,
        *,
        device: torch.device | str = "cpu",
        round_bytes: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._rank = rank
        self._member = SliceMember(device=device, round_bytes=round_bytes, timeout_s=timeout_s)

    def receive(
        self, tensors: list[tuple[str, torch.Tensor]], version: int, wanted: Wanted
    ) -> ExchangeReport:
        """Receive a version's slices in their places.

        Args:
            tensors: What `load` was called with.
            version: Of the refit.
            wanted: What this rank consumes, see `Exchange`; read if the group is new, as after a
                failure, and kept otherwise.

        Raises:
            VerificationError: The digest of what has arrived is wrong, here or at another rank.
            RefitError: The exchange failed, or this is no sender of slices.
        """
        names = [name for name, _ in tensors]
        if names != [INVITATION]:
            raise RefitError(f"the sender sends tensors, not slices: {', '.join(names[:3])}")
        invitation = Invitation.decode(tensors[0][1])
        return self._member.transfer(
            invitation, invitation.num_trainers + self._rank, version, wanted=wanted
        )

    def close(self) -> None:
        """Leave the group. May be called again; the places keep what they have received."""
        self._member.close()


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names the group of a refit, to those who may join it.

    Attributes:
        group: With the rank of nobody in particular.
        num_trainers: Their ranks in the group come first.
    """

    group: GroupGrant
    num_trainers: int

    def encode(self) -> torch.Tensor:
        """Return the bytes that are sent, padded with zeros."""
        data = msgspec.json.encode(self).ljust(_BYTES)
        assert len(data) == _BYTES
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @classmethod
    def decode(cls, data: torch.Tensor) -> Invitation:
        """Return the invitation of these bytes, or raise `RefitError`."""
        try:
            return msgspec.json.decode(data.cpu().numpy().tobytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise RefitError(f"no invitation to an exchange: {error}") from error


class SliceMember(Closing):
    """One rank's membership in the group, made anew after a failure.

    Args:
        device: Of the messages.
        round_bytes: See `Exchange`.
        timeout_s: Limit of joining a group, and of each exchange, in seconds.
        delta: Whether it sends what has changed, where that is enough.

    Attributes:
        invitation: To the group that this rank is in; None before the first, and after a failure.
        bases: What this rank keeps of the last transfer, over all groups.
    """

    def __init__(
        self,
        *,
        device: torch.device | str,
        round_bytes: int | None,
        timeout_s: float,
        delta: bool = False,
    ) -> None:
        Deadline(timeout_s)
        self._device, self._round_bytes = torch.device(device), round_bytes
        self._timeout_s = timeout_s
        self.invitation: Invitation | None = None
        self.bases = Bases(ShardCopies() if delta else None)
        self._group: ProcessGroup | None = None
        self._exchange: Exchange | None = None

    def transfer(
        self,
        invitation: Invitation,
        rank: int,
        version: int,
        *,
        held: Held | None = None,
        wanted: Wanted = (),
        watch: Callable[[], None] = lambda: None,
    ) -> ExchangeReport:
        """Join the group of an invitation, unless this rank is in it, and exchange the slices.

        Args:
            invitation: To the group.
            rank: In the group.
            version: Of the refit.
            held: See `Exchange`.
            wanted: See `Exchange`; read if the group is new.
            watch: Called while members are waited for; its exception ends that wait.
        """
        try:
            if self._exchange is None or self.invitation != invitation:
                self.close()
                exchange = self._join(invitation, rank, held or {}, wanted, watch)
            else:
                exchange = self._exchange
                exchange.hold(held or {})
            exchange.begin(version)
            return exchange.transfer(version)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group. May be called again."""
        group, self._group = self._group, None
        exchange, self._exchange, self.invitation = self._exchange, None, None
        if exchange is not None:
            exchange.close()
        if group is not None:
            group.close()

    def _join(
        self,
        invitation: Invitation,
        rank: int,
        held: Held,
        wanted: Wanted,
        watch: Callable[[], None],
    ) -> Exchange:
        grant = msgspec.structs.replace(invitation.group, group_rank=rank)
        if (grant.backend == "nccl") != (self._device.type == "cuda"):
            raise RefitError(f"the sender exchanges over {grant.backend}, this is {self._device}")
        if rank >= grant.group_size:
            raise RefitError(f"rank {rank} is not among the {grant.group_size} of the group")
        host = _address_towards(grant.host, grant.port)
        deadline = Deadline(self._timeout_s)
        self._group = run_bounded(
            lambda: join_group(
                grant, host, self._device, deadline, limit_s=self._timeout_s + _MARGIN_S
            ),
            deadline,
            "process group of trainers and engines",
            watch=watch,
            discard=ProcessGroup.close,
        )
        self._exchange = Exchange(
            held,
            wanted,
            group=self._group.backend,
            round_bytes=self._round_bytes,
            timeout_s=self._timeout_s,
            device=self._device,
            bases=self.bases,
        )
        self.invitation = invitation
        return self._exchange


class _Invitations:
    """The source of the invitation."""

    def __init__(self, invite: Callable[[], Invitation]) -> None:
        self._invite = invite

    def metadata(self) -> list[WeightMeta]:
        return [WeightMeta(INVITATION, torch.uint8, (_BYTES,))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield INVITATION, self._invite().encode()


class _InvitingSender(RefitSender):
    def __init__(
        self,
        source: _Invitations,
        transport: str,
        num_receivers: int,
        *,
        host: str,
        timeout_s: float,
        exchange: Callable[[int, Callable[[], None]], None],
        renew: Callable[[], None],
    ) -> None:
        super().__init__(source, transport, num_receivers, host=host, timeout_s=timeout_s)
        self._stream_class = partial(_InvitingStream, exchange=exchange)
        self._renew = renew

    def _open(self, channels: dict[int, Channel], version: int, deadline: Deadline) -> Connections:
        # Those that have connected anew are not in the group.
        self._renew()
        return super()._open(channels, version, deadline)


@dataclass(kw_only=True)
class _InvitingStream(OutboundStream):
    exchange: Callable[[int, Callable[[], None]], None]

    def announce(self, filled: Filled) -> None:
        super().announce(filled)
        try:
            self.exchange(self.version, self.receivers.read_pending)
        except RefitError:
            self._raise_reported()
            raise

    def _raise_reported(self) -> None:
        """Raise what a receiver reports, if it does: it says more than that the exchange failed."""
        try:
            self.receivers.read_pending()
        except RefitError as error:
            if not isinstance(error.__cause__, ChannelClosed):
                raise


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address on the way to another; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])


def _timedelta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
