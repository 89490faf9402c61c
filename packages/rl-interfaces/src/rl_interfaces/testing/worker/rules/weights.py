"""Weights on their way out of the worker."""

from __future__ import annotations

import math
from typing import Any

import torch

from rl_interfaces.testing.expectations import expect, expect_error, expect_tensors
from rl_interfaces.testing.report import NotApplicable, rule
from rl_interfaces.testing.worker.bench import WorkerBench
from rl_interfaces.worker import WeightSendingWorker


@rule(needs=WeightSendingWorker)
def the_weights_sizes_are_told(bench: WorkerBench) -> None:
    """Names, shapes, wire dtypes and bytes of the weights go together, in one order."""
    worker = bench.worker
    info: dict[str, Any] = worker.prepare_refit_info()
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
    """Handles come under the worker's device, for the names that are asked for and no other."""
    worker = bench.worker
    held = list(worker.prepare_refit_info())
    names = held[1:3] or held
    handles = worker.get_weights_ipc_handles(names)
    device = worker.report_device_id()
    expect(list(handles) == [device], f"handles are of {list(handles)}, the worker of {device!r}")
    found = handles[device]
    expect(sorted(found) == sorted(names), f"handles of {names} come for {sorted(found)}")
    # What a handle is, the transport alone knows.
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
    """What is received is what the worker holds when it is sent, bit for bit, twice."""
    open_receiver = bench.case.open_receiver
    if open_receiver is None:
        raise NotApplicable("the case names no receiver (`WorkerCase.open_receiver`)")
    versions: list[dict[str, torch.Tensor]] = []
    with bench.fresh(init_reference_model=False) as worker, open_receiver(worker) as receive:
        info: dict[str, Any] = worker.prepare_refit_info()
        told = {name: (tuple(shape), dtype) for name, (shape, dtype) in info.items()}
        for version in (1, 2):
            bench.train(worker)
            received, held = dict(receive(version)), bench.exported(worker)
            if received:
                found = {name: (tuple(each.shape), each.dtype) for name, each in received.items()}
                expect(found == told, "what is received is not what prepare_refit_info says")
                wire = {name: each.to(told[name][1]) for name, each in held.items()}
                expect_tensors(received, wire, f"version {version}")
            versions.append(received)
    expect(bench.ranks.any(bool(versions[0])), "no rank has received anything")
    moved = [not torch.equal(each, versions[1][name]) for name, each in versions[0].items()]
    expect(any(moved) or not moved, "training has changed no tensor, so that nothing is shown")
