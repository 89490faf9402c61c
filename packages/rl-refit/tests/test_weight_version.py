"""The states of a receiver's weights, without a sender: every call in every state."""

import pytest
from rl_refit import PoisonedError, RefitError, RefitInProgress, StaleVersionError
from rl_refit.protocol import State, WeightVersion

# How each state is reached, with version 3 committed before where that is possible.
PATHS = {
    State.EMPTY: [],
    State.READY: [("begin", 3), ("set_loaded",), ("commit", 3)],
    State.IN_PROGRESS: [("begin", 3), ("set_loaded",), ("commit", 3), ("begin", 4)],
    State.LOADED: [("begin", 3), ("set_loaded",), ("commit", 3), ("begin", 4), ("set_loaded",)],
    State.POISONED: [("begin", 3), ("set_loaded",), ("commit", 3), ("begin", 4), ("poison", "why")],
}
READY = {
    State.EMPTY: RefitError,
    State.READY: 3,
    State.IN_PROGRESS: RefitInProgress,
    State.LOADED: RefitInProgress,
    State.POISONED: PoisonedError,
}
COMMIT_4 = {
    State.EMPTY: RefitError,
    State.READY: RefitError,
    State.IN_PROGRESS: RefitError,
    State.LOADED: True,
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
