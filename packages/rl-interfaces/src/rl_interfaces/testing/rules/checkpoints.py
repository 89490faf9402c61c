"""Saving and loading: what is resumed goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_interfaces.testing.expectations import (
    expect,
    expect_close,
    expect_error,
    expect_tensors,
    expect_unlike,
)
from rl_interfaces.testing.report import rule
from rl_interfaces.testing.worker_bench import NUM_CALLS, TrainedRun, WorkerBench
from rl_interfaces.testing.worker_oracle import is_target


@rule()
def a_resumed_run_equals_an_uninterrupted_one(bench: WorkerBench) -> None:
    """A new worker that starts from a save gives what the saved one would have given."""
    saved, run = bench.saved, bench.trained
    paths = {"weights_path": saved.weights, "optimizer_path": saved.optimizer}
    options: dict[str, Any] = {**paths, "init_reference_model": False}
    with bench.fresh(**options) as worker:
        _expect_rest_of_run(bench, worker, run)


@rule()
def a_running_worker_can_go_back_to_a_save(bench: WorkerBench) -> None:
    """`load_checkpoint` brings back weights and optimizer, whatever was trained since."""
    saved, run = bench.saved, bench.trained
    with bench.fresh(init_reference_model=False) as worker:
        for _ in range(2):
            bench.train(worker, gbs=2 * bench.global_batch_size)
        worker.load_checkpoint(saved.weights, saved.optimizer)
        _expect_rest_of_run(bench, worker, run)


@rule()
def weights_load_alone(bench: WorkerBench) -> None:
    """A worker without an optimizer scores with the weights of a save."""
    mine, saved = bench.share(bench.scoring), bench.saved
    options: dict[str, Any] = {"init_optimizer": False, "init_reference_model": False}
    with bench.fresh(weights_path=saved.weights, **options) as worker:
        found = worker.get_logprobs(mine)["logprobs"]
    expect_close(found, saved.logprobs, "get_logprobs", atol=bench.tolerances.repeat)
    places = is_target(mine)
    if places.any():
        initial = bench.expected_logprobs(bench.scoring)[mine["row_id"]]
        expect_unlike(found[places], initial[places], "saved and initial log-probabilities")
    expect(any(Path(saved.tokenizer).iterdir()), "tokenizer_path is empty after a save")


@rule()
def the_exported_model_is_the_worker(bench: WorkerBench) -> None:
    """What `save_hf_checkpoint` writes, in any state, scores as the trained worker does."""
    mine, path = bench.share(bench.scoring), bench.path("hf")
    with bench.fresh(init_reference_model=False) as worker:
        bench.train(worker)
        found = worker.get_logprobs(mine)["logprobs"].clone()
        worker.offload_after_refit()
        worker.save_hf_checkpoint(path)
    expected = bench.expected_logprobs(bench.scoring, bench.load_oracle(path))
    initial = bench.expected_logprobs(bench.scoring)
    expect_unlike(expected, initial, "the exported and the initial model's log-probabilities")
    bench.expect_logprobs(found, expected, mine, "the exported model's log-probabilities")


@rule()
def a_checkpoint_that_is_not_there_is_named(bench: WorkerBench) -> None:
    """Loading from a path that holds no save raises a ValueError with the path."""
    nowhere = bench.path("nowhere")
    expect_error(
        lambda: bench.worker.load_checkpoint(nowhere),
        ValueError,
        words=(nowhere,),
        what="load_checkpoint of a path that is not there",
    )


def _expect_rest_of_run(bench: WorkerBench, worker: Any, run: TrainedRun) -> None:
    """Hold a worker that stands after the first call against the run that went on."""
    repeat = bench.tolerances.repeat
    for index in range(1, NUM_CALLS):
        found, expected = bench.train(worker), run.results[index]
        for key in ("global_loss", "grad_norm"):
            expect_close(found[key], expected[key], f"{key} of call {index}", atol=repeat)
    expect_tensors(bench.exported(worker), run.parameters, "parameters", atol=repeat)
