"""Split training: `forward_backward` calls and an `optimizer_step` that add up to one `train`."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.residency import ResidencyError
from rl_interfaces.testing.expectations import (
    expect,
    expect_close,
    expect_error,
    expect_tensors,
    expect_unlike,
)
from rl_interfaces.testing.report import NotApplicable, rule
from rl_interfaces.testing.worker.bench import WorkerBench
from rl_interfaces.testing.worker.oracle import (
    InfiniteLoss,
    LogprobLoss,
    SequenceLoss,
    plain_loss,
)
from rl_interfaces.worker import SplitTrainingWorker

if TYPE_CHECKING:
    from rl_interfaces.loss import LossFunction
    from rl_interfaces.testing.worker.case import Worker
    from rl_interfaces.testing.worker.oracle import Columns, PlainRun

NUM_STEPS = 2
LOSSES = (LogprobLoss, SequenceLoss)


def _chunks(bench: WorkerBench) -> list[Columns]:
    """Return the training rows in chunks with different counts, for a call each."""
    total = len(bench.training["input_ids"])
    # The first has a row for each data-parallel rank.
    edges = sorted({0, bench.layout.data_parallel, bench.global_batch_size, total})
    return [
        {name: column[start:end] for name, column in bench.training.items()}
        for start, end in pairwise(edges)
    ]


def _call(
    bench: WorkerBench, worker: Worker, columns: Columns, loss_fn: LossFunction | None = None
) -> Any:
    return worker.forward_backward(bench.share(columns), loss_fn or LogprobLoss())


def _one_step(bench: WorkerBench, num_calls: int = 1, **options: Any) -> PlainRun:
    """Return the reference loop's results with all rows in one global batch."""
    size = len(bench.training["input_ids"])
    return bench.plain_run(num_calls, global_batch_size=size, **options)


def _expect_step(bench: WorkerBench, found: Any, expected: torch.Tensor, what: str) -> None:
    norm = torch.tensor(found["grad_norm"])
    expect_close(norm, expected, f"grad_norm of {what}", rtol=bench.tolerances.loss)
    expect(found["stepped"] is True, f"{what}: stepped is {found['stepped']}")


@rule(needs=SplitTrainingWorker)
def split_calls_add_up_to_one_step(bench: WorkerBench) -> None:
    """Calls over unequal chunks and a step are the oracle's step on all rows."""
    for make_loss in LOSSES:
        expected = _one_step(bench, NUM_STEPS, loss_type=make_loss.loss_type)
        with bench.fresh(init_reference_model=False) as worker:
            for norm in expected.grad_norms:
                for chunk in _chunks(bench):
                    _call(bench, worker, chunk, make_loss())
                found = worker.optimizer_step()
                _expect_step(bench, found, norm, f"optimizer_step of {make_loss.__name__}")
            parameters = bench.exported(worker)
        what = f"parameters of {make_loss.__name__}"
        limit = bench.tolerances.parameter
        expect_tensors(parameters, expected.parameters, what, atol=limit)


@rule(needs=SplitTrainingWorker)
def a_split_call_reports_its_own_rows(bench: WorkerBench) -> None:
    """`forward_backward` returns loss and metrics of its rows alone, and changes no parameter."""
    with bench.fresh(init_reference_model=False) as worker:
        before = bench.exported(worker)
        for make_loss in LOSSES:
            for chunk in _chunks(bench):
                found = _call(bench, worker, chunk, make_loss())
                with torch.no_grad():
                    loss = plain_loss(
                        bench.oracle,
                        chunk,
                        temperature=bench.case.temperature,
                        loss_type=make_loss.loss_type,
                    )
                losses, limit = found["global_loss"], bench.tolerances.loss
                expect(losses.shape == (1,), f"global_loss has shape {list(losses.shape)}")
                expect_close(losses[0], loss, f"loss of {make_loss.__name__}", rtol=limit)
                expect(found["grad_norm"] is None, f"grad_norm is {found['grad_norm']}")
                expect(found["rank"] == bench.ranks.rank, f"rank={found['rank']}")
                valid = sum(found["all_mb_metrics"].get("num_valid_samples", []))
                mine = int(bench.share(chunk)["sample_mask"].sum())
                expect(valid == mine, f"the metrics tell of {valid} valid samples, not of {mine}")
            worker.zero_grad()
        after = bench.exported(worker)
    expect_tensors(after, before, "parameters after forward_backward")


@rule(needs=SplitTrainingWorker)
def pending_gradients_outlast_other_calls(bench: WorkerBench) -> None:
    """Scoring, sampling, evaluating and saving between the calls do not change the step."""
    (norm,) = _one_step(bench).grad_norms
    with bench.fresh() as worker:
        for chunk in _chunks(bench):
            _call(bench, worker, chunk)
            for call in bench.scoring_calls(worker).values():
                call(bench.share(bench.scoring))
            bench.train(worker, eval_mode=True)
            worker.save_checkpoint(bench.path("weights"), bench.path("optimizer"))
            worker.save_hf_checkpoint(bench.path("exported"))
            worker.prepare_for_training()
        _expect_step(bench, worker.optimizer_step(), norm, "a step after other calls")


@rule(needs=SplitTrainingWorker)
def pending_gradients_are_not_lost_unseen(bench: WorkerBench) -> None:
    """`train`, loads and moves are refused until `optimizer_step` or `zero_grad`."""
    saved, chunk = bench.saved, _chunks(bench)[-1]
    with bench.fresh(init_reference_model=False) as worker:
        refused = {
            "train": lambda: bench.train(worker),
            "load_checkpoint": lambda: worker.load_checkpoint(saved.weights),
            "prepare_for_lp_inference": worker.prepare_for_lp_inference,
            "offload_before_refit": worker.offload_before_refit,
            "offload_after_refit": worker.offload_after_refit,
        }
        _call(bench, worker, chunk)
        for name, call in refused.items():
            what = f"{name} with pending gradients"
            words = ("optimizer_step()", "zero_grad()")
            expect_error(call, ResidencyError, words=words, what=what)
        worker.zero_grad()
        result = bench.train(worker)
        what = " of `train` after zero_grad"
        bench.expect_results(
            result, bench.trained.results[0], what=what, rtol=bench.tolerances.loss
        )


@rule(needs=SplitTrainingWorker)
def a_split_step_needs_gradients(bench: WorkerBench) -> None:
    """`optimizer_step` without a call before it is refused, also after a step or `zero_grad`."""
    words = ("forward_backward()",)
    with bench.fresh(init_reference_model=False) as worker:

        def expect_refused(when: str) -> None:
            what = f"optimizer_step {when}"
            expect_error(worker.optimizer_step, ResidencyError, words=words, what=what)

        expect_refused("at the start")
        _call(bench, worker, bench.training)
        worker.zero_grad()
        expect_refused("after zero_grad")
        _call(bench, worker, bench.training)
        worker.optimizer_step()
        expect_refused("after a step")


@rule(needs=SplitTrainingWorker)
def losses_of_two_types_do_not_add_up(bench: WorkerBench) -> None:
    """A loss of another `loss_type` than the pending ones is refused; the gradients stay."""
    (norm,) = _one_step(bench).grad_norms
    with bench.fresh(init_reference_model=False) as worker:
        _call(bench, worker, bench.training)
        expect_error(
            lambda: _call(bench, worker, bench.training, SequenceLoss()),
            ValueError,
            words=("SequenceLoss", "loss_type"),
            what="a sequence-level loss after a token-level one",
        )
        _expect_step(bench, worker.optimizer_step(), norm, "the step after it")


@rule(needs=SplitTrainingWorker)
def a_split_step_that_is_not_finite_changes_nothing(bench: WorkerBench) -> None:
    """Non-finite gradients of one call skip the step of all, and do not reach the next."""
    expected = _one_step(bench)
    with bench.fresh(init_reference_model=False) as worker:
        before = bench.exported(worker)
        for chunk, loss_fn in zip(_chunks(bench), (InfiniteLoss(), LogprobLoss()), strict=False):
            _call(bench, worker, chunk, loss_fn)
        spoilt = worker.optimizer_step()
        after = bench.exported(worker)
        for chunk in _chunks(bench):
            _call(bench, worker, chunk)
        found = worker.optimizer_step()
        parameters = bench.exported(worker)
    expect(spoilt["stepped"] is False, f"stepped is {spoilt['stepped']}")
    norm = torch.tensor(spoilt["grad_norm"])
    expect(not norm.isfinite(), f"grad_norm is reported as {spoilt['grad_norm']}")
    expect_tensors(after, before, "parameters after a step that is not finite")
    _expect_step(bench, found, expected.grad_norms[0], "the next step")
    limit = bench.tolerances.parameter
    expect_tensors(parameters, expected.parameters, "parameters of the next step", atol=limit)


@rule(needs=SplitTrainingWorker)
def a_schedule_goes_on_by_split_steps(bench: WorkerBench) -> None:
    """The schedule steps once per `optimizer_step`, whose `lr` is the rate it stepped with."""
    schedule = bench.case.schedule
    if schedule is None:
        raise NotApplicable("the case names no schedule (`WorkerCase.schedule`)")
    rates = [schedule.learning_rate(call) for call in range(NUM_STEPS)]
    expect_unlike(torch.tensor(rates[0]), torch.tensor(rates[1]), "the rates of the schedule")
    expected = _one_step(bench, NUM_STEPS, learning_rate=schedule.learning_rate)
    with bench.fresh(schedule.settings, init_reference_model=False) as worker:
        for rate in rates:
            for chunk in _chunks(bench):
                _call(bench, worker, chunk)
            found = worker.optimizer_step()["lr"]
            expect(abs(found - rate) <= 1e-6 * rate, f"lr is {found}, not {rate}")
        parameters = bench.exported(worker)
    limit = bench.tolerances.parameter
    expect_tensors(parameters, expected.parameters, "parameters", atol=limit)
