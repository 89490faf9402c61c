"""The process that Ray's workers are forked from, and what a fork takes over from its client."""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from rl_policy.backends import import_backend

logger = logging.getLogger(__name__)

_NUM_FILES = 3
_REQUEST_LIMIT_S = 10.0
_MAX_NAMES_BYTES = 4096
# From `sys/prctl.h`.
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """Imports backends, forks a process for each client, and reports how that has ended.

    Args:
        listener: The socket that clients connect to.
        control: Has names of backends to import, a line each, and ends with the driver.
        modules: Names of modules to import before them.
        gc_threshold: That of the garbage collector in forks.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        control: socket.socket,
        modules: Sequence[str],
        gc_threshold: Sequence[int],
    ) -> None:
        self.is_orphan = False
        """Whether the driver has ended."""
        self._pid = os.getpid()
        self._listener = listener
        self._control = control
        self._modules = modules
        self._gc_threshold = gc_threshold
        self._clients: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        # A signal that arrives between two looks is read from here at the second.
        self._signals, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)

    def serve(self) -> None:
        """Serve until the driver ends; the kernel then ends what has been forked.

        Clients wait while backends are imported. If these leave what cannot be forked, they start
        plain processes.
        """
        # It would go through modules, none of them garbage, and copy each page that it looks at.
        gc.disable()
        for name in self._modules:
            import_module(name)
        gc.freeze()
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for source in (self._listener, self._signals, self._control):
            self._selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._signals:
                    self._signals.recv(64)
                    self._reap()
                elif key.fileobj is self._control:
                    if not self._import():
                        return
                elif key.fileobj is self._listener:
                    self._fork()
                elif isinstance(key.fileobj, socket.socket):
                    self._lose(key.fileobj)

    def _import(self) -> bool:
        """Import the backends that are asked for; return whether there is more to do."""
        names = self._control.recv(_MAX_NAMES_BYTES).decode().splitlines()
        if not names:
            self.is_orphan = True
            return False
        for name in names:
            try:
                import_backend(name)
            except Exception as error:
                # Of whatever kind: the driver imports it as well, and reports this.
                logger.debug("the fork server does without %s: %s", name, error)
        gc.freeze()
        obstacle = obstacle_to_forks()
        if obstacle is None and _fork_lacks_cuda():
            obstacle = f"an import of {', '.join(names)} has looked for CUDA"
        if obstacle is not None:
            logger.info("workers are started without a fork server: %s", obstacle)
        return obstacle is None

    def _fork(self) -> None:
        client, _ = self._listener.accept()
        client.settimeout(_REQUEST_LIMIT_S)
        try:
            pid, files, request = _receive(client)
        except (OSError, ValueError) as error:
            # It has ended, or its program's user is another.
            logger.warning("the fork server refuses a client: %s", error)
            client.close()
            return
        forked = os.fork()
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
        end_with_parent(self._pid)
        # Ray ends the process group of a worker that has died.
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The fork has copies of all that the server holds, and is no end of these connections.
        self._selector.close()
        own = (self._listener, self._control, self._signals, self._wakes)
        for each in (client, *own, *self._clients.values()):
            each.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        _take_over(pid, request)
        gc.set_threshold(*self._gc_threshold)
        gc.enable()
        run_program(request["arguments"])

    def _reap(self) -> None:
        """Report the ends of forks."""
        while self._clients:
            forked, status = os.waitpid(-1, os.WNOHANG)
            if not forked:
                return
            client = self._clients.pop(forked)
            code = os.waitstatus_to_exitcode(status)
            try:
                client.sendall(code.to_bytes(4, "big", signed=True))
            except OSError:
                logger.debug("the client of the fork %d has ended before it", forked)
            if client in self._selector.get_map():
                self._selector.unregister(client)
            client.close()

    def _lose(self, client: socket.socket) -> None:
        """End the fork of a client that has ended, as by SIGKILL, which it cannot pass on."""
        for forked, other in self._clients.items():
            if other is client:
                os.kill(forked, signal.SIGKILL)
        if client in self._selector.get_map():
            self._selector.unregister(client)


def obstacle_to_forks() -> str | None:
    """Return why this process cannot be forked; None if it can be."""
    if threading.active_count() > 1:
        return f"{threading.active_count()} threads run"
    if "ray" in sys.modules:
        return "Ray has been imported, and has read the environment"
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and (cuda.is_initialized() or cuda._is_in_bad_fork()):
        return "CUDA has been initialised"
    return None


def _fork_lacks_cuda() -> bool:
    """Return whether a fork of this process could not initialise CUDA.

    CUDA's driver, once it has counted the devices, is of no use in a fork. torch remembers that
    where it counts, but shows it in forks alone.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None:
        return False
    forked = os.fork()
    if not forked:
        os._exit(int(cuda._is_in_bad_fork()))
    return os.waitpid(forked, 0)[1] != 0


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process, which was just forked, with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _receive(client: socket.socket) -> tuple[int, list[int], dict[str, Any]]:
    """Return a client's process id, its standard files and its request."""
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = array.array("i", credentials)
    if user != os.getuid():
        raise ValueError(f"its user is {user}, not {os.getuid()}")
    files = array.array("i")
    size, ancillary, _, _ = client.recvmsg(4, socket.CMSG_LEN(_NUM_FILES * files.itemsize))
    for _, _, data in ancillary:
        files.frombytes(data)
    wanted = int.from_bytes(size, "big")
    request = bytearray()
    while len(request) < wanted:
        part = client.recv(wanted - len(request))
        if not part:
            break
        request += part
    if len(files) != _NUM_FILES or not wanted or len(request) < wanted:
        for file in files:
            os.close(file)
        raise ValueError(f"{len(request)} bytes of {wanted}, with {len(files)} files")
    return pid, list(files), json.loads(bytes(request))


def _take_over(pid: int, request: dict[str, Any]) -> None:
    """Take over what a process inherits from the one that starts it."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.nice(max(0, request["niceness"] - os.nice(0)))
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    try:
        # Ray has the kernel end its workers first where memory runs out.
        score = Path(f"/proc/{pid}/oom_score_adj").read_text()
        Path("/proc/self/oom_score_adj").write_text(score)
    except OSError as error:
        logger.debug("oom_score_adj stays as it is: %s", error)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # Forks would draw the same numbers. Python's own generator is seeded anew by itself.
        numpy.random.seed()


def run_program(arguments: Sequence[str]) -> NoReturn:
    """Run a script as `python SCRIPT ARGUMENTS` does, and end the process as that ends."""
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).parent)
    status = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    leave(status)


def leave(status: int) -> NoReturn:
    """End a forked process, without going back to what the process it was forked from does."""
    try:
        # Python's own last steps, in its order, as `multiprocessing` takes them for its forks.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
