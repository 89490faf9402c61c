"""A buffer of rollouts: each problem trained on once, never too stale, whatever the order."""

import random
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_batched_data import BatchedDataDict
from rl_policy.rollout_buffer import RolloutBuffer


def rows(id, num_rows=2):
    return BatchedDataDict(input_ids=torch.full((num_rows, 3), id), reward=torch.ones(num_rows))


def conserved(counts):
    held = counts.taken + counts.complete + counts.in_flight + counts.reopened
    return counts.opened == counts.num_trained + held


def test_the_example_of_the_docstring():
    buffer = RolloutBuffer(groups_per_take=1, max_staleness=1)
    assert buffer.open() == [0, 1]
    buffer.put(1, rows(1), version=0)
    assert [group.id for group in buffer.take()] == [1]
    assert buffer.open() == []
    buffer.finish(version=1)
    assert buffer.open() == [2]


def test_weights_that_are_behind_the_trainer_open_less():
    def opened(*, held, version, versions_per_take=1, lag=0):
        """Return how many groups open at the trainer's version, with some open before."""
        buffer = RolloutBuffer(
            groups_per_take=4, max_staleness=2, versions_per_take=versions_per_take
        )
        for id in buffer.open(4):
            buffer.put(id, rows(id), version=0)
        buffer.take()
        buffer.finish(version=version)
        assert len(buffer.open(held)) == held
        return len(buffer.open(version=version - lag))

    # The example of the docstring.
    assert opened(held=8, version=5) == 4
    assert opened(held=8, version=5, lag=1) == 0
    assert opened(held=0, version=5) == 12
    assert opened(held=0, version=5, lag=2) == 4
    assert opened(held=0, version=5, lag=3) == 0
    # Two optimizer steps per take: half as many takes ahead.
    assert opened(held=0, version=4, versions_per_take=2) == 8
    assert opened(held=0, version=4, versions_per_take=2, lag=2) == 4
    assert opened(held=0, version=4, versions_per_take=2, lag=4) == 0


def test_without_staleness_nothing_is_opened_before_the_trainer_has_finished():
    buffer = RolloutBuffer(groups_per_take=2, max_staleness=1, versions_per_take=2)
    for version in (0, 2, 4):
        ids = buffer.open()
        assert ids == [version, version + 1]
        for id in reversed(ids):
            assert buffer.take() == []
            buffer.put(id, rows(id), version=version)
        assert [group.id for group in buffer.take()] == ids
        assert buffer.open() == []
        buffer.finish(version=version + 2)
    assert buffer.counts.num_dropped == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    groups_per_take=st.integers(1, 4),
    versions_per_take=st.integers(1, 3),
    max_staleness=st.integers(0, 7),
    too_old=st.sampled_from(["drop", "rescore", "wait"]),
    overtake=st.booleans(),
)
def test_every_problem_is_trained_on_once_within_the_bound(
    tmp_path_factory, seed, groups_per_take, versions_per_take, max_staleness, too_old, overtake
):
    """Samplers that finish in any order, die, and see the newest weights late; a trainer that dies.

    Where groups are taken in the order in which they were opened, or are waited for, none is ever
    too old.
    """
    chance = random.Random(seed)
    path = tmp_path_factory.mktemp("buffer") / "buffer.safetensors"

    def new():
        return RolloutBuffer(
            groups_per_take=groups_per_take,
            max_staleness=max_staleness,
            versions_per_take=versions_per_take,
            too_old=too_old,
        )

    buffer, trained, sampled_by = new(), [], {}
    for _ in range(150):
        weights = max(0, buffer.version - chance.choice([0, 0, 1, 2]) * versions_per_take)
        opened = buffer.open(chance.choice([None, 1, 3]), version=weights)
        sampled_by |= dict.fromkeys(opened, weights)
        counts = buffer.counts
        assert conserved(counts)
        assert buffer.in_flight == sorted(sampled_by)
        assert counts.in_flight + counts.complete <= buffer.capacity
        move = chance.random()
        if sampled_by and move < 0.6:
            id = chance.choice(list(sampled_by)) if overtake else min(sampled_by)
            buffer.put(id, rows(id), version=sampled_by.pop(id))
        elif sampled_by and overtake and move < 0.65:
            buffer.reopen([sampled_by.popitem()[0]])
        elif move < 0.7:
            buffer.save(path)
            before, buffer = buffer.counts, new()
            buffer.load(path)
            sampled_by.clear()
            assert buffer.counts.num_trained == before.num_trained
            assert buffer.counts.reopened == before.reopened + before.in_flight
        taken = buffer.take()
        if taken and chance.random() < 0.2:
            buffer.give_back(taken)
            assert conserved(buffer.counts)
            assert [group.id for group in buffer.take()] == [group.id for group in taken]
        for group in taken:
            staleness = buffer.version - group.version
            assert group.is_too_old == (staleness > max_staleness)
            assert too_old == "rescore" or not group.is_too_old
            assert torch.equal(group.rows["input_ids"], rows(group.id)["input_ids"])
            trained.append(group.id)
        if taken:
            keys = [(group.version * (too_old == "wait"), group.id) for group in taken]
            assert keys == sorted(keys)
            buffer.finish(version=buffer.version + versions_per_take)
    assert len(trained) == len(set(trained)) == buffer.counts.num_trained
    if not overtake or too_old == "wait":
        assert buffer.counts.num_dropped == buffer.counts.num_rescored == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    groups_per_take=st.integers(1, 3),
    versions_per_take=st.integers(1, 2),
    max_staleness=st.integers(0, 5),
)
def test_a_take_waits_only_where_later_ones_would_be_too_late(
    tmp_path_factory, seed, groups_per_take, versions_per_take, max_staleness
):
    """The oracle counts: no more may be too old at a take than the takes before it have taken."""
    chance = random.Random(seed)
    path = tmp_path_factory.mktemp("buffer") / "buffer.safetensors"

    def new():
        return RolloutBuffer(
            groups_per_take=groups_per_take,
            max_staleness=max_staleness,
            versions_per_take=versions_per_take,
            too_old="wait",
        )

    def fits(versions, *, first):
        """Return whether takes, the first of them by the trainer's version `first`, suffice."""
        return all(
            sum(first + take * versions_per_take - version > max_staleness for version in versions)
            <= take * groups_per_take
            for take in range(len(versions) + max_staleness + 1)
        )

    def may_take():
        return any(
            fits(
                [version for id, version in (in_flight | complete).items() if id not in ids],
                first=buffer.version + versions_per_take,
            )
            for ids in combinations(complete, groups_per_take)
        )

    buffer, in_flight, complete, trained = new(), {}, {}, []
    for _ in range(100):
        weights = max(0, buffer.version - chance.choice([0, 0, 1, 2]) * versions_per_take)
        in_flight |= dict.fromkeys(buffer.open(chance.choice([None, 2]), version=weights), weights)
        # All that is open can be trained on in time: nobody waits for what cannot be.
        assert fits([*in_flight.values(), *complete.values()], first=buffer.version)
        if chance.random() < 0.05:
            buffer.save(path)
            buffer = new()
            buffer.load(path)
            in_flight.clear()
        elif in_flight:
            id = chance.choice(list(in_flight))
            # A refit may have come before its first token was sampled.
            newer = chance.randint(in_flight.pop(id), buffer.version)
            buffer.put(id, rows(id), version=newer)
            complete[id] = newer
        expected = may_take()
        assert buffer.is_ready == expected
        assert buffer.waits_for_oldest == (len(complete) >= groups_per_take and not expected)
        taken = buffer.take()
        assert bool(taken) == expected
        for group in taken:
            assert group.version == complete.pop(group.id)
            assert buffer.version - group.version <= max_staleness
            trained.append(group.id)
        if taken:
            buffer.finish(version=buffer.version + versions_per_take)
    assert len(trained) == len(set(trained)) == buffer.counts.num_trained
    assert buffer.counts.num_dropped == buffer.counts.num_rescored == 0
    assert conserved(buffer.counts)


def test_a_take_waits_for_a_straggler():
    buffer = RolloutBuffer(groups_per_take=1, max_staleness=1, too_old="wait")
    assert buffer.open() == [0, 1]
    buffer.put(1, rows(1), version=0)
    assert [group.id for group in buffer.take()] == [1]
    buffer.finish(version=1)
    assert buffer.open() == [2]
    buffer.put(2, rows(2), version=1)
    assert buffer.take() == []
    assert buffer.waits_for_oldest
    buffer.put(0, rows(0), version=0)
    assert not buffer.waits_for_oldest
    assert [group.id for group in buffer.take()] == [0]
    buffer.finish(version=2)
    assert [group.id for group in buffer.take()] == [2]


def test_what_a_checkpoint_of_a_laxer_run_has_too_much_of_is_sampled_anew(tmp_path):
    def buffer_of(**settings):
        return RolloutBuffer(groups_per_take=1, **settings)

    lax = buffer_of(max_staleness=2, too_old="rescore")
    lax.open()
    for id, version in ((1, 0), (2, 1)):
        lax.put(id, rows(id), version=0)
        lax.take()
        lax.finish(version=version + 1)
    lax.open()
    for id, version in ((0, 0), (3, 1), (4, 1)):
        lax.put(id, rows(id), version=version + (id > 2))
    lax.save(tmp_path / "buffer.safetensors")
    strict = buffer_of(max_staleness=0, too_old="wait")
    strict.load(tmp_path / "buffer.safetensors")
    # Group 0 is of version 0, and 3 and 4 of version 2, of which one step takes one.
    assert [group.id for group in strict.take()] == [3]
    strict.finish(version=3)
    assert strict.counts.num_dropped == 2
    assert strict.open(version=3) == [0]


def test_a_straggler_is_dropped_and_sampled_anew_first():
    buffer = RolloutBuffer(groups_per_take=1, max_staleness=1)
    assert buffer.open() == [0, 1]
    for id in (1, 2):
        buffer.put(id, rows(id), version=buffer.version)
        buffer.take()
        buffer.finish(version=buffer.version + 1)
        assert buffer.open() == [id + 1]
    buffer.put(0, rows(0), version=0)
    assert buffer.take() == []
    assert buffer.counts.num_dropped == 1
    assert buffer.open(limit=1) == [0]


def test_what_a_checkpoint_holds_is_what_was_there(tmp_path):
    buffer = RolloutBuffer(groups_per_take=3, max_staleness=0)
    batch = BatchedDataDict(
        input_ids=torch.arange(24).reshape(4, 6), is_masked=torch.zeros(4, 6, dtype=torch.bool)
    )
    buffer.open()
    # Views of one batch, one of them not contiguous.
    buffer.put(0, batch.slice(0, 2), version=0)
    buffer.put(2, BatchedDataDict(input_ids=batch["input_ids"].T), version=0)
    buffer.save(tmp_path / "buffer.safetensors")
    loaded = RolloutBuffer(groups_per_take=3, max_staleness=0)
    loaded.load(tmp_path / "buffer.safetensors")
    assert loaded.open() == [1]
    loaded.put(1, batch.slice(2, 4), version=0)
    found = [group.rows for group in loaded.take()]
    assert torch.equal(found[0]["input_ids"], batch["input_ids"][:2])
    assert torch.equal(found[0]["is_masked"], batch["is_masked"][:2])
    assert torch.equal(found[2]["input_ids"], batch["input_ids"].T)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda each: each.put(7, rows(7), version=0), "group 7 is unknown"),
        (lambda each: each.put(1, rows(1), version=0), "group 1 is complete"),
        (lambda each: each.put(0, rows(0), version=3), "version 3, and the trainer is at version"),
        (lambda each: each.put(0, rows(0), version=-1), "version -1, and was opened for version 0"),
        (lambda each: each.put(0, BatchedDataDict(t=["a"]), version=0), "'t' of group 0 is a list"),
        (lambda each: each.reopen([1]), "group 1 is complete"),
        (lambda each: each.give_back([each._complete[1]]), "group 1 is complete: it is not taken"),
        (lambda each: each.open(version=1), "version 1 cannot sample while .* at version 0"),
        (lambda each: each.finish(version=1), "no groups are taken"),
        (lambda each: RolloutBuffer(groups_per_take=0, max_staleness=0), "groups_per_take=0"),
        (lambda each: RolloutBuffer(groups_per_take=1, max_staleness=-1), "max_staleness=-1"),
        (
            lambda each: RolloutBuffer(groups_per_take=1, max_staleness=0, too_old="keep"),
            "too_old='keep'",
        ),
    ],
)
def test_a_wrong_call_is_named_and_changes_nothing(wrong, message):
    buffer = RolloutBuffer(groups_per_take=1, max_staleness=1)
    buffer.open()
    buffer.put(1, rows(1), version=0)
    before = buffer.counts
    with pytest.raises((ValueError, RuntimeError), match=message):
        wrong(buffer)
    assert buffer.counts == before


def test_what_is_taken_is_not_saved_nor_taken_again(tmp_path):
    buffer = RolloutBuffer(groups_per_take=1, max_staleness=1)
    for id in buffer.open():
        buffer.put(id, rows(id), version=0)
    buffer.take()
    for call in (buffer.take, lambda: buffer.save(tmp_path / "b")):
        with pytest.raises(RuntimeError, match=r"\[0\] are taken and not finished"):
            call()
    with pytest.raises(ValueError, match="version=0 is not newer than 0"):
        buffer.finish(version=0)
    torch.save({}, tmp_path / "other")
    with pytest.raises(RuntimeError, match="opened 2 groups"):
        buffer.load(tmp_path / "other")
