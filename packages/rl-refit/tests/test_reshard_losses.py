"""Engines that are lost while slices are exchanged: the others commit, and they come back."""

import time

import pytest
import torch
from refit_pairs import must
from rl_refit import RefitError
from rl_refit.resharding import Box
from slice_pairs import Engine, Trainer, refit

SHAPE = (8, 96)
VICTIM = 1
SILENCE_S = 3.0
SETTLE_S = 0.3
"""An engine that was lost takes part again if it has connected before a refit begins."""


class World:
    """A trainer with `delta`, and engines that want two rows more than the one before."""

    def __init__(self, num_receivers, **options):
        options = {"delta": True, "receiver_timeout_s": SILENCE_S, **options}
        tensors = {"w": torch.randn(SHAPE)}
        self.trainer = Trainer(tensors, num_receivers=num_receivers, **options)
        self.engines = [self.make_engine(rank) for rank in range(num_receivers)]

    def make_engine(self, rank):
        return Engine(self.trainer.sender.address, rank, {"w": Box((0, 0), (2 * rank + 2, 96))})

    def good_refit(self, version, *, lost=(), **options):
        """Refit and commit; return whether each engine that lives got what has changed alone."""
        self.trainer.tensors["w"][0, version] += 1
        sent, *received = refit(self.trainer, self.engines, version, **options)
        must([sent])
        assert set(sent.dropped) == set(lost), (version, sent.dropped)
        self.trainer.sender.commit(version)
        found = []
        for rank, (engine, outcome) in enumerate(zip(self.engines, received, strict=True)):
            if rank in lost:
                assert isinstance(outcome, RefitError), outcome
                assert engine.receiver.version != version
                continue
            must([outcome])
            engine.require_holds(self.trainer.tensors)
            assert engine.receiver.require_ready() == version
            found.append(engine.report.bytes_received < engine.report.bytes_full)
        return found

    def close(self):
        for engine in self.engines:
            engine.close()
        self.trainer.close()


@pytest.fixture
def world_of():
    made = []

    def make(*arguments, **options):
        made.append(World(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def lose(engine, how):
    """Lose an engine in its next exchange, when a message has arrived."""
    messages = engine.slices._member._exchange._messages

    def unpack(flow):
        if how == "dies":
            engine.receiver._session.channel.hang_up()
            engine.slices.close()
            raise OSError("dead")
        time.sleep(3 * SILENCE_S)

    messages.unpack = unpack


@pytest.mark.parametrize("how", ["dies", "is silent"])
def test_others_commit_without_an_engine_that_is_lost_and_it_comes_back(world_of, how):
    world = world_of(3, min_receivers=2)
    assert world.good_refit(1) == [False] * 3
    assert world.good_refit(2) == [True] * 3
    lose(world.engines[VICTIM], how)
    # What has arrived is half of two versions, so that all of it is sent.
    assert world.good_refit(3, lost=[VICTIM]) == [False] * 2
    world.engines[VICTIM].close()
    world.engines[VICTIM] = world.make_engine(VICTIM)
    assert world.good_refit(4, settle_s=SETTLE_S) == [True, False, True]
    assert world.good_refit(5) == [True] * 3


def test_an_engine_is_lost_with_all_of_its_ranks(world_of):
    world = world_of(4, min_receivers=2, receivers_per_engine=2)
    world.good_refit(1)
    lose(world.engines[VICTIM], "dies")
    world.good_refit(2, lost=[0, 1])
    for rank in (0, 1):
        world.engines[rank].close()
        world.engines[rank] = world.make_engine(rank)
    assert world.good_refit(3, settle_s=SETTLE_S) == [False, False, True, True]


@pytest.mark.parametrize(
    "options", [{"min_receivers": 2}, {}, {"min_receivers": 1, "receivers_per_engine": 2}]
)
def test_nobody_commits_if_too_few_are_left(world_of, options):
    world = world_of(2, **options)
    world.good_refit(1)
    lose(world.engines[VICTIM], "dies")
    for outcome in refit(world.trainer, world.engines, 2):
        assert isinstance(outcome, RefitError), outcome
    with pytest.raises(RefitError, match="was not sent"):
        world.trainer.sender.commit(2)
    world.engines[VICTIM].close()
    world.engines[VICTIM] = world.make_engine(VICTIM)
    world.good_refit(2)


def test_an_engine_that_never_came_is_left_out(world_of):
    world = world_of(3, min_receivers=2)
    world.engines.pop().close()
    must(refit(world.trainer, world.engines, 1))
    world.trainer.sender.commit(1)
    assert [engine.receiver.require_ready() for engine in world.engines] == [1, 1]


def test_an_engine_that_joins_between_two_refits_costs_the_others_nothing(world_of):
    world = world_of(3, min_receivers=2)
    world.good_refit(1)
    world.engines[VICTIM].close()
    joined = world.engines[VICTIM] = world.make_engine(VICTIM)
    must(refit(world.trainer, [joined], 1, receivers=[VICTIM]))
    world.trainer.sender.commit(1)
    joined.require_holds(world.trainer.tensors)
    assert world.good_refit(2) == [True] * 3


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="num_receivers=3 is no multiple of receivers_per_engine"):
        World(3, receivers_per_engine=2)
    with pytest.raises(ValueError, match="min_receivers=4"):
        World(3, min_receivers=4)
