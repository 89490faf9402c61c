"""A refit without a full gather, under the commit protocol of `rl_refit.protocol`.

Trainer rank 0 has a `RefitSender` whose tensors are invitations to a process group of all trainers
and engines. What the protocol promises holds: the receivers are authenticated, a version is
committed after all have loaded it, a failure is reported to all and poisons. The slices go
through an `Exchange` over that group, while the receivers load the invitation:

    trainer 0    send(v): begin, invite the receivers, invite the trainers, exchange, all loaded
    trainers     send(v): wait for the invitation, exchange, wait for its outcome
    engines      begin(v), receive(v, load), where `load` gets the invitation: exchange, load

A group and its exchange last until a refit fails; the next one is over a new group. Ranks in the
exchange's errors are those of the group: the trainers, then the receivers.

With `min_receivers` there are several invitations, each in a bucket of its own. If an engine is
lost, the exchange breaks off at all members; those that live say that they have "loaded" the
invitation, the sender drops the others, and the next invitation is to a group without them. Those
that are left over, once an exchange has succeeded, say that it is over.
"""

# torch annotates its distributed functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import datetime
import logging
import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypedDict, Unpack

import msgspec
import torch
import torch.distributed as dist

from rl_refit.ends.membership import Membership
from rl_refit.ends.outbound import Connections, NamedTensors, OutboundStream
from rl_refit.errors import RefitError
from rl_refit.plan import Bucket, align
from rl_refit.protocol.channel import Channel, ChannelClosed, Filled
from rl_refit.protocol.waiting import Closing, Deadline
from rl_refit.report import RefitReport
from rl_refit.resharding.exchange import ExchangeReport, Held, MemberLostError, Wanted
from rl_refit.resharding.members import (
    LOSSES,
    MARGIN_S,
    Invitation,
    SliceMember,
    Word,
    decode_word,
    encode_word,
)
from rl_refit.sender import RefitSender, check_delta
from rl_refit.source import WeightMeta
from rl_refit.transports.collective import GroupGrant, serve_store

logger = logging.getLogger(__name__)

INVITATION = "rl_refit.resharding.invitation"
"""The tensors with which a refit by slices is announced to an engine have this name, and a number.
"""

_BYTES = 1024
_BYTES_PER_RECEIVER = 8
"""Of every invitation, so that it can be planned."""
_MOST_ATTEMPTS = 4
"""Of one refit, if engines are lost in one after the other."""
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
        transport: Of the invitation: "shm" on one machine, "chain" or "collective" between
            machines.
        host: The address at which others reach trainer rank 0.
        device: Of the messages: a GPU to exchange them over NCCL, the CPU for gloo.
        round_bytes: See `Exchange`; equal on all trainer ranks and receivers.
        timeout_s: Limit of one `send`, in seconds.
        min_receivers: How many receivers have to hold a version before it can be committed, see
            `RefitSender`. If one is lost in a refit, the others receive it anew without its engine;
            the transport has to survive that, as "shm" and "chain" do.
        receiver_timeout_s: See `RefitSender`. While slices are exchanged, every wait for another
            member has this limit, and so has the wait for those that live after it.
        receivers_per_engine: Receivers of one engine, see `RefitSender`.
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
        min_receivers: int | None = None,
        receiver_timeout_s: float | None = None,
        receivers_per_engine: int = 1,
        delta: bool = False,
    ) -> None:
        if num_receivers < 1:
            raise ValueError(f"num_receivers={num_receivers} is not positive")
        members = Membership(
            num_receivers,
            min_receivers=min_receivers,
            timeout_s=timeout_s,
            receiver_timeout_s=receiver_timeout_s,
            per_engine=receivers_per_engine,
        )
        # Each attempt but the last one loses an engine.
        num_losses = members.num_dispensable // receivers_per_engine
        self._num_attempts = min(1 + num_losses, _MOST_ATTEMPTS)
        self._silence_s = members.silence_s if num_losses else None
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
                _Invitations(self._invite, self._num_attempts, self._num_bytes),
                transport,
                num_receivers,
                bucket_bytes=self._num_bytes,
                host=host,
                timeout_s=timeout_s,
                min_receivers=min_receivers,
                receiver_timeout_s=receiver_timeout_s,
                receivers_per_engine=receivers_per_engine,
                lead=self,
            )
        # Where members meet; releasing it ends the wait of those who still do.
        self._store: dist.Store | None = None
        # Of rank 0, in the refit that is being sent: to whom it goes, the last invitation, whether
        # an exchange has succeeded, whether the other trainers wait for a word, and how many
        # invitations may follow.
        self._members: tuple[int, ...] = ()
        self._invitation: Invitation | None = None
        self._is_over = False
        self._is_awaited = False
        self._num_left = 0

    @property
    def _num_bytes(self) -> int:
        return align(_BYTES + _BYTES_PER_RECEIVER * self._num_receivers)

    @property
    def address(self) -> dict[str, str | int]:
        """What receivers need, at trainer rank 0; see `RefitSender.address`.

        Raises:
            RefitError: This is another rank.
        """
        if self._control is None:
            raise RefitError(f"trainer rank {self._rank} has no address: take that of rank 0")
        return self._control.address

    def send(self, version: int, *, receivers: Collection[int] | None = None) -> RefitReport | None:
        """Send the slices; return once every engine has verified and, at rank 0, loaded them.

        Collective over the trainers.

        Args:
            version: Of the weights.
            receivers: See `RefitSender.send`; at rank 0. Not empty.

        Returns:
            At rank 0, the report of the control messages; `report` has the exchange's.

        Raises:
            RefitError: A receiver or a trainer failed, or did not answer in time. No version can be
                committed; call again, on all ranks.
        """
        if receivers is not None and not receivers:
            raise ValueError("receivers=[]: slices are sent to somebody")
        self._sent_version = None
        try:
            if self._control is None:
                self._follow(version)
                sent = None
            else:
                self._is_over, self._is_awaited = False, True
                self._num_left = self._num_attempts
                sent = self._control.send(version, receivers=receivers)
        except BaseException as error:
            self.leave()
            if isinstance(error, Exception) and self._is_awaited:
                self._announce("the refit has failed at trainer rank 0")
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
        self.leave()
        self._member.bases.close()
        if self._control is not None:
            self._control.close()

    def leave(self) -> None:
        """Leave the group: the next exchange is over a new one."""
        self._member.close()
        self._store = None

    def prepare(self, ranks: tuple[int, ...]) -> None:
        """Note, at rank 0, who the next invitation is to."""
        self._members = ranks

    def _invite(self) -> Invitation | None:
        """Return the invitation to the next exchange; None: an exchange has succeeded.

        It is to the current group, if that is intact.
        """
        if self._is_over:
            return None
        current = self._member.invitation
        if current is None or current.receivers != self._members:
            self.leave()
            current = self._new_invitation()
        self._num_left -= 1
        self._invitation = msgspec.structs.replace(current, num_left=self._num_left)
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
                group_size=self._num_trainers + len(self._members),
            ),
            num_trainers=self._num_trainers,
            receivers=self._members,
            silence_s=self._silence_s,
            num_left=0,
        )

    def lead(self, stream: InvitingStream, bucket: int) -> None:
        """Exchange at rank 0, once the receivers have been invited by this bucket."""
        if self._is_over:
            return
        assert self._invitation is not None
        self._announce(self._invitation)
        receivers, invited = stream.receivers, self._members

        def watch() -> None:
            receivers.read_pending()
            if receivers.ranks != invited:
                raise MemberLostError("an engine was lost before the exchange")

        failure: Exception | None = None
        try:
            self._transfer(self._invitation, stream.version, watch)
        except LOSSES as error:
            if self._num_attempts == 1:
                raise
            failure = error
        if self._num_attempts > 1:
            # They answer once they have left the exchange; who does not is dropped.
            receivers.wait_loaded(stream.plan, bucket)
        if receivers.ranks == invited:
            if failure is not None:
                raise failure
            self._is_over = True
            self._announce(None)
            return
        self.leave()
        if not self._invitation.num_left:
            raise RefitError(f"engines were lost in each of {self._num_attempts} attempts")

    def _follow(self, version: int) -> None:
        """Exchange at another rank, whenever rank 0 invites to it, until it says it is over."""
        failure: Exception | None = None
        while isinstance(word := self._await_word(), Invitation):
            failure = None
            try:
                self._transfer(word, version)
            except Exception as error:
                # Rank 0 repeats the exchange, or fails too; whatever it says is waited for.
                failure = error
        if failure is not None:
            raise failure
        if word is not None:
            raise RefitError(f"{word}, before the exchange")

    def _transfer(
        self, invitation: Invitation, version: int, watch: Callable[[], None] = lambda: None
    ) -> None:
        self.report = self._member.transfer(
            invitation, self._rank, version, held=self._shards(), watch=watch
        )

    def _announce(self, word: Word) -> None:
        """Send the other trainers an invitation, the reason of a failure, or None for success."""
        if self._trainers is None:
            return
        # If they cannot be reached, there is nothing more to say.
        self._is_awaited = False
        self._broadcast(encode_word(word, self._num_bytes))
        self._is_awaited = isinstance(word, Invitation)

    def _await_word(self) -> Word:
        return decode_word(self._broadcast(torch.zeros(self._num_bytes, dtype=torch.uint8)))

    def _broadcast(self, data: torch.Tensor) -> torch.Tensor:
        data = data.to(self._device)
        work = dist.broadcast(data, group=self._trainers, group_src=0, async_op=True)
        assert work is not None
        try:
            work.wait(_timedelta(self._timeout_s + MARGIN_S))
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
        self._received: int | None = None
        self._member = SliceMember(device=device, round_bytes=round_bytes, timeout_s=timeout_s)

    def receive(
        self, tensors: list[tuple[str, torch.Tensor]], version: int, wanted: Wanted
    ) -> ExchangeReport | None:
        """Receive a version's slices in their places, or try to.

        Where the sender goes on without engines that are lost, it is called several times in a
        refit. What has arrived counts once the last bucket is loaded: see to it in `check`.

        Args:
            tensors: What `load` was called with.
            version: Of the refit.
            wanted: What this rank consumes, see `Exchange`; read if the group is new, as after a
                failure, and kept otherwise.

        Returns:
            None if a member was lost, so that the sender repeats the exchange, or if this bucket
            says that no repetition is needed.

        Raises:
            VerificationError: The digest of what has arrived is wrong, here or at another rank.
            RefitError: The exchange failed, or this is no sender of slices.
        """
        if not is_invitation(tensors):
            names = [name for name, _ in tensors[:3]]
            raise RefitError(f"the sender sends tensors, not slices: {', '.join(names)}")
        word = decode_word(tensors[0][1])
        if not isinstance(word, Invitation):
            if self._received != version:
                raise RefitError(f"version {version} has not arrived, and is not sent again")
            return None
        self._received = None
        try:
            report = self._member.transfer(
                word, word.group_rank_of(self._rank), version, wanted=wanted
            )
        except LOSSES as error:
            if not word.num_left:
                raise
            logger.warning("the exchange of version %d has broken off: %s", version, error)
            return None
        self._received = version
        return report

    def close(self) -> None:
        """Leave the group. May be called again; the places keep what they have received."""
        self._member.close()


def is_invitation(tensors: list[tuple[str, torch.Tensor]]) -> bool:
    """Return whether a bucket announces slices."""
    return bool(tensors) and tensors[0][0].startswith(INVITATION)


class _Invitations:
    """The source of the invitations."""

    def __init__(self, invite: Callable[[], Invitation | None], number: int, nbytes: int) -> None:
        self._invite, self._number, self._nbytes = invite, number, nbytes

    def metadata(self) -> list[WeightMeta]:
        return [
            WeightMeta(f"{INVITATION}.{index}", torch.uint8, (self._nbytes,))
            for index in range(self._number)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for each in self.metadata():
            yield each.name, encode_word(self._invite(), self._nbytes)


class _InvitingSender(RefitSender):
    def __init__(
        self,
        source: _Invitations,
        transport: str,
        num_receivers: int,
        *,
        lead: ReshardSender,
        **options: Unpack[_Options],
    ) -> None:
        super().__init__(source, transport, num_receivers, **options)
        self._stream_class = partial(InvitingStream, leader=lead)
        self._leader = lead

    def _open(self, channels: dict[int, Channel], version: int, deadline: Deadline) -> Connections:
        # Those that have connected anew are not in the group.
        self._leader.leave()
        return super()._open(channels, version, deadline)


class _Options(TypedDict):
    bucket_bytes: int
    host: str
    timeout_s: float
    min_receivers: int | None
    receiver_timeout_s: float | None
    receivers_per_engine: int


@dataclass(kw_only=True)
class InvitingStream(OutboundStream):
    """Sends invitations, and has each of them followed by an exchange."""

    leader: ReshardSender

    def fill(self, bucket: Bucket, tensors: NamedTensors) -> Filled:
        """Write an invitation to those that are connected."""
        self.leader.prepare(self.receivers.ranks)
        return super().fill(bucket, tensors)

    def announce(self, filled: Filled) -> None:
        """Invite the receivers, and exchange."""
        super().announce(filled)
        try:
            self.leader.lead(self, filled.bucket)
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


def _timedelta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
