"""Rules of a staged refit: the old version serves until the swap, whatever happens before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Unpack

import torch

from rl_refit import errors
from rl_refit.report import RefitReport
from rl_refit.testing import faults
from rl_refit.testing.pair import (
    Engine,
    ReceiverOptions,
    RefitPair,
    Tensors,
    World,
    must,
    refuses,
    require_errors,
    require_same,
    some_tensors,
)


class StagingEngine(Engine):
    """Serves its weights while it stages others, as an inference engine would.

    Attributes:
        staged: The weights that are received.
        num_swaps: How often they became the engine's.
        breaks_swap: Whether the next swaps fail.
    """

    def __init__(
        self,
        pair: RefitPair,
        address: Mapping[str, str | int],
        rank: int = 0,
        **options: Unpack[ReceiverOptions],
    ) -> None:
        super().__init__(pair, address, rank, **options)
        self.staged: Tensors = {}
        self.num_swaps = 0
        self.breaks_swap = False

    def keep(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Clone the tensors of a bucket, beside those that are served."""
        for name, tensor in tensors:
            self.staged[name] = tensor.clone()

    def swap(self) -> None:
        """Serve what was staged."""
        if self.breaks_swap:
            raise ZeroDivisionError("the swap breaks")
        self.weights, self.staged = self.staged, {}
        self.num_swaps += 1

    def refit(self, version: int) -> RefitReport:
        """Begin and receive a version."""
        self.staged = {}
        self.receiver.begin(version, swap=self.swap)
        return self.receiver.receive(version, lambda tensors: self.load(tensors))


def _copies(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _serves(engine: Engine, version: int, weights: Mapping[str, torch.Tensor], when: str) -> None:
    """Fail unless an engine is ready with a version, and has exactly its weights."""
    ready = engine.receiver.require_ready()
    assert ready == version == engine.receiver.version, f"{when}: ready at {ready}, not {version}"
    require_same(engine.weights, weights, f"the engine {when}")


def a_staged_refit_leaves_the_engine_ready(pair: RefitPair, num_cases: int) -> None:
    """With the old version, from the beginning to the commit; and no bit of its weights changes."""
    tensors = some_tensors()
    with World(pair, tensors, 2, engine_class=StagingEngine) as world:
        world.good_refit(1)
        for version in range(2, 5):
            old = _copies(tensors)
            for tensor in tensors.values():
                tensor += 1
            for engine in world.engines:
                engine.load = _watched(engine, version - 1, old)
            must(world.refit(version))
            for engine in world.engines:
                _serves(engine, version - 1, old, "before the commit")
            world.sender.commit(version)
            for engine in world.engines:
                _serves(engine, version, tensors, "after the commit")


def _watched(
    engine: Engine, version: int, old: Tensors
) -> Callable[[list[tuple[str, torch.Tensor]]], object]:
    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        engine.keep(tensors)
        _serves(engine, version, old, "while it receives")

    return load


def a_staged_version_is_swapped_once_at_its_commit(pair: RefitPair, num_cases: int) -> None:
    """Whoever commits it first, the sender or the engine; and the report says it was staged."""
    with World(pair, some_tensors(), engine_class=StagingEngine) as world:
        (engine,) = world.engines
        assert isinstance(engine, StagingEngine)
        for version in range(1, 5):
            results = world.refit(version)
            must(results)
            for report in results:
                assert isinstance(report, RefitReport)
                assert report.staged, f"{report} does not say that it was staged"
                assert report.pause_s == 0, f"{report} has a pause"
            assert engine.num_swaps == version - 1, "it swaps before the commit"
            if version % 2:
                world.sender.commit(version)
                engine.receiver.require_ready()
            engine.receiver.commit(version)
            engine.receiver.commit(version)
            if not version % 2:
                world.sender.commit(version)
            assert engine.receiver.require_ready() == version
            assert engine.num_swaps == version, f"{engine.num_swaps} swaps at version {version}"


def a_failed_staged_refit_leaves_the_old_version_ready(pair: RefitPair, num_cases: int) -> None:
    """Whatever has failed: no fault poisons, and none can be committed."""
    failures = [*faults.IN_ONE_BUCKET, None]
    for case in range(num_cases):
        rng = random.Random(f"staged {case}")
        drill = faults.Drill(pair, rng, engine_class=StagingEngine)
        _fail_once(drill, failures[case % len(failures)])
        drill.world.close()


def _fail_once(drill: faults.Drill, kind: type[faults.AtOneBucket] | None) -> None:
    """Let a staged refit fail, by a fault on its way or in the `load` of an engine."""
    world, engines = drill.world, drill.world.engines
    world.good_refit(1)
    old = _copies(drill.tensors)
    for tensor in drill.tensors.values():
        tensor += 1
    if kind is None:
        kept = engines[-1].load
        engines[-1].load = lambda tensors: 1 / 0
        require_errors(world.refit(2), errors.RefitError, "the load of an engine failed")
        engines[-1].load = kept
    else:
        drill.fail(kind(drill), limit_s=faults.limit_of(kind, drill))
    for engine in engines:
        _serves(engine, 1, old, "after a failed refit")
        refuses(errors.RefitError, lambda r=engine.receiver: r.commit(2), "its commit")
        _serves(engine, 1, old, "after a refused commit")
    refuses(errors.RefitError, lambda: world.sender.commit(2), "the sender's commit")
    world.good_refit(2)


def a_failed_swap_poisons_until_a_full_resend(pair: RefitPair, num_cases: int) -> None:
    """The weights are undefined, as some may have been exchanged; another staged refit heals."""
    with World(pair, some_tensors(), engine_class=StagingEngine) as world:
        (engine,) = world.engines
        assert isinstance(engine, StagingEngine)
        world.good_refit(1)
        must(world.refit(2))
        engine.breaks_swap = True
        must(world.refit(3))
        refuses(ZeroDivisionError, lambda: engine.receiver.commit(3), "a commit whose swap fails")
        refuses(errors.PoisonedError, engine.receiver.require_ready, "an engine half swapped")
        engine.breaks_swap = False
        world.good_refit(4)
