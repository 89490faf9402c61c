"""Devices for a policy: bundles of a Ray cluster, one per rank, and the Ray that holds them."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import ray
from ray._private import ray_constants, services, worker
from ray._private.node import Node
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_policy.ray.address import check_running_ray, find_running_ray
from rl_policy.ray.failures import RayStartError
from rl_policy.ray.forks import forking_executable
from rl_policy.ray.hosts import SpareHosts

if TYPE_CHECKING:
    from rl_interfaces import Cluster

logger = logging.getLogger(__name__)

# Ray's name for whether it forms clusters of several machines.
_CLUSTER_SETTING = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
# And for how often it tries an address.
_ATTEMPTS_SETTING = "RAY_NUM_REDIS_GET_RETRIES"
# And for how long it waits for its node, as far as this module sees to it.
_NODE_SETTING = "RAY_raylet_start_wait_time_s"
_OVERLOADED = f"the machine may be overloaded: try again, or set {_NODE_SETTING}=900"
_LOOK = "`rl-policy doctor limits ray` looks for the cause"
# For a watcher that finds nothing to end. It only takes long on a busy machine.
_WATCHER_LIMIT_S = 300.0
# Of a Ray that is started here.
_LOCAL_SETTINGS = {
    # How long its processes look for a head that is not there, in seconds. On one machine it does
    # not come back: Ray's own minute is for one that is restarted elsewhere.
    "gcs_rpc_server_reconnect_timeout_s": 5,
    # Ray's own default, 15, suits tasks beside a desktop: ranks would wait for any other process.
    "worker_niceness": 0,
    # Ray would keep a record of the last 100,000 calls for its dashboard, which is not started.
    "task_events_report_interval_ms": 0,
    # Ray would start a process per core for tasks, of which there are none, while ranks start.
    "prestart_worker_first_driver": False,
    # Its node tries the socket of the object store, which it has just started, once a second, ten
    # times; the first time is too early in every second start.
    "raylet_client_connect_timeout_milliseconds": 20,
    "raylet_client_num_connect_attempts": 3000,
    # Limits of a start, which a busy machine exceeds. Ray's own are 30 s for the agents, without
    # which the node ends, 60 s for a worker's imports, and 10 s for an answer of the node.
    "agent_register_timeout_ms": 300_000,
    "worker_register_timeout_seconds": 600,
    "health_check_timeout_ms": 60_000,
}
# How long to wait for Ray's head and for its node, and how often to look for the node. Ray's own
# limits are 30 s each.
_START_LIMIT_S = 300
_NODE_PERIOD_S = 0.02
# Limits that processes read from the environment, before they can ask the head for the others.
_START_ENVIRONMENT = {
    "RAY_gcs_server_port_wait_time_s": _START_LIMIT_S,
    _NODE_SETTING: _START_LIMIT_S,
    # How long a process waits for its connection to the head: Ray's own limit is 5 s.
    "RAY_gcs_rpc_server_connect_timeout_s": 30,
}
# How often a start that takes long is logged.
_PROGRESS_S = 10.0
_STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
# Long enough for a node that is just joining, short enough not to look like a hang.
_RESERVE_LIMIT_S = 60.0
# For a task that finds a free port: its process has to start.
_PORT_LIMIT_S = 300.0
# A reservation that takes longer is reported in the log.
_PATIENCE_S = 3.0


class RaySession:
    """Reference count of the Ray that this process has started, if it has started one.

    A Ray that was running before, or that the program has initialised itself, is joined and never
    shut down. A local one that was started here is shut down with its last user.
    """

    def __init__(self) -> None:
        self._started = False
        self._users: set[int] = set()
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def is_local(self) -> bool:
        """Whether Ray was started here, and so runs on this machine alone."""
        return self._started

    def enter(self, user: int, *, num_cpus: int) -> None:
        """Register a user, and connect to Ray first if this process is not connected.

        Args:
            user: An id, the same as for `leave`.
            num_cpus: Logical CPUs that a local Ray offers at least, however many cores there are.
        """
        if not ray.is_initialized():
            self._users.clear()
            with _own_sigterm_handler():
                self._started = _join_or_start(num_cpus)
            if self._started:
                self._watcher = _watch_agents()
        if self._started:
            self._users.add(user)

    def leave(self, user: int) -> None:
        """Unregister a user; without users left, shut down the Ray that was started here."""
        self._users.discard(user)
        if self._started and not self._users:
            self._started = False
            if ray.is_initialized():
                ray.shutdown(wait_for_processes=True)
            if self._watcher is not None:
                self._watcher.communicate(timeout=_WATCHER_LIMIT_S)
                self._watcher = None


SESSION = RaySession()
"""The session of this process: `ray.init` connects a process to one Ray."""


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keep a handler of SIGTERM that the program has set, which `ray.init` replaces by its own.

    Ray's kills its processes first, and then aborts in whatever call waits for them.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and before not in (None, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, before)


def _watch_agents() -> subprocess.Popen[bytes]:
    """Start the process that ends the agents of the Ray that was started here, see `watcher`."""
    # Ray brings it, and puts it on the path.
    import psutil

    node: Any = worker._global_node
    raylet = psutil.Process(node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid)
    agents = [
        (each.pid, each.create_time())
        for each in raylet.children()
        if "agent" in " ".join(each.cmdline()).lower()
    ]
    program, folder = Path(__file__).with_name("watcher.py"), Path(psutil.__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, "-I", str(program), json.dumps(agents), str(folder)],
        stdin=subprocess.PIPE,
        # A Ctrl-C in a terminal is for us, and we end in order.
        start_new_session=True,
    )


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a Ray that is started inside, and its processes, listen on the loopback interface alone.

    Ray does so where it does not form clusters, as on macOS: the setting of that name is read from
    the environment by its processes, and in this one was read when Ray was imported. With an
    address of the loopback interface as `_node_ip_address` it listens on all interfaces. What the
    user's environment says of it stands.
    """
    if _CLUSTER_SETTING in os.environ:
        yield
        return
    forms_clusters = ray_constants.ENABLE_RAY_CLUSTER
    os.environ[_CLUSTER_SETTING] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = forms_clusters
        del os.environ[_CLUSTER_SETTING]


@contextmanager
def _without_services() -> Iterator[None]:
    """Leave out of a Ray that is started inside what serves those who look at it from outside.

    These are the autoscaler's monitor and the server of the dashboard's API, for which `ray.init`
    waits even without a dashboard. It has no argument for either.
    """

    def start_nothing(node: Node, **_: object) -> None:
        node._webui_url = None

    services = ("start_monitor", "start_api_server")
    starts = {name: getattr(Node, name) for name in services if hasattr(Node, name)}
    if len(starts) < len(services):
        # They are for lookers-on: a run is the same with them, and its start takes longer.
        lacking = ", ".join(name for name in services if name not in starts)
        logger.warning(
            "Ray %s has no Node.%s: what it starts for its autoscaler and dashboard runs beside "
            "the ranks",
            ray.__version__,
            lacking,
        )
    for name in starts:
        setattr(Node, name, start_nothing)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(Node, name, start)


@contextmanager
def _looking_often() -> Iterator[None]:
    """Let a Ray that is started inside be there as soon as its node has registered.

    Ray looks for the node in the head's list once a second, for 30 s.
    """
    get_node = services.get_node

    def await_node(address: str, node_id: str) -> object:
        head = GcsClient(address=address)
        limit_s = float(os.environ.get(_NODE_SETTING, _START_LIMIT_S))
        deadline = monotonic() + limit_s
        while monotonic() < deadline:
            listed = head.get_all_node_info(timeout=limit_s)
            if any(node.hex() == node_id for node in listed):
                break
            _require_node()
            sleep(_NODE_PERIOD_S)
        # Which reports one that is not there.
        return get_node(address, node_id)

    services.get_node = await_node
    try:
        yield
    finally:
        services.get_node = get_node


def _require_node() -> None:
    """Raise `ChildProcessError` if the process of the node that this process started has ended."""
    import psutil

    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                return
    folder = Path(os.environ.get("RAY_TMPDIR", gettempdir()), "ray", "session_latest", "logs")
    raise ChildProcessError(f"the process of Ray's node has ended, see raylet.err in {folder}")


@contextmanager
def _patient() -> Iterator[None]:
    """Let a Ray that is started inside wait for its processes for minutes.

    What the user's environment says of it stands.
    """
    added = {name: limit for name, limit in _START_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update({name: str(limit) for name, limit in added.items()})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _one_attempt_to_join() -> Iterator[None]:
    """Let Ray give up an address after one attempt, of about 40 s, where its own number is 20.

    What the user's environment says of it stands.
    """
    attempts = ray_constants.NUM_REDIS_GET_RETRIES
    if _ATTEMPTS_SETTING not in os.environ:
        ray_constants.NUM_REDIS_GET_RETRIES = 1
    try:
        yield
    finally:
        ray_constants.NUM_REDIS_GET_RETRIES = attempts


@contextmanager
def _explained(doing: str, failure: str, way_out: str) -> Iterator[None]:
    """Log that the block takes long, and raise `RayStartError` for Ray's errors of all classes.

    Args:
        doing: For the log: "starting Ray, 4 CPUs".
        failure: For the error: "Ray did not start within {time} (4 CPUs requested)".
        way_out: What the user can do about the error.
    """
    started, ended = monotonic(), threading.Event()

    def log_progress() -> None:
        while not ended.wait(_PROGRESS_S):
            logger.warning("%s ... %.0f s", doing, monotonic() - started)

    progress = threading.Thread(target=log_progress, name="progress of Ray", daemon=True)
    progress.start()
    try:
        yield
    except ValueError:
        # Of the caller's arguments and environment.
        raise
    except Exception as error:
        # What has started of it.
        ray.shutdown()
        text = " ".join(str(error).split()) or type(error).__name__
        passed_s = monotonic() - started
        if passed_s > _PROGRESS_S:
            way_out = f"{_OVERLOADED}; {way_out}"
        failed = failure.format(time=f"{passed_s:.0f} s")
        raise RayStartError(f"{failed}: {text[:500]}; {way_out}") from error
    finally:
        ended.set()
        progress.join()


def _join_or_start(num_cpus: int) -> bool:
    """Connect to Ray; return whether a local one had to be started.

    Raises:
        ValueError: `RAY_ADDRESS`, or the file of `ray start`, names an address without a Ray.
        RayStartError: Ray gives up.
    """
    check_running_ray()
    num_cpus = max(num_cpus, os.cpu_count() or 1)
    settings = {
        name: value
        for name, value in _LOCAL_SETTINGS.items()
        # What the user's environment says stands.
        if f"RAY_{name}" not in os.environ
    }
    try:
        attempt = _explained(
            f"starting Ray, {num_cpus} CPUs",
            f"Ray did not start within {{time}} ({num_cpus} CPUs requested)",
            _LOOK,
        )
        with ExitStack() as stack:
            for adjusted in (_on_loopback, _without_services, _looking_often, _patient):
                stack.enter_context(adjusted())
            stack.enter_context(forking_executable())
            stack.enter_context(attempt)
            ray.init(
                num_cpus=num_cpus,
                include_dashboard=False,
                logging_level=logging.ERROR,
                _system_config=settings,
            )
    except ValueError as refusal:
        # `ray.init` refuses num_cpus if it finds a running Ray, and there is no public way to look
        # for one beforehand.
        logger.debug("joining a running Ray: %s", refusal)
        address = find_running_ray()
        attempt = _explained(
            f"joining the Ray of {address}",
            f"the Ray of {address} did not answer within {{time}}",
            f"{_LOOK}, and RAY_ADDRESS=local starts a Ray on this machine",
        )
        with _one_attempt_to_join(), attempt:
            ray.init(logging_level=logging.ERROR)
        return False
    return True


class RayVirtualCluster:
    """Bundles on one or more nodes, reserved when they are first needed.

    A running Ray is joined, otherwise a local one is started, which `shutdown` ends again. A bundle
    holds one GPU if GPUs are used, and one CPU for each worker group that may share it: a rank
    takes one of the bundle's CPUs and the same fraction of its GPU. CPUs are logical, so a local
    Ray runs four ranks on two cores.

    Example, two nodes with four ranks each, shared by a trainer and an inference engine:
        RayVirtualCluster(bundle_ct_per_node_list=[4, 4], max_colocated_worker_groups=2)

    Args:
        bundle_ct_per_node_list: Ranks per node, one placement group each.
        use_gpus: Whether a bundle holds a GPU. None: if Ray has any.
        max_colocated_worker_groups: Worker groups that may run in the same bundles.
        num_gpus_per_node: Most GPUs that a node has.
        name: Prefix of the placement groups' names.
        placement_group_strategy: Ray's, for the bundles of each placement group.

    Raises:
        ValueError: An argument is out of range; names it and the numbers.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: list[int],
        use_gpus: bool | None = None,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: str = "SPREAD",
    ) -> None:
        # First, as `__del__` reads them even if an argument is refused.
        self._placement_groups: list[PlacementGroup] | None = None
        self._is_shut_down = False
        self.spare_hosts = SpareHosts()
        _check_bundle_counts(bundle_ct_per_node_list)
        if max_colocated_worker_groups < 1:
            raise ValueError(
                f"max_colocated_worker_groups={max_colocated_worker_groups} must be positive"
            )
        if placement_group_strategy not in _STRATEGIES:
            raise ValueError(
                f"placement_group_strategy={placement_group_strategy!r} must be one of "
                f"{_STRATEGIES}"
            )
        self._bundle_counts = list(bundle_ct_per_node_list)
        self._use_gpus = use_gpus
        self._max_worker_groups = max_colocated_worker_groups
        self._num_gpus_per_node = num_gpus_per_node
        self._name = name
        self._strategy = placement_group_strategy
        if use_gpus:
            self._check_gpus_per_node()

    def world_size(self) -> int:
        """Return the number of bundles, which is the number of ranks."""
        return sum(self._bundle_counts)

    def get_placement_groups(self) -> list[PlacementGroup]:
        """Return the placement groups that hold the bundles, in node order.

        Raises:
            ValueError: The Ray that was started here has too few resources.
            TimeoutError: The resources were not free in time; names requested and available ones.
            RuntimeError: The cluster is shut down.
        """
        if self._is_shut_down:
            raise RuntimeError("the cluster is shut down")
        if self._placement_groups is None:
            SESSION.enter(id(self), num_cpus=self.world_size() * self._max_worker_groups)
            try:
                self._placement_groups = self._reserve()
            except BaseException:
                SESSION.leave(id(self))
                raise
        return list(self._placement_groups)

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Return the address of rank 0's node and a port that is free there."""
        in_first_bundle = PlacementGroupSchedulingStrategy(
            self.get_placement_groups()[0], placement_group_bundle_index=0
        )
        task = ray.remote(_address_and_free_port)
        # Without a CPU, as those of the bundle are the ranks': the task would wait for one.
        answer = task.options(num_cpus=0, scheduling_strategy=in_first_bundle).remote()
        try:
            return ray.get(answer, timeout=_PORT_LIMIT_S)
        except GetTimeoutError as error:
            message = f"rank 0's node gave no free port within {_PORT_LIMIT_S:.0f} s"
            raise TimeoutError(message) from error

    def shutdown(self) -> None:
        """Release the bundles, and end Ray if it was started here. Idempotent."""
        self._is_shut_down = True
        if self._placement_groups is None:
            return
        groups, self._placement_groups = self._placement_groups, None
        if ray.is_initialized():
            self.spare_hosts.end()
            _remove(groups)
        SESSION.leave(id(self))

    # Kept here, as the interpreter clears the names of modules before the last objects.
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __del__(self) -> None:
        """Shut down, unless the interpreter exits, which ends Ray by itself."""
        if not self._is_finalizing():
            self.shutdown()

    def _reserve(self) -> list[PlacementGroup]:
        total = ray.cluster_resources()
        use_gpus = self._use_gpus
        if use_gpus is None:
            use_gpus = total.get("GPU", 0) > 0
        if use_gpus:
            self._check_gpus_per_node()
        bundle = {"CPU": float(self._max_worker_groups)} | ({"GPU": 1.0} if use_gpus else {})
        asked = {key: amount * self.world_size() for key, amount in bundle.items()}
        if SESSION.is_local and any(total.get(key, 0) < asked[key] for key in asked):
            raise ValueError(self._shortage(asked))
        groups = [
            placement_group([bundle] * count, strategy=self._strategy, name=self._name_of(node))
            for node, count in enumerate(self._bundle_counts)
        ]
        try:
            if not _all_ready(groups, limit_s=_PATIENCE_S):
                logger.warning("waiting for devices: %s", self._shortage(asked))
                if not _all_ready(groups, limit_s=_RESERVE_LIMIT_S):
                    raise TimeoutError(self._shortage(asked))
        except BaseException:
            _remove(groups)
            raise
        return groups

    def _name_of(self, node: int) -> str:
        # Names must be unique in a Ray cluster; "" means none.
        return f"{self._name}-{node}-{uuid4().hex[:8]}" if self._name else ""

    def _check_gpus_per_node(self) -> None:
        for node, count in enumerate(self._bundle_counts):
            if count > self._num_gpus_per_node:
                raise ValueError(
                    f"bundle_ct_per_node_list[{node}]={count} is more than "
                    f"num_gpus_per_node={self._num_gpus_per_node}"
                )

    def _shortage(self, asked: dict[str, float]) -> str:
        total, free = ray.cluster_resources(), ray.available_resources()
        amounts = ", ".join(
            f"{amount:g} {key} asked ({free.get(key, 0):g} free of {total.get(key, 0):g})"
            for key, amount in asked.items()
        )
        return (
            f"Ray cannot hold bundle_ct_per_node_list={self._bundle_counts} with "
            f"max_colocated_worker_groups={self._max_worker_groups}, "
            f"placement_group_strategy={self._strategy!r}: {amounts}"
        )


def _check_bundle_counts(counts: Sequence[int]) -> None:
    if not counts:
        raise ValueError("bundle_ct_per_node_list is empty: give the number of ranks per node")
    for node, count in enumerate(counts):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(
                f"bundle_ct_per_node_list[{node}]={count!r} must be a positive integer"
            )


def _all_ready(groups: Sequence[PlacementGroup], *, limit_s: float) -> bool:
    deadline = monotonic() + limit_s
    return all(group.wait(max(0.0, deadline - monotonic())) for group in groups)


def _remove(groups: Sequence[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)


def _address_and_free_port() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def rank_bundles(
    bundle_nodes: Sequence[Sequence[str]], *, workers_per_node: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return the placement group and bundle of each rank; ranks of a node are consecutive.

    Example, two placement groups of two bundles that Ray has spread over nodes `a` and `b`:
        rank_bundles([["a", "b"], ["a", "b"]]) -> [(0, 0), (1, 0), (0, 1), (1, 1)]

    Args:
        bundle_nodes: The node of each bundle of each placement group, see `bundle_nodes`.
        workers_per_node: How many of each placement group's bundles to use. None: all.

    Raises:
        ValueError: More bundles are requested than there are, or none.
    """
    counts = [len(nodes) for nodes in bundle_nodes]
    used = list(workers_per_node) if workers_per_node is not None else counts
    if len(used) != len(counts):
        raise ValueError(f"workers_per_node={used} does not fit {len(counts)} nodes")
    for node, (wanted, count) in enumerate(zip(used, counts, strict=True)):
        if not 1 <= wanted <= count:
            raise ValueError(
                f"workers_per_node={wanted} for node {node}, which has {count} bundles"
            )
    bundles = [(group, bundle) for group, wanted in enumerate(used) for bundle in range(wanted)]
    # A placement group may span nodes (and two groups share one), while torch's collectives and
    # tensor parallelism expect the ranks of a node to be neighbours.
    order: dict[str, int] = {}
    for group, bundle in bundles:
        order.setdefault(bundle_nodes[group][bundle], len(order))
    return sorted(bundles, key=lambda place: order[bundle_nodes[place[0]][place[1]]])


def bundles_per_node(
    cluster: Cluster, workers_per_node: int | Sequence[int] | None
) -> list[int] | None:
    """Return how many bundles of each node to use; None for all of them."""
    if isinstance(workers_per_node, int):
        return [workers_per_node] * len(cluster.get_placement_groups())
    return None if workers_per_node is None else list(workers_per_node)


def bundle_nodes(cluster: Cluster) -> list[list[str]]:
    """Return Ray's id of the node of each bundle of each placement group."""
    nodes: list[list[str]] = []
    for group in cluster.get_placement_groups():
        by_bundle = placement_group_table(group)["bundles_to_node_id"]
        nodes.append([by_bundle[bundle] for bundle in range(group.bundle_count)])
    return nodes
