"""The transfer of a resharding plan over a process group, round by round.

Every member of the group, trainers and engines, makes an `Exchange` of what it holds and wants. A
refit is then, on every member:

    begin(v)      the engine's weights are about to be overwritten
    transfer(v)   for each round: receive, pack and send, wait, unpack; then digests; then an
                  agreement of all members that every digest was right
    commit(v)     the weights of v are valid

In a round a rank sends each of its receivers one packed message. A rank that fails says so in the
agreement if it gets there; otherwise the others' waits end at their limit, or when its connections
break. After a failure the receivers are poisoned (see `rl_refit.protocol`) and messages may be
under way: make a new process group and a new `Exchange`.
"""

# torch annotates its distributed functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import datetime
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
from rl_refit.resharding.digest import add_digests, shard_digest
from rl_refit.resharding.layouts import Shard, merge_ranks
from rl_refit.resharding.planner import ReshardPlan, plan_pieces
from rl_refit.resharding.slices import Box
from rl_refit.source import WeightMeta


class Want(NamedTuple):
    """A slice that this rank consumes, and where it goes."""

    name: str
    """Of the trainer's tensor."""
    shape: tuple[int, ...]
    """Of the full tensor."""
    box: Box
    data: torch.Tensor
    """The place, of the box's shape: a view into the engine's parameter, whose dtype is sent."""


Held = Mapping[str, Shard | Sequence[Shard]]
"""What a rank holds of each tensor, by name: one shard, or several disjoint ones."""

Wanted = Sequence[Want] | Callable[[list[WeightMeta]], Sequence[Want]]

Slices = list[tuple[str, tuple[int, ...], Box, str]]
"""Name, full shape, box and dtype of each slice that a rank holds or wants, as it says to all."""


class _Message(NamedTuple):
    """What is sent to a rank, or received from it."""

    peer: int
    data: torch.Tensor
    is_out: bool


_TAG = 0
"""Messages between two ranks are in the same order on both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeReport:
    """What one rank's transfer has done.

    Attributes:
        version: Of the weights.
        bytes_sent: Without headers.
        bytes_received: Without headers.
        peak_bytes: The most that its messages took at once, beside the tensors themselves.
        num_rounds: In which this rank took part.
    """

    version: int
    bytes_sent: int
    bytes_received: int
    peak_bytes: int
    num_rounds: int


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
    ) -> None:
        self._timeout_s, self._device = timeout_s, torch.device(device or "cpu")
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
        self._held = listed

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
        sums: dict[tuple[int, int], int] = {}
        for _, members in groupby(self._own, key=lambda index: int(pieces.round[index])):
            messages = self._run_round(list(members), sums, deadline)
            out = sum(data.numel() for (_, is_out), data in messages.items() if is_out)
            into = sum(data.numel() for (_, is_out), data in messages.items() if not is_out)
            sent, received, peak = sent + out, received + into, max(peak, out + into)
            num_rounds += 1
        problem = self._verify(sums, deadline)
        self._agree(version, problem, deadline)
        return ExchangeReport(
            version=version,
            bytes_sent=sent,
            bytes_received=received,
            peak_bytes=peak,
            num_rounds=num_rounds,
        )

    def _run_round(
        self, members: list[int], sums: dict[tuple[int, int], int], deadline: Deadline
    ) -> dict[tuple[int, bool], torch.Tensor]:
        """Exchange the pieces of one round; return the messages, by peer and whether it is sent."""
        pieces = self.plan.pieces
        flows: dict[tuple[int, bool], list[int]] = {}
        for index in members:
            # A rank that is both has one flow each way with itself, which no message carries.
            if int(pieces.sender[index]) == self._rank:
                flows.setdefault((int(pieces.receiver[index]), True), []).append(index)
            if int(pieces.receiver[index]) == self._rank:
                flows.setdefault((int(pieces.sender[index]), False), []).append(index)
        messages: dict[tuple[int, bool], torch.Tensor] = {}
        operations: list[_Message] = []
        for (peer, is_out), indices in flows.items():
            size = int(pieces.nbytes[indices].sum())
            data = messages[peer, is_out] = torch.empty(
                size, dtype=torch.uint8, device=self._device
            )
            if is_out:
                self._pack(indices, data, sums)
            if peer != self._rank:
                operations.append(_Message(peer, data, is_out))
        self._wait_all(operations, deadline)
        if (self._rank, False) in messages:
            messages[self._rank, False] = messages[self._rank, True]
        for (peer, is_out), indices in flows.items():
            if not is_out:
                self._unpack(indices, messages[peer, False])
        return messages

    def _wait_all(self, operations: list[_Message], deadline: Deadline) -> None:
        if not operations:
            return
        peers = sorted({operation.peer for operation in operations})
        # Or NCCL would wait for each before it starts the next, on both sides of a pair.
        is_one = self._group.supports_coalescing
        try:
            if is_one:
                self._group._start_coalescing()
            works = [self._start(operation) for operation in operations]
            if is_one:
                works = [self._group._end_coalescing()]
        except RuntimeError as error:
            raise RefitError(f"cannot reach ranks {peers}: {error}") from error
        named = [",".join(map(str, peers))] if is_one else [each.peer for each in operations]
        for work, peer in zip(works, named, strict=True):
            self._wait(work, f"message of or to rank {peer}", deadline)

    def _start(self, message: _Message) -> dist.Work:
        call = self._group.send if message.is_out else self._group.recv
        return call([message.data], message.peer, _TAG)

    def _wait(self, work: dist.Work, waited_for: str, deadline: Deadline) -> None:
        left = deadline.remaining(waited_for)
        try:
            work.wait(datetime.timedelta(seconds=left))
        except RuntimeError as error:
            deadline.remaining(waited_for)  # raises if it was the limit
            raise RefitError(f"{waited_for} failed: {error}") from error

    def _pack(
        self, indices: list[int], message: torch.Tensor, sums: dict[tuple[int, int], int]
    ) -> None:
        """Copy slices into a message in the wire dtype; add their digests to `sums`."""
        for index, room in zip(indices, self._split(indices, message), strict=True):
            spec, box = self._spec(index), self.plan.box(index)
            # A piece is of one box that is held.
            shard = next(each for each in self._held[spec.name] if each.box.contains(box))
            # The copy casts, so that a narrower wire dtype means fewer bytes.
            room.copy_(box.relative_to(shard.box).view_of(shard.data))
            key = int(self.plan.pieces.receiver[index]), int(self.plan.pieces.tensor[index])
            sums[key] = add_digests([sums.get(key, 0), shard_digest(room, spec.name, box)])

    def _unpack(self, indices: list[int], message: torch.Tensor) -> None:
        for index, room in zip(indices, self._split(indices, message), strict=True):
            name, box = self._spec(index).name, self.plan.box(index)
            for want in self._wants.get(name, ()):
                # Of several places for the same box, or of overlapping boxes, each gets it.
                if common := want.box.intersect(box):
                    place = common.relative_to(want.box).view_of(want.data)
                    place.copy_(common.relative_to(box).view_of(room))

    def _split(self, indices: list[int], message: torch.Tensor) -> list[torch.Tensor]:
        """Return each piece's view of a message, of its shape and dtype.

        The pieces are in the order of falling item sizes, so that every view is aligned.
        """
        ordered = sorted(indices, key=lambda index: -self._spec(index).dtype.itemsize)
        views: dict[int, torch.Tensor] = {}
        start = 0
        for index in ordered:
            size = int(self.plan.pieces.nbytes[index])
            flat = message[start : start + size].view(self._spec(index).dtype)
            views[index] = flat.view(self.plan.box(index).shape)
            start += size
        return [views[index] for index in indices]

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

    def _agree(self, version: int, problem: str, deadline: Deadline) -> None:
        """Return if all members have one version and none has a problem, raise on all otherwise."""
        mine = [self._rank if problem else -1, version, -version]
        worst = torch.tensor(mine, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._wait(self._group.allreduce([worst], options), "agreement of all ranks", deadline)
        if problem:
            raise VerificationError(problem)
        rank, newest, oldest = worst.tolist()
        if rank >= 0:
            raise VerificationError(f"what rank {rank} received differs from what was sent to it")
        if newest != -oldest:
            raise RefitError(f"ranks transfer different versions, from {-oldest} to {newest}")

    def _make_plan(
        self, wanted: Wanted, round_bytes: int | None, deadline: Deadline
    ) -> ReshardPlan:
        offered = self._gather_held(deadline)
        self._wanted = list(wanted(_metadata(offered)) if callable(wanted) else wanted)
        for want in self._wanted:
            self._wants[want.name].append(want)
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
        for rank, other in enumerate(self._gather(plan.hash.encode(), deadline)):
            if other.decode() != plan.hash:
                raise PlanMismatchError(
                    f"rank {rank} has computed the plan {other.decode()[:16]}, this one "
                    f"{plan.hash[:16]}: do they have the same round_bytes and numpy?"
                )

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
        self._wait(self._group.allgather([rows], [own]), "offer of all ranks", deadline)

    def _spec(self, piece: int) -> TensorSpec:
        return self.plan.specs[int(self.plan.pieces.tensor[piece])]


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
