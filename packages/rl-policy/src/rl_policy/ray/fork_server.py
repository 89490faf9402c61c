"""The process that Ray's workers are forked from, and what a fork takes over from its client."""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import json
import logging
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from fcntl import F_DUPFD_CLOEXEC, fcntl
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

from rl_policy.backends import import_backend

logger = logging.getLogger(__name__)

_NUM_FILES = 3
# A client sends all of its request at once.
_REQUEST_LIMIT_S = 10.0
_MAX_NAMES_BYTES = 4096
# How long workers have, when their driver was killed, to end what they have started: Ray's node has
# ended as well, which they see.
_ORPHAN_LIMIT_S = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Which the server leaves to the driver, and a fork ignores if its client does."""
# From `sys/prctl.h`.
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """Imports modules, forks a process for each client, and reports how that has ended.

    It is the parent of all workers, and the kernel ends them with it: once there is one, nothing
    but the end of the driver ends the server.

    Args:
        listener: The socket that clients connect to.
        control: Has names of backends to import, a line each. The driver closes it.
        modules: Names of modules to import first.
        gc_threshold: The garbage collector's threshold that workers get.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        control: socket.socket,
        modules: Sequence[str],
        gc_threshold: Sequence[int],
    ) -> None:
        self._pid = os.getpid()
        self._listener = listener
        self._control = control
        self._modules = modules
        self._gc_threshold = gc_threshold
        self._deadline: float | None = None
        """Of workers, once the driver has ended."""
        self._clients: dict[int, socket.socket] = {}
        """By the process id of their fork."""
        self._selector = selectors.DefaultSelector()
        # A signal that arrives between two looks is read from here at the second.
        self._signals, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)

    def serve(self) -> None:
        """Serve until the driver has ended, and then the workers, or their time is over.

        Clients wait while modules are imported. If the process cannot be forked after that, clients
        are refused, and become plain processes.
        """
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # It would go through modules, none of them garbage, and copy each page that it looks at.
        gc.disable()
        for source in (self._listener, self._signals, self._control):
            self._selector.register(source, selectors.EVENT_READ)
        self._import(self._modules, import_module)
        while self._deadline is None or (self._clients and monotonic() < self._deadline):
            limit = None if self._deadline is None else max(0.0, self._deadline - monotonic())
            for key, _ in self._selector.select(limit):
                if key.fileobj is self._signals:
                    self._signals.recv(64)
                    self._reap()
                elif key.fileobj is self._control:
                    self._read_control()
                elif key.fileobj is self._listener:
                    self._fork()
                elif isinstance(key.fileobj, socket.socket):
                    self._lose(key.fileobj)

    def _close_listener(self) -> None:
        """Let clients that come, and those that wait, start plain processes."""
        self._forget(self._listener)
        self._listener.close()

    def _read_control(self) -> None:
        names = self._control.recv(_MAX_NAMES_BYTES).decode().splitlines()
        if names:
            self._import(names, import_backend)
            return
        self._forget(self._control)
        self._close_listener()
        self._deadline = monotonic() + _ORPHAN_LIMIT_S

    def _import(self, names: Sequence[str], import_one: Callable[[str], object]) -> None:
        """Import modules or backends, and go on listening if forks can be made after that."""
        for name in names:
            try:
                with _printing_nothing():
                    import_one(name)
            except Exception as error:
                # Of whatever kind: the driver imports it as well, and reports this.
                logger.debug("the fork server does without %s: %s", name, error)
        gc.freeze()
        obstacle = obstacle_to_forks(max_threads=1)
        if obstacle is not None:
            logger.info("workers are started without a fork server: %s", obstacle)
            self._close_listener()

    def _fork(self) -> None:
        files: list[int] = []
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            logger.warning("the fork server has lost a client: %s", error)
            return
        try:
            client.settimeout(_REQUEST_LIMIT_S)
            pid = _checked_peer(client)
            request = _receive(client, files)
            forked = _fork_with_signals_waiting()
        except (OSError, ValueError) as error:
            # It has ended, is of another user, or there is no memory for a fork.
            logger.warning("a worker is started without the fork server: %s", error)
            for file in files:
                os.close(file)
            client.close()
            return
        if not forked:
            try:
                self._become(client, pid, files, request)
            finally:
                traceback.print_exc()
                os._exit(1)
        for file in files:
            os.close(file)
        self._clients[forked] = client
        try:
            client.sendall(forked.to_bytes(4, "big"))
        except OSError:
            self._lose(client)
        else:
            # A client sends nothing more: what can be read is its end.
            self._selector.register(client, selectors.EVENT_READ)

    def _become(
        self, client: socket.socket, pid: int, files: Sequence[int], request: dict[str, Any]
    ) -> NoReturn:
        """Be, in the fork, the process that the client stands for."""
        _end_with_parent(self._pid)
        # Ray ends the process group of a worker that has died.
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The fork has copies of all that the server holds, and is no end of these connections.
        self._selector.close()
        own = (self._listener, self._control, self._signals, self._wakes)
        for each in (client, *own, *self._clients.values()):
            each.close()
        # None has a number that another is to have.
        moved = [fcntl(file, F_DUPFD_CLOEXEC, _NUM_FILES) for file in files]
        for file in files:
            os.close(file)
        for number, file in enumerate(moved):
            os.dup2(file, number)
            os.close(file)
        _take_over(pid, request)
        gc.set_threshold(*self._gc_threshold)
        gc.enable()
        _run_script(request["arguments"])

    def _reap(self) -> None:
        """Report the ends of forks."""
        while True:
            try:
                forked, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not forked:
                return
            client = self._clients.pop(forked, None)
            if client is None:  # what an import has started
                continue
            code = os.waitstatus_to_exitcode(status)
            try:
                client.sendall(code.to_bytes(4, "big", signed=True))
            except OSError:
                logger.debug("the client of the fork %d has ended before it", forked)
            self._forget(client)
            client.close()

    def _lose(self, client: socket.socket) -> None:
        """End the fork of a client that has ended, as by SIGKILL, which it cannot pass on."""
        for forked, other in self._clients.items():
            if other is client:
                os.kill(forked, signal.SIGKILL)
                self._forget(client)

    def _forget(self, source: socket.socket) -> None:
        # Closed ones have no number; others may never have been looked at.
        if source.fileno() >= 0 and source in self._selector.get_map():
            self._selector.unregister(source)


def _fork_with_signals_waiting() -> int:
    """Fork; what is sent to the fork waits until `_take_over` has set its signals.

    The server ignores them, and the client passes them on as soon as it knows the fork.
    """
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    forked = -1
    try:
        forked = os.fork()
    finally:
        if forked:
            signal.pthread_sigmask(signal.SIG_SETMASK, kept)
    return forked


@contextlib.contextmanager
def _printing_nothing() -> Iterator[None]:
    """Keep what libraries print to their importers off the driver's terminal.

    Not by other objects in `sys`: loggers would keep these.
    """
    flush_standard_files()
    with open(os.devnull, "w") as nothing, contextlib.ExitStack() as restoring:
        for number in (1, 2):
            kept = os.dup(number)
            restoring.callback(os.close, kept)
            restoring.callback(os.dup2, kept, number)
            os.dup2(nothing.fileno(), number)
        restoring.callback(flush_standard_files)
        yield


def obstacle_to_forks(*, max_threads: int | None = None) -> str | None:
    """Return why forks of this process could not be workers; None if they can.

    Args:
        max_threads: Threads of any library that there may be. None: threads of Python alone count.
    """
    if threading.active_count() > 1:
        return f"{threading.active_count()} threads run"
    num_threads = len(os.listdir("/proc/self/task"))
    if max_threads is not None and num_threads > max_threads:
        return f"{num_threads} threads of libraries run"
    if None in (sys.stdin, sys.stdout, sys.stderr):
        # Sockets would get its number.
        return "a standard file is closed"
    if "ray" in sys.modules:
        return "Ray has been imported, and has read the environment"
    if _has_used_cuda():
        return "CUDA has been initialised or has counted its devices, or no fork could tell"
    return None


def _has_used_cuda() -> bool:
    """Return whether this process has initialised CUDA's driver, which is of no use in a fork then.

    torch remembers that it has, also where it has counted devices alone, but shows it in forks. Of
    other libraries the device file that CUDA opens tells.
    """
    files = Path("/proc/self/fd")
    for number in os.listdir(files):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            if os.readlink(files / number) == "/dev/nvidia-uvm":
                return True
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None:
        return False
    try:
        forked = fork_quietly()
        if not forked:
            os._exit(int(cuda._is_in_bad_fork()))
        return os.waitpid(forked, 0)[1] != 0
    except OSError:
        # No process can be had, or SIGCHLD is ignored, which leaves no status: it may have.
        return True


def fork_quietly() -> int:
    """Fork, without Python's warning of threads: OpenBLAS has some, and ends them before a fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _end_with_parent(parent: int) -> None:
    """Have the kernel end this process, which was just forked, with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _checked_peer(client: socket.socket) -> int:
    """Return a client's process id.

    Raises:
        ValueError: It is another user's.
    """
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = array.array("i", credentials)
    if user != os.getuid():
        raise ValueError(f"the user of a client is {user}, not {os.getuid()}")
    return pid


def _receive(client: socket.socket, files: list[int]) -> dict[str, Any]:
    """Return a client's request.

    Args:
        client: The connection.
        files: Gets the client's standard files, for the caller to close after an error as well.

    Raises:
        ValueError: It is cut off, or no JSON.
        OSError: The client has ended, or sends nothing.
    """
    received = array.array("i")
    size, ancillary, _, _ = client.recvmsg(4, socket.CMSG_LEN(_NUM_FILES * received.itemsize))
    for _, _, data in ancillary:
        received.frombytes(data)
    files.extend(received)
    wanted = int.from_bytes(size, "big")
    request = bytearray()
    while len(request) < wanted:
        part = client.recv(wanted - len(request))
        if not part:
            break
        request += part
    if len(files) != _NUM_FILES or not wanted or len(request) < wanted:
        raise ValueError(f"a client sent {len(request)} bytes of {wanted}, and {len(files)} files")
    return json.loads(bytes(request))


def _take_over(pid: int, request: dict[str, Any]) -> None:
    """Take over what a process inherits from the one that starts it, from a client."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.umask(request["umask"])
    os.nice(max(0, request["niceness"] - os.nice(0)))
    os.sched_setaffinity(0, os.sched_getaffinity(pid))
    for name in filter(lambda each: each.startswith("RLIMIT_"), dir(resource)):
        limit = getattr(resource, name)
        # Of a limit that the kernel does not have, or that was raised by the superuser.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, resource.prlimit(pid, limit))
    for number in SIGNALS:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    try:
        # Ray has the kernel end its workers first where memory runs out.
        score = Path(f"/proc/{pid}/oom_score_adj").read_text()
        Path("/proc/self/oom_score_adj").write_text(score)
    except OSError as error:
        logger.debug("oom_score_adj stays as it is: %s", error)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # Forks would draw the same numbers. Python's own generator is seeded anew by itself.
        numpy_random.seed()


def _run_script(arguments: Sequence[str]) -> NoReturn:
    """Run a script as `python SCRIPT ARGUMENTS` does, and end the process as that ends."""
    sys.argv = list(arguments)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(arguments[0]).parent)
    status = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    _leave(status)


def _leave(status: int) -> NoReturn:
    """End a fork with Python's own last steps, but not with those of the stack that it is on."""
    try:
        # In Python's order, as `multiprocessing` takes them for its forks.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        flush_standard_files()
    finally:
        os._exit(status)


def flush_standard_files() -> None:
    """Write what is buffered."""
    for file in (sys.stdout, sys.stderr):
        file.flush()
