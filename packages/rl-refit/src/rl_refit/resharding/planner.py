"""The plan of a resharding: which rank sends which slice to which rank, in which round.

It consists of integers and is computed from shapes alone, by numpy. Every rank computes it from the
same input and gets the same one.
"""

# numpy's reductions are annotated only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_refit.errors import PlanMismatchError
from rl_refit.plan import TensorSpec, layer_of
from rl_refit.resharding.layouts import Placed
from rl_refit.resharding.slices import Box

Ints = npt.NDArray[np.int64]

MOST_ROUND_BYTES = 256 << 20
"""Default limit of what a rank sends or receives in a round, where a layer is larger."""

_LEAST_SPLIT_BYTES = 64 << 10
"""Smaller slices are sent by one replica: a message costs more than the balance gains."""

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """The slices that are sent, one per index, in the order of the rounds.

    Attributes:
        tensor: `[pieces]`, index of the tensor.
        sender: `[pieces]`, rank.
        receiver: `[pieces]`, rank.
        offset: `[pieces, dims]`, of the slice in the full tensor; unused last dims are 0.
        shape: `[pieces, dims]`; unused last dims are 1.
        nbytes: `[pieces]`, on the wire.
        round: `[pieces]`, ascending.
    """

    tensor: Ints
    sender: Ints
    receiver: Ints
    offset: Ints
    shape: Ints
    nbytes: Ints
    round: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    def select(self, index: Ints | npt.NDArray[np.bool_]) -> Pieces:
        """Return some of them, in the order of `index`."""
        return Pieces(**{name: getattr(self, name)[index] for name in self.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardPlan:
    """What is sent, by whom, to whom and when.

    Attributes:
        specs: The tensors, with their wire dtypes.
        pieces: The slices.
        round_bytes: No rank sends or receives more in one round.
        senders: All ranks that hold something.
        receivers: All ranks that want something.
        hash: Of everything else.
    """

    specs: tuple[TensorSpec, ...]
    pieces: Pieces
    round_bytes: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    hash: str

    @property
    def num_rounds(self) -> int:
        """The number of rounds."""
        return int(self.pieces.round[-1]) + 1 if len(self.pieces) else 0

    def sent(self) -> dict[int, int]:
        """Return the bytes that each sender sends."""
        return _loads(self.pieces.sender, self.pieces.nbytes, self.senders)

    def received(self) -> dict[int, int]:
        """Return the bytes that each receiver receives."""
        return _loads(self.pieces.receiver, self.pieces.nbytes, self.receivers)

    def peak_bytes(self) -> int:
        """Return the most bytes that a rank sends or receives in one round."""
        peaks = [0]
        for ranks in (self.pieces.sender, self.pieces.receiver):
            _, slot = np.unique(np.stack([self.pieces.round, ranks]), axis=1, return_inverse=True)
            peaks += np.bincount(slot.ravel(), weights=self.pieces.nbytes).astype(int).tolist()
        return max(peaks)

    def box(self, piece: int) -> Box:
        """Return where a piece lies in its tensor."""
        num_dims = len(self.specs[int(self.pieces.tensor[piece])].shape)
        offset, shape = (
            tuple(int(each) for each in table[piece, :num_dims])
            for table in (self.pieces.offset, self.pieces.shape)
        )
        return Box(offset, shape)


def imbalance(loads: dict[int, int]) -> float:
    """Return the largest load over the mean; 1 if all are equal, or there are none."""
    total = sum(loads.values())
    return max(loads.values()) * len(loads) / total if total else 1.0


def plan_pieces(
    specs: Sequence[TensorSpec],
    held: Sequence[Placed],
    wanted: Sequence[Placed],
    *,
    round_bytes: int | None = None,
) -> ReshardPlan:
    """Return the plan that brings every wanted box to its ranks.

    Each rank gets the elements that it wants once. Of several ranks that hold the same box, those
    with less to send otherwise send more. Tensors go in the order of `specs`, so that an engine's
    layers are complete one after the other.

    Args:
        specs: The tensors, with their wire dtypes.
        held: Boxes and the ranks that hold them. Distinct boxes of a tensor do not overlap.
        wanted: Boxes and the ranks that want them. Those of one rank do not overlap.
        round_bytes: Limit of what a rank sends, and of what it receives, in one round; None: the
            largest layer, at most 256 MiB or a row.

    Raises:
        PlanMismatchError: A wanted box is not held in full, or held boxes overlap.
        ValueError: A row of a tensor is larger than `round_bytes`.
    """
    limit = default_round_bytes(specs) if round_bytes is None else round_bytes
    dims = max((len(spec.shape) for spec in specs), default=1) or 1
    index = {spec.name: position for position, spec in enumerate(specs)}
    have, want = _Boxes.of(held, index, dims), _Boxes.of(wanted, index, dims)
    _check_disjoint(specs, held)
    itemsize = np.array([spec.dtype.itemsize for spec in specs], dtype=np.int64)
    atoms = _intersections(have, want)
    _check_covered(want, wanted, atoms)
    # One transfer for each rank that wants the slice.
    counts = want.num_ranks[atoms.want]
    source = np.repeat(np.arange(len(atoms.want)), counts)
    nth = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    receiver = want.ranks[want.first[atoms.want[source]] + nth]
    tensor = want.tensor[atoms.want[source]]
    offset, shape = atoms.offset[source], atoms.shape[source]
    nbytes = shape.prod(axis=1) * itemsize[tensor]
    sender, origin, rows = _choose_senders(have, atoms.have[source], tensor, shape, nbytes)
    offset, shape = _take_rows(offset[origin], shape[origin], rows)
    receiver, tensor = receiver[origin], tensor[origin]
    origin, rows = _limit_sizes(specs, tensor, shape, itemsize, limit)
    offset, shape = _take_rows(offset[origin], shape[origin], rows)
    sender, receiver, tensor = sender[origin], receiver[origin], tensor[origin]
    nbytes = shape.prod(axis=1) * itemsize[tensor]
    order = _order(specs, sender, receiver, tensor, offset, nbytes)
    rounds = _assign_rounds(sender[order], receiver[order], nbytes[order], limit)
    pieces = Pieces(
        tensor=tensor[order],
        sender=sender[order],
        receiver=receiver[order],
        offset=offset[order],
        shape=shape[order],
        nbytes=nbytes[order],
        round=rounds,
    )
    senders, receivers = (
        tuple(sorted({rank for each in boxes for rank in each.ranks})) for boxes in (held, wanted)
    )
    return ReshardPlan(
        specs=tuple(specs),
        pieces=pieces,
        round_bytes=limit,
        senders=senders,
        receivers=receivers,
        hash=_hash(specs, pieces),
    )


def default_round_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the bytes of the largest layer, at most `MOST_ROUND_BYTES` or the largest row."""
    layers: dict[str, int] = defaultdict(int)
    for spec in specs:
        layers[layer_of(spec.name)] += spec.nbytes
    # Slices are divided along their first dim of more than one index alone.
    rows = (spec.nbytes // next((size for size in spec.shape if size > 1), 1) for spec in specs)
    most = max(MOST_ROUND_BYTES, *rows)
    return min(max(layers.values(), default=1) or 1, most)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Boxes:
    """Boxes as columns, sorted by tensor; `ranks[first : first + num_ranks]` are those of each."""

    tensor: Ints
    offset: Ints
    shape: Ints
    ranks: Ints
    first: Ints
    num_ranks: Ints
    group: Ints
    """Equal for boxes with the same ranks."""
    order: Ints
    """Index of each in the list that it came from."""

    @classmethod
    def of(cls, placed: Sequence[Placed], index: dict[str, int], dims: int) -> _Boxes:
        tensor = np.array([index[each.name] for each in placed], dtype=np.int64)
        order = np.argsort(tensor, kind="stable")
        chosen: list[Placed] = [placed[int(position)] for position in order.tolist()]
        pad = [(0,) * (dims - len(each.box.shape)) for each in chosen]
        groups: dict[tuple[int, ...], int] = {}
        num_ranks = np.array([len(each.ranks) for each in chosen], dtype=np.int64)
        return cls(
            tensor=tensor[order],
            offset=_table(
                [each.box.offset + zeros for each, zeros in zip(chosen, pad, strict=True)], dims
            ),
            shape=_table(
                [
                    each.box.shape + tuple(1 for _ in zeros)
                    for each, zeros in zip(chosen, pad, strict=True)
                ],
                dims,
            ),
            ranks=np.array([rank for each in chosen for rank in each.ranks], dtype=np.int64),
            first=np.cumsum(num_ranks) - num_ranks,
            num_ranks=num_ranks,
            group=np.array(
                [groups.setdefault(each.ranks, len(groups)) for each in chosen], dtype=np.int64
            ),
            order=order,
        )


def _table(rows: Sequence[tuple[int, ...]], dims: int) -> Ints:
    return np.array(rows, dtype=np.int64).reshape(len(rows), dims)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Atoms:
    have: Ints
    want: Ints
    offset: Ints
    shape: Ints


def _intersections(have: _Boxes, want: _Boxes) -> _Atoms:
    """Return the non-empty intersections of what is held and wanted of each tensor."""
    first = np.searchsorted(have.tensor, want.tensor, side="left")
    counts = np.searchsorted(have.tensor, want.tensor, side="right") - first
    wants = np.repeat(np.arange(len(want.tensor)), counts)
    nth = np.arange(len(wants)) - np.repeat(np.cumsum(counts) - counts, counts)
    haves = first[wants] + nth
    start = np.maximum(have.offset[haves], want.offset[wants])
    end = np.minimum(have.offset[haves] + have.shape[haves], want.offset[wants] + want.shape[wants])
    some = (end > start).all(axis=1)
    return _Atoms(have=haves[some], want=wants[some], offset=start[some], shape=(end - start)[some])


def _check_disjoint(specs: Sequence[TensorSpec], held: Sequence[Placed]) -> None:
    # Boxes of FSDP, tensor, expert and pipeline parallelism are a partition or equal, never
    # overlapping; their sizes tell.
    totals: dict[str, int] = defaultdict(int)
    for each in held:
        totals[each.name] += each.box.numel
    for spec in specs:
        numel = Box.full(spec.shape).numel
        if totals[spec.name] > numel:
            raise PlanMismatchError(
                f"the ranks hold {totals[spec.name]} elements of {numel} in distinct boxes: "
                "some overlap without being equal",
                tensor=spec.name,
            )


def _check_covered(want: _Boxes, wanted: Sequence[Placed], atoms: _Atoms) -> None:
    # A random sum in place of a count: held boxes that overlap could make up for a gap.
    size = int((want.offset + want.shape).max(initial=0)) + 1
    keys = np.random.default_rng(0).integers(0, 2**64, (want.offset.shape[1], size), np.uint64)
    sums = keys.cumsum(axis=1, dtype=np.uint64)
    found = np.zeros(len(want.tensor), dtype=np.uint64)
    np.add.at(found, atoms.want, _weights(sums, atoms.offset, atoms.shape))
    short = np.flatnonzero(found != _weights(sums, want.offset, want.shape))
    if len(short):
        each = wanted[int(want.order[short[0]])]
        held = int(atoms.shape[atoms.want == short[0]].prod(axis=1).sum())
        raise PlanMismatchError(
            f"rank {each.ranks[0]} wants {each.box.numel} elements {each.box}, of which the "
            f"senders hold {held}" + (", some twice" if held >= each.box.numel else ""),
            tensor=each.name,
        )


def _weights(sums: npt.NDArray[np.uint64], offset: Ints, shape: Ints) -> npt.NDArray[np.uint64]:
    """Return, modulo 2^64, the sum of each box's elements' products of the keys of their dims."""
    dims = np.arange(len(sums))
    return (sums[dims, offset + shape] - sums[dims, offset]).prod(axis=1, dtype=np.uint64)


def _choose_senders(
    have: _Boxes, source: Ints, tensor: Ints, shape: Ints, nbytes: Ints
) -> tuple[Ints, Ints, Ints]:
    """Divide transfers among the ranks that hold them, so that all send about equally much.

    Groups of replicas are filled from small to large: a rank of many groups takes less of a large
    one if it is busy with a small one. Within a group each tensor's bytes are divided in the
    same shares, so that all replicas are busy in every round.

    Returns:
        Sender, index of the transfer, and `[start, end)` of its rows, of each piece.
    """
    loads: dict[int, float] = defaultdict(float)
    group = have.group[source]
    order = np.lexsort([tensor, group])
    starts = np.flatnonzero(np.r_[True, np.diff(group[order]) != 0]) if len(order) else order
    members = np.split(order, starts[1:]) if len(order) else []
    members.sort(key=lambda each: int(have.num_ranks[source[each[0]]]))
    found: list[tuple[Ints, Ints, Ints]] = []
    for each in members:
        box = source[each[0]]
        ranks = have.ranks[have.first[box] : have.first[box] + have.num_ranks[box]]
        fills = _water_fill(
            np.array([loads[rank] for rank in ranks.tolist()]), float(nbytes[each].sum())
        )
        cut = _divide(tensor[each], shape[each], nbytes[each], fills)
        found.append((ranks[cut[0]], each[cut[1]], cut[2]))
        sent = np.bincount(cut[0], weights=cut[3], minlength=len(ranks))
        for rank, size in zip(ranks.tolist(), sent.tolist(), strict=True):
            loads[rank] += size
    if not found:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, np.zeros((0, 2), dtype=np.int64)
    sender, origin, rows = (np.concatenate(column) for column in zip(*found, strict=True))
    return sender, origin, rows


def _water_fill(loads: npt.NDArray[np.float64], total: float) -> npt.NDArray[np.float64]:
    """Return how much of `total` each takes so that the largest sum is as small as can be."""
    ordered = np.sort(loads)
    # With the k smallest up to a common level, the level is (total + their sum) / k.
    levels = (total + np.cumsum(ordered)) / np.arange(1, len(loads) + 1)
    reached = np.flatnonzero(levels >= ordered)
    return np.maximum(levels[reached[-1]] - loads, 0.0)


def _divide(
    tensor: Ints, shape: Ints, nbytes: Ints, fills: npt.NDArray[np.float64]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Divide each tensor's transfers in the shares of `fills`, splitting some between rows.

    Returns:
        Index of the replica, of the transfer, its rows `[start, end)` and bytes, of each piece.
    """
    num_rows, row_bytes = _rows(shape, nbytes)
    if len(fills) == 1:
        rows = np.stack([np.zeros_like(num_rows), num_rows], axis=1)
        return np.zeros_like(tensor), np.arange(len(tensor)), rows, nbytes
    new = np.flatnonzero(np.r_[True, np.diff(tensor) != 0])
    block = np.cumsum(np.r_[0, (np.diff(tensor) != 0).astype(np.int64)])
    totals = np.add.reduceat(nbytes, new)[block]
    before = np.cumsum(nbytes) - nbytes
    # Each tensor starts elsewhere in the cycle of replicas, so that small ones spread too.
    start = ((before - before[new][block]) / totals + tensor * _GOLDEN) % 1.0
    width = nbytes / totals
    bounds = np.r_[0.0, np.cumsum(fills / fills.sum())]
    bounds[-1] = 1.0
    bounds = np.r_[bounds, bounds[1:] + 1.0]
    small = nbytes < _LEAST_SPLIT_BYTES
    start = np.where(small, start + width / 2, start)
    end = np.where(small, start, start + width)
    low = np.searchsorted(bounds, start, side="right") - 1
    high = np.maximum(np.searchsorted(bounds, end, side="left") - 1, low)
    counts = high - low + 1
    origin = np.repeat(np.arange(len(tensor)), counts)
    nth = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
    slot = low[origin] + nth
    with np.errstate(divide="ignore", invalid="ignore"):
        upper = np.where(
            nth == counts[origin] - 1, 1.0, (bounds[slot + 1] - start[origin]) / width[origin]
        )
    last = np.rint(upper * num_rows[origin]).astype(np.int64)
    previous = np.r_[0, last[:-1]]
    first = np.where(nth == 0, 0, previous)
    some = last > first
    rows = np.stack([first, last], axis=1)[some]
    origin = origin[some]
    sizes = (rows[:, 1] - rows[:, 0]) * row_bytes[origin]
    return slot[some] % len(fills), origin, rows, sizes


def _rows(shape: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
    """Return the number of rows, along the first dim of more than one, and the bytes of each."""
    dim = np.argmax(shape > 1, axis=1)
    num = shape[np.arange(len(shape)), dim] if len(shape) else np.zeros(0, dtype=np.int64)
    return num, nbytes // num


def _take_rows(offset: Ints, shape: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return offsets and shapes of the rows `[start, end)` of each box."""
    dim = np.argmax(shape > 1, axis=1)
    each = np.arange(len(shape))
    offset, shape = offset.copy(), shape.copy()
    offset[each, dim] += rows[:, 0]
    shape[each, dim] = rows[:, 1] - rows[:, 0]
    return offset, shape


def _limit_sizes(
    specs: Sequence[TensorSpec], tensor: Ints, shape: Ints, itemsize: Ints, limit: int
) -> tuple[Ints, Ints]:
    """Return pieces of at most `limit` bytes: index of the old one, and rows `[start, end)`."""
    nbytes = shape.prod(axis=1) * itemsize[tensor]
    num_rows, row_bytes = _rows(shape, nbytes)
    wide = np.flatnonzero(row_bytes > limit)
    if len(wide):
        spec = specs[int(tensor[wide[0]])]
        raise ValueError(
            f"round_bytes={limit} is less than the {row_bytes[wide[0]]} bytes of a row of {spec}"
        )
    step = np.maximum(limit // np.maximum(row_bytes, 1), 1)
    counts = -(-num_rows // step)
    origin = np.repeat(np.arange(len(tensor)), counts)
    nth = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = nth * step[origin]
    return origin, np.stack([start, np.minimum(start + step[origin], num_rows[origin])], axis=1)


def _order(
    specs: Sequence[TensorSpec],
    sender: Ints,
    receiver: Ints,
    tensor: Ints,
    offset: Ints,
    nbytes: Ints,
) -> Ints:
    """Return the order of sending: layer by layer, within which all senders advance equally."""
    numbers: dict[str, int] = {}
    layers = np.array(
        [numbers.setdefault(layer_of(spec.name), len(numbers)) for spec in specs], dtype=np.int64
    )[tensor]
    by_sender = np.lexsort([receiver, *offset.T[::-1], tensor, sender, layers])
    sizes = nbytes[by_sender]
    before = np.cumsum(sizes) - sizes
    block = np.stack([layers[by_sender], sender[by_sender]])
    is_new = np.r_[True, (np.diff(block) != 0).any(axis=0)][: len(sizes)]
    first = np.maximum.accumulate(np.where(is_new, np.arange(len(sizes)), 0))
    progress = before - before[first]
    # The sort is stable: pieces of equal progress stay in the order of senders.
    return by_sender[np.lexsort([progress, block[0]])]


def _assign_rounds(sender: Ints, receiver: Ints, nbytes: Ints, limit: int) -> Ints:
    """Return each piece's round; a new one begins where a rank's limit would be exceeded."""
    num_ranks = int(max(sender.max(initial=-1), receiver.max(initial=-1))) + 1
    out, into = [0] * num_ranks, [0] * num_ranks
    rounds: list[int] = []
    current = 0
    for source, target, size in zip(
        sender.tolist(), receiver.tolist(), nbytes.tolist(), strict=True
    ):
        if out[source] + size > limit or into[target] + size > limit:
            current += 1
            out, into = [0] * num_ranks, [0] * num_ranks
        out[source] += size
        into[target] += size
        rounds.append(current)
    return np.array(rounds, dtype=np.int64)


def _loads(ranks: Ints, nbytes: Ints, members: Sequence[int]) -> dict[int, int]:
    num_ranks = max(members, default=-1) + 1
    sums = np.bincount(ranks, weights=nbytes, minlength=num_ranks)
    return {rank: int(sums[rank]) for rank in members}


def _hash(specs: Sequence[TensorSpec], pieces: Pieces) -> str:
    digest = hashlib.sha256("\n".join(map(str, specs)).encode())
    for name in pieces.__slots__:
        digest.update(np.ascontiguousarray(getattr(pieces, name)).tobytes())
    return digest.hexdigest()
