"""Membership in the process group over which slices are exchanged, and the invitations to it."""

# torch annotates its distributed functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec
import torch

from rl_refit.errors import RefitError, RefitTimeoutError
from rl_refit.protocol.waiting import Closing, Deadline, run_bounded
from rl_refit.resharding.bases import Bases, ShardCopies
from rl_refit.resharding.exchange import Exchange, ExchangeReport, Held, MemberLostError, Wanted
from rl_refit.transports.collective import GroupGrant, ProcessGroup, join_group

MARGIN_S = 5.0
"""Waits for another member may take so much longer than its own, so that its error comes first."""

LOSSES = (MemberLostError, RefitTimeoutError)
"""What an exchange raises if another member may be lost."""


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names the group of an exchange, to those who may join it.

    Attributes:
        group: With the rank of nobody in particular.
        num_trainers: Their ranks in the group come first.
        receivers: The ranks of the receivers that are invited, in the order of the group.
        silence_s: Limit of each wait for another member, in seconds; None: none of its own.
        num_left: How many invitations may follow if members are lost.
    """

    group: GroupGrant
    num_trainers: int
    receivers: tuple[int, ...]
    silence_s: float | None
    num_left: int

    def group_rank_of(self, receiver: int) -> int:
        """Return the rank of a receiver in the group."""
        if receiver not in self.receivers:
            raise RefitError("the invitation is to others", rank=receiver)
        return self.num_trainers + self.receivers.index(receiver)


Word = Invitation | str | None
"""An invitation; why there is none; or None: an exchange has succeeded and needs no other one."""


def encode_word(word: Word, nbytes: int) -> torch.Tensor:
    """Return the bytes of a word, padded with spaces."""
    data = msgspec.json.encode(word).ljust(nbytes)
    assert len(data) == nbytes, f"a word of {len(data)} bytes"
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode_word(data: torch.Tensor) -> Word:
    """Return the word of these bytes, or raise `RefitError`."""
    try:
        return msgspec.json.decode(data.cpu().numpy().tobytes(), type=Word)
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
            if not self._is_in(invitation) or self._exchange is None:
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

    def _is_in(self, invitation: Invitation) -> bool:
        return self.invitation is not None and self.invitation.group == invitation.group

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
        host = _address_towards(grant.host, grant.port)
        limit_s = min(self._timeout_s, invitation.silence_s or self._timeout_s)
        deadline = Deadline(limit_s)

        def join() -> ProcessGroup:
            try:
                return join_group(
                    grant, host, self._device, deadline, limit_s=self._timeout_s + MARGIN_S
                )
            except RefitError:
                raise
            except RuntimeError as error:
                raise MemberLostError(f"not all members join the group: {error}") from error

        self._group = run_bounded(
            join,
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
            silence_s=invitation.silence_s,
            bases=self.bases,
        )
        self.invitation = invitation
        return self._exchange


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address on the way to another; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])
