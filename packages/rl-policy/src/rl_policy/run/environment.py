"""What a run ran on, `environment.json`, and how it ended, `status.json`."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from rl_policy.run.directory import RunDirectory, write_durably

State = Literal["running", "finished", "failed", "interrupted"]

_PACKAGES = (
    "rl-policy",
    "rl-interfaces",
    "rl-batched-data",
    "rl-refit",
    "rl-dtensor-worker",
    "rl-megatron-worker",
    "torch",
    "transformers",
    "ray",
    "vllm",
    "megatron-core",
    "peft",
    "numpy",
)


def describe_environment() -> dict[str, Any]:
    """Return versions and devices of the driver's machine, plain values by name."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = {name: _version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": names,
        "cuda": torch.version.cuda,
        **{name: value for name, value in found.items() if value is not None},
    }


def record_environment(path: Path) -> None:
    """Write what `describe_environment` returns; a resumed run replaces it."""
    write_durably(path, json.dumps(describe_environment(), indent=1) + "\n")


@contextmanager
def recorded_status(path: Path) -> Iterator[None]:
    """Keep the state of a run in a file for as long as the block runs, and how it ended."""
    _write_status(path, "running")
    try:
        yield
    except KeyboardInterrupt:
        _write_status(path, "interrupted")
        raise
    except BaseException:
        _write_status(path, "failed")
        raise
    _write_status(path, "finished")


def state_of(directory: RunDirectory) -> str:
    """Return the state of a run: `finished`, `failed`, `interrupted`, `running` or `killed`.

    It is `killed` where its process on this machine is gone without a word, and `finished` for a
    run before there was a state, if its final model is there.
    """
    if not directory.status.exists():
        return "finished" if directory.final.is_dir() else "running"
    status = json.loads(directory.status.read_text(encoding="utf-8"))
    if status["state"] != "running":
        return status["state"]
    is_here = status["host"] == socket.gethostname()
    return "killed" if is_here and not _is_alive(status["pid"]) else "running"


def _write_status(path: Path, state: State) -> None:
    status = {"state": state, "host": socket.gethostname(), "pid": os.getpid()}
    write_durably(path, json.dumps(status) + "\n")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
