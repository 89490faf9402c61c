"""The states of a receiver's weights, without a sender: every call in every state."""

import pytest
from rl_refit import PoisonedError, RefitError, RefitInProgress, StaleVersionError
from rl_refit.protocol import State, WeightVersion

pytestmark = pytest.mark.promise

# How each state is reached, with version 3 committed before where that is possible.
PATHS = {
    State.EMPTY: [],
    State.READY: [("begin", 3), ("set_loaded",), ("commit", 3)],
    State.IN_PROGRESS: [("begin", 3), ("set_loaded",), ("commit", 3), ("begin", 4)],
    State.LOADED: [("begin", 3), ("set_loaded",), ("commit", 3), ("begin", 4), ("set_loaded",)],
    State.SWAPPING: [
        *[("begin", 3), ("set_loaded",), ("commit", 3)],
        *[("begin", 4), ("set_loaded",), ("start_swap",)],
    ],
    State.POISONED: [("begin", 3), ("set_loaded",), ("commit", 3), ("begin", 4), ("poison", "why")],
}
READY = {
    State.EMPTY: RefitError,
    State.READY: 3,
    State.IN_PROGRESS: RefitInProgress,
    State.LOADED: RefitInProgress,
    State.SWAPPING: RefitInProgress,
    State.POISONED: PoisonedError,
}
COMMIT_4 = {
    State.EMPTY: RefitError,
    State.READY: RefitError,
    State.IN_PROGRESS: RefitError,
    State.LOADED: True,
    State.SWAPPING: True,
    State.POISONED: PoisonedError,
}


def reach(state):
    weights = WeightVersion(rank=7)
    for name, *arguments in PATHS[state]:
        getattr(weights, name)(*arguments)
    assert weights.state is state
    return weights


def outcome(call, *arguments):
    """Return what a call returns, or the class of its error."""
    try:
        return call(*arguments)
    except RefitError as error:
        return type(error)


@pytest.mark.parametrize("state", State)
def test_every_call_in_every_state(state):
    assert outcome(reach(state).require_ready) == READY[state]
    assert outcome(reach(state).commit, 4) == COMMIT_4[state]
    weights = reach(state)
    kept = weights.committed
    if kept is not None:
        assert outcome(weights.begin, kept) is StaleVersionError
        assert weights.state is state
    weights.begin(9)
    assert weights.state is State.IN_PROGRESS
    assert weights.committed == kept
    weights.require_begun(9)
    assert outcome(weights.require_begun, 8) is RefitError


def test_a_second_commit_changes_nothing():
    weights = reach(State.READY)
    assert weights.commit(3) is False
    assert outcome(weights.commit, 2) is RefitError
    assert weights.require_ready() == 3


def test_only_a_complete_refit_heals():
    weights = reach(State.POISONED)
    with pytest.raises(
        PoisonedError, match="the last refit failed: why; the weights are undefined"
    ):
        weights.require_ready()
    weights.begin(4)
    assert outcome(weights.commit, 4) is RefitError
    weights.set_loaded()
    assert weights.commit(4) is True
    assert weights.require_ready() == 4


def test_an_engine_may_start_with_committed_weights():
    weights = WeightVersion(committed=0)
    assert (weights.require_ready(), weights.is_updating, weights.is_poisoned) == (0, False, False)
    with pytest.raises(StaleVersionError):
        weights.begin(0)
    weights.begin(1)
    assert weights.is_updating
    weights.set_loaded()
    assert weights.is_updating
    weights.poison("no such shard")
    assert (weights.is_updating, weights.is_poisoned, weights.committed) == (False, True, 0)
    assert weights.reason == "no such shard"
    with pytest.raises(PoisonedError, match="the last refit failed: no such shard"):
        weights.require_ready()


def staged(*calls):
    """Return weights with version 3 committed and a staged refit to 4 begun, after `calls`."""
    weights = reach(State.READY)
    weights.begin(4, staged=True)
    for name, *arguments in calls:
        getattr(weights, name)(*arguments)
    return weights


@pytest.mark.parametrize("calls", [[], [("set_loaded",)]])
def test_a_staged_refit_leaves_the_committed_version_ready(calls):
    weights = staged(*calls)
    assert (weights.require_ready(), weights.is_updating, weights.serves) == (3, True, True)
    weights.poison("the sender is gone")
    assert (weights.state, weights.require_ready(), weights.is_updating) == (State.READY, 3, False)
    assert weights.reason == "the sender is gone"
    assert outcome(weights.commit, 4) is RefitError
    weights.begin(4)
    assert outcome(weights.require_ready) is RefitInProgress


def test_a_staged_version_counts_from_its_commit():
    assert outcome(staged().commit, 4) is RefitError
    weights = staged(("set_loaded",), ("start_swap",))
    assert outcome(weights.require_ready) is RefitInProgress
    assert weights.commit(4) is True
    assert weights.require_ready() == 4
    weights.begin(5)
    weights.poison("not staged")
    assert outcome(weights.require_ready) is PoisonedError


def test_a_failed_swap_poisons():
    weights = staged(("set_loaded",), ("start_swap",), ("poison", "in the middle"))
    assert outcome(weights.require_ready) is PoisonedError


def test_staging_serves_nothing_where_nothing_valid_is_held():
    for state, after in [(State.EMPTY, RefitError), (State.POISONED, PoisonedError)]:
        weights = reach(state)
        weights.begin(4, staged=True)
        assert outcome(weights.require_ready) is RefitInProgress
        weights.poison("again")
        assert outcome(weights.require_ready) is after


def test_a_staged_refit_that_is_begun_anew_still_serves():
    weights = staged()
    weights.begin(5, staged=True)
    assert (weights.require_ready(), weights.begun) == (3, 5)


@pytest.mark.parametrize("num_reads", [1, 2])
def test_a_failure_in_another_thread_never_hides_the_version_that_serves(num_reads):
    class Failing(WeightVersion):
        """Fails, as by the thread that receives, after some reads of what a failure changes."""

        num_left = 0

        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name in ("state", "is_staged"):
                self.num_left -= 1
                if self.num_left == 0:
                    self.poison("the sender is gone")
            return value

    weights = Failing(committed=3)
    weights.begin(4, staged=True)
    weights.num_left = num_reads
    assert weights.serves
    assert weights.reason == "the sender is gone"
    assert weights.serves
