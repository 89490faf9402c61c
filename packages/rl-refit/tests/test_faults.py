"""Random faults on the way. None may commit a version, hang, or leave anything behind."""

import dataclasses
import os
import random

import pytest
import torch
from leftovers import nothing_left
from refit_pairs import Engine, make_sender, must, refit, same
from rl_refit import PlanMismatchError, PoisonedError, RefitError, StaleVersionError
from rl_refit.outbound import OutboundStream
from rl_refit.plan import RefitPlan
from rl_refit.sender import RefitSender

CASES = int(os.environ.get("REFIT_DRILLS", "20"))
LIMIT_S = 30.0


def random_tensors(rng):
    """Some layers of matrices whose rows all differ, over several buckets."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    tensors = {}
    for layer in range(rng.randint(3, 6)):
        for index in range(rng.randint(1, 3)):
            shape = (rng.randint(2, 20), rng.randint(8, 40))
            values = torch.randn(shape, generator=generator)
            kind = rng.choice([torch.float32, torch.bfloat16, torch.float16])
            tensors[f"layers.{layer}.w{index}"] = values.to(kind)
    return tensors


@pytest.fixture(autouse=True, scope="module")
def once_before():
    """gloo opens a pipe of its own at its first use, and keeps it."""
    tensors = {"a": torch.ones(3)}
    with make_sender(tensors, "collective") as sender:
        engine = Engine(sender.address)
        must(refit(sender, [engine], 1))
        engine.receiver.close()


class Drill:
    """One sender, a few receivers, and a fault in the second refit."""

    def __init__(self, rng):
        self.rng = rng
        self.tensors = random_tensors(rng)
        count = rng.randint(1, 3)
        self.sender = make_sender(
            self.tensors,
            rng.choice(["shm", "shm", "golden", "collective"]),
            count,
            bucket_bytes=rng.choice([1024, 2048]),
            num_buffers=rng.randint(1, 3),
            timeout_s=LIMIT_S,
        )
        self.engines = [Engine(self.sender.address, r, timeout_s=LIMIT_S) for r in range(count)]
        self.bucket = rng.choice(self.sender.plan.buckets)

    def good_refit(self, version):
        must(refit(self.sender, self.engines, version))
        self.sender.commit(version)
        for engine in self.engines:
            assert engine.receiver.require_ready() == version
            assert same(engine.weights, self.tensors)

    def run(self, fault, *, limit_s=LIMIT_S):
        self.good_refit(1)
        for tensor in self.tensors.values():
            tensor += 1
        self.sender._timeout_s = limit_s
        with fault(self):
            sent, *received = refit(self.sender, self.engines, 2)
        self.sender._timeout_s = LIMIT_S
        assert isinstance(sent, RefitError), sent
        for error in received:
            assert isinstance(error, RefitError), error
            assert "hangs" not in str(error)
        for engine in self.engines:
            assert engine.receiver.version == 1
            with pytest.raises(PoisonedError):
                engine.receiver.require_ready()
            with pytest.raises(PoisonedError):
                engine.receiver.commit(2)
        with pytest.raises(RefitError):
            self.sender.commit(2)
        self.good_refit(2)
        return sent

    def close(self):
        for engine in self.engines:
            engine.receiver.close()
        self.sender.close()


def announce_faulty(change):
    """A fault in what is announced: `change(announce, bucket, digest)` in place of announcing."""

    def fault(drill):
        original = OutboundStream.announce

        def announce(self, bucket, digest):
            if bucket.index >= drill.bucket.index:
                change(drill, lambda b, d: original(self, b, d), bucket, digest)
            else:
                original(self, bucket, digest)

        return patched(OutboundStream, "announce", announce)

    return fault


def memory_faulty(change):
    """A fault in the buffer, after its digest was taken."""

    def fault(drill):
        original = OutboundStream._fill

        def fill(self, bucket, tensors):
            digest = original(self, bucket, tensors)
            if bucket.index == drill.bucket.index:
                buffers = self._side.buffers
                change(drill, buffers[bucket.index % len(buffers)][: bucket.nbytes])
            return digest

        return patched(OutboundStream, "_fill", fill)

    return fault


def patched(owner, name, value):
    context = pytest.MonkeyPatch.context()

    class Patch:
        def __enter__(self):
            context.__enter__().setattr(owner, name, value)

        def __exit__(self, *error):
            context.__exit__(*error)

    return Patch()


def drop(drill, announce, bucket, digest):
    if bucket.index != drill.bucket.index:
        announce(bucket, digest)


def duplicate(drill, announce, bucket, digest):
    announce(bucket, digest)
    if bucket.index == drill.bucket.index:
        announce(bucket, digest)


def reorder(drill, announce, bucket, digest):
    # The next one in its place, and then itself.
    if bucket.index == drill.bucket.index:
        following = (bucket.index + 1) % len(drill.sender.plan.buckets)
        announce(drill.sender.plan.buckets[following], digest)
    announce(bucket, digest)


def truncate_message(drill, announce, bucket, digest):
    if bucket.index == drill.bucket.index:
        shorter = drill.rng.randrange(0, bucket.nbytes, 256)
        bucket = dataclasses.replace(bucket, nbytes=shorter)
    announce(bucket, digest)


def truncate(drill, buffer):
    # What did not come is zero; the last byte that was not zero is lost for sure.
    last = int(buffer.nonzero()[-1])
    buffer[drill.rng.randint(0, last) :] = 0


def flip(drill, buffer):
    buffer[drill.rng.randrange(len(buffer))] ^= 1 << drill.rng.randrange(8)


def swap_rows(drill, buffer):
    piece = drill.rng.choice(drill.bucket.pieces)
    spec = drill.sender.plan.specs[piece.tensor]
    width = spec.shape[1] * spec.dtype.itemsize
    rows = buffer[piece.offset : piece.offset + piece.size // width * width].view(-1, width)
    if len(rows) < 2:  # a piece of a split tensor with less than two rows: halves of it
        rows = buffer[piece.offset : piece.offset + piece.size // 2 * 2].view(2, -1)
    first, second = drill.rng.sample(range(len(rows)), 2)
    assert not torch.equal(rows[first], rows[second])
    rows[[first, second]] = rows[[second, first]]


FAULTS = {
    "dropped": announce_faulty(drop),
    "duplicated": announce_faulty(duplicate),
    "reordered": announce_faulty(reorder),
    "truncated in the message": announce_faulty(truncate_message),
    "truncated in memory": memory_faulty(truncate),
    "one bit flipped": memory_faulty(flip),
    "two rows swapped": memory_faulty(swap_rows),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_the_way_is_found_and_a_full_resend_heals(name):
    with nothing_left():
        for case in range(CASES):
            run_case(name, case)


def run_case(name, case):
    drill = Drill(random.Random(f"{name} {case}"))
    # Where there is one buffer, both sides wait for the other if an announcement is lost.
    waits = name == "dropped" and drill.sender.address["num_buffers"] == 1
    error = drill.run(FAULTS[name], limit_s=1.5 if waits else LIMIT_S)
    assert error.bucket is not None or "the end was due" in str(error), error
    drill.close()


def test_a_plan_that_differs_is_found():
    original = RefitPlan.to_wire

    def change_one(rng, wire):
        entry = rng.choice(wire["tensors"])
        choice = rng.randrange(4)
        if choice == 0:
            entry[0] += "x"
        elif choice == 1:
            entry[1] = "float64"
        elif choice == 2:
            entry[2] = [entry[2][1], entry[2][0] + 1]
        else:
            wire["bucket_bytes"] *= 2

    def run_case(case):
        rng = random.Random(f"plan {case}")
        drill = Drill(rng)

        def to_wire(plan):
            wire = original(plan)
            change_one(rng, wire)
            return wire

        with patched(RefitPlan, "to_wire", to_wire):
            sent, *received = refit(drill.sender, drill.engines, 1)
        for error in (sent, *received):
            assert isinstance(error, RefitError)
        assert any(isinstance(error, PlanMismatchError) for error in received)
        assert all(engine.receiver.version is None for engine in drill.engines)
        drill.good_refit(1)
        drill.close()

    with nothing_left():
        for case in range(CASES):
            run_case(case)


def test_another_plan_than_was_agreed_upon_is_found():
    original = RefitSender._begin

    def begin(self, version, deadline):
        kept = self.plan
        self.plan = dataclasses.replace(kept, hash="0" * 64)
        try:
            return original(self, version, deadline)
        finally:
            self.plan = kept

    def run_case(case):
        drill = Drill(random.Random(f"begin {case}"))
        error = drill.run(lambda drill: patched(RefitSender, "_begin", begin))
        assert isinstance(error, PlanMismatchError)
        drill.close()

    with nothing_left():
        for case in range(CASES):
            run_case(case)


def test_a_stale_version_changes_nothing():
    def run_case(case):
        rng = random.Random(f"stale {case}")
        drill = Drill(rng)
        version = rng.randint(1, 5)
        drill.good_refit(version)
        for engine in drill.engines:
            with pytest.raises(StaleVersionError):
                engine.receiver.begin(rng.randint(0, version))
            assert engine.receiver.require_ready() == version
        drill.good_refit(version + 1)
        drill.close()

    with nothing_left():
        for case in range(CASES):
            run_case(case)
