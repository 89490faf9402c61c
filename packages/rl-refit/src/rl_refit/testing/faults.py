"""Rules of a transport: no fault in transit may commit a version, hang, or leak a resource.

Every rule is checked with random tensors, buckets and numbers of receivers. In every case the refit
after the fault must heal all receivers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from rl_refit import errors
from rl_refit.plan import ALIGNMENT, Bucket, WirePlan
from rl_refit.report import RefitReport
from rl_refit.testing.leftovers import nothing_left
from rl_refit.testing.pair import (
    Announcement,
    Engine,
    Fault,
    RefitPair,
    Tensors,
    World,
    refuses,
    require_errors,
)
from rl_refit.testing.rules import warm_up

LIMIT_S = 300.0
LOST_S = 2.0
"""With one buffer both sides wait until the limit if an announcement is lost: so a short one."""


class Drill:
    """A sender and one to three receivers, with a fault in the second refit."""

    def __init__(
        self, pair: RefitPair, rng: random.Random, *, engine_class: type[Engine] = Engine
    ) -> None:
        self.rng = rng
        self.num_buffers = rng.randint(1, 3)
        self.tensors = random_tensors(rng)
        self.world = World(
            pair,
            self.tensors,
            rng.randint(1, 3),
            bucket_bytes=rng.choice([1024, 2048]),
            num_buffers=self.num_buffers,
            timeout_s=LIMIT_S,
            engine={"timeout_s": LIMIT_S},
            engine_class=engine_class,
        )
        self.plan = self.world.sender.plan
        self.bucket: Bucket = rng.choice(self.plan.buckets)

    def run(self, fault: Fault, *, limit_s: float = LIMIT_S) -> list[RefitReport | Exception]:
        """Return the errors of the sender and of every receiver, and heal them."""
        self.world.good_refit(1)
        for tensor in self.tensors.values():
            tensor += 1
        results = self.fail(fault, limit_s)
        for engine in self.world.engines:
            receiver = engine.receiver
            assert receiver.version == 1, f"version {receiver.version} counts after a failed refit"
            refuses(errors.PoisonedError, receiver.require_ready, "an engine whose refit failed")
            refuses(errors.PoisonedError, lambda r=receiver: r.commit(2), "its commit")
        refuses(errors.RefitError, lambda: self.world.sender.commit(2), "the sender's commit")
        self.world.good_refit(2)
        return results

    def fail(self, fault: Fault, limit_s: float = LIMIT_S) -> list[RefitReport | Exception]:
        """Return the errors of a refit with the fault, one for each end."""
        version = 2
        with self.world.pair.tamper(self.world.sender, fault, timeout_s=limit_s):
            results = self.world.refit(version)
        require_errors(results, errors.RefitError, type(fault).__name__)
        return results


def random_tensors(rng: random.Random) -> Tensors:
    """Return some layers of matrices whose rows all differ, over several buckets."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    tensors: Tensors = {}
    for layer in range(rng.randint(3, 6)):
        for index in range(rng.randint(1, 3)):
            shape = (rng.randint(2, 20), rng.randint(8, 40))
            values = torch.randn(shape, generator=generator)
            kind = rng.choice([torch.float32, torch.bfloat16, torch.float16])
            tensors[f"layers.{layer}.w{index}"] = values.to(kind)
    return tensors


class AtOneBucket(Fault):
    """A fault in the drill's bucket alone."""

    def __init__(self, drill: Drill) -> None:
        self.drill = drill

    def announce(self, due: Announcement) -> Iterable[Announcement]:
        """Return the drill's own bucket changed, and the others as they are."""
        return self.replace(due) if due.bucket == self.drill.bucket.index else [due]

    def spoil(self, bucket: int, data: torch.Tensor) -> None:
        """Damage the drill's own bucket."""
        if bucket == self.drill.bucket.index:
            self.damage(data, self.drill.rng)

    def replace(self, due: Announcement) -> Iterable[Announcement]:
        """Return the announcements in place of the bucket's own."""
        return [due]

    def damage(self, data: torch.Tensor, rng: random.Random) -> None:
        """Change the bucket's bytes."""


class _Dropped(AtOneBucket):
    def replace(self, due: Announcement) -> Iterable[Announcement]:
        return []


class _Duplicated(AtOneBucket):
    def replace(self, due: Announcement) -> Iterable[Announcement]:
        return [due, due]


class _Reordered(AtOneBucket):
    def replace(self, due: Announcement) -> Iterable[Announcement]:
        # The following bucket in its place, then the bucket itself.
        buckets = self.drill.plan.buckets
        following = buckets[(due.bucket + 1) % len(buckets)]
        return [Announcement(following.index, following.nbytes, due.digest), due]


class _AnnouncedTooShort(AtOneBucket):
    def replace(self, due: Announcement) -> Iterable[Announcement]:
        return [replace(due, nbytes=self.drill.rng.randrange(0, due.nbytes, ALIGNMENT))]


class _Truncated(AtOneBucket):
    def damage(self, data: torch.Tensor, rng: random.Random) -> None:
        # The missing bytes are zero. Truncating at the last non-zero byte ensures a difference.
        last = int(data.nonzero()[-1])
        data[rng.randint(0, last) :] = 0


class _Flipped(AtOneBucket):
    def damage(self, data: torch.Tensor, rng: random.Random) -> None:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


class _Swapped(AtOneBucket):
    def damage(self, data: torch.Tensor, rng: random.Random) -> None:
        piece = rng.choice(self.drill.bucket.pieces)
        spec = self.drill.plan.specs[piece.tensor]
        width = spec.shape[1] * spec.dtype.itemsize
        rows = data[piece.offset : piece.offset + piece.size // width * width].view(-1, width)
        if len(rows) < 2:  # a piece of a split tensor, shorter than two rows: swap its halves
            rows = data[piece.offset : piece.offset + piece.size // 2 * 2].view(2, -1)
        first, second = rng.sample(range(len(rows)), 2)
        assert not torch.equal(rows[first], rows[second])
        rows[[first, second]] = rows[[second, first]]


class _OtherPlan(Fault):
    def __init__(self, drill: Drill) -> None:
        self.rng = drill.rng

    def offer(self, plan: WirePlan) -> None:
        tensor = self.rng.choice(plan.tensors)
        choice = self.rng.randrange(4)
        if choice == 0:
            tensor.name += "x"
        elif choice == 1:
            tensor.dtype = "float64"
        elif choice == 2:
            tensor.shape = (tensor.shape[1], tensor.shape[0] + 1)
        else:
            plan.bucket_bytes *= 2


class _OtherHash(Fault):
    def begin(self, plan_hash: str) -> str:
        return "0" * len(plan_hash)


def _drill(pair: RefitPair, num_cases: int, name: str, run: Callable[[Drill], None]) -> None:
    warm_up(pair)
    with nothing_left() as look:
        for case in range(num_cases):
            drill = Drill(pair, random.Random(f"{name} {case}"))
            run(drill)
            look()
            drill.world.close()


IN_ONE_BUCKET: tuple[type[AtOneBucket], ...] = (
    _Dropped,
    _Duplicated,
    _Reordered,
    _AnnouncedTooShort,
    _Truncated,
    _Flipped,
    _Swapped,
)
"""The faults of one bucket on its way."""


def limit_of(kind: type[AtOneBucket], drill: Drill) -> float:
    """Return how long the sender of a drill should wait, in seconds."""
    if kind is _Dropped and drill.num_buffers == 1:
        return LOST_S * drill.world.pair.patience
    return LIMIT_S


def _finds(pair: RefitPair, num_cases: int, kind: type[AtOneBucket]) -> None:
    """Fail unless a fault in one bucket is detected, by an error that names a bucket or the end."""

    def run(drill: Drill) -> None:
        sent, *_ = drill.run(kind(drill), limit_s=limit_of(kind, drill))
        named = "bucket" in str(sent) or "the end was due" in str(sent)
        assert named, f"the error does not name the bucket: {sent}"

    _drill(pair, num_cases, kind.__name__, run)


def a_dropped_bucket_is_detected(pair: RefitPair, num_cases: int) -> None:
    """A bucket that is never announced."""
    _finds(pair, num_cases, _Dropped)


def a_duplicated_bucket_is_detected(pair: RefitPair, num_cases: int) -> None:
    """A bucket that is announced twice."""
    _finds(pair, num_cases, _Duplicated)


def a_reordered_bucket_is_detected(pair: RefitPair, num_cases: int) -> None:
    """A bucket that is announced after its successor."""
    _finds(pair, num_cases, _Reordered)


def a_bucket_announced_too_short_is_detected(pair: RefitPair, num_cases: int) -> None:
    """A bucket announced with fewer bytes than in the plan."""
    _finds(pair, num_cases, _AnnouncedTooShort)


def a_truncated_bucket_is_detected(pair: RefitPair, num_cases: int) -> None:
    """A bucket whose last bytes did not arrive."""
    _finds(pair, num_cases, _Truncated)


def a_flipped_bit_is_detected(pair: RefitPair, num_cases: int) -> None:
    """One bit anywhere in a bucket."""
    _finds(pair, num_cases, _Flipped)


def swapped_rows_are_detected(pair: RefitPair, num_cases: int) -> None:
    """Two swapped rows of one matrix, which change no sum of its bytes."""
    _finds(pair, num_cases, _Swapped)


def a_plan_modified_in_transit_is_detected(pair: RefitPair, num_cases: int) -> None:
    """A changed name, dtype, shape or bucket size, in the first refit."""

    def run(drill: Drill) -> None:
        _, *received = drill.fail(_OtherPlan(drill))
        mismatch = errors.PlanMismatchError
        assert any(isinstance(error, mismatch) for error in received), f"not one of {received}"
        assert all(engine.receiver.version is None for engine in drill.world.engines)
        drill.world.good_refit(2)

    _drill(pair, num_cases, "plan", run)


def another_plan_hash_is_detected(pair: RefitPair, num_cases: int) -> None:
    """Another hash at `Begin`, on a connection with a successful refit."""

    def run(drill: Drill) -> None:
        sent, *_ = drill.run(_OtherHash())
        mismatch = errors.PlanMismatchError
        assert isinstance(sent, mismatch), f"the sender ended with {sent!r}"

    _drill(pair, num_cases, "begin", run)
