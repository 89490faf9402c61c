"""Rules of a refit by deltas: patches of any length arrive, and none that was changed counts."""

from __future__ import annotations

import random
from unittest import SkipTest

import torch

from rl_refit import errors
from rl_refit.report import RefitReport
from rl_refit.testing.pair import (
    Fault,
    RefitPair,
    Tensors,
    World,
    must,
    require_errors,
    require_same,
    some_tensors,
)

LIMIT_S = 300.0
SHARES = (0.01, 0.0, 0.2, 1.0, 0.01)


def changes_alone_arrive_bit_exact(pair: RefitPair, num_cases: int) -> None:
    """Few, none, many and all of the elements, at receivers that have what was there before."""
    _require_host(pair)
    for num_buffers in (1, 3):
        tensors = some_tensors()
        with World(pair, tensors, 2, num_buffers=num_buffers, delta=True) as world:
            _refit(world, 1)
            for version, share in enumerate(SHARES, 2):
                _change(tensors, share, random.Random(version))
                sent = _refit(world, version)
                assert sent.changed is not None, f"version {version} was sent in full"
                if share < 0.1:
                    few = sent.bytes_sent < sent.bytes // 4
                    assert few, f"{sent.bytes_sent} bytes for {share:.0%} of {sent.bytes}"


def a_changed_patch_is_detected(pair: RefitPair, num_cases: int) -> None:
    """One bit anywhere in a patch; the refit after it is a full one."""
    _require_host(pair)
    tensors = some_tensors()
    with World(pair, tensors, 2, delta=True) as world:
        _refit(world, 0)
        for case in range(1, num_cases + 1):
            rng = random.Random(case)
            _change(tensors, 0.05, rng)
            with pair.tamper(world.sender, _SpoiledPatch(rng), timeout_s=LIMIT_S):
                results = world.refit(2 * case)
            require_errors(results, errors.VerificationError, "a patch with a flipped bit")
            assert _refit(world, 2 * case).changed is None, "a delta to what was lost"
            _change(tensors, 0.05, rng)
            assert _refit(world, 2 * case + 1).changed is not None, "no delta after a full refit"


class _SpoiledPatch(Fault):
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def spoil(self, bucket: int, data: torch.Tensor) -> None:
        if bucket == 0:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)


def _require_host(pair: RefitPair) -> None:
    if pair.verify == "none" or torch.device(pair.device).type != "cpu":
        raise SkipTest("deltas are of verified buckets in host memory")


def _change(tensors: Tensors, share: float, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    for tensor in tensors.values():
        tensor[torch.rand(tensor.shape, generator=generator) < share] += 1


def _refit(world: World, version: int) -> RefitReport:
    """Refit, commit, and compare every engine with the tensors; return the sender's report."""
    results = world.refit(version)
    must(results)
    world.sender.commit(version)
    for rank, engine in enumerate(world.engines):
        ready = engine.receiver.require_ready()
        assert ready == version, f"receiver {rank} is at version {ready}, not {version}"
        require_same(engine.weights, world.tensors, f"receiver {rank}")
    sent = results[0]
    assert isinstance(sent, RefitReport)
    return sent
