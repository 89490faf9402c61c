import os
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from patience import PATIENCE_S, wait_until

# Tests import the modules beside them.
sys.path.insert(0, str(Path(__file__).parent))

import backend_runs
import pytest
import ray
import torch
from forked_python import rank_python
from kept_clusters import end_kept_clusters, kept_cluster
from processes import is_gone
from recipe_runs import forked_command
from rl_policy import backends
from rl_policy.ray import cluster
from rl_policy.run import samplers, session

if find_spec("vllm") and not torch.cuda.is_available():
    # Engines of tests are eager: helpers that vLLM would compile all the same take seconds each.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

STRANGER = Path(__file__).parent / "stranger"


def pytest_collection_modifyitems(items):
    """Start with what takes longest, then with what ends the Ray that the other tests share."""
    items.sort(
        key=lambda item: (
            item.get_closest_marker("slow") is None,
            "ray_apart" not in item.fixturenames,
        )
    )


@pytest.fixture(scope="session")
def stranger_site(tmp_path_factory):
    """Write the entry point of a stranger's backend, and return the directories to import from."""
    site = tmp_path_factory.mktemp("site")
    info = site / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rl_policy.workers]\nstranger = stranger_worker:StrangerWorker\n"
    )
    return [str(site), str(STRANGER)]


@contextmanager
def python_path(added):
    """Put directories on the path of the processes that are started in the block."""
    inherited = [entry for entry in [os.environ.get("PYTHONPATH")] if entry]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(added + inherited))
        yield patch


@pytest.fixture(scope="module")
def stranger_path(stranger_site):
    """Let this process, and those it starts, find the stranger's backend."""
    with python_path(stranger_site) as patch:
        patch.setattr(sys, "path", stranger_site + sys.path)
        yield stranger_site


def start_shared_ray(stranger_site):
    """Start the one local Ray of all tests, unless it runs; its workers find the stranger."""
    if not ray.is_initialized():
        # As patient as a Ray that the product starts.
        patient = (cluster._looking_often(), cluster._patient())
        with python_path(stranger_site) as patch, patient[0], patient[1]:
            patch.setattr(sys, "executable", rank_python())
            ray.init(
                "local",
                num_cpus=32,  # logical ones, of which clusters that are kept hold some
                include_dashboard=False,
                logging_level="ERROR",
                # As where a run starts one: a process for each of them would wait for tasks.
                _system_config={"prestart_worker_first_driver": False},
            )
    return ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def shared_ray(stranger_site):
    """Let the clusters of a module join the Ray of all tests; return its address.

    Runs in the process of the tests take over the ranks of earlier ones, see `kept_clusters`.
    """
    address = start_shared_ray(stranger_site)
    with pytest.MonkeyPatch.context() as patch:
        for module in (session, samplers):
            patch.setattr(module, "RayVirtualCluster", kept_cluster)
        yield address


@pytest.fixture
def begin(workplace):
    """Return a function that starts a command with a Ray of its own; it ends with the test."""
    processes = []

    def begin(*arguments):
        process = subprocess.Popen(
            forked_command(*arguments),
            cwd=workplace,
            env={**os.environ, "RAY_ADDRESS": "local"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def ray_apart():
    """End the Ray of all tests, for a module whose tests start one of their own, or none."""
    end_kept_clusters()
    ray.shutdown(wait_for_processes=True)
    yield
    ray.shutdown(wait_for_processes=True)


@pytest.fixture(scope="session")
def backends_model(tmp_path_factory):
    """Return path and tokenizer of a model that both backends load."""
    tokenizer = backend_runs.make_tokenizer()
    return backend_runs.save_model(tmp_path_factory.mktemp("model"), tokenizer), tokenizer


@pytest.fixture(scope="session")
def megatron_results(stranger_site, backends_model, tmp_path_factory):
    """Return what a policy gives over two pipeline stages of Megatron-core."""
    start_shared_ray(stranger_site)
    sizes = {"pipeline_model_parallel_size": 2}
    directory = tmp_path_factory.mktemp("megatron")
    return backend_runs.run(*backends_model, "megatron", sizes, directory)


@pytest.fixture
def without_megatron(monkeypatch):
    """Let no installed package register the backend "megatron"."""
    found = backends.entry_points

    def others(**wanted):
        return [entry for entry in found(**wanted) if entry.name != "megatron"]

    monkeypatch.setattr(backends, "entry_points", others)


@pytest.fixture
def wait_until_gone():
    """Return a function that waits until all processes have ended."""

    def wait(pids):
        wait_until(lambda: all(map(is_gone, pids)), what=f"the end of processes {pids}")

    return wait
