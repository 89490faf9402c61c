"""Rules of receivers that come and go: the others commit, and one that joins catches up."""

from __future__ import annotations

import threading
from unittest import SkipTest

import torch

from rl_refit import errors
from rl_refit.report import RefitReport
from rl_refit.testing.pair import (
    Engine,
    RefitPair,
    SenderOptions,
    Tensors,
    World,
    must,
    outcomes,
    refuses,
    require_errors,
    require_same,
    some_tensors,
)
from rl_refit.transports import find_transport

SILENCE_S = 2.0
"""Limit of a receiver's silence; the others answer far earlier also on a busy machine."""


def require_surviving(pair: RefitPair) -> None:
    """Raise `SkipTest` for a transport that cannot go on without a receiver."""
    if not find_transport(pair.transport).survives_loss:
        raise SkipTest(f"transport={pair.transport!r} does not go on without a receiver")


def a_silent_receiver_is_dropped_after_its_limit(pair: RefitPair, num_cases: int) -> None:
    """It cannot answer with what it has, and is back in the next refit; the others commit."""
    require_surviving(pair)
    tensors = some_tensors()
    with _world(pair, tensors) as world, _Silence(world.engines[1]) as silence:
        world.good_refit(1)
        _add_one(tensors)
        silence.begin()
        sent, first, dropped, last = world.refit(2, after_send=silence.end)
        must([sent, first, last])
        _require_dropped(sent, {1})
        world.sender.commit(2)
        for index in (0, 2):
            assert world.engines[index].receiver.require_ready() == 2
            require_same(world.engines[index].weights, tensors, f"receiver {index}")
        _require_behind(world.engines[1], dropped, 2)
        world.good_refit(3, receivers=[0, 1, 2])


def too_few_receivers_commit_nothing(pair: RefitPair, num_cases: int) -> None:
    """Neither the sender nor the receiver that has answered, if fewer than `min_receivers` have."""
    require_surviving(pair)
    with (
        _world(pair, some_tensors(), timeout_s=4 * SILENCE_S * pair.patience) as world,
        _Silence(world.engines[1]) as first,
        _Silence(world.engines[2]) as second,
    ):
        world.good_refit(1)
        first.begin()
        second.begin()

        def end() -> None:
            first.end()
            second.end()

        results = world.refit(2, after_send=end)
        require_errors(results, errors.RefitError, "two of three are silent")
        refuses(errors.RefitError, lambda: world.sender.commit(2), "the sender's commit")
        for engine in world.engines:
            refuses(errors.RefitError, lambda e=engine: e.receiver.commit(2), "its commit")
            assert engine.receiver.version == 1
        world.good_refit(3, receivers=[0, 1, 2])


def a_missing_receiver_is_dropped_until_it_connects(pair: RefitPair, num_cases: int) -> None:
    """The others do not wait for it again; it is in the next refit once it has connected."""
    with _world(pair, some_tensors()) as world:
        late = world.engines.pop()
        for version in (1, 2):
            results = world.refit(version)
            must(results)
            _require_dropped(results[0], {2})
            world.sender.commit(version)
            for engine in world.engines:
                assert engine.receiver.require_ready() == version
        refuses(errors.RefitError, late.receiver.require_ready, "an engine without weights")
        world.engines.append(late)
        results = world.refit(3, receivers=[0, 1, 2])
        must(results)
        _require_dropped(results[0], set())
        world.sender.commit(3)
        assert [engine.receiver.require_ready() for engine in world.engines] == [3, 3, 3]
        world.good_refit(4)


def an_engine_that_joins_gets_the_present_version_alone(pair: RefitPair, num_cases: int) -> None:
    """The others serve meanwhile, and the next refit is one of all."""
    tensors = some_tensors()
    with _world(pair, tensors) as world:
        world.good_refit(1)
        others = world.engines[:2]
        world.engines[2].receiver.close()
        joining = world.engines[2] = Engine(pair, world.sender.address, 2)
        refuses(errors.RefitError, joining.receiver.require_ready, "an engine without weights")

        def load(pairs: list[tuple[str, torch.Tensor]]) -> None:
            joining.keep(pairs)
            for engine in others:
                assert engine.receiver.require_ready() == 1, "the others do not serve"

        joining.load = load
        must(outcomes(lambda: joining.refit(1), lambda: world.sender.send(1, receivers=[2])))
        world.sender.commit(1)
        joining.load = joining.keep
        for engine in world.engines:
            assert engine.receiver.require_ready() == 1
            require_same(engine.weights, tensors, "an engine")
        _add_one(tensors)
        world.good_refit(2)


def _world(pair: RefitPair, tensors: Tensors, *, timeout_s: float | None = None) -> World:
    options: SenderOptions = {
        "min_receivers": 2,
        "receiver_timeout_s": SILENCE_S * pair.patience,
    }
    if timeout_s is not None:
        options["timeout_s"] = timeout_s
    return World(pair, tensors, 3, **options)


def _add_one(tensors: Tensors) -> None:
    for tensor in tensors.values():
        tensor += 1


def _require_dropped(report: RefitReport | Exception, ranks: set[int]) -> None:
    assert isinstance(report, RefitReport)
    dropped = set(report.dropped)
    assert dropped == ranks, f"the report names {dropped} where {ranks} were dropped"


def _require_behind(engine: Engine, result: RefitReport | Exception, version: int) -> None:
    """Fail unless a receiver that was dropped has learned it, and commits nothing."""
    assert isinstance(result, errors.RefitError), f"the dropped receiver ended with {result!r}"
    refuses(errors.RefitError, engine.receiver.require_ready, "a dropped receiver")
    refuses(errors.RefitError, lambda: engine.receiver.commit(version), "its commit")
    assert engine.receiver.version != version, f"it says that it is at version {version}"


class _Silence:
    """Lets an engine stop in the load of a bucket, and go on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._goes_on = threading.Event()
        self._goes_on.set()
        engine.load = self._load

    def begin(self) -> None:
        self._goes_on.clear()

    def end(self) -> None:
        self._goes_on.set()

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._goes_on.wait()
        self._engine.keep(tensors)

    def __enter__(self) -> _Silence:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
