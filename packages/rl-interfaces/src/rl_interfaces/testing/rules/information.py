"""What a worker says of itself, and how it ends."""

from __future__ import annotations

import gc
from pathlib import Path

from rl_interfaces.contract import CONTRACT_VERSION, check_contract_version
from rl_interfaces.testing.expectations import expect
from rl_interfaces.testing.report import NotApplicable, rule
from rl_interfaces.testing.worker_bench import WorkerBench
from rl_interfaces.worker import PolicyWorker

THIS_PROCESS = Path("/proc/self")


@rule()
def the_contracts_version_is_declared(bench: WorkerBench) -> None:
    """`contract_version` of the class is one that this version of the interfaces takes."""
    worker_class = type(bench.worker)
    check_contract_version(worker_class, owner=worker_class.__module__)
    expect(len(CONTRACT_VERSION) == 2, "a contract version is a major and a minor number")


@rule()
def every_required_method_is_there(bench: WorkerBench) -> None:
    """The worker has each method of `rl_interfaces.PolicyWorker`."""
    wanted = [name for name in dir(PolicyWorker) if not name.startswith("_")]
    missing = [name for name in wanted if not callable(getattr(bench.worker, name, None))]
    expect(wanted, "PolicyWorker has methods")
    expect(not missing, f"the worker lacks {', '.join(missing)} of rl_interfaces.PolicyWorker")


@rule()
def a_worker_says_where_it_is(bench: WorkerBench) -> None:
    """It is alive, and names its rank and its device, each time alike."""
    worker = bench.worker
    expect(worker.is_alive() is True, "is_alive() is not True")
    rank = worker.get_gpu_info()["rank"]
    expect(rank == bench.ranks.rank, f"get_gpu_info()['rank'] is {rank} on {bench.ranks.rank}")
    device = worker.report_device_id()
    expect(isinstance(device, str) and device, f"report_device_id() is {device!r}")
    expect(device == worker.report_device_id(), "report_device_id() gives another id each time")


@rule()
def a_layout_is_of_all_ranks(bench: WorkerBench) -> None:
    """`validate_config` returns a layout of as many ranks as there are."""
    found = bench.layout.world_size
    expect(found == bench.ranks.world_size, f"{bench.layout} is of {found} ranks")


@rule()
def shutting_down_twice_is_fine(bench: WorkerBench) -> None:
    """`shutdown` may be called again."""
    with bench.fresh(init_reference_model=False) as worker:
        worker.shutdown()


@rule()
def a_worker_takes_its_threads_with_it(bench: WorkerBench) -> None:
    """Workers that follow one another in a process leave no threads and no open files behind."""
    if not THIS_PROCESS.is_dir():
        raise NotApplicable(f"threads are counted in {THIS_PROCESS}, which is not there")
    # The first one starts what a process has once, such as a pool of threads.
    _, second, third = [_left_by_a_worker(bench) for _ in range(3)]
    for what, count in third.items():
        expect(count <= second[what], f"a worker left {count - second[what]} {what} behind")


def _left_by_a_worker(bench: WorkerBench) -> dict[str, int]:
    """Return how many threads and open files there are after one more worker has ended."""
    with bench.fresh(init_reference_model=False):
        pass
    gc.collect()
    folders = {"threads": "task", "open files": "fd"}
    return {what: len(list((THIS_PROCESS / name).iterdir())) for what, name in folders.items()}
