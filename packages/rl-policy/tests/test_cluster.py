import gc
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import ray
from patience import PATIENCE_S, wait_until
from processes import descendants
from ray._private.node import Node
from rl_interfaces import Cluster
from rl_policy import RayVirtualCluster
from rl_policy.ray import cluster as cluster_module
from rl_policy.ray.failures import RayStartError

pytestmark = [pytest.mark.usefixtures("ray_apart")]


@pytest.fixture
def no_ray():
    """Start from a process without Ray, and leave none."""
    ray.shutdown(wait_for_processes=True)
    yield
    ray.shutdown(wait_for_processes=True)


def programs_of(pid):
    """Return the file names on the command line of a process, which may have ended."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except FileNotFoundError:
        return set()
    return {Path(part).name for part in line.split("\0")}


def niceness_of_a_worker():
    task = ray.remote(lambda: os.nice(0))
    return ray.get(task.options(num_cpus=0).remote(), timeout=PATIENCE_S)


def test_a_local_ray_is_started_with_the_cpus_that_are_asked_for(no_ray, wait_until_gone):
    before = set(descendants(os.getpid()))
    asked = 2 * (os.cpu_count() or 1)
    cluster = RayVirtualCluster([asked], use_gpus=False, name="local")
    assert isinstance(cluster, Cluster)
    assert cluster.world_size() == asked
    assert not ray.is_initialized()  # nothing starts before it is needed

    (group,) = cluster.get_placement_groups()
    assert group.bundle_specs == [{"CPU": 1.0}] * asked
    assert niceness_of_a_worker() == os.nice(0)
    address, port = cluster.get_master_address_and_port()
    with socket.socket() as probe:
        probe.bind((address, port))
    with pytest.raises(ValueError, match=rf"{asked + 1} CPU asked \(\d+ free of {asked}\)"):
        RayVirtualCluster([asked + 1], use_gpus=False).get_placement_groups()

    started = set(descendants(os.getpid())) - before
    assert len(started) > 2
    programs = {name for pid in started for name in programs_of(pid)}
    assert "log_monitor.py" in programs, "what the ranks print is shown"
    assert not {"dashboard.py", "monitor.py"} & programs
    cluster.shutdown()
    cluster.shutdown()
    assert not ray.is_initialized()
    wait_until_gone(started)
    with pytest.raises(RuntimeError, match="the cluster is shut down"):
        cluster.get_placement_groups()


def test_a_ray_without_the_services_that_are_left_out_says_so(monkeypatch, caplog):
    before = Node.start_api_server
    monkeypatch.delattr(Node, "start_monitor")
    with cluster_module._without_services():
        assert Node.start_api_server is not before
        assert not hasattr(Node, "start_monitor")
    assert Node.start_api_server is before
    (record,) = caplog.records
    assert f"Ray {ray.__version__} has no Node.start_monitor: " in record.getMessage()


def test_the_node_of_a_ray_is_looked_for_until_it_is_listed(monkeypatch):
    looks = []

    class Head:
        def __init__(self, address):
            assert address == "the head"

        def get_all_node_info(self, timeout):
            looks.append("list")
            return {bytes([7]): None} if looks.count("list") > 2 else {}

    def get_node(address, node_id):
        looks.append("get")
        return address, node_id

    monkeypatch.setattr(cluster_module, "GcsClient", Head)
    monkeypatch.setattr(cluster_module.services, "get_node", get_node)
    monkeypatch.setattr(cluster_module, "_require_node", lambda: looks.append("runs"))
    with cluster_module._looking_often():
        assert cluster_module.services.get_node("the head", "07") == ("the head", "07")
    assert looks == ["list", "runs", "list", "runs", "list", "get"]
    assert cluster_module.services.get_node is get_node
    # One that does not come is for Ray to report.
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "0")
    with cluster_module._looking_often():
        cluster_module.services.get_node("the head", "08")
    assert looks[6:] == ["get"]


def test_a_node_that_ends_while_it_starts_is_not_waited_for(monkeypatch):
    class Head:
        def __init__(self, address):
            pass

        def get_all_node_info(self, timeout):
            return {}

    monkeypatch.setattr(cluster_module, "GcsClient", Head)
    # No process of that name is below this one.
    with (
        cluster_module._looking_often(),
        pytest.raises(ChildProcessError, match=r"Ray's node has ended, see raylet\.err in /"),
    ):
        cluster_module.services.get_node("the head", "07")


def test_a_start_that_takes_long_is_logged_and_its_failure_says_what_to_do(monkeypatch, caplog):
    monkeypatch.setattr(cluster_module, "_PROGRESS_S", 0.05)
    failure = "Ray did not start within {time} (2 CPUs requested)"
    attempt = cluster_module._explained("starting Ray, 2 CPUs", failure, "call the doctor")
    match = r"^Ray did not start within \d+ s \(2 CPUs requested\): "

    def start():
        with attempt:
            wait_until(lambda: len(caplog.records) >= 2, what="two lines of progress")
            raise RuntimeError("the node is gone")

    with pytest.raises(RayStartError, match=match) as error:
        start()
    assert re.fullmatch(r"starting Ray, 2 CPUs \.\.\. \d+ s", caplog.records[0].getMessage())
    told = str(error.value).partition("requested): ")[2]
    assert told == (
        "the node is gone; the machine may be overloaded: try again, or set "
        "RAY_raylet_start_wait_time_s=900; call the doctor"
    )
    # One that is quick has no line, and another cause.
    caplog.clear()
    monkeypatch.undo()
    attempt = cluster_module._explained("starting Ray, 2 CPUs", failure, "call the doctor")
    with pytest.raises(RayStartError, match=r"\): the node is gone; call the doctor$"), attempt:
        raise RuntimeError("the node is gone")
    assert not caplog.records


def test_limits_of_a_start_are_the_user_s_if_they_are_set(monkeypatch):
    head, node = "RAY_gcs_server_port_wait_time_s", "RAY_raylet_start_wait_time_s"
    monkeypatch.setenv(head, "7")
    monkeypatch.delenv(node, raising=False)
    with cluster_module._patient():
        assert (os.environ[head], os.environ[node]) == ("7", "300")
    assert os.environ[head] == "7"
    assert node not in os.environ


@pytest.mark.slow
def test_the_priority_of_ranks_may_be_asked_for(no_ray, monkeypatch):
    monkeypatch.setenv("RAY_worker_niceness", "7")
    cluster = RayVirtualCluster([1], use_gpus=False)
    cluster.get_placement_groups()
    assert niceness_of_a_worker() == os.nice(0) + 7
    cluster.shutdown()


def test_a_ray_that_runs_is_joined_and_left_running(no_ray, monkeypatch):
    ray.init(num_cpus=3, include_dashboard=False)
    first = RayVirtualCluster([1, 1], use_gpus=False)
    assert [group.bundle_count for group in first.get_placement_groups()] == [1, 1]

    monkeypatch.setattr(cluster_module, "_RESERVE_LIMIT_S", 1.0)
    second = RayVirtualCluster([2], use_gpus=False)
    with pytest.raises(TimeoutError, match=r"2 CPU asked \(1 free of 3\)"):
        second.get_placement_groups()

    # What the first one gives back is enough for the second.
    first.shutdown()
    monkeypatch.undo()
    assert len(second.get_placement_groups()) == 1
    second.shutdown()
    assert ray.is_initialized()
    assert ray.cluster_resources()["CPU"] == 3


@pytest.mark.slow
def test_the_last_cluster_on_a_ray_that_was_started_ends_it(no_ray):
    first = RayVirtualCluster([1], max_colocated_worker_groups=2, use_gpus=None)
    (group,) = first.get_placement_groups()
    gpus = {"GPU": 1.0} if ray.cluster_resources().get("GPU") else {}
    assert group.bundle_specs == [{"CPU": 2.0} | gpus]
    with pytest.raises(ValueError, match="CPU asked"):
        RayVirtualCluster([1000], use_gpus=False).get_placement_groups()
    assert ray.is_initialized()  # the failure of one does not end what the other uses
    first.shutdown()
    assert not ray.is_initialized()

    forgotten = RayVirtualCluster([1], use_gpus=False)
    forgotten.get_placement_groups()
    del forgotten  # one that is forgotten gives back what it holds as well
    gc.collect()  # Ray leaves a reference cycle through the frame of the call above
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bundle_ct_per_node_list": []}, "bundle_ct_per_node_list is empty"),
        ({"bundle_ct_per_node_list": [2, 0]}, r"bundle_ct_per_node_list\[1\]=0 must be a positive"),
        ({"bundle_ct_per_node_list": [True]}, r"bundle_ct_per_node_list\[0\]=True must be"),
        (
            {"bundle_ct_per_node_list": [1], "max_colocated_worker_groups": 0},
            "max_colocated_worker_groups=0 must be positive",
        ),
        (
            {"bundle_ct_per_node_list": [1], "placement_group_strategy": "spread"},
            "placement_group_strategy='spread' must be one of",
        ),
        (
            {"bundle_ct_per_node_list": [4, 9], "use_gpus": True},
            r"bundle_ct_per_node_list\[1\]=9 is more than num_gpus_per_node=8",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RayVirtualCluster(**arguments)


DRIVER = """
    import pathlib, sys
    import numpy as np
    from probe_worker import ProbeWorker
    from rl_policy import NamedSharding, RayVirtualCluster, RayWorkerGroup

    cluster = RayVirtualCluster([2], use_gpus=False)
    sharding = NamedSharding(np.arange(2), ["data_parallel"])
    group = RayWorkerGroup(cluster, ProbeWorker, sharding=sharding)
    group.run_all("describe")
    pathlib.Path(sys.argv[1]).touch()
    try:
        group.run_all("sleep", 3600)
    finally:
        print("in order:", group.shutdown(timeout_s=1.0))
        cluster.shutdown()
"""


def restore_ctrl_c():
    """Take SIGINT as under a terminal; a background job inherits that it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running(stranger_path, tmp_path, wait_until_gone):
    ready = tmp_path / "ready"
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), str(ready)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=restore_ctrl_c,
    )
    while not ready.exists():
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.1)
    processes = descendants(driver.pid)
    assert len(processes) > 4
    # A terminal sends Ctrl-C to the whole foreground process group.
    os.killpg(driver.pid, signal.SIGINT)
    output, errors = driver.communicate(timeout=PATIENCE_S)
    assert "in order: False" in output
    assert "KeyboardInterrupt" in errors
    wait_until_gone(processes)


def test_a_cluster_that_outlives_its_module_ends_without_a_word(monkeypatch):
    cluster = RayVirtualCluster([1], use_gpus=False)
    # As at the exit of the interpreter, which clears modules before what refers to itself.
    monkeypatch.setattr("rl_policy.ray.cluster.sys", None)
    cluster.__del__()
    assert cluster._is_shut_down


def test_importing_the_package_loads_nothing_heavy():
    check = (
        "import rl_policy, sys; print({'ray', 'torch', 'transformers', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_workers_run_in_the_drivers_environment_under_uv_run():
    check = (
        "import rl_policy.ray.cluster, ray._private.ray_constants as constants;"
        "print(constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ENABLE_UV_RUN_RUNTIME_ENV"}
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "False"


IDLE_DRIVER = """
import sys
from rl_policy import RayVirtualCluster

cluster = RayVirtualCluster([1], use_gpus=False)
cluster.get_placement_groups()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def driver():
    """Yield a process that has started a Ray, and the processes below it."""
    process = subprocess.Popen(
        [sys.executable, "-c", IDLE_DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    yield process, descendants(process.pid)
    process.kill()
    process.communicate(timeout=PATIENCE_S)


def test_nothing_is_left_of_a_driver_that_is_killed(driver, wait_until_gone):
    process, children = driver
    assert len(children) > 5
    process.kill()
    process.wait(timeout=PATIENCE_S)
    wait_until_gone(children)


@pytest.mark.slow
def test_a_dead_head_is_named_and_nothing_is_left(driver, wait_until_gone):
    process, children = driver
    (head,) = [
        pid for pid in children if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(head, signal.SIGKILL)
    assert process.wait(timeout=PATIENCE_S) != 0
    assert "Failed to connect to GCS" in process.stdout.read()
    wait_until_gone(children)
