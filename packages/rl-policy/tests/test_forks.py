import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from patience import PATIENCE_S, wait_until
from processes import descendants, is_gone
from rl_policy.ray import fork_client

# Standard modules that nothing else imports, in place of torch and transformers.
_SHARED, _AHEAD = "sndhdr" if sys.version_info < (3, 13) else "tabnanny", "pyclbr"
_DRIVER = f"""
import sys
{{before}}
from rl_policy.ray.forks import forked_workers, forking_executable, import_ahead, stop_forking
with forked_workers(["{_SHARED}"], ["{_AHEAD}"], gc_threshold=(321, 4, 5)):
    {{within}}
    with forking_executable():
        print(sys.executable, flush=True)
    for line in sys.stdin:
        exec(line)
        print("done", flush=True)
print(sys.executable, flush=True)
"""
_FACTS = f"""
import gc, json, os, sys
imported = [name for name in ("{_SHARED}", "{_AHEAD}") if name in sys.modules]
print("to the standard error", file=sys.stderr)
print(json.dumps({{
    "imported": imported, "arguments": sys.argv, "first": sys.path[0], "name": __name__,
    "directory": os.getcwd(), "variables": dict(os.environ), "given": sys.stdin.read(),
    "threshold": gc.get_threshold(), "executable": sys.executable, "parent": os.getppid(),
}}))
"""
_WAITS = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(3600)\n"
_STARTS_A_THREAD = "threading.Thread(target=time.sleep, args=[3600], daemon=True).start()"


@dataclass
class Driver:
    """A process that has a fork server, and the `python` that this answers to."""

    process: subprocess.Popen
    python: str

    @property
    def server(self):
        # Its own forks follow it.
        return descendants(self.process.pid)[0]

    @property
    def folder(self):
        return Path(self.python).parent

    def do(self, line):
        """Have it run a line."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextmanager
def driver_with(*, before="", within="pass", **options):
    """Yield a driver that has run lines before and in its context; it ends with the context."""
    process = subprocess.Popen(
        [sys.executable, "-c", _DRIVER.format(before=before, within=within)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    driver = Driver(process, process.stdout.readline().strip())
    try:
        yield driver
        if process.poll() is None:
            told, _ = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, told) == (0, f"{sys.executable}\n")
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    assert driver.python == sys.executable or not driver.folder.exists()


@pytest.fixture(scope="module")
def driver():
    with driver_with() as made:
        yield made


@pytest.fixture
def worker(tmp_path):
    """Return a function that writes a program where Ray has the one that it starts workers with."""

    def write(text):
        path = tmp_path / "ray/_private/workers/default_worker.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


@contextmanager
def waiting(driver, script):
    """Yield a client whose fork waits, and the fork's process id."""
    client = subprocess.Popen([driver.python, script], stdout=subprocess.PIPE, text=True)
    try:
        yield client, int(client.stdout.readline())
    finally:
        client.kill()
        client.communicate(timeout=PATIENCE_S)


def run(python, *arguments, **options):
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, **options
    )


def test_a_worker_has_the_imports_of_the_driver_and_all_else_of_its_client(
    driver, worker, tmp_path
):
    script = worker(_FACTS)
    variables = {"ONLY": "this", "PATH": os.environ["PATH"]}
    ended = run(driver.python, script, "a b", "--c", input="given", env=variables, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "to the standard error\n")
    facts = json.loads(ended.stdout)
    assert facts.pop("variables").items() >= variables.items()
    assert facts == {
        "imported": [_SHARED, _AHEAD],
        "arguments": [script, "a b", "--c"],
        "first": str(Path(script).parent),
        "name": "__main__",
        "directory": str(tmp_path),
        "given": "given",
        "threshold": [321, 4, 5],
        "executable": sys.executable,
        "parent": driver.server,
    }


def test_other_programs_are_started_plainly(driver, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(_FACTS)
    facts = json.loads(run(driver.python, str(script), input="").stdout)
    assert (facts["imported"], facts["parent"]) == ([], os.getpid())


@pytest.mark.parametrize(
    ("program", "status", "line"),
    [
        ("import sys\nsys.exit(3)", 3, ""),
        ("import sys\nsys.exit('a reason')", 1, "a reason\n"),
        ("import sys\nsys.exit([1])", 1, "[1]\n"),
        (
            "import atexit, sys\natexit.register(lambda: sys.stderr.write('at its end'))",
            0,
            "at its",
        ),
        ("raise ValueError('an error')", 1, "ValueError: an error\n"),
        ("import os\nos.kill(os.getpid(), 9)", -9, ""),
        ("import os\nos.kill(os.getpid(), 15)", -15, ""),
    ],
)
def test_a_client_ends_as_its_fork_does(driver, worker, program, status, line):
    ended = run(driver.python, worker(program))
    assert ended.returncode == status
    assert line in ended.stderr
    assert bool(line) == bool(ended.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_fork(driver, worker, number):
    script = worker(
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(7))\n"
        f"signal.pthread_sigmask(signal.SIG_UNBLOCK, [{int(number)}])\n" + _WAITS
    )
    with waiting(driver, script) as (client, _):
        client.send_signal(number)
        assert client.wait(timeout=PATIENCE_S) == 7


def _blocks(pid, number):
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(re.search(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)[1], 16)
    return mask >> (number - 1) & 1


def test_a_signal_that_is_earlier_than_the_fork_waits_for_it(driver, worker):
    os.kill(driver.server, signal.SIGSTOP)
    try:
        client = subprocess.Popen([driver.python, worker(_WAITS)], stdout=subprocess.DEVNULL)
        wait_until(lambda: _blocks(client.pid, signal.SIGTERM), what="a blocked signal")
        client.terminate()
        time.sleep(0.2)
        assert client.poll() is None
    finally:
        os.kill(driver.server, signal.SIGCONT)
    assert client.wait(timeout=PATIENCE_S) == -signal.SIGTERM


def test_signals_that_are_blocked_where_it_is_started_are_blocked_in_a_fork(driver, worker):
    script = worker("import signal\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, []))")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        assert run(driver.python, script).stdout == f"{{{signal.SIGUSR2!r}}}\n"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_killed_client_takes_its_fork_with_it(driver, worker, wait_until_gone):
    with waiting(driver, worker(_WAITS)) as (client, fork):
        client.kill()
        wait_until_gone([fork])
    assert not is_gone(driver.server)


def test_forks_draw_other_numbers(worker):
    script = worker(
        "import sys\nfrom random import random\nnumpy = sys.modules['numpy']\n"
        "print(numpy.random.random(), random())"
    )
    with driver_with(before="import numpy.random") as driver:
        drawn = [run(driver.python, script).stdout.split() for _ in range(2)]
    assert len({*drawn[0], *drawn[1]}) == 4


def test_limits_are_those_of_the_client(driver, worker):
    script = worker(
        "import os, resource\numask = os.umask(0)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], umask, os.sched_getaffinity(0))"
    )
    processor = max(os.sched_getaffinity(0))

    def restrict():
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, most))
        os.sched_setaffinity(0, [processor])

    ended = run(driver.python, script, preexec_fn=restrict, umask=0o27)
    assert ended.stdout == f"200 {0o27} {{{processor}}}\n", ended.stderr


def test_what_is_to_be_removed_at_the_end_is(worker):
    # The first of its kind has Python run all of them at the end, which is before the fork here.
    before = "import tempfile; first = tempfile.TemporaryDirectory()"
    script = worker(
        "import sys, tempfile\nsys.kept = tempfile.TemporaryDirectory()\nprint(sys.kept.name)"
    )
    with driver_with(before=before) as driver:
        ended = run(driver.python, script)
        assert ended.stdout, ended.stderr
        assert not Path(ended.stdout.strip()).exists()


def test_a_fork_and_its_client_that_end_at_once_are_no_end_of_others(worker, wait_until_gone):
    script = worker(_WAITS)
    with driver_with() as driver, waiting(driver, script) as (_, other):
        with waiting(driver, script) as (client, fork), socket.socket(socket.AF_UNIX) as stalled:
            # The server waits for what this one asks for, and sees both ends at its next look.
            stalled.connect(str(driver.folder / "server"))
            time.sleep(0.2)
            os.kill(fork, signal.SIGKILL)
            wait_until_gone([fork])
            client.kill()
            client.wait(timeout=PATIENCE_S)
        assert json.loads(run(driver.python, worker(_FACTS), input="").stdout)["imported"]
        assert not is_gone(other)


@pytest.mark.parametrize(
    ("imported", "is_forking"),
    [
        ("subprocess.Popen(['true'])", True),
        ("setattr(os, 'fork', lambda: os.close(-1))", False),
        (_STARTS_A_THREAD, False),
    ],
    ids=["starts a process", "no memory", "starts a thread"],
)
def test_what_an_import_does_is_no_end_of_workers(worker, imported, is_forking):
    before = (
        "import os, subprocess, threading, time\nimport rl_policy.ray.fork_server as server\n"
        f"server.import_backend = lambda name: {imported}"
    )
    with driver_with(before=before) as driver, waiting(driver, worker(_WAITS)) as (_, fork):
        server = driver.server
        driver.do("import_ahead(['one'])")
        for _ in range(2):
            facts = json.loads(run(driver.python, worker(_FACTS), input="").stdout)
            assert bool(facts["imported"]) == is_forking
        assert not is_gone(fork)
        assert not is_gone(server)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_server_leaves_signals_to_the_driver(driver, worker, number):
    os.kill(driver.server, number)
    assert json.loads(run(driver.python, worker(_FACTS), input="").stdout)["imported"]


def test_workers_whose_driver_was_killed_have_time_to_end_by_themselves(worker, tmp_path):
    script = worker(
        "import os, sys, time\nfrom pathlib import Path\nprint(os.getpid(), flush=True)\n"
        "while Path(f'/proc/{sys.argv[1]}/stat').read_text().split()[2] != 'Z':\n"
        "    time.sleep(0.05)\n"
        "time.sleep(0.5)\nPath(sys.argv[2]).touch()"
    )
    ended = tmp_path / "ended"
    with driver_with() as driver:
        given = [str(driver.process.pid), str(ended)]
        client = subprocess.Popen([driver.python, script, *given], stdout=subprocess.PIPE)
        assert client.stdout.readline()
        os.kill(driver.process.pid, signal.SIGKILL)
        client.communicate(timeout=PATIENCE_S)
        assert client.returncode == 0
        assert ended.exists()
        wait_until(lambda: not driver.folder.exists(), what="the folder is removed")


@pytest.mark.parametrize("length", [83, 84, 120])
def test_a_long_place_of_temporary_files_has_a_server_too(tmp_path, length):
    place = tmp_path / ("x" * (length - len(str(tmp_path)) - 1))
    place.mkdir()
    with driver_with(env=os.environ | {"TMPDIR": str(place)}) as driver:
        assert driver.python != sys.executable
        assert (driver.folder.parent == place) == (length <= 83)
        assert not is_gone(driver.server)


@pytest.mark.parametrize(
    "before",
    [
        "import os; os.access = lambda *_: False",
        "import os, pathlib; pathlib.Path.write_text = lambda *_: os.close(-1)",
        "import os; os.fork = lambda: os.close(-1)",
    ],
    ids=["not executable", "no space", "no memory"],
)
def test_workers_are_plain_and_nothing_is_left_where_there_can_be_no_server(tmp_path, before):
    with driver_with(before=before, env=os.environ | {"TMPDIR": str(tmp_path)}) as driver:
        assert driver.python == sys.executable
        assert [*tmp_path.iterdir()] == []


def test_a_server_that_is_stopped_is_gone(wait_until_gone):
    with driver_with() as driver:
        server = driver.server
        driver.do("stop_forking()")
        wait_until_gone([server])
        assert not driver.folder.exists()


def test_a_driver_may_ignore_ends_of_processes(worker):
    def ignore():
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with driver_with(preexec_fn=ignore) as driver:
        assert json.loads(run(driver.python, worker(_FACTS), input="").stdout)["imported"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_driver_that_is_killed(worker, wait_until_gone, number):
    with driver_with() as driver, waiting(driver, worker(_WAITS)) as (client, fork):
        server, folder = driver.server, driver.folder
        assert folder.stat().st_mode & 0o777 == 0o700
        os.kill(driver.process.pid, number)
        assert driver.process.wait(timeout=PATIENCE_S) == -number
        wait_until_gone([server, fork])
        assert client.wait(timeout=PATIENCE_S) == 1
        assert not folder.exists()


def test_nothing_is_left_of_a_context_that_has_ended(worker, wait_until_gone):
    with driver_with() as driver, waiting(driver, worker(_WAITS)) as (client, fork):
        server = driver.server
        driver.process.communicate(timeout=PATIENCE_S)
        assert driver.process.returncode == 0
        wait_until_gone([server, fork])
        assert client.wait(timeout=PATIENCE_S) == 1
        assert not driver.folder.exists()


def test_workers_of_a_server_that_was_killed_are_started_plainly(worker):
    with driver_with() as driver:
        os.kill(driver.server, signal.SIGKILL)
        ended = run(driver.python, worker(_FACTS), input="")
    assert json.loads(ended.stdout)["imported"] == []
    assert ended.stderr.startswith("a worker starts as a plain process, as its fork server does ")
    assert "cluster.fork_workers=false" in ended.stderr


def test_a_worker_whose_server_hangs_is_started_plainly(worker, tmp_path):
    # With a shorter limit than the product's.
    text = Path(fork_client.__file__).read_text()
    impatient = tmp_path / "impatient.py"
    impatient.write_text(text.replace("_ANSWER_LIMIT_S = 300.0", "_ANSWER_LIMIT_S = 0.5"))
    assert impatient.read_text() != text
    with driver_with() as driver:
        command = [sys.executable, "-IS", impatient, driver.folder / "server", worker(_FACTS)]
        server, printed, told = driver.server, tmp_path / "printed", tmp_path / "told"
        os.kill(server, signal.SIGSTOP)
        try:
            # Files, as Ray has: the server's queue keeps those that it was sent open.
            with printed.open("w") as stdout, told.open("w") as stderr:
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    timeout=PATIENCE_S,
                    check=True,
                )
        finally:
            os.kill(server, signal.SIGCONT)
        assert json.loads(printed.read_text())["imported"] == []
        assert "does not answer (timed out)" in told.read_text()


@pytest.mark.parametrize(
    "before",
    [
        f"import threading, time\n{_STARTS_A_THREAD}",
        "sys.modules['ray'] = sys",
        # As `2>&-` leaves it.
        "sys.stderr = None",
        # That a fork cannot be made is known where torch is there, which a fork is asked about.
        "import os, types\nos.fork = lambda: os.close(-1)\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=types.SimpleNamespace())",
    ],
)
def test_a_driver_that_cannot_be_forked_has_no_server(before):
    with driver_with(before=before) as driver:
        assert driver.python == sys.executable
        assert descendants(driver.process.pid) == []


def test_a_backend_that_looks_for_cuda_is_left_to_plain_workers(worker):
    # In place of torch's own, which knows whether CUDA was initialised before a fork.
    before = (
        "import os, types\nimport rl_policy.ray.fork_server as server\n"
        "cuda = types.SimpleNamespace(seen_by=None)\n"
        "cuda._is_in_bad_fork = lambda: cuda.seen_by not in (None, os.getpid())\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda)\n"
        "server.import_backend = lambda name: setattr(cuda, 'seen_by', os.getpid())"
    )
    within = "import rl_policy.ray.forks as forks; forks.import_ahead(['looks'])"
    with driver_with(before=before) as driver:
        assert json.loads(run(driver.python, worker(_FACTS), input="").stdout)["imported"]
    with driver_with(before=before, within=within) as driver:
        assert not json.loads(run(driver.python, worker(_FACTS), input="").stdout)["imported"]


def test_a_ray_that_is_started_within_forks_its_workers():
    driver = f"""
import json, os, signal, sys
import rl_policy.ray.forks as forks
with forks.forked_workers(["{_SHARED}"], [], gc_threshold=(700, 10, 10)):
    import ray
    from rl_policy.ray.cluster import RayVirtualCluster
    cluster = RayVirtualCluster([2], use_gpus=False)
    groups = cluster.get_placement_groups()
    class Probe:
        def look(self):
            return os.getpid(), os.getppid(), "{_SHARED}" in sys.modules, "RAY_JOB_ID" in os.environ
    make = ray.remote(Probe).options(num_cpus=0).remote
    probes = [make(), make()]
    looks = ray.get([probe.look.remote() for probe in probes], timeout={PATIENCE_S})
    # One that dies takes nobody along.
    os.kill(looks[0][0], signal.SIGKILL)
    try:
        ray.get(probes[0].look.remote(), timeout={PATIENCE_S})
    except ray.exceptions.RayActorError:
        looks.append(ray.get(probes[1].look.remote(), timeout={PATIENCE_S}))
    looks.append(ray.get(make().look.remote(), timeout={PATIENCE_S}))
    with open(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children") as children:
        print(json.dumps([looks, children.read().split()]))
    cluster.shutdown()
"""
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = run(sys.executable, "-c", driver, env=variables)
    assert ended.returncode == 0, ended.stderr
    looks, children = json.loads(ended.stdout.splitlines()[-1])
    numbers = [number for number, *_ in looks]
    assert numbers[1] == numbers[2]
    assert len({*numbers}) == 3
    [(server, *_)] = {(*look,) for _, *look in looks}
    assert [look for _, *look in looks] == [[server, True, True]] * 4
    assert str(server) in children


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "dtensor"])
def test_a_fork_computes_on_a_gpu(worker, backend):
    if backend is not None:
        pytest.importorskip("rl_dtensor_worker")
    script = worker(
        "import os, sys\nassert os.getppid() == int(sys.argv[1])\n"
        # Ray's worker is given its GPU when it runs.
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0'\ntorch = sys.modules['torch']\n"
        "print(torch.ones(3, device='cuda').sum().item(), torch.cuda.device_count())"
    )
    with driver_with(before="import torch, transformers") as driver:
        if backend is not None:
            driver.do(f"import_ahead([{backend!r}])")
        for _ in range(2):
            ended = run(driver.python, script, str(int(driver.server)))
            assert ended.stdout == "3.0 1\n", ended.stderr
