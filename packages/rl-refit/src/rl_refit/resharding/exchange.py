"""The transfer of a resharding plan over a process group, round by round.

Every member of the group, trainers and engines, makes an `Exchange` of what it holds and wants. A
refit is then, on every member:

    begin(v)      the engine's weights are about to be overwritten
    transfer(v)   who has what was sent last; for each round: receive, pack and send, wait, unpack;
                  then digests; then an agreement of all members that every digest was right
    commit(v)     the weights of v are valid

In a round a rank sends each of its receivers one packed message. A slice whose receiver has what
was sent last travels as a patch (`bases`), so that the sizes of its message are sent before it. A
rank that fails says so in the agreement if it gets there; otherwise the others' waits end at their
limit, or when its connections break. After a failure the receivers are poisoned (see
`rl_refit.protocol`) and messages may be under way: make a new process group and a new `Exchange`.
"""

# torch annotates its distributed functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
# pyright: reportAttributeAccessIssue=false, reportUnknownLambdaType=false

from __future__ import annotations

import datetime
import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from rl_refit.errors import PlanMismatchError, RefitError, VerificationError
from rl_refit.plan import TensorSpec, dtype_name, parse_dtype
from rl_refit.protocol import WeightVersion
from rl_refit.protocol.waiting import Deadline
from rl_refit.resharding.bases import Bases
from rl_refit.resharding.digest import add_digests, shard_digest
from rl_refit.resharding.layouts import Shard, merge_ranks
from rl_refit.resharding.messages import Flow, SharedBases, SliceMessages, Want
from rl_refit.resharding.planner import ReshardPlan, plan_pieces
from rl_refit.resharding.slices import Box
from rl_refit.sender import check_delta
from rl_refit.source import WeightMeta

Held = Mapping[str, Shard | Sequence[Shard]]
"""What a rank holds of each tensor, by name: one shard, or several disjoint ones."""

Wanted = Sequence[Want] | Callable[[list[WeightMeta]], Sequence[Want]]

Slices = list[tuple[str, tuple[int, ...], Box, str]]
"""Name, full shape, box and dtype of each slice that a rank holds or wants, as it says to all."""


class MemberLostError(RefitError):
    """A member of the group did not do its part: its connection has broken."""


class _Message(NamedTuple):
    """What is sent to a rank, or received from it."""

    peer: int
    data: torch.Tensor
    is_out: bool


_TAG = 0
"""Messages between two ranks are in the same order on both."""

_NUMBER_BITS = 60
"""Of the numbers of transfers: so many that no two are equal."""
_LEAST = -(1 << 62)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeReport:
    """What one rank's transfer has done.

    Attributes:
        version: Of the weights.
        bytes_sent: Without headers.
        bytes_received: Without headers.
        peak_bytes: The most that its messages took at once, beside the tensors themselves.
        num_rounds: In which this rank took part.
        bytes_full: What it would have sent and received if no slice had been a patch.
        changed: Share of the 16-bit words that had changed in the slices that it sent as patches;
            None if it sent none so.
    """

    version: int
    bytes_sent: int
    bytes_received: int
    peak_bytes: int
    num_rounds: int
    bytes_full: int
    changed: float | None


class Exchange:
    """One rank's side of a resharding. Collective to construct.

    Args:
        held: What this rank holds, by the names that `wanted` uses; see `local_shards`. A fused
            parameter has several shards of each of its tensors.
        wanted: What this rank consumes, or a function that returns it, given name, dtype and shape
            of all that is held. A box that is wanted in several places is sent once.
        group: The trainers and the engines; None: the default group. It may be one of torch's
            backends, which `torch.distributed` does not know.
        round_bytes: Limit of what a rank sends, and of what it receives, at once; None: the
            largest layer, at most 256 MiB or a row.
        timeout_s: Limit of the construction, and of each transfer, in seconds.
        device: Of the messages; None: the CPU. NCCL needs a GPU.
        silence_s: Limit of each wait for other members, in seconds; None: that of all together.
        bases: What this rank keeps of its last transfer, over several exchanges. With `sent`,
            receivers that have it get what has changed alone; that needs messages in host memory.

    Raises:
        PlanMismatchError: Ranks disagree on a tensor's shape or wire dtype, a wanted slice is not
            held by anyone, or ranks have computed different plans.
        RefitTimeoutError: Not all members of the group have joined in time.
    """

    def __init__(
        self,
        held: Held | None = None,
        wanted: Wanted = (),
        *,
        group: dist.ProcessGroup | Backend | None = None,
        round_bytes: int | None = None,
        timeout_s: float = 300.0,
        device: torch.device | str | None = None,
        silence_s: float | None = None,
        bases: Bases | None = None,
    ) -> None:
        self._timeout_s, self._device = timeout_s, torch.device(device or "cpu")
        self._silence_s = math.inf if silence_s is None else silence_s
        self._bases = Bases() if bases is None else bases
        if self._bases.sent is not None:
            check_delta("digest", self._device)
        # Of the transfer before the first.
        self._number = 0
        self._backend: Backend | None = _backend_of(group, self._device)
        del group  # the traceback of an error has this frame
        self._rank = self._group.rank()
        self._held = _listed(held or {})
        self.weights = WeightVersion(self._rank)
        self._has_failed = False
        self._wanted: list[Want] = []
        self._wants: dict[str, list[Want]] = defaultdict(list)
        try:
            self.plan = self._make_plan(wanted, round_bytes, Deadline(timeout_s))
        except BaseException:
            self.close()
            raise
        self._messages = SliceMessages(
            self.plan,
            self._rank,
            device=self._device,
            held=self._held,
            wants=self._wants,
            bases=self._bases,
        )
        pieces = self.plan.pieces
        self._own = np.flatnonzero(
            (pieces.sender == self._rank) | (pieces.receiver == self._rank)
        ).tolist()

    def hold(self, held: Held) -> None:
        """Send from these shards from now on, as after the trainer's tensors have moved.

        Raises:
            ValueError: Their names, shapes and boxes are not those that this rank has held.
        """
        listed = _listed(held)
        for name in self._held.keys() | listed.keys():
            before, now = (
                [shard[:2] for shard in each.get(name, [])] for each in (self._held, listed)
            )
            if before != now:
                raise ValueError(f"{name}: this rank held {before} and now {now}")
        self._held = self._messages.held = listed

    def begin(self, version: int) -> None:
        """Open a refit; see `WeightVersion.begin`."""
        self.weights.begin(version)

    @torch.no_grad()
    def transfer(self, version: int) -> ExchangeReport:
        """Send and receive everything; return once every member has verified what it received.

        Shards are read when their round comes: the trainer must not change them meanwhile.

        Raises:
            VerificationError: A digest differs, on this rank or on another.
            RefitTimeoutError: A member did not do its part in time; the message names it.
            RefitError: A connection has broken, and the message names the rank; ranks transfer
                different versions; or a transfer of this exchange has failed before.
        """
        self.weights.require_begun(version)
        try:
            if self._has_failed:
                raise RefitError("a transfer has failed: make a new group and a new Exchange")
            report = self._run(version, Deadline(self._timeout_s))
        except BaseException as error:
            self._has_failed = True
            self.weights.poison(str(error))
            raise
        self.weights.set_loaded()
        return report

    def commit(self, version: int) -> None:
        """Make the transferred version the committed one; see `WeightVersion.commit`."""
        self.weights.commit(version)

    def require_ready(self) -> int:
        """Return the committed version, if no refit has begun or failed since."""
        return self.weights.require_ready()

    def close(self) -> None:
        """Let go of the group: an error's traceback may hold this object for longer than its owner.

        A transfer in another thread fails with its next message.
        """
        self._backend = None

    @property
    def _group(self) -> Backend:
        if self._backend is None:
            raise RefitError("the exchange is closed")
        return self._backend

    def _run(self, version: int, deadline: Deadline) -> ExchangeReport:
        pieces, sent, received, peak, num_rounds = self.plan.pieces, 0, 0, 0, 0
        shared = self._compare_bases(deadline)
        self._messages.begin(shared)
        self._bases.received = None
        for _, members in groupby(self._own, key=lambda index: int(pieces.round[index])):
            flows = self._run_round(list(members), deadline)
            out = sum(flow.data.numel() for flow in flows if flow.is_out)
            into = sum(flow.data.numel() for flow in flows if not flow.is_out)
            sent, received, peak = sent + out, received + into, max(peak, out + into)
            num_rounds += 1
        differs = self._verify(self._messages.digests, deadline)
        problem = self._messages.problem or differs
        number = self._agree(version, problem, shared.own[0], deadline)
        self._bases.mark(number)
        return ExchangeReport(
            version=version,
            bytes_sent=sent,
            bytes_received=received,
            peak_bytes=peak,
            num_rounds=num_rounds,
            bytes_full=self._full_bytes,
            changed=self._messages.traffic.changed,
        )

    @property
    def _full_bytes(self) -> int:
        pieces = self.plan.pieces
        is_own = (pieces.sender == self._rank, pieces.receiver == self._rank)
        return sum(int(pieces.nbytes[each].sum()) for each in is_own)

    def _compare_bases(self, deadline: Deadline) -> SharedBases:
        """Exchange with each peer what both have of the transfer before."""
        own = torch.tensor(self._bases.numbers(), device=self._device)
        pieces = self.plan.pieces
        ranks = np.unique(np.r_[pieces.sender[self._own], pieces.receiver[self._own]]).tolist()
        theirs = {rank: torch.zeros_like(own) for rank in ranks if rank != self._rank}
        messages = [_Message(peer, own, True) for peer in theirs]
        messages += [_Message(peer, data, False) for peer, data in theirs.items()]
        self._wait_all(messages, deadline)
        return SharedBases(
            own=_pair(own), theirs={peer: _pair(data) for peer, data in theirs.items()}
        )

    def _keep_sent(self) -> bool:
        """Keep a copy of what was sent; return whether it differs from what was sent before."""
        if self._rank not in self.plan.senders:
            return False
        if self._bases.sent is None:
            return True
        return self._bases.sent.update(self._held, self.plan.specs)

    def _run_round(self, members: list[int], deadline: Deadline) -> list[Flow]:
        """Exchange the pieces of one round; return what went to and from each peer."""
        messages = self._messages
        flows = messages.flows(members)
        outgoing = [flow for flow in flows if flow.is_out]
        incoming = [flow for flow in flows if not flow.is_out]
        for flow in outgoing:
            messages.pack(flow)
        self._exchange_sizes([flow for flow in flows if flow.is_delta], deadline)
        own = next((flow for flow in outgoing if flow.peer == self._rank), None)
        for flow in incoming:
            if flow.peer == self._rank:
                assert own is not None
                flow.data = own.data
            else:
                flow.data = messages.room(flow)
        self._wait_all(
            [
                _Message(flow.peer, flow.data, flow.is_out)
                for flow in flows
                if flow.peer != self._rank
            ],
            deadline,
        )
        for flow in incoming:
            messages.unpack(flow)
        return flows

    def _exchange_sizes(self, flows: list[Flow], deadline: Deadline) -> None:
        """Learn how large the slices are that arrive, of flows with patches."""
        sizes = {
            id(flow): torch.tensor(flow.sizes, dtype=torch.int64, device=self._device)
            for flow in flows
        }
        messages = [_Message(flow.peer, sizes[id(flow)], flow.is_out) for flow in flows]
        self._wait_all(messages, deadline)
        for flow in flows:
            if not flow.is_out:
                self._messages.resize(flow, sizes[id(flow)].tolist())

    def _wait_all(self, operations: list[_Message], deadline: Deadline) -> None:
        if not operations:
            return
        if not self._group.supports_coalescing:
            works = [(self._start(each), _waited_for(each.peer)) for each in operations]
        else:
            # Or NCCL would wait for each before it starts the next, on both sides of a pair.
            waited_for = _waited_for(*sorted({each.peer for each in operations}))
            works = [(self._started(lambda: self._start_all(operations), waited_for), waited_for)]
        self._wait(works, deadline)

    def _start(self, message: _Message) -> dist.Work:
        return self._started(lambda: self._send_or_receive(message), _waited_for(message.peer))

    def _send_or_receive(self, message: _Message) -> dist.Work:
        # No variable holds the group: the traceback of an error has this frame, see `_wait`.
        if message.is_out:
            return self._group.send([message.data], message.peer, _TAG)
        return self._group.recv([message.data], message.peer, _TAG)

    def _start_all(self, messages: list[_Message]) -> dist.Work:
        self._group._start_coalescing()
        for message in messages:
            self._start(message)
        return self._group._end_coalescing()

    def _started(self, call: Callable[[], dist.Work], waited_for: str) -> dist.Work:
        try:
            return call()
        except RefitError:
            raise
        except RuntimeError as error:
            raise MemberLostError(f"{waited_for} cannot start: {error}") from error

    def _run_collective(
        self, call: Callable[[], dist.Work], waited_for: str, deadline: Deadline
    ) -> None:
        self._wait([(self._started(call, waited_for), waited_for)], deadline)

    def _wait(self, works: list[tuple[dist.Work, str]], deadline: Deadline) -> None:
        """Wait for all, and let go of them.

        Args:
            works: With what each waits for.
            deadline: Of all of them.
        """
        # A traceback keeps what its frames name, and a work of gloo the connections: the others
        # would not learn that this rank has failed.
        work: dist.Work | None = None
        try:
            while works:
                work, waited_for = works.pop(0)
                left = deadline.remaining(waited_for)
                limit = Deadline(min(left, self._silence_s))
                try:
                    work.wait(datetime.timedelta(seconds=limit.seconds))
                except RuntimeError as error:
                    for each in (deadline, limit):
                        each.remaining(waited_for)  # raises if it was the limit
                    raise MemberLostError(f"{waited_for} failed: {error}") from error
        finally:
            works.clear()
            del work

    def _verify(self, sums: dict[tuple[int, int], int], deadline: Deadline) -> str:
        """Exchange the digests of what was sent; return what differs, or ""."""
        expected = self._exchange_digests(sums, deadline)
        for name, digest in expected.items():
            # Of what the engine's own tensors hold now, at the places where it wants it.
            places: dict[Box, list[int]] = defaultdict(list)
            for want in self._wants[name]:
                places[want.box].append(shard_digest(want.data, name, want.box))
            # A box is sent once for all of its places, whose digests have to be equal.
            for choose in (min, max):
                found = add_digests([choose(each) for each in places.values()])
                if found != digest:
                    return (
                        f"the digest of what rank {self._rank} holds of {name} is {found:016x}, "
                        f"that of what was sent to it {digest:016x}"
                    )
        return ""

    def _exchange_digests(
        self, sums: dict[tuple[int, int], int], deadline: Deadline
    ) -> dict[str, int]:
        pieces = self.plan.pieces
        operations: list[_Message] = []
        incoming: dict[int, tuple[list[int], torch.Tensor]] = {}
        own: dict[int, int] = {}
        receivers = sorted({receiver for receiver, _ in sums})
        for receiver in receivers:
            tensors = sorted(tensor for rank, tensor in sums if rank == receiver)
            values = [sums[receiver, tensor] for tensor in tensors]
            if receiver == self._rank:
                own = dict(zip(tensors, values, strict=True))
                continue
            data = torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64))
            data = data.to(self._device)
            operations.append(_Message(receiver, data, True))
        mine = np.array(self._own, dtype=np.int64)
        mine = mine[pieces.receiver[mine] == self._rank]
        for sender in np.unique(pieces.sender[mine]).tolist():
            tensors = np.unique(pieces.tensor[mine[pieces.sender[mine] == sender]]).tolist()
            if sender == self._rank:
                continue
            data = torch.empty(len(tensors), dtype=torch.int64, device=self._device)
            incoming[sender] = tensors, data
            operations.append(_Message(sender, data, False))
        self._wait_all(operations, deadline)
        totals = dict(own)
        for tensors, data in incoming.values():
            for tensor, value in zip(tensors, data.tolist(), strict=True):
                totals[tensor] = add_digests([totals.get(tensor, 0), value])
        return {self.plan.specs[tensor].name: value for tensor, value in totals.items()}

    def _agree(self, version: int, problem: str, sent_before: int, deadline: Deadline) -> int:
        """Return if all members have one version and none has a problem, raise on all otherwise.

        Args:
            version: Of the weights.
            problem: What is wrong on this rank, or "".
            sent_before: The transfer of which this rank had copies, -1 for none.
            deadline: Of the transfer.

        Returns:
            The number of this transfer: that of the one before, if senders have sent the same bits.
        """
        self._number += 1
        before = [sent_before, -sent_before] if self._rank in self.plan.senders else [_LEAST] * 2
        mine = [self._rank if problem else -1, version, -version, int(self._keep_sent()), *before]
        worst = torch.tensor(mine, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._run_collective(
            lambda: self._group.allreduce([worst], options), "agreement of all ranks", deadline
        )
        if problem:
            raise VerificationError(problem)
        rank, newest, oldest, has_changed, last, first = worst.tolist()
        if rank >= 0:
            raise VerificationError(f"what rank {rank} received differs from what was sent to it")
        if newest != -oldest:
            raise RefitError(f"ranks transfer different versions, from {-oldest} to {newest}")
        return last if last == -first >= 0 and not has_changed else self._number

    def _make_plan(
        self, wanted: Wanted, round_bytes: int | None, deadline: Deadline
    ) -> ReshardPlan:
        offered = self._gather_held(deadline)
        self._wanted = list(wanted(_metadata(offered)) if callable(wanted) else wanted)
        for want in self._wanted:
            self._wants[want.name].append(want)
        self._bases.use([(each.name, each.box, each.data) for each in self._wanted])
        plan = _plan(offered, self._gather_wanted(deadline), round_bytes)
        self._require_same(plan, deadline)
        return plan

    def _gather_held(self, deadline: Deadline) -> list[Slices]:
        return self._gather_slices(
            [
                (name, each.shape, each.box, each.data.dtype)
                for name, shards in self._held.items()
                for each in shards
            ],
            deadline,
        )

    def _gather_wanted(self, deadline: Deadline) -> list[Slices]:
        for want in self._wanted:
            if tuple(want.data.shape) != want.box.shape:
                raise ValueError(
                    f"{want.name}: the place for {want.box} has the shape {list(want.data.shape)}"
                )
        return self._gather_slices(
            [(each.name, each.shape, each.box, each.data.dtype) for each in self._wanted], deadline
        )

    def _gather_slices(
        self, mine: list[tuple[str, tuple[int, ...], Box, torch.dtype]], deadline: Deadline
    ) -> list[Slices]:
        named = [(name, shape, box, dtype_name(dtype)) for name, shape, box, dtype in mine]
        gathered = self._gather(msgspec.msgpack.encode(named), deadline)
        return [msgspec.msgpack.decode(each, type=Slices) for each in gathered]

    def _require_same(self, plan: ReshardPlan, deadline: Deadline) -> None:
        """Raise unless all have this plan; agree on a number that no other exchange has."""
        mine = msgspec.msgpack.encode((plan.hash, secrets.randbits(_NUMBER_BITS)))
        for rank, encoded in enumerate(self._gather(mine, deadline)):
            other, number = msgspec.msgpack.decode(encoded, type=tuple[str, int])
            if other != plan.hash:
                raise PlanMismatchError(
                    f"rank {rank} has computed the plan {other[:16]}, this one "
                    f"{plan.hash[:16]}: do they have the same round_bytes and numpy?"
                )
            self._number = (self._number + number) % (1 << _NUMBER_BITS)

    def _gather(self, mine: bytes, deadline: Deadline) -> list[bytes]:
        """Return what each member gives, in the order of ranks.

        Not `all_gather_object`, which unpickles what comes from a socket.
        """
        num_ranks = self._group.size()
        own = torch.tensor([len(mine)], device=self._device)
        lengths = [torch.zeros_like(own) for _ in range(num_ranks)]
        self._all_gather(lengths, own, deadline)
        sizes = [int(length) for length in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = [torch.empty_like(padded) for _ in range(num_ranks)]
        self._all_gather(rows, padded, deadline)
        pairs = zip(rows, sizes, strict=True)
        return [row[:size].cpu().numpy().tobytes() for row, size in pairs]

    def _all_gather(self, rows: list[torch.Tensor], own: torch.Tensor, deadline: Deadline) -> None:
        self._run_collective(
            lambda: self._group.allgather([rows], [own]), "offer of all ranks", deadline
        )


def _waited_for(*ranks: int) -> str:
    return f"message of or to rank {','.join(map(str, ranks))}"


def _pair(data: torch.Tensor) -> tuple[int, int]:
    one, other = data.tolist()
    return one, other


def _backend_of(group: dist.ProcessGroup | Backend | None, device: torch.device) -> Backend:
    if isinstance(group, Backend):
        return group
    # The calls of `torch.distributed` take registered groups alone.
    known = group if group is not None else dist.group.WORLD
    if known is None:
        raise ValueError("there is no default process group, and no other was given")
    return known._get_backend(device)


def _listed(held: Held) -> dict[str, list[Shard]]:
    """Return the shards of each tensor, or raise `ValueError` if one has not its box's shape."""
    listed = {
        name: [shards] if isinstance(shards, Shard) else list(shards)
        for name, shards in held.items()
    }
    for name, shards in listed.items():
        for box, data in ((each.box, each.data) for each in shards):
            if tuple(data.shape) != box.shape:
                raise ValueError(f"{name}: the shard {box} has the shape {list(data.shape)}")
    return listed


def _metadata(held: Sequence[Slices]) -> list[WeightMeta]:
    """Return all tensors that ranks hold, each once, in the order of ranks."""
    found: dict[str, WeightMeta] = {}
    for slices in held:
        for name, shape, _, dtype in slices:
            found.setdefault(name, WeightMeta(name, parse_dtype(dtype), tuple(shape)))
    return list(found.values())


def _plan(
    offered: Sequence[Slices], requested: Sequence[Slices], round_bytes: int | None
) -> ReshardPlan:
    specs: dict[str, TensorSpec] = {}
    for rank, slices in enumerate(requested):
        for name, shape, _, dtype in slices:
            spec = TensorSpec(name, parse_dtype(dtype), tuple(shape))
            if specs.setdefault(name, spec) != spec:
                raise PlanMismatchError(f"rank {rank} wants {spec}, others {specs[name]}")
    for rank, slices in enumerate(offered):
        for name, shape, _, _ in slices:
            if name in specs and specs[name].shape != tuple(shape):
                raise PlanMismatchError(f"rank {rank} holds {list(shape)} of {specs[name]}")
    held, wanted = (
        merge_ranks(
            (name, box, rank)
            for rank, slices in enumerate(each)
            for name, _, box, _ in slices
            if name in specs
        )
        for each in (offered, requested)
    )
    return plan_pieces(list(specs.values()), held, wanted, round_bytes=round_bytes)
