"""Receivers that die or fall silent at each stage of a refit; those that join catch up."""

import signal

import pytest
from pair_apart import PairApart
from patience import PATIENCE_S
from refit_pairs import Engine as ThreadEngine
from refit_pairs import make_sender, must, outcomes, refit, same, some_tensors
from rl_refit import RefitError, RefitReport, RefitSender
from rl_refit.ends.membership import Membership
from rl_refit.testing.pair import Engine, World

pytestmark = [pytest.mark.needs("rl-refit[testing]")]

VICTIM, OTHERS = 1, (0, 2)
STAGES = ["between two refits", "in its first bucket", "in its last bucket", "before the commit"]
SILENCE_S = 2.0
# A chain takes two seconds to pass a silent one over, in which those behind it are silent too.
SILENCE_IN_CHAIN_S = 6.0


class Dies:
    """Ends the process of an engine at a stage of its next refit."""

    def __init__(self, engine, stage):
        self.engine, self.stage, self.is_armed = engine, stage, False
        engine.load = self.load

    def arm(self):
        self.is_armed = True
        if self.stage == "between two refits":
            self.engine.receiver.kill()

    def load(self, tensors):
        names = [name for name, _ in tensors]
        is_due = {"in its first bucket": "embed.weight", "in its last bucket": "head.weight"}
        if self.is_armed and is_due.get(self.stage) in names:
            self.engine.receiver.kill()
        self.engine.keep(tensors)


def world_of(transport, tensors, **options):
    limit_s = SILENCE_IN_CHAIN_S if transport == "chain" else SILENCE_S
    options = {"min_receivers": 2, "receiver_timeout_s": limit_s, **options}
    return World(PairApart(transport), tensors, 3, **options)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("transport", ["shm", "golden", "chain"])
def test_others_commit_and_a_new_engine_catches_up_whenever_one_dies(transport, stage, caplog):
    tensors = some_tensors()
    with world_of(transport, tensors) as world:
        world.good_refit(1)
        dies = Dies(world.engines[VICTIM], stage)
        dies.arm()
        for tensor in tensors.values():
            tensor += 1
        results = world.refit(2)
        must(results[rank + 1] for rank in OTHERS)
        if stage == "before the commit":
            must(results)
            world.engines[VICTIM].receiver.kill()
        else:
            assert isinstance(results[VICTIM + 1], Exception)
            assert list(results[0].dropped) == [VICTIM]
        caplog.clear()
        world.sender.commit(2)
        is_late = stage == "before the commit"
        assert is_late == (f"committed without receiver {VICTIM}: the receiver" in caplog.text)
        joined = world.engines[VICTIM] = Engine(world.pair, world.sender.address, VICTIM)
        must(outcomes(lambda: joined.refit(2), lambda: world.sender.send(2, receivers=[VICTIM])))
        world.sender.commit(2)
        for engine in world.engines:
            assert engine.receiver.require_ready() == 2
            assert same(engine.weights, tensors)
        world.good_refit(3)


@pytest.mark.parametrize(
    ("transport", "limit_s"),
    [("shm", SILENCE_S), ("golden", SILENCE_S), ("chain", SILENCE_IN_CHAIN_S)],
)
def test_a_stopped_process_learns_that_it_is_behind(transport, limit_s):
    with world_of(transport, some_tensors(), receiver_timeout_s=limit_s) as world:
        world.good_refit(1)
        victim = world.engines[VICTIM]

        def load(tensors):
            victim.load = victim.keep  # over TCP it reads what was announced before it was dropped
            victim.receiver.signal(signal.SIGSTOP)
            victim.keep(tensors)

        victim.load = load
        results = world.refit(2, after_send=lambda: victim.receiver.signal(signal.SIGCONT))
        must(results[rank] for rank in (0, 1, 3))
        assert f"within {limit_s:g} s" in results[0].dropped[VICTIM]
        assert "goes on without it" in str(results[VICTIM + 1])
        world.sender.commit(2)
        with pytest.raises(RefitError, match="undefined until a complete refit"):
            victim.receiver.require_ready()
        assert victim.receiver.version == 1
        victim.load = victim.keep
        world.good_refit(3, receivers=[0, 1, 2])


def test_a_group_fails_by_name_and_its_next_refit_leaves_the_dead_out():
    tensors = some_tensors()
    with world_of("collective", tensors) as world:
        world.good_refit(1)
        Dies(world.engines[VICTIM], "in its first bucket").arm()
        results = world.refit(2)
        assert all(isinstance(result, Exception) for result in results)
        assert "transport='collective' cannot go on without one" in str(results[0])
        del world.engines[VICTIM]
        must(world.refit(2, receivers=OTHERS))
        world.sender.commit(2)
        assert [engine.receiver.require_ready() for engine in world.engines] == [2, 2]


def test_nobody_commits_if_too_few_are_left_at_the_commit():
    with world_of("shm", some_tensors(), min_receivers=3) as world:
        world.good_refit(1)
        must(world.refit(2))
        world.engines[VICTIM].receiver.kill()
        with pytest.raises(RefitError, match="2 hold version 2, and min_receivers=3"):
            world.sender.commit(2)
        for rank in OTHERS:
            with pytest.raises(RefitError):
                world.engines[rank].receiver.commit(2)
            assert world.engines[rank].receiver.version == 1
        with pytest.raises(RefitError, match="was not sent"):
            world.sender.commit(2)


def test_a_sender_of_changes_sends_everything_to_one_that_joins():
    tensors = some_tensors()
    sender = make_sender(tensors, num_receivers=2, delta=True, min_receivers=1)
    engines = [ThreadEngine(sender.address, rank) for rank in range(2)]
    must(refit(sender, engines, 1))
    sender.commit(1)
    engines[1].receiver.close()
    joined = ThreadEngine(sender.address, 1)
    must(outcomes(lambda: sender.send(1, receivers=[1]), lambda: joined.refit(1)))
    sender.commit(1)
    engines[1] = joined
    for version, is_full in [(2, True), (3, False)]:
        tensors["steps"] += 1
        sent, *received = refit(sender, engines, version)
        must(received)
        assert (sent.changed is None) == is_full
        sender.commit(version)
        assert all(engine.receiver.require_ready() == version for engine in engines)
        assert all(same(engine.weights, tensors) for engine in engines)
    for end in [sender, *(engine.receiver for engine in engines)]:
        end.close()


def test_without_receivers_of_its_own_a_sender_takes_part_in_the_gathers():
    read = []

    class Source:
        def metadata(self):
            return [(name, t.dtype, tuple(t.shape)) for name, t in some_tensors().items()]

        def __iter__(self):
            for name, tensor in some_tensors().items():
                read.append(name)
                yield name, tensor

    with RefitSender(Source(), "shm", 2, timeout_s=PATIENCE_S) as sender:
        assert isinstance(sender.send(1, receivers=[]), RefitReport)
        sender.commit(1)
    assert read == list(some_tensors())


def membership(num_receivers=3, min_receivers=2, **options):
    options = {"timeout_s": 20.0, "receiver_timeout_s": None, **options}
    return Membership(num_receivers, min_receivers=min_receivers, **options)


def test_others_that_hold_the_version_count():
    members = membership()
    members.connect([0, 1, 2])
    assert members.least_of(1, None) == 2
    with pytest.raises(RefitError, match=r"receivers=\[2\] and 0 others that hold version 1"):
        members.least_of(1, [2])
    members.finish(1, [0, 1])
    assert members.least_of(1, [2]) == 1
    with pytest.raises(RefitError, match="fewer than min_receivers=2"):
        members.least_of(2, [2])
    # What a refit overwrites is held no more.
    members.begin([0, 1])
    with pytest.raises(RefitError, match="0 others"):
        members.least_of(1, [2])


def test_one_that_was_dropped_and_comes_back_holds_nothing():
    members = membership(min_receivers=3)
    members.connect([0, 1, 2])
    members.finish(1, [0, 1])
    assert members.least_of(1, [2]) == 1
    members.drop_missing([], wanted=[1])
    members.connect([1])
    with pytest.raises(RefitError, match=r"receivers=\[2\] and 1 others that hold version 1"):
        members.least_of(1, [2])


@pytest.mark.parametrize("least", [0, 4])
def test_a_number_that_cannot_be_is_refused(least):
    with pytest.raises(ValueError, match=f"min_receivers={least} is not between 1 and"):
        membership(min_receivers=least)
    with pytest.raises(ValueError, match="receiver_timeout_s=30 is not between 0 and"):
        membership(receiver_timeout_s=30)


def test_missing_receivers_are_named():
    members = membership(num_receivers=4)
    members.connect([7, 1])
    members.drop_missing([1], wanted=None)
    assert set(members.dropped) == {7, 0, 2}
    assert members.num_expected == 1
    members.connect([7])
    assert members.num_expected == 2


def test_an_engine_of_several_receivers_is_dropped_and_comes_back_as_one():
    members = membership(num_receivers=4, per_engine=2)
    members.connect([0, 1, 2])
    members.drop_missing([0, 1, 2], wanted=None)
    assert members.dropped == {
        3: "no connection within 10 s",
        2: "its engine has lost receiver 3: no connection within 10 s",
    }
    assert members.num_expected == 2
    assert members.with_fellows([1], [0, 1, 2]) == [0, 1]
    members.connect([3])
    assert members.num_expected == 4
    with pytest.raises(
        ValueError, match="num_receivers=3 is no multiple of receivers_per_engine=2"
    ):
        membership(per_engine=2)


def test_a_sender_of_tensors_commits_without_an_engine_of_which_one_receiver_dies():
    tensors = some_tensors()
    options = {"min_receivers": 2, "receivers_per_engine": 2}
    sender = make_sender(tensors, num_receivers=4, **options)
    engines = [ThreadEngine(sender.address, rank) for rank in range(4)]
    must(refit(sender, engines, 1))
    sender.commit(1)

    def die(pairs):
        engines[VICTIM].receiver._session.channel.hang_up()
        raise OSError("dead")

    engines[VICTIM].load = die
    sent, *received = refit(sender, engines, 2)
    must([sent, *received[2:]])
    assert set(sent.dropped) == {0, 1}
    sender.commit(2)
    assert [engine.receiver.version for engine in engines] == [1, 1, 2, 2]
    for end in [sender, *(engine.receiver for engine in engines)]:
        end.close()
