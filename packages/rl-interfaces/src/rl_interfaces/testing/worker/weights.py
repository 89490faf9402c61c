"""Rules on weights that leave the worker: streams, handles, checkpoints, exports."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.testing.expectations import (
    expect,
    expect_close,
    expect_error,
    expect_tensors,
    expect_unlike,
)
from rl_interfaces.testing.report import NotApplicable, rule
from rl_interfaces.testing.worker.bench import NUM_CALLS, TrainedRun, WorkerBench
from rl_interfaces.testing.worker.oracle import is_target
from rl_interfaces.worker import AdapterSavingWorker, WeightSendingWorker

if TYPE_CHECKING:
    from rl_interfaces.testing.worker.case import Worker
    from rl_interfaces.weights import RefitInfo


@rule(needs=WeightSendingWorker)
def the_weights_sizes_are_told(bench: WorkerBench) -> None:
    """Names, shapes, wire dtypes and bytes of the weights are consistent, in one order."""
    worker = bench.worker
    info: RefitInfo = worker.prepare_refit_info()
    expect(info, "prepare_refit_info names no tensor")
    sizes, free = worker.prepare_weights_for_ipc()
    expected = [(name, math.prod(shape) * dtype.itemsize) for name, (shape, dtype) in info.items()]
    expect(sizes == expected, f"prepare_weights_for_ipc gives {sizes}, the info {expected}")
    expect(free > 0, f"{free} bytes are free")
    expect(
        list(worker.prepare_info_for_collective()) == list(info),
        "prepare_info_for_collective and prepare_refit_info name other tensors",
    )


@rule(needs=WeightSendingWorker)
def handles_are_of_the_workers_device(bench: WorkerBench) -> None:
    """Handles are keyed by the worker's device, and only for the requested names."""
    worker = bench.worker
    held = list(worker.prepare_refit_info())
    names = held[1:3] or held
    handles = worker.get_weights_ipc_handles(names)
    device = worker.report_device_id()
    expect(list(handles) == [device], f"handles are of {list(handles)}, the worker of {device!r}")
    found = handles[device]
    expect(sorted(found) == sorted(names), f"handles of {names} come for {sorted(found)}")
    # The content of a handle is opaque.
    alike = len(names) > 1 and found[names[0]] == found[names[1]]
    expect(not alike, f"the handles of {names} are the same: {found[names[0]]!r}")
    expect_error(
        lambda: worker.get_weights_ipc_handles(["no such tensor"]),
        ValueError,
        words=("no such tensor",),
        what="a handle of a tensor that is not there",
    )


@rule(needs=WeightSendingWorker)
def a_receiver_gets_the_weights_of_each_version(bench: WorkerBench) -> None:
    """Received weights equal the worker's, bit for bit, in two versions."""
    open_receiver = bench.case.open_receiver
    if open_receiver is None:
        raise NotApplicable("the case names no receiver (`WorkerCase.open_receiver`)")
    versions: list[dict[str, torch.Tensor]] = []
    with bench.fresh(init_reference_model=False) as worker, open_receiver(worker) as receive:
        info: RefitInfo = worker.prepare_refit_info()
        announced = {name: (tuple(shape), dtype) for name, (shape, dtype) in info.items()}
        for version in (1, 2):
            bench.train(worker)
            received, held = dict(receive(version)), bench.exported(worker)
            if received:
                found = {name: (tuple(each.shape), each.dtype) for name, each in received.items()}
                expect(found == announced, "what is received is not what prepare_refit_info says")
                wire = {name: each.to(announced[name][1]) for name, each in held.items()}
                expect_tensors(received, wire, f"version {version}")
            versions.append(received)
    expect(bench.ranks.any(bool(versions[0])), "no rank has received anything")
    moved = [not torch.equal(each, versions[1][name]) for name, each in versions[0].items()]
    expect(any(moved) or not moved, "training has changed no tensor, so the check proves nothing")


@rule()
def a_resumed_run_equals_an_uninterrupted_one(bench: WorkerBench) -> None:
    """A new worker that starts from a save has the results of an uninterrupted run."""
    saved, run = bench.saved, bench.trained
    paths = {"weights_path": saved.weights, "optimizer_path": saved.optimizer}
    options: dict[str, Any] = {**paths, "init_reference_model": False}
    with bench.fresh(**options) as worker:
        _expect_rest_of_run(bench, worker, run)


@rule()
def a_running_worker_can_go_back_to_a_save(bench: WorkerBench) -> None:
    """`load_checkpoint` restores weights and optimizer after further training."""
    saved, run = bench.saved, bench.trained
    with bench.fresh(init_reference_model=False) as worker:
        for _ in range(2):
            bench.train(worker, gbs=2 * bench.global_batch_size)
        worker.load_checkpoint(saved.weights, saved.optimizer)
        _expect_rest_of_run(bench, worker, run)


@rule()
def a_schedule_goes_on_by_calls(bench: WorkerBench) -> None:
    """The schedule steps once per `train` call outside eval mode, also after a load."""
    schedule = bench.case.schedule
    if schedule is None:
        raise NotApplicable("the case names no schedule (`WorkerCase.schedule`)")
    expected = bench.plain_run(NUM_CALLS, learning_rate=schedule.learning_rate).parameters
    rates = [schedule.learning_rate(call) for call in range(NUM_CALLS)]
    expect(
        len(set(rates)) == NUM_CALLS,
        f"the rates {rates} do not differ, so the check proves nothing",
    )
    paths = {name: bench.path(name) for name in ("weights_path", "optimizer_path")}
    with bench.fresh(schedule.settings, init_reference_model=False) as worker:
        bench.train(worker)
        bench.train(worker, eval_mode=True)
        worker.save_checkpoint(**paths)
    options: dict[str, Any] = {**paths, "init_reference_model": False}
    with bench.fresh(schedule.settings, **options) as worker:
        for _ in range(1, NUM_CALLS):
            bench.train(worker)
        found = bench.exported(worker)
    expect_tensors(found, expected, "parameters", atol=bench.tolerances.parameter)


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
    """An export of `save_hf_checkpoint`, in any state, scores like the trained worker."""
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


@rule(needs=AdapterSavingWorker)
def saved_adapters_are_the_worker(bench: WorkerBench) -> None:
    """The initial model with the adapters of `save_adapters` scores like the trained worker."""
    case = bench.case.adapters
    if case is None:
        raise NotApplicable("the case names no adapters (`WorkerCase.adapters`)")
    mine, path = bench.share(bench.scoring), bench.path("adapters")
    with bench.fresh(case.settings) as worker:
        bench.train(worker)
        found = worker.get_logprobs(mine)["logprobs"].clone()
        reference = worker.get_reference_policy_logprobs(mine)["reference_logprobs"]
        worker.save_adapters(path)
    initial = bench.expected_logprobs(bench.scoring)
    expected = bench.expected_logprobs(bench.scoring, case.load(path).eval())
    expect_unlike(expected, initial, "log-probabilities with the saved adapters and without")
    bench.expect_logprobs(found, expected, mine, "log-probabilities with the saved adapters")
    bench.expect_logprobs(reference, initial, mine, "the reference, which has no adapters")


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


def _expect_rest_of_run(bench: WorkerBench, worker: Worker, run: TrainedRun) -> None:
    """Compare a worker that has done the first call with the uninterrupted run."""
    repeat = bench.tolerances.repeat
    for index in range(1, NUM_CALLS):
        found, expected = bench.train(worker), run.results[index]
        bench.expect_results(found, expected, what=f" of call {index}", atol=repeat)
    expect_tensors(bench.exported(worker), run.parameters, "parameters", atol=repeat)
