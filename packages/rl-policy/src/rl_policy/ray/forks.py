"""Workers as forks of one process, for a Ray that is started here: they share what they import.

A rank takes three seconds of a processor to import torch, transformers and its backend, longer than
all the rest of its start with a small model. The driver has imported the first two: it forks a
server, which imports the backend while the driver starts Ray, and forks the ranks. Pages of memory
that nobody writes to are shared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from rl_policy.ray.fork_server import (
    SIGNALS,
    ForkServer,
    flush_standard_files,
    fork_quietly,
    obstacle_to_forks,
)

logger = logging.getLogger(__name__)

_PREFIX, _ADDRESS = "rl-fork-", "server"
# Of a socket's path the kernel takes 107 bytes; `mkdtemp` adds eight to the prefix.
_MAX_PARENT_BYTES = 107 - len(f"/{_PREFIX}12345678/{_ADDRESS}")
_NVML_SETTING = "PYTORCH_NVML_BASED_CUDA_CHECK"
_PLAIN = "workers are started without a fork server: %s"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Server:
    """A fork server of this process."""

    pid: int
    folder: Path
    """Of this user alone: the server's socket, and the client."""
    control: socket.socket
    """Takes names of backends to import, a line each. To close it ends the server."""

    @property
    def python(self) -> str:
        """What Ray starts workers with."""
        return str(self.folder / "python")

    def end(self) -> None:
        """End the server, and remove what it has used. Idempotent."""
        self.control.close()
        # It may be importing. What it has forked ends with it, and Ray has ended before.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        # Who ignores SIGCHLD, which is inherited, is left no status.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        shutil.rmtree(self.folder, ignore_errors=True)


class _Current:
    """What Ray's workers are started with now."""

    server: _Server | None = None
    """None: plain processes."""


@contextlib.contextmanager
def forked_workers(
    shared: Sequence[str], ahead: Sequence[str], *, gc_threshold: Sequence[int]
) -> Iterator[None]:
    """Let a Ray that is started within the context fork its workers from a copy of this process.

    Workers are plain processes where this one cannot be forked, as it runs threads, has imported
    Ray, or has used CUDA; outside Linux; and where a socket or a process cannot be had.

    Args:
        shared: Names of modules that both need: they are imported before the copy is made.
        ahead: Names of modules that the copy imports at once, while this process goes on.
        gc_threshold: The garbage collector's threshold that workers get.
    """
    with _counting_devices_by_nvml():
        for name in shared:
            import_module(name)
    _Current.server = _start(ahead, gc_threshold)
    try:
        yield
    finally:
        stop_forking()


def import_ahead(backends: Sequence[str]) -> None:
    """Have the fork server import training backends, if there is one, while this process goes on.

    Args:
        backends: Their names.
    """
    if _Current.server is None:
        return
    try:
        _Current.server.control.sendall("".join(f"{name}\n" for name in backends).encode())
    except BrokenPipeError:
        logger.debug(_PLAIN, "it has ended")


def stop_forking() -> None:
    """End the fork server, if there is one: workers are plain processes from now on."""
    server, _Current.server = _Current.server, None
    if server is not None:
        server.end()


@contextlib.contextmanager
def forking_executable() -> Iterator[None]:
    """Let a Ray that is started inside start its workers by the fork server, if there is one.

    Ray starts them with the interpreter that it finds itself in, and has no argument for another
    that would not first start a plain one.
    """
    executable = sys.executable
    if _Current.server is not None:
        sys.executable = _Current.server.python
    try:
        yield
    finally:
        sys.executable = executable


@contextlib.contextmanager
def _counting_devices_by_nvml() -> Iterator[None]:
    """Let torch count GPUs without CUDA's driver, which no fork could use after that."""
    before = os.environ.get(_NVML_SETTING)
    os.environ.setdefault(_NVML_SETTING, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_NVML_SETTING, None)


def _start(modules: Sequence[str], gc_threshold: Sequence[int]) -> _Server | None:
    """Return a server that was forked from this process; None where there can be none."""
    obstacle = "forks are for Linux" if sys.platform != "linux" else obstacle_to_forks()
    if obstacle is not None:
        logger.debug(_PLAIN, obstacle)
        return None
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
        parent = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        _write_client(folder)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / _ADDRESS))
            listener.listen(128)
            return _fork_server(listener, folder, modules=modules, gc_threshold=gc_threshold)
    except OSError as error:
        # No place for a socket or a program, or no memory for a process.
        logger.debug(_PLAIN, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _write_client(folder: Path) -> None:
    """Write the program that Ray takes for its Python.

    Raises:
        OSError: Nothing can be written there, or run.
    """
    client = folder / "python"
    command = [sys.executable, "-IS", str(Path(__file__).with_name("fork_client.py"))]
    command.append(str(folder / _ADDRESS))
    client.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    client.chmod(0o700)
    if not os.access(client, os.X_OK):
        raise PermissionError(f"{folder.parent} is mounted noexec")


def _fork_server(
    listener: socket.socket, folder: Path, *, modules: Sequence[str], gc_threshold: Sequence[int]
) -> _Server:
    # What is buffered would be written by both.
    flush_standard_files()
    control, received = socket.socketpair()
    # A Ctrl-C at this moment would be raised in both, and the server go on as a second driver.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pid = fork_quietly()
        if not pid:
            make = partial(
                ForkServer, listener, control=received, modules=modules, gc_threshold=gc_threshold
            )
            _be_server(make, folder, control=control, blocked=blocked)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        received.close()
    return _Server(pid=pid, folder=folder, control=control)


def _be_server(
    make: Callable[[], ForkServer],
    folder: Path,
    *,
    control: socket.socket,
    blocked: Iterable[int],
) -> NoReturn:
    """Serve, in the fork, until the driver ends.

    Args:
        make: Makes the server, in here: a failure is not to unwind what the driver is in.
        folder: What is removed at the end.
        control: The driver's end.
        blocked: The signals that the driver had blocked.
    """
    try:
        control.close()
        # They are for the driver, which ends the server. It is no part of the driver's terminal.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.setsid()
        empty = os.open(os.devnull, os.O_RDONLY)
        if empty:
            os.dup2(empty, 0)
            os.close(empty)
        with _counting_devices_by_nvml():
            make().serve()
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        # Clients that the server does not answer start plain processes.
        traceback.print_exc()
    finally:
        # What runs at Python's end is for the driver's.
        flush_standard_files()
        os._exit(0)
