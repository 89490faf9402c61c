"""Rules of a transport: which version counts, who may send it, and how long one waits."""

from __future__ import annotations

import torch

from rl_refit import errors
from rl_refit.testing.engines import (
    Engine,
    World,
    must,
    outcomes,
    refuses,
    require_errors,
    require_same,
    some_tensors,
)
from rl_refit.testing.pair import RefitPair

SHORT_S = 0.4
"""For a wait that is to end at its limit."""


def a_version_counts_from_its_commit_on(pair: RefitPair, num_cases: int) -> None:
    """Before, the engine is not ready; a new one that has begun leaves the committed one alone."""
    with World(pair, some_tensors()) as world:
        (engine,) = world.engines
        receiver = engine.receiver
        assert receiver.version is None, f"version {receiver.version} before any refit"
        refuses(errors.RefitError, receiver.require_ready, "an engine without weights")
        must(world.refit(3))
        assert receiver.version is None, f"version {receiver.version} before the commit"
        refuses(errors.RefitInProgress, receiver.require_ready, "an engine before the commit")
        world.sender.commit(3)
        assert (receiver.require_ready(), receiver.version) == (3, 3)
        must(world.refit(4))
        receiver.commit(4)
        assert receiver.require_ready() == 4
        receiver.begin(5)
        refuses(errors.RefitInProgress, receiver.require_ready, "an engine that has begun")
        assert receiver.version == 4


def what_was_not_sent_is_not_committed(pair: RefitPair, num_cases: int) -> None:
    """At neither end, nor is it received where it was not begun."""
    error = errors.RefitError
    with World(pair, some_tensors()) as world:
        (engine,) = world.engines
        refuses(error, lambda: world.sender.commit(1), "a commit before any refit")
        refuses(error, lambda: engine.receiver.commit(1), "a commit before any refit")
        must(world.refit(1))
        refuses(error, lambda: world.sender.commit(2), "a commit of another version")
        refuses(error, lambda: engine.receiver.commit(2), "a commit of another version")
        refuses(error, lambda: engine.receiver.receive(2, engine.keep), "what was not begun")
        assert engine.receiver.version is None


def a_stale_version_changes_nothing(pair: RefitPair, num_cases: int) -> None:
    """It is refused, the committed one goes on, and a newer one is welcome."""
    for committed in range(1, 6):
        with World(pair, some_tensors(), 2) as world:
            world.good_refit(committed)
            for engine in world.engines:
                receiver = engine.receiver
                for stale in range(committed + 1):
                    refuses(
                        errors.StaleVersionError,
                        lambda r=receiver, v=stale: r.begin(v),
                        f"version {stale} where {committed} is committed",
                    )
                    assert receiver.require_ready() == committed
            world.good_refit(committed + 1)


def a_sender_of_another_version_is_refused(pair: RefitPair, num_cases: int) -> None:
    """At both ends, and the engine needs a full resend."""
    with World(pair, some_tensors()) as world:
        (engine,) = world.engines
        results = outcomes(lambda: world.sender.send(1), lambda: engine.refit(2))
        require_errors(results, errors.RefitError, "version 1 was sent where 2 was begun")
        refuses(errors.PoisonedError, engine.receiver.require_ready, "an engine that failed")
        world.good_refit(3)


def tensors_that_the_engine_does_not_expect_are_refused(pair: RefitPair, num_cases: int) -> None:
    """Before one is loaded, by an error that names every one."""
    tensors = some_tensors()
    expected = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    expected[0] = ("embed.weight", torch.float64, (64, 48))
    expected.append(("bias", torch.float32, (4,)))
    with World(pair, tensors, engine={"expected": expected}) as world:
        results = world.refit(1)
        require_errors(results, errors.PlanMismatchError, "other tensors were expected")
        for error in results:
            for name in ("embed.weight", "bias"):
                assert name in str(error), f"the error does not name {name}: {error}"
        assert not world.engines[0].weights, "tensors of a refused plan were loaded"


def a_load_that_fails_stops_all_until_a_full_resend(pair: RefitPair, num_cases: int) -> None:
    """Every engine refuses to be used, and none commits, until all have loaded everything."""
    with World(pair, some_tensors(), 2) as world:
        _, second = world.engines
        must(world.refit(1))
        second.load = lambda tensors: 1 / 0
        results = world.refit(2)
        require_errors(results, errors.RefitError, "the load of receiver 1 failed")
        for error in results:
            assert "ZeroDivisionError" in str(error), f"the error lacks the reason: {error}"
            assert "embed.weight" in str(error), f"the tensor is not named: {error}"
        for engine in world.engines:
            refuses(errors.PoisonedError, engine.receiver.require_ready, "an engine that failed")
            refuses(errors.PoisonedError, lambda e=engine: e.receiver.commit(2), "its commit")
        refuses(errors.RefitError, lambda: world.sender.commit(2), "the sender's commit")
        second.load = second.keep
        world.good_refit(2)


def who_does_not_come_is_waited_for_as_long_as_said(pair: RefitPair, num_cases: int) -> None:
    """By a sender for its second receiver, and by a receiver for its sender."""
    sender = pair.open_sender(some_tensors(), num_receivers=2, timeout_s=SHORT_S)
    engine = Engine(pair, sender.address)
    sent, received = outcomes(lambda: sender.send(1), lambda: engine.refit(1))
    assert isinstance(sent, errors.RefitTimeoutError), f"the sender ended with {sent!r}"
    assert isinstance(received, errors.RefitError), f"the receiver ended with {received!r}"
    engine.receiver.close()
    sender.close()
    sender = pair.open_sender(some_tensors())
    engine = Engine(pair, sender.address, timeout_s=SHORT_S)
    refuses(errors.RefitTimeoutError, lambda: engine.refit(1), "a receiver alone")
    engine.receiver.close()
    sender.close()


def a_wrong_token_gets_nothing(pair: RefitPair, num_cases: int) -> None:
    """It is turned away, and who has the right one is served."""
    tensors = some_tensors()
    sender = pair.open_sender(tensors, timeout_s=4 * SHORT_S)
    stranger = Engine(pair, {**sender.address, "token": "00" * 32})
    sent, received = outcomes(lambda: sender.send(1), lambda: stranger.refit(1))
    kind = errors.AuthenticationError
    assert isinstance(received, kind), f"the stranger ended with {received!r}"
    assert isinstance(sent, errors.RefitTimeoutError), f"the sender ended with {sent!r}"
    assert not stranger.weights, "the stranger was given weights"
    stranger.receiver.close()
    engine = Engine(pair, sender.address)
    must(outcomes(lambda: sender.send(2), lambda: engine.refit(2)))
    require_same(engine.weights, tensors, "the receiver with the right token")
    engine.receiver.close()
    sender.close()


def a_new_receiver_takes_the_place_of_the_old_one(pair: RefitPair, num_cases: int) -> None:
    """Of its rank, while the old one is still there; the other ranks go on."""
    with World(pair, some_tensors(), 2) as world:
        world.good_refit(1)
        old = world.engines[0]
        world.engines[0] = Engine(pair, world.sender.address, 0)
        world.good_refit(2)
        old.receiver.close()
