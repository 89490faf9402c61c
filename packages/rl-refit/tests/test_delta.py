"""Refits by deltas: patches against numpy, chains of versions, and what asks for a full refit."""

import logging
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S
from refit_pairs import DeltaPair
from rl_refit import RefitError, RefitSender, TensorSource, VerificationError
from rl_refit import delta as delta_module
from rl_refit.delta import (
    FULL,
    SEARCH_WORDS,
    SLICE_WORDS,
    Base,
    OwnTensors,
    PatchWriter,
    apply_patch,
    search_threads,
    slices_of,
    slices_of_words,
    views_of,
    words_of,
)
from rl_refit.digest import RunningDigest
from rl_refit.ends import outbound
from rl_refit.plan import RefitPlan
from rl_refit.testing import check_rule, rule_names
from rl_refit.testing.pair import (
    Engine,
    Fault,
    RefitPair,
    World,
    must,
    outcomes,
    require_errors,
)
from rl_refit.transports import SendingSide

pytestmark = pytest.mark.needs("rl-refit[testing]")

TRANSPORTS = ("shm", "golden", "collective", "chain")


def bits(*values):
    return np.array(values, dtype=np.uint16)


def plan_of(tensors, bucket_bytes=64 << 20):
    return RefitPlan.of(TensorSource(tensors).metadata(), bucket_bytes)


def patch_between(old, new, *, bucket_bytes=64 << 20):
    """Return the base after a patch of bucket 0, its slices, and the patch."""
    plan = plan_of(old, bucket_bytes)
    base, bucket = Base(plan), plan.buckets[0]
    fill(base, plan, old)
    writer = PatchWriter(base.words(bucket), base.slices(bucket))
    for tensor in new.values():
        assert list(writer.add(words_of(tensor)))
    buffer = torch.zeros(writer.nbytes, dtype=torch.uint8)
    assert writer.write(buffer) == writer.nbytes
    return base, base.slices(bucket), buffer


def fill(base, plan, tensors):
    for piece in plan.buckets[0].pieces:
        tensor = tensors[plan.specs[piece.tensor].name]
        data = tensor.contiguous().view(-1).view(torch.uint8)
        base.buckets[0][piece.offset : piece.offset + piece.size] = data


def test_a_patch_is_what_the_module_says():
    old = {"a": torch.arange(8, dtype=torch.int16), "b": torch.zeros(3, dtype=torch.uint8)}
    new = {"a": old["a"].clone(), "b": torch.tensor([0, 7, 9], dtype=torch.uint8)}
    new["a"][[2, 5]] = torch.tensor([100, 101], dtype=torch.int16)
    base, slices, patch = patch_between(old, new)
    assert slices == ((0, 8), (128, 2))
    assert patch[:8].numpy().view(np.uint32).tolist() == [2, FULL]
    # Positions, values, and the three bytes of `b` with the zero of the gap.
    words = bits(2, 5, 100, 101, 7 << 8, 9)
    assert patch[8:].numpy().view(np.uint16).tolist() == words.tolist()
    # The writer's own base is that of the new version.
    plan = plan_of(new)
    wanted = Base(plan)
    fill(wanted, plan, new)
    assert torch.equal(base.buckets[0], wanted.buckets[0])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), share=st.sampled_from([0, 1e-4, 0.01, 0.3, 0.6, 1]))
def test_any_patch_makes_the_new_version_of_the_old(seed, share):
    rng = np.random.default_rng(seed)
    sizes = [int(rng.choice([1, 2, 3, 9, 4096, SLICE_WORDS - 1, SLICE_WORDS + 5, 3 * SLICE_WORDS]))]
    sizes += [int(rng.integers(1, 3000)) for _ in range(int(rng.integers(0, 4)))]
    kinds = [torch.int8, torch.bfloat16, torch.float32]
    old, new = {}, {}
    for index, size in enumerate(sizes):
        kind = kinds[int(rng.integers(3))]
        values = torch.from_numpy(rng.integers(-99, 99, size)).to(kind)
        changed = torch.from_numpy(rng.random(size) < share)
        old[f"w{index}"] = values
        new[f"w{index}"] = torch.where(changed, values + 1, values)
    written, slices, patch = patch_between(old, new)
    plan = plan_of(old)
    base, wanted = Base(plan), Base(plan)
    fill(base, plan, old)
    fill(wanted, plan, new)
    apply_patch(base.places(plan.buckets[0]), patch)
    assert torch.equal(base.buckets[0], wanted.buckets[0])
    assert torch.equal(written.buckets[0], wanted.buckets[0])
    # Never more than the new version and the table.
    assert len(patch) <= 4 * len(slices) + sum(2 * size for _, size in slices)


@pytest.mark.parametrize("updates", [True, False])
def test_a_search_in_threads_finds_the_same_in_the_same_order(updates, monkeypatch):
    """A tensor of several searches: one finds a slice to be sent in full, one nothing."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    rng = np.random.default_rng(0)
    old = rng.integers(0, 99, 4 * SEARCH_WORDS + 2 * SLICE_WORDS + 5, dtype=np.uint16)
    new = old + (rng.random(len(old)) < 0.01).astype(np.uint16)
    new[SEARCH_WORDS : SEARCH_WORDS + SLICE_WORDS] += 1
    new[2 * SEARCH_WORDS : 3 * SEARCH_WORDS] = old[2 * SEARCH_WORDS : 3 * SEARCH_WORDS]
    patches, threads = [], set()
    with search_threads() as in_threads:

        def each(compare, *arguments):
            def noted(*pair):
                threads.add(threading.get_ident())
                return compare(*pair)

            return in_threads(noted, *arguments)

        for way in (map, each):
            base = old.copy()
            writer = PatchWriter(base, slices_of_words(len(old)), updates=updates, each=way)
            ends = list(writer.add(new))
            patches.append(torch.zeros(writer.nbytes, dtype=torch.uint8))
            writer.write(patches[-1])
            assert ends == sorted(ends)
            assert ends[-1] == 2 * len(old)
            assert writer.num_changed == np.count_nonzero(old != new)
            assert np.array_equal(base, new if updates else old)
    assert threads
    assert threading.get_ident() not in threads
    assert torch.equal(*patches)
    found = old.copy()
    apply_patch(views_of(found, slices_of_words(len(old))), patches[0])
    assert np.array_equal(found, new)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda patch: patch[:3], "a patch of 3 bytes for 2 slices"),
        (lambda patch: patch[:-2], "of which .* are accounted for"),
        (lambda patch: torch.cat([patch, patch[:2]]), "of which .* are accounted for"),
        # A count of four billion words: nothing of that size is allocated.
        (lambda patch: set_bytes(patch, 0, [0xFE, 0xFF, 0xFF, 0xFF]), "accounted for"),
        (lambda patch: set_bytes(patch, 0, [9, 0, 0, 0]), "accounted for"),
        (lambda patch: set_bytes(patch, 8, [8, 0]), "beyond the end of its slice"),
    ],
)
def test_a_patch_with_other_lengths_or_positions_is_refused(spoil, reason):
    old = {"a": torch.arange(8, dtype=torch.int16), "b": torch.arange(4, dtype=torch.int16)}
    new = {"a": old["a"].clone(), "b": old["b"]}
    new["a"][2] = 100
    base, _, patch = patch_between(old, new)
    with pytest.raises(ValueError, match=reason):
        apply_patch(base.places(plan_of(old).buckets[0]), spoil(patch))


def set_bytes(patch, start, values):
    patch[start : start + len(values)] = torch.tensor(values, dtype=torch.uint8)
    return patch


def some_weights(seed=0):
    """Return tensors over several buckets, of several dtypes, one of them split."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tensors = {"embed": normal(64, 48).bfloat16()}
    for layer in range(3):
        tensors[f"layers.{layer}.up"] = normal(100, 90).bfloat16()
        tensors[f"layers.{layer}.norm"] = normal(41)
        tensors[f"layers.{layer}.mask"] = torch.ones(13, dtype=torch.bool)
    tensors["head"] = normal(300, 100).bfloat16()
    return tensors


def change(tensors, share, generator):
    """Change a share of every tensor's elements in place; return the share of changed words."""
    num_changed = 0
    for tensor in tensors.values():
        where = torch.rand(tensor.shape, generator=generator) < share
        before = tensor.clone()
        tensor[where] = ~tensor[where] if tensor.dtype == torch.bool else tensor[where] * 1.5 + 1
        num_changed += int((words_of(before) != words_of(tensor)).sum())
    return num_changed


def delta_world(transport, tensors, num_receivers=2, **options):
    return World(RefitPair(transport), tensors, num_receivers, delta=True, **options)


def good_report(world, version):
    """Refit, commit and compare; return the sender's report."""
    results = world.refit(version)
    must(results)
    world.sender.commit(version)
    for engine in world.engines:
        assert engine.receiver.require_ready() == version
        for name, tensor in world.tensors.items():
            assert torch.equal(
                engine.weights[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
            ), (version, name)
        assert len(engine.weights) == len(world.tensors)
    sent, *received = results
    assert {report.bytes_sent for report in received} == {sent.bytes_sent}
    return sent


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_buffers", [1, 2])
@pytest.mark.promise
def test_only_changes_are_sent_to_receivers_that_have_the_rest(transport, num_buffers):
    tensors, generator = some_weights(), torch.Generator().manual_seed(1)
    with delta_world(transport, tensors, num_buffers=num_buffers) as world:
        first = good_report(world, 1)
        assert first.bytes_sent >= first.bytes
        assert first.changed is None
        for version, share in enumerate((0.01, 0.0, 0.01, 0.2, 1.0, 0.01), 2):
            num_changed = change(tensors, share, generator)
            report = good_report(world, version)
            num_words = sum(bucket.nbytes for bucket in world.sender.plan.buckets) // 2
            assert report.changed == num_changed / num_words
            table = 4 * sum(len(slices_of(bucket)) for bucket in world.sender.plan.buckets)
            if share == 1.0:
                assert report.bytes_sent <= first.bytes_sent
            else:
                # Position and value of each, unless most of a small slice has changed.
                assert report.bytes_sent <= 4 * num_changed + table
        metrics = report.as_metrics()
        assert metrics["refit_bytes_sent"] == report.bytes_sent
        assert metrics["refit_changed"] == report.changed


def test_receivers_with_tensors_of_their_own_and_a_load_get_every_version():
    tensors, generator = some_weights(), torch.Generator().manual_seed(1)
    own = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if "up" in name}
    with delta_world("shm", tensors, 1, engine={"into": own}) as world:
        for version in range(1, 5):
            must(world.refit(version))
            world.sender.commit(version)
            (engine,) = world.engines
            assert engine.receiver.require_ready() == version
            for name, tensor in tensors.items():
                assert torch.equal((own | engine.weights)[name], tensor), (version, name)
            change(tensors, 0.01, generator)


def weights_of_words(seed=0):
    """Return tensors of which each has an even number of bytes."""
    weights = some_weights(seed)
    return {name: tensor for name, tensor in weights.items() if tensor.nbytes % 2 == 0}


def base_of(engine):
    return engine.receiver._session.base


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_patches_are_applied_to_the_engines_own_tensors(transport):
    tensors, generator = weights_of_words(), torch.Generator().manual_seed(1)
    own = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with delta_world(transport, tensors, 1, engine={"into": own}, num_buffers=2) as world:
        for version, share in enumerate((1.0, 0.01, 0.0, 0.2, 1.0, 0.01), 1):
            change(tensors, share, generator)
            results = world.refit(version)
            must(results)
            world.sender.commit(version)
            assert (results[0].changed is None) == (version == 1)
            assert isinstance(base_of(world.engines[0]), OwnTensors)
            for name, tensor in tensors.items():
                assert torch.equal(own[name], tensor), (version, name)
            assert not world.engines[0].weights


def test_own_tensors_that_somebody_changed_fail_the_refit_and_the_next_is_full():
    tensors, generator = weights_of_words(), torch.Generator().manual_seed(1)
    own = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with delta_world("shm", tensors, 1, engine={"into": own}) as world:
        must(world.refit(1))
        own["head"][7, 7] += 1
        change({"embed": tensors["embed"]}, 0.02, generator)
        require_errors(world.refit(2), VerificationError, "a tensor that somebody changed")
        results = world.refit(2)
        must(results)
        assert results[0].changed is None
        assert all(torch.equal(own[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("bucket_bytes", [4096, 64 << 20])
def test_own_tensors_have_the_digest_of_their_bucket(bucket_bytes):
    tensors = weights_of_words()
    plan = plan_of(tensors, bucket_bytes)
    copy, own = Base(plan), OwnTensors(plan, tensors)
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            data = tensors[plan.specs[piece.tensor].name].view(-1).view(torch.uint8)
            place = copy.buckets[bucket.index][piece.offset : piece.offset + piece.size]
            place.copy_(data[piece.start : piece.start + piece.size])
        assert own.digest(bucket, "xxh3") == copy.digest(bucket, "xxh3")
        assert [len(words) for words in own.places(bucket)] == [
            size for _, size in copy.slices(bucket)
        ]
    assert not OwnTensors.fit(plan, {**tensors, "head": tensors["head"].to("meta")})
    assert not OwnTensors.fit(plan, {"head": tensors["head"]})
    odd = {"mask": torch.ones(13, dtype=torch.bool)}
    assert not OwnTensors.fit(plan_of(odd), odd)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_whoever_lacks_the_base_gets_everything(transport):
    """A late joiner, and every receiver after a failed refit; the next one is a delta again."""
    tensors, generator = some_weights(), torch.Generator().manual_seed(1)
    with delta_world(transport, tensors) as world:

        def is_delta(version):
            change(tensors, 0.01, generator)
            return good_report(world, version).changed is not None

        assert [is_delta(version) for version in (1, 2)] == [False, True]
        world.engines[0].receiver.close()
        world.engines[0] = Engine(world.pair, world.sender.address, 0)
        assert [is_delta(version) for version in (3, 4)] == [False, True]
        world.engines[1].load = lambda tensors: 1 / 0
        require_errors(world.refit(5), RefitError, "a load failed")
        world.engines[1].load = world.engines[1].keep
        assert [is_delta(version) for version in (5, 6)] == [False, True]
        kept = world.sender._connections.base, world.engines[0].receiver._session.base
        # A version that was sent and not committed is a base as well: what counts are the bits.
        change(tensors, 0.01, generator)
        must(world.refit(7))
        assert [is_delta(version) for version in (7, 8)] == [True, True]
    assert all(len(base.buckets) == 0 and base.version is None for base in kept)


class Spoiled(Fault):
    """Flips one bit of the first bucket that is sent."""

    def __init__(self, chance):
        self.chance = chance

    def spoil(self, bucket, data):
        if bucket == 0:
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_patch_that_is_changed_on_its_way_fails_the_refit_and_the_next_is_full(transport):
    tensors, generator = some_weights(), torch.Generator().manual_seed(1)
    with delta_world(transport, tensors, 1) as world:
        version = 1
        good_report(world, version)
        for case in range(12):
            change(tensors, 0.02, generator)
            fault = Spoiled(random.Random(case))
            with world.pair.tamper(world.sender, fault, timeout_s=PATIENCE_S):
                require_errors(world.refit(version + 1), VerificationError, f"case {case}")
            assert good_report(world, version + 1).changed is None
            change(tensors, 0.02, generator)
            assert good_report(world, version + 2).changed is not None
            version += 2


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_copy_that_is_not_what_it_should_be_fails_the_refit(side):
    """Whichever side has lost a bit of the memory that both rely on."""
    tensors, generator = some_weights(), torch.Generator().manual_seed(1)
    with delta_world("shm", tensors, 1) as world:
        good_report(world, 1)
        owner = (
            world.sender._connections if side == "sender" else world.engines[0].receiver._session
        )
        bucket = world.sender.plan.buckets[-1]
        # Of an element that does not change: a change would repair it.
        owner.base.buckets[bucket.index][bucket.pieces[0].offset] ^= 1
        change({"embed": tensors["embed"]}, 0.02, generator)
        if side == "sender":
            # Its comparison finds the wrong bit and sends the right one: nothing is lost.
            assert good_report(world, 2).changed is not None
        else:
            require_errors(world.refit(2), VerificationError, "a copy with a wrong bit")
            assert good_report(world, 2).changed is None


def test_a_transport_with_another_digest_sends_deltas(monkeypatch):
    """A transport of another package names the digest of its memory."""
    monkeypatch.setattr(SendingSide, "digest", "keyed_sum")
    tensors, generator = some_weights(), torch.Generator().manual_seed(1)
    with delta_world("shm", tensors, 1) as world:
        for version in (1, 2, 3):
            assert (good_report(world, version).changed is None) == (version == 1)
            change(tensors, 0.01, generator)


def test_no_second_of_a_delta_is_counted_twice(monkeypatch):
    """The phases of this side follow one another, so that their sum is no more than the total."""

    class Slow(RunningDigest):
        STEP = 1

        def _update(self, end):
            begun = time.perf_counter()
            time.sleep(0.01)
            self.seconds += time.perf_counter() - begun
            super()._update(end)

    tensors, generator = some_weights(), torch.Generator().manual_seed(1)
    with delta_world("shm", tensors, 1) as world:
        good_report(world, 1)
        change(tensors, 0.01, generator)
        monkeypatch.setattr(outbound, "RunningDigest", Slow)
        sent, received = world.refit(2)
    assert sent.changed is not None
    own = sent.gather_s + sent.pack_s + sent.wire_s + sent.join_s + sent.resume_s
    assert own + sent.verify_s - received.verify_s <= sent.seconds


class Announced(Fault):
    """Announces another size of every patch."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def announce(self, due):
        return [replace(due, nbytes=self.nbytes)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_patch_announced_larger_than_a_buffer_is_refused(transport):
    tensors = some_weights()
    with delta_world(transport, tensors, 1) as world:
        good_report(world, 1)
        with world.pair.tamper(world.sender, Announced(2**62), timeout_s=PATIENCE_S):
            _, received = world.refit(2)
        assert isinstance(received, VerificationError), received
        assert str(2**62) in str(received)
        assert good_report(world, 2).changed is None


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_without_memory_for_a_copy_everything_is_sent(side, monkeypatch, caplog):
    tensors, generator = some_weights(), torch.Generator().manual_seed(1)
    # The sender asks first, then its receivers, one of which has what it needs.
    rooms = iter([1000] if side == "sender" else [1 << 40, 1000, 1 << 40])
    monkeypatch.setattr(delta_module, "available_bytes", lambda: next(rooms))
    with caplog.at_level(logging.WARNING), delta_world("shm", tensors) as world:
        for version in (1, 2, 3):
            report = good_report(world, version)
            assert report.changed is None
            assert report.bytes_sent >= report.bytes
            change(tensors, 0.01, generator)
    assert f"{side} " in caplog.text
    assert "memory for a copy" in caplog.text


@pytest.mark.parametrize(("transport", "copies"), [("shm", 2), ("collective", 1)])
def test_receivers_of_one_machine_ask_for_memory_for_all_of_them(transport, copies, monkeypatch):
    asked = []

    def if_room(plan, *, copies):
        asked.append(copies)
        return Base(plan)

    monkeypatch.setattr(Base, "if_room", if_room)
    with delta_world(transport, some_weights(), 2) as world:
        good_report(world, 1)
    assert asked == [1, copies, copies]


def test_what_does_not_combine_is_refused():
    source = TensorSource(some_weights())
    with pytest.raises(ValueError, match=r'delta=True contradicts verify="none".*verify="digest"'):
        RefitSender(source, delta=True, verify="none")
    with pytest.raises(ValueError, match=r"delta=True needs buffers in host memory.*'cuda:0'"):
        RefitSender(source, delta=True, device="cuda:0")


def test_live_weights_are_compared_after_a_delta():
    tensors, generator = some_weights(), torch.Generator().manual_seed(1)
    pair = RefitPair("shm", verify="weights")
    sender = pair.open_sender(tensors, delta=True)
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    receiver = pair.open_receiver(sender.address, into=live)
    for version, is_wrong in enumerate([False, False, True], 1):
        change(tensors, 0.01, generator)

        def read_back(is_wrong=is_wrong):
            if is_wrong:
                live["head"][3, 5] += 1
            return live.items()

        receiver.begin(version)
        sent, received = outcomes(
            lambda v=version: sender.send(v),
            lambda v=version, r=read_back: receiver.receive(v, read_back=r),
        )
        if is_wrong:
            require_errors([sent, received], VerificationError, "live weights that differ")
            assert "head" in str(received)
        else:
            must([sent, received])
            assert (sent.changed is not None) == (version == 2)
    receiver.close()
    sender.close()


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "num_versions"), [("shm", 1000), ("collective", 300)])
def test_hundreds_of_versions_in_a_chain_are_bit_exact(transport, num_versions):
    """With failures, receivers that are replaced, and versions that are sent again."""
    tensors, generator = some_weights(), torch.Generator().manual_seed(2)
    chance = random.Random(transport)
    num_deltas = num_full = 0
    with delta_world(transport, tensors, bucket_bytes=16 << 10) as world:
        version = 0
        while version < num_versions:
            version += 1
            change(tensors, chance.choice([0, 1e-3, 0.01, 0.3]), generator)
            event = chance.randrange(40)
            if event == 0:
                rank = chance.randrange(2)
                world.engines[rank].receiver.close()
                world.engines[rank] = Engine(world.pair, world.sender.address, rank)
            elif event == 1:
                fault = Spoiled(chance)
                with world.pair.tamper(world.sender, fault, timeout_s=PATIENCE_S):
                    require_errors(world.refit(version), RefitError, f"version {version}")
            elif event == 2:
                must(world.refit(version))  # and not committed, but sent again
            report = good_report(world, version)
            num_deltas += report.changed is not None
            num_full += report.changed is None
    assert num_deltas > 0.9 * num_versions
    assert num_full > 0.02 * num_versions


@pytest.mark.slow
@pytest.mark.parametrize("rule", rule_names(["kills"]))
def test_killed_processes_cost_no_more_than_a_full_refit(rule):
    check_rule(rule, DeltaPair("shm"), num_cases=25)
