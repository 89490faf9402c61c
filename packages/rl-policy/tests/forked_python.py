"""A `python` whose scripts are forked from a process that has imported what they need.

A rank, a command or a page's program takes some five seconds of a processor to import torch,
transformers, Ray and these packages, which is longer than it works in a test. What starts them runs
`sys.executable`, so that is what a test exchanges for the path that `forking_python` yields: a tiny
program that hands its arguments, environment, working directory and standard files to the process
that has the imports, passes signals on, and ends with the status of the fork.
"""

import array
import atexit
import contextlib
import fcntl
import gc
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_MAX_REQUEST, _MAX_FILES = 2**20, 64
# Ray's own services look at which process is their parent.
_RAY_SCRIPTS = ("setup_worker.py", "default_worker.py")
# Others may be given further files than the standard ones.
_FORKED = [("-m", "rl_policy.planning"), ("-c", "from rl_policy.cli import main; main()")]
# How `multiprocessing` starts a process, which keeps the files that it is given.
_SPAWNED = "from multiprocessing.spawn import spawn_main; "
# What every rank imports.
RANK_MODULES = [
    "transformers.models.qwen2.modeling_qwen2",
    "rl_dtensor_worker.engine",
    "rl_megatron_worker.engine",
]
# And every engine, where it is installed. By vLLM's kernels, which these do not load, tests tell an
# engine's process from others.
ENGINE_MODULES = ["vllm.entrypoints.llm"]
_CLIENT = '''#!{python} -IS
import array, os, signal, socket, sys

def program(arguments):
    """Return the script and what follows it, or None where it is no script that is forked."""
    rest = arguments
    if arguments[:1] == ["-u"]:
        rest = arguments[1:]
        os.environ["PYTHONUNBUFFERED"] = "1"
    if len(rest) > 1 and ((rest[0], rest[1]) in {given!r} or rest[1].startswith({spawned!r})):
        return rest
    if not rest or rest[0].startswith("-") or not os.path.isfile(rest[0]):
        return None
    is_ray = "/ray/" in rest[0] and not rest[0].endswith({ray_scripts!r})
    return None if is_ray else rest

def is_inherited(file):
    try:
        return os.get_inheritable(file)
    except OSError:  # that of the list itself
        return False

rest = program(sys.argv[1:])
if rest is None:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import json
files = array.array("i", [0, 1, 2])
if rest[0] == "-c":
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    files.extend(each for each in numbers if each > 2 and is_inherited(each))
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
request = [rest, dict(os.environ), os.getcwd(), files.tolist(), is_ignored]
request = json.dumps(request).encode()
server.sendmsg([len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
server.sendall(request)
forked = int.from_bytes(server.recv(4), "big")
def forward(number, frame):
    try:
        os.kill(forked, number)
    except ProcessLookupError:
        pass
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, forward)
status = server.recv(4)
if len(status) < 4:
    sys.exit(1)
status = int.from_bytes(status, "big", signed=True)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status not in (9, 19) else None
    os.kill(os.getpid(), -status)
os._exit(status)
'''


@contextlib.contextmanager
def forking_python(modules, *, commands=(), environment=None):
    """Yield the path of a Python whose scripts start with modules that were imported once.

    Args:
        modules: Names of the modules. Ray is not among them, as it reads the environment when it is
            imported, and that of a fork is another.
        commands: Names of scripts beside this Python, which stand beside that one too.
        environment: What the process that imports them is started with; None is this one's.
    """
    # The path of a socket may have a hundred characters.
    with tempfile.TemporaryDirectory(prefix="fork", dir="/tmp") as folder:
        address = str(Path(folder) / "server")
        client = Path(folder) / "python"
        client.write_text(
            _CLIENT.format(
                python=sys.executable,
                address=address,
                ray_scripts=_RAY_SCRIPTS,
                given=_FORKED,
                spawned=_SPAWNED,
            )
        )
        client.chmod(0o700)
        for name in commands:
            beside = Path(folder) / name
            script = Path(sys.executable).with_name(name)
            beside.write_text(f'#!/bin/sh\nexec {client} {script} "$@"\n')
            beside.chmod(0o700)
        command = [sys.executable, __file__, address, str(client), *modules]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        ) as server:
            assert server.stdout.readline() == b"ready\n"
            yield str(client)
            # At the end of its input it ends, and with it the connections of what it has forked.
            server.stdin.close()


@cache
def rank_python():
    """Return the Python that ranks are started with: without a GPU, one that forks them."""
    import torch

    if torch.cuda.device_count():
        return sys.executable
    wanted = [*RANK_MODULES, *ENGINE_MODULES] if find_spec("vllm") else RANK_MODULES
    installed = [name for name in wanted if find_spec(name.partition(".")[0])]
    forking = contextlib.ExitStack()
    atexit.register(forking.close)
    return forking.enter_context(forking_python(installed))


def fork_of(pid):
    """Return the process that a process of a forking Python stands for; None for any other."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return int((Path(words[2]).with_name("forks") / str(pid)).read_text())
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError, IndexError, ValueError):
        return None


class _Server:
    """Forks a process for each connection, and tells it the status with which that ends."""

    def __init__(self, address, client):
        self.client = client
        self.forks = Path(client).with_name("forks")
        self.forks.mkdir()
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(address)
        self.socket.listen(64)
        self.connections = {}
        self.selector = selectors.DefaultSelector()
        self.woken, wakes = socket.socketpair()
        self.wakes = wakes
        wakes.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno())
        self.path = os.environ.get("PYTHONPATH", "").split(os.pathsep)

    def serve(self):
        """Return what a forked process has to run; None in the server, at its end."""
        for source in (self.socket, self.woken, sys.stdin):
            self.selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is sys.stdin:
                    self.end_all()
                    return None
                if key.fileobj is self.woken:
                    self.woken.recv(64)
                    self.reap()
                elif key.fileobj is self.socket:
                    arguments = self.fork()
                    if arguments is not None:
                        return arguments
                else:
                    self.lose(key.fileobj)

    def fork(self):
        connection, _ = self.socket.accept()
        space = socket.CMSG_LEN(_MAX_FILES * array.array("i").itemsize)
        size, passed, _, _ = connection.recvmsg(4, space)
        files = array.array("i")
        files.frombytes(passed[0][2])
        wanted = int.from_bytes(size, "big")
        request = b""
        while len(request) < wanted:
            request += connection.recv(_MAX_REQUEST)
        forked = os.fork()
        if forked:
            for file in files:
                os.close(file)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            client = int.from_bytes(credentials[:4], sys.byteorder)
            (self.forks / str(client)).write_text(str(forked))
            connection.sendall(forked.to_bytes(4, "big"))
            self.connections[forked] = connection
            self.selector.register(connection, selectors.EVENT_READ)
            return None
        return self.become(connection, files, *json.loads(request))

    def become(self, connection, files, arguments, environment, directory, numbers, is_ignored):
        """Be the process that was asked for, in all but the script."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A job in a shell's background inherits that SIGINT is ignored: the server may, not this.
        signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignored else signal.default_int_handler)
        # The fork has copies of all that the server holds, and is no end of these connections.
        for each in [connection, self.socket, self.woken, self.wakes, *self.connections.values()]:
            each.close()
        self.selector.close()
        # None has a number that another is to have.
        moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for file in files]
        for file in files:
            os.close(file)
        for number, file in zip(numbers, moved, strict=True):
            os.dup2(file, number)
            os.close(file)
        if arguments[0] == "-c" and arguments[1].startswith(_SPAWNED) and find_spec("setproctitle"):
            # vLLM's workers have titles, whose place is found by the environment at the start. Not
            # in other processes: what Ray sets titles with would not find it again.
            import_module("setproctitle").getproctitle()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        compiler = sys.modules.get("torch._dynamo.config")
        if compiler is not None:  # which has read the variable of the server
            compiler.disable = environment.get("TORCHDYNAMO_DISABLE") == "1"
        added = environment.get("PYTHONPATH", "").split(os.pathsep)
        own = [entry for entry in sys.path[1:] if entry not in self.path]
        # The interpreter's own first entry is the script's directory.
        is_script = arguments[0] not in ("-m", "-c")
        first = str(Path(arguments[0]).resolve().parent) if is_script else directory
        sys.path[:] = [first, *filter(None, added), *own]
        sys.executable = self.client
        multiprocessing.set_executable(self.client)
        sys.argv = arguments if is_script else [arguments[0], *arguments[2:]]
        if environment.get("PYTHONUNBUFFERED"):
            sys.stdout.reconfigure(write_through=True)
        return arguments

    def reap(self):
        while True:
            try:
                forked, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not forked:
                return
            connection = self.connections.pop(forked)
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):  # who asked for it may be gone
                connection.sendall(code.to_bytes(4, "big", signed=True))
            if connection in self.selector.get_map():
                self.selector.unregister(connection)
            connection.close()

    def end_all(self):
        """End what still runs: with the server go the processes that passed signals on to it."""
        for forked in self.connections:
            os.kill(forked, signal.SIGKILL)

    def lose(self, connection):
        """End the process of one that was killed while it waited."""
        for forked, other in self.connections.items():
            if other is connection:
                os.kill(forked, signal.SIGKILL)
        # Nothing but its end can be read of it any more.
        self.selector.unregister(connection)


def _main():
    address, client, *modules = sys.argv[1:]
    # What is imported is no garbage: a fork that looked for some would copy each page of it.
    gc.disable()
    # vLLM would import Ray, see `forking_python`; no executor of its own over Ray is tested.
    sys.modules["ray"] = None
    for name in modules:
        import_module(name)
    del sys.modules["ray"]
    gc.freeze()
    gc.enable()
    server = _Server(address, client)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    return server.serve()


if __name__ == "__main__":
    _started = _main()
    if _started is None:
        pass
    elif _started[0] == "-m":
        runpy.run_module(_started[1], run_name="__main__", alter_sys=True)
    elif _started[0] == "-c":
        exec(_started[1])
    else:
        runpy.run_path(_started[0], run_name="__main__")
