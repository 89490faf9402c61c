"""Workers as forks of one process, for a Ray that is started here: they share what they import.

A rank takes three seconds of a processor to import torch, transformers and its backend, longer than
all the rest of its start with a small model. The driver has imported the first two: it forks a
server, which imports the backend while the driver starts Ray, and forks the ranks. Pages of memory
that nobody writes to are shared.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from rl_policy.ray.fork_server import ForkServer, leave, obstacle_to_forks

logger = logging.getLogger(__name__)

# The kernel's limit of a socket's path is 108 bytes.
_MAX_FOLDER_BYTES = 90
_NVML_SETTING = "PYTORCH_NVML_BASED_CUDA_CHECK"


class _Forks:
    """The fork server of this process."""

    def __init__(self) -> None:
        self.python: str | None = None
        """What Ray starts workers with; None: there is no server."""
        self.control: socket.socket | None = None
        """The driver's end: names of backends to import, a line each. Its end is the server's."""


_FORKS = _Forks()


@contextmanager
def forked_workers(
    shared: Sequence[str], ahead: Sequence[str], *, gc_threshold: Sequence[int]
) -> Iterator[None]:
    """Let a Ray that is started within the context fork its workers from a copy of this process.

    Where this process cannot be forked (it runs threads, has imported Ray, or has initialised CUDA)
    they are started as ever, and so they are outside Linux.

    Args:
        shared: Names of modules that both need: they are imported before the copy is made.
        ahead: Names of modules that the copy imports at once, while this process goes on.
        gc_threshold: That of the garbage collector in workers.
    """
    with _counting_devices_by_nvml():
        for name in shared:
            import_module(name)
    obstacle = "forks are for Linux" if sys.platform != "linux" else obstacle_to_forks()
    if obstacle is not None:
        logger.debug("workers are started without a fork server: %s", obstacle)
        yield
        return
    with _folder() as folder:
        client = _write_client(folder)
        if not os.access(client, os.X_OK):
            logger.debug("workers are started without a fork server: %s is not executable", client)
            yield
            return
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "server"))
            listener.listen(128)
            server, control = _fork_server(
                listener, folder, modules=ahead, gc_threshold=gc_threshold
            )
        _FORKS.python, _FORKS.control = str(client), control
        try:
            yield
        finally:
            _FORKS.python = _FORKS.control = None
            control.close()
            # It may be importing. What it has forked ends with it, and Ray has ended before.
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)


def import_ahead(backends: Sequence[str]) -> None:
    """Have the fork server import training backends, if there is one, while this process goes on.

    Args:
        backends: Their names.
    """
    if _FORKS.control is None:
        return
    try:
        _FORKS.control.sendall("".join(f"{name}\n" for name in backends).encode())
    except BrokenPipeError:
        logger.debug("the fork server has ended: workers start as plain processes")


def stop_forking() -> None:
    """Let a Ray that is started from now on start its workers as plain processes."""
    _FORKS.python = None


@contextmanager
def forking_executable() -> Iterator[None]:
    """Let a Ray that is started inside start its workers by the fork server, if there is one.

    Ray starts them with the interpreter that it finds itself in, and has no argument for another
    that would not first start a plain one.
    """
    executable = sys.executable
    sys.executable = _FORKS.python or executable
    try:
        yield
    finally:
        sys.executable = executable


@contextmanager
def _counting_devices_by_nvml() -> Iterator[None]:
    """Let torch count GPUs without CUDA's driver, which no fork could use after that."""
    before = os.environ.get(_NVML_SETTING)
    os.environ.setdefault(_NVML_SETTING, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NVML_SETTING]


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a folder of this user alone, whose path is short enough for a socket."""
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) > _MAX_FOLDER_BYTES:
        place = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="rl-fork-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_client(folder: Path) -> Path:
    """Write a program that takes the arguments of a Python."""
    client = folder / "python"
    command = [sys.executable, "-IS", str(Path(__file__).with_name("fork_client.py"))]
    command.append(str(folder / "server"))
    client.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    client.chmod(0o700)
    return client


def _fork_server(
    listener: socket.socket, folder: Path, *, modules: Sequence[str], gc_threshold: Sequence[int]
) -> tuple[int, socket.socket]:
    """Return the process id of a server that was forked from this process, and its control."""
    # What is buffered would be written by both.
    sys.stdout.flush()
    sys.stderr.flush()
    control, received = socket.socketpair()
    with warnings.catch_warnings():
        # From Python 3.12 on, of threads: OpenBLAS has some, and ends its own before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        server = os.fork()
    if not server:
        control.close()
        made = ForkServer(listener, control=received, modules=modules, gc_threshold=gc_threshold)
        _be_server(made, folder)
    received.close()
    return server, control


def _be_server(server: ForkServer, folder: Path) -> NoReturn:
    """Serve, in the fork, until the driver ends."""
    try:
        # Functions that the driver has registered are for its own end.
        atexit._clear()
        # A Ctrl-C in a terminal is for the driver, which ends the server.
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        with _counting_devices_by_nvml():
            server.serve()
        if server.is_orphan:
            shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        # Clients that the server does not answer start plain processes.
        traceback.print_exc()
    finally:
        leave(0)
