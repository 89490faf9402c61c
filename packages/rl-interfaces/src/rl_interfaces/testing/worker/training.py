"""Training: the oracle's numbers, whatever the micro-batches, and steps that are steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rl_interfaces.loss import LossType
from rl_interfaces.testing.expectations import expect, expect_close, expect_tensors, expect_unlike
from rl_interfaces.testing.report import NotApplicable, rule
from rl_interfaces.testing.worker.bench import WorkerBench
from rl_interfaces.testing.worker.oracle import (
    InfiniteLoss,
    LogitLoss,
    LogprobLoss,
    SequenceLoss,
    ShardedLogitLoss,
    parameters_of,
    plain_loss,
)

if TYPE_CHECKING:
    from rl_interfaces.testing.worker.bench import TrainResult


@rule()
def losses_equal_the_oracle(bench: WorkerBench) -> None:
    """Each step's loss is that of the reference loop over full global batches."""
    found = torch.cat([result["global_loss"] for result in bench.trained.results])
    expected = torch.stack(bench.expected_run.losses)
    expect_unlike(expected[0], expected[-1], "the first and the last loss")
    expect_close(found, expected, "global_loss", rtol=bench.tolerances.loss)


@rule()
def grad_norms_equal_the_oracle(bench: WorkerBench) -> None:
    """Each step's gradient norm, before clipping, is that of the reference loop."""
    found = torch.cat([result["grad_norm"] for result in bench.trained.results])
    expected = torch.stack(bench.expected_run.grad_norms)
    expect_close(found, expected, "grad_norm", rtol=bench.tolerances.loss)


@rule()
def parameters_equal_the_oracle(bench: WorkerBench) -> None:
    """After several calls the parameters are those of the reference loop."""
    expected = bench.expected_run.parameters
    initial = parameters_of(bench.oracle)
    largest = max(float((expected[name] - initial[name]).abs().max()) for name in expected)
    expect(largest > 20 * bench.tolerances.parameter, f"training moves by {largest} alone")
    limit = bench.tolerances.parameter
    expect_tensors(bench.trained.parameters, expected, "parameters", atol=limit)


@rule()
def train_returns_what_it_documents(bench: WorkerBench) -> None:
    """`train` returns float32 losses and norms, the rank, and metrics of each micro-batch."""
    mine = bench.share(bench.training, batch_size=bench.global_batch_size)
    num_valid = int(mine["sample_mask"].sum())
    for result in bench.trained.results:
        for key in ("global_loss", "grad_norm"):
            value = result[key]
            expect(value.dtype == torch.float32, f"{key} is {value.dtype}, not float32")
            expect(value.shape == (2,), f"{key} has shape {list(value.shape)} for two steps")
            expect(value.device.type == "cpu", f"{key} is on {value.device}, not on the CPU")
        expect(result["rank"] == bench.ranks.rank, f"rank={result['rank']} of {bench.ranks.rank}")
        metrics = result["all_mb_metrics"]
        expect(all(isinstance(each, list) for each in metrics.values()), f"{metrics}: no lists")
        found = sum(metrics.get("num_valid_samples", []))
        expect(found == num_valid, f"{metrics} tell of {found} valid samples, not of {num_valid}")


@rule()
def every_global_batch_is_a_step(bench: WorkerBench) -> None:
    """B rows make ceil(B / gbs) steps, the last on the remaining rows; `gbs` holds for one call."""
    unit, rows = bench.layout.data_parallel, len(bench.training["input_ids"])

    def expect_steps(result: TrainResult, size: int, what: str) -> None:
        steps = -(-rows // size)
        found = (len(result["global_loss"]), len(result["grad_norm"]))
        expect(found == (steps, steps), f"{rows} rows with {what} made {found} steps")

    settings = {"train_global_batch_size": unit}
    with bench.fresh(settings, init_reference_model=False) as worker:
        for size in (2 * unit, 3 * unit, 2 * rows * unit):
            expect_steps(bench.train(worker, gbs=size), size, f"gbs={size}")
        result = worker.train(bench.share(bench.training, batch_size=unit), LogprobLoss())
        expect_steps(result, unit, f"train_global_batch_size={unit} and no gbs")


@rule()
def micro_batches_do_not_change_training(bench: WorkerBench) -> None:
    """Loss, norm and parameters are the same for any `mbs`."""
    uninterrupted, limit = bench.trained.results, bench.tolerances
    for size in (1, 3):
        with bench.fresh(init_reference_model=False) as worker:
            results = [bench.train(worker, mbs=size) for _ in uninterrupted]
            parameters = bench.exported(worker)
        for found, expected in zip(results, uninterrupted, strict=True):
            bench.expect_results(found, expected, what=f" with mbs={size}", rtol=limit.loss)
        what = f"parameters with mbs={size}"
        expect_tensors(parameters, bench.trained.parameters, what, atol=limit.parameter)


@rule()
def every_way_of_batching_gives_the_same_numbers(bench: WorkerBench) -> None:
    """Packed and dynamic micro-batches score and train like padded ones."""
    ways = bench.case.ways
    if not ways:
        raise NotApplicable("the case names no other ways of batching (`WorkerCase.ways`)")
    expected, limit = bench.expected_logprobs(bench.scoring), bench.tolerances
    size = bench.global_batch_size
    for name, way in ways.items():
        make = way.make_batches
        with bench.fresh(way.settings) as worker:
            mine = bench.share(bench.scoring, make_batches=make)
            bench.expect_logprobs(worker.get_logprobs(mine)["logprobs"], expected, mine, name)
            reference = worker.get_reference_policy_logprobs(mine)["reference_logprobs"]
            bench.expect_logprobs(reference, expected, mine, f"{name}: the reference")
            batch = bench.share(bench.training, batch_size=size, make_batches=make)
            result = worker.train(batch, LogprobLoss(), gbs=size)
            parameters = bench.exported(worker)
        first = bench.expected_call
        losses, norms = torch.stack(first.losses), torch.stack(first.grad_norms)
        expect_close(result["global_loss"], losses, f"{name}: loss", rtol=limit.loss)
        expect_close(result["grad_norm"], norms, f"{name}: grad_norm", rtol=limit.loss)
        what = f"{name}: parameters"
        expect_tensors(parameters, first.parameters, what, atol=limit.parameter)


@rule()
def a_loss_may_ask_for_logits(bench: WorkerBench) -> None:
    """A loss of logits has the results of the same loss of log-probabilities."""
    with bench.fresh(init_reference_model=False) as worker:
        result = bench.train(worker, loss_fn=LogitLoss())
    bench.expect_results(result, bench.trained.results[0], rtol=bench.tolerances.loss)


@rule()
def a_loss_may_take_sharded_logits(bench: WorkerBench) -> None:
    """A loss that accepts sharded logits has the results of the same loss of full logits."""
    loss_fn = ShardedLogitLoss(bench.layout.tensor_parallel)
    with bench.fresh(init_reference_model=False) as worker:
        result = bench.train(worker, loss_fn=loss_fn)
        parameters = bench.exported(worker)
    limit = bench.tolerances
    bench.expect_results(result, bench.trained.results[0], rtol=limit.loss)
    expect_tensors(parameters, bench.expected_call.parameters, "parameters", atol=limit.parameter)


@rule()
def a_loss_may_be_of_sequences(bench: WorkerBench) -> None:
    """A sequence-level loss is divided by the valid sequences of the global batch."""
    with bench.fresh(init_reference_model=False) as worker:
        result = bench.train(worker, loss_fn=SequenceLoss())
    expected = bench.plain_run(1, loss_type=LossType.SEQUENCE_LEVEL)
    losses, norms = torch.stack(expected.losses), torch.stack(expected.grad_norms)
    expect_close(result["global_loss"], losses, "global_loss", rtol=bench.tolerances.loss)
    expect_close(result["grad_norm"], norms, "grad_norm", rtol=bench.tolerances.loss)


@rule()
def masked_tokens_do_not_count(bench: WorkerBench) -> None:
    """Masked rows and masked tokens do not contribute to the loss."""
    columns = bench.training
    full = {
        **columns,
        "sample_mask": torch.ones_like(columns["sample_mask"]),
        "token_mask": torch.where(columns["token_mask"].cumsum(1) == 1, 0, columns["token_mask"]),
    }
    size = 2 * bench.global_batch_size
    results, expected = [], []
    for batch in (columns, full):
        results.append(bench.train(bench.worker, batch, eval_mode=True, gbs=size))
        with torch.no_grad():
            expected.append(plain_loss(bench.oracle, batch, temperature=bench.case.temperature))
    expect_unlike(expected[0], expected[1], "the losses under both masks")
    for found, loss in zip(results, expected, strict=True):
        expect_close(found["global_loss"][0], loss, "global_loss", rtol=bench.tolerances.loss)


@rule()
def evaluating_needs_no_optimizer(bench: WorkerBench) -> None:
    """`eval_mode` returns losses and no norm, with or without an optimizer."""
    size = 2 * bench.global_batch_size
    with torch.no_grad():
        loss = plain_loss(bench.oracle, bench.training, temperature=bench.case.temperature)
    results = [bench.train(bench.worker, eval_mode=True, gbs=size)]
    with bench.fresh(init_optimizer=False, init_reference_model=False) as worker:
        results.append(bench.train(worker, eval_mode=True, gbs=size))
    for result in results:
        expect(result["grad_norm"] is None, f"grad_norm is {result['grad_norm']}, not None")
        expect(len(result["global_loss"]) == 1, f"{result['global_loss']} is of several steps")
        expect_close(result["global_loss"][0], loss, "global_loss", rtol=bench.tolerances.loss)


@rule()
def a_step_that_is_not_finite_changes_nothing(bench: WorkerBench) -> None:
    """Non-finite gradients change neither weights nor optimizer, and are reported."""
    size = 2 * bench.global_batch_size
    with bench.fresh(init_reference_model=False) as worker:
        before = bench.exported(worker)
        with _warnings() as warnings:
            spoilt = bench.train(worker, gbs=size, loss_fn=InfiniteLoss())
        after = bench.exported(worker)
        result = bench.train(worker)
    expect_tensors(after, before, "parameters after a step that is not finite")
    first, repeat = bench.trained.results[0], bench.tolerances.repeat
    bench.expect_results(result, first, what=" of the next call", atol=repeat)
    norm = spoilt["grad_norm"]
    expect(not norm.isfinite().any(), f"grad_norm is reported as {norm}")
    if bench.ranks.rank == 0:
        expect(warnings, "nothing is logged as a warning")
        skipped = spoilt["all_mb_metrics"].get("skipped_steps")
        expect(skipped == [1], f"all_mb_metrics['skipped_steps'] is {skipped}, not [1]")


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings that the body logs."""
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield seen
    finally:
        root.removeHandler(handler)
