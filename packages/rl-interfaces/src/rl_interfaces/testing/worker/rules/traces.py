"""What leaves no trace: scoring, sampling and evaluating, in the worker and in its batches."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.testing.expectations import expect, expect_close
from rl_interfaces.testing.report import rule
from rl_interfaces.testing.worker.bench import WorkerBench
from rl_interfaces.testing.worker.inputs import LogprobLoss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@rule()
def scoring_and_sampling_leave_no_trace(bench: WorkerBench) -> None:
    """Scores and samples change neither random state nor weights, nor the step that follows."""
    mine = bench.share(bench.scoring)

    def act(worker: Any) -> None:
        worker.get_logprobs(mine)
        worker.get_reference_policy_logprobs(mine)
        if bench.case.config.get("generation") is not None:
            worker.generate(mine)
        if hasattr(worker, "get_topk_logits"):
            worker.get_topk_logits(mine, 2)

    _expect_no_trace(bench, act)
    with _reward_worker(bench) as worker:
        if worker is not None:
            _expect_random_state_kept(lambda: worker.score(mine))


@rule()
def evaluating_leaves_no_trace(bench: WorkerBench) -> None:
    """`eval_mode` changes neither random state nor weights, nor the step that follows."""
    _expect_no_trace(bench, lambda worker: bench.train(worker, eval_mode=True))


@rule()
def batches_are_not_written_into(bench: WorkerBench) -> None:
    """A batch is as it was after every call that takes one."""
    size = bench.global_batch_size

    def hold(call: Callable[[Any], Any], what: str, *, batch_size: int | None = None) -> None:
        mine = bench.share(bench.training, batch_size=batch_size)
        before = {key: value.clone() for key, value in _tensors(mine).items()}
        call(mine)
        after = _tensors(mine)
        expect(after.keys() == before.keys(), f"{what} has changed the keys of its batch")
        for key, value in before.items():
            expect(torch.equal(after[key], value), f"{what} has written into {key!r}")

    with bench.fresh() as worker:
        hold(worker.get_logprobs, "get_logprobs")
        hold(worker.get_reference_policy_logprobs, "get_reference_policy_logprobs")
        if bench.case.config.get("generation") is not None:
            hold(worker.generate, "generate")
        if hasattr(worker, "get_topk_logits"):
            hold(lambda mine: worker.get_topk_logits(mine, 2), "get_topk_logits")

        def train(mine: Any) -> None:
            worker.train(mine, LogprobLoss(), gbs=size)

        hold(train, "train", batch_size=size)
    with _reward_worker(bench) as worker:
        if worker is not None:
            hold(worker.score, "score")


@contextmanager
def _reward_worker(bench: WorkerBench) -> Iterator[Any]:
    """Give a worker that scores rows, None where there is none."""
    reward = bench.case.reward
    if reward is None or not hasattr(bench.worker_type, "score"):
        yield None
        return
    options: dict[str, Any] = {"init_optimizer": False, "init_reference_model": False}
    with bench.fresh(reward.settings, **options) as worker:
        yield worker


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    return {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}


def _expect_random_state_kept(act: Callable[[], Any]) -> None:
    """Call `act`, and raise if the state of a global generator of torch is another then."""
    before = _random_states()
    act()
    after = _random_states()
    kept = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    expect(all(kept), "the random state has moved")


def _random_states() -> list[torch.Tensor]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpus]


def _expect_no_trace(bench: WorkerBench, act: Callable[[Any], Any]) -> None:
    mine = bench.share(bench.scoring)
    repeat = bench.tolerances.repeat
    with bench.fresh() as worker:
        before = worker.get_logprobs(mine)["logprobs"].clone()
        _expect_random_state_kept(lambda: act(worker))
        after = worker.get_logprobs(mine)["logprobs"]
        result = bench.train(worker)
    expect_close(after, before, "get_logprobs", atol=repeat)
    for key in ("global_loss", "grad_norm"):
        expected = bench.trained.results[0][key]
        expect_close(result[key], expected, f"{key} of the step that follows", atol=repeat)
