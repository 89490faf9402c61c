"""What this machine lacks for a run: every part is tried, with a limit of time.

Packages are imported, ranks exchange a tensor and Ray runs a task, each in a process of its own:
one that crashes or hangs is a line like any other.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from rl_policy.ray.address import check_running_ray

PARTS = ("versions", "devices", "packages", "limits", "ranks", "ray")
"""What is looked at, in this order."""

_OURS = (
    "rl-interfaces",
    "rl-batched-data",
    "rl-refit",
    "rl-dtensor-worker",
    "rl-megatron-worker",
    "rl-policy",
)
# Import name, the extra of rl-policy that brings it, and what a run lacks without it.
_PACKAGES = (
    ("rl_dtensor_worker", "dtensor", "the backend dtensor"),
    ("rl_megatron_worker", "megatron", "the backend megatron"),
    ("vllm", "vllm", "inference engines"),
    ("peft", "lora", "merging adapters"),
    ("datasets", "datasets", "Parquet and datasets of Hugging Face"),
)
# An import of vLLM, or a start of Ray, on a machine that is busy.
_IMPORT_LIMIT_S = 600.0
_RANKS_LIMIT_S = 600.0
_RAY_LIMIT_S = 600.0
# For some ranks; Ray's own documentation asks for 65536, for many.
_LEAST_OPEN_FILES = 4096
# Of /dev/shm: batches of a small run, and a bucket of a refit.
_LEAST_SHM = 2 * 2**30
_LEAST_DISK = 10 * 2**30

# Two ranks that add up a tensor, by NCCL where each has a GPU.
_RANKS = """
import datetime, pathlib, torch
from torch import distributed, multiprocessing

def run(rank, backend):
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    distributed.init_process_group(
        backend,
        init_method=f"file://{pathlib.Path(__file__).with_name('rendezvous')}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=300),
    )
    tensor = torch.full((1024,), float(rank + 1), device=device)
    distributed.all_reduce(tensor)
    assert tensor.eq(3).all()
    distributed.destroy_process_group()

if __name__ == "__main__":
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    multiprocessing.spawn(run, args=(backend,), nprocs=2)
    print(backend)
"""
_RAY = """
import ray
from rl_policy.ray.cluster import SESSION
SESSION.enter(1, num_cpus=1)
nodes = [node for node in ray.nodes() if node["Alive"]]
assert ray.get(ray.remote(num_cpus=1)(lambda: 7).remote(), timeout=300) == 7
kind = "started here" if SESSION.is_local else "running already"
print(f"{len(nodes)} nodes, {ray.cluster_resources().get('CPU', 0):.0f} CPUs, {kind}")
SESSION.leave(1)
"""
_DEVICES = """
import torch
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        print(f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check has found.

    Attributes:
        name: What was checked.
        text: What it is like.
        remedy: What to do; None where nothing has to be done.
        is_optional: Whether runs work without it.
    """

    name: str
    text: str
    remedy: str | None = None
    is_optional: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether nothing has to be done for a run."""
        return self.remedy is None or self.is_optional

    def __str__(self) -> str:
        """Return a line, and what to do in a second one."""
        mark = "ok  " if self.remedy is None else ("    " if self.is_optional else "FAIL")
        line = f"{mark}  {self.name}: {self.text}"
        return line if self.remedy is None else f"{line}\n      -> {self.remedy}"


def findings(parts: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield what is found, part by part.

    Args:
        parts: Of `PARTS`; none are all, which takes about a minute.

    Raises:
        ValueError: A part is unknown.
    """
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"{part!r} is no part: there are {', '.join(PARTS)}")
    checks = {
        "versions": _check_versions,
        "devices": _check_devices,
        "packages": _check_packages,
        "limits": _check_limits,
        "ranks": _check_ranks,
        "ray": _check_ray,
    }
    for part in parts or PARTS:
        yield from checks[part]()


def _check_versions() -> Iterator[Finding]:
    """Check each package of ours that is installed, and what it requires."""
    yield Finding(name="python", text=f"{sys.version.split()[0]} in {sys.prefix}")
    for name in _OURS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        wrong = [fault for line in requires(name) or () if (fault := _broken(line))]
        remedy = f'pip install "{name}=={found}" again brings what it requires' if wrong else None
        yield Finding(name=name, text="; ".join([found, *wrong]), remedy=remedy)
    for name in ("torch", "transformers", "ray"):
        yield Finding(name=name, text=version(name))


def _broken(line: str) -> str:
    """Return what is wrong with a requirement of a package, the extras' aside; empty: nothing."""
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return ""
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(found, prereleases=True):
        return ""
    return f"{requirement.name} {found} is not {requirement.specifier}"


def _check_devices() -> Iterator[Finding]:
    code, lines = _run(_DEVICES, limit_s=_IMPORT_LIMIT_S)
    if code:
        yield Finding(name="devices", text=lines[-1], remedy="reinstall torch")
    elif lines:
        for index, line in enumerate(lines):
            yield Finding(name=f"device {index}", text=line)
    elif shutil.which("nvidia-smi"):
        yield Finding(
            name="devices",
            text="there is nvidia-smi, and torch sees no GPU",
            remedy="install torch's build for the CUDA version that nvidia-smi shows, and look at "
            "CUDA_VISIBLE_DEVICES",
        )
    else:
        yield Finding(name="devices", text=f"{os.cpu_count()} cores, no GPU")


def _check_packages() -> Iterator[Finding]:
    for module, extra, lack in _PACKAGES:
        code, lines = _run(
            "import importlib.util, sys\n"
            f"sys.exit(0 if importlib.util.find_spec({module!r}) else 77)",
            limit_s=_IMPORT_LIMIT_S,
        )
        install = f'for {lack}: pip install "rl-policy[{extra}]"'
        if code == 77:
            yield Finding(name=module, text="not installed", remedy=install, is_optional=True)
            continue
        code, lines = _run(f"import {module}", limit_s=_IMPORT_LIMIT_S)
        if code:
            yield Finding(name=module, text=f"cannot be imported: {lines[-1]}", remedy=install)
        else:
            yield Finding(name=module, text="can be imported")


def _check_limits() -> Iterator[Finding]:
    """Check what the operating system grants."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding(
        name="open files",
        text=f"{files} at most",
        remedy=None
        if files >= _LEAST_OPEN_FILES or files == resource.RLIM_INFINITY
        else "ulimit -n 65536: Ray opens some for each worker and each call",
    )
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield _room("shared memory", shared, _LEAST_SHM, "docker run --shm-size=8g, or larger")
    for name, path in (
        ("runs", Path.cwd()),
        ("temporary files", Path(tempfile.gettempdir())),
        ("models", _existing(Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser())),
    ):
        yield _room(name, path, _LEAST_DISK, f"free some, or use another disk than that of {path}")


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def _room(name: str, path: Path, least: int, remedy: str) -> Finding:
    free = shutil.disk_usage(path).free
    text = f"{free / 2**30:.1f} GiB free in {path}"
    if not os.access(path, os.W_OK):
        return Finding(name=name, text=f"{path} is not writable", remedy="choose another directory")
    return Finding(name=name, text=text, remedy=None if free >= least else remedy)


def _check_ranks() -> Iterator[Finding]:
    code, lines = _run(_RANKS, limit_s=_RANKS_LIMIT_S)
    if code:
        yield Finding(
            name="ranks",
            text=f"two processes do not add up a tensor: {lines[-1]}",
            remedy="look at GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and at a firewall between "
            "processes of this machine; NCCL_DEBUG=INFO says more",
        )
    else:
        yield Finding(name="ranks", text=f"two processes add up a tensor by {lines[-1]}")


def _check_ray() -> Iterator[Finding]:
    try:
        check_running_ray()
    except ValueError as error:
        fault, _, remedy = str(error).rpartition(": ")
        yield Finding(name="ray", text=fault, remedy=remedy)
        return
    code, lines = _run(_RAY, limit_s=_RAY_LIMIT_S)
    if code:
        yield Finding(
            name="ray",
            text=f"runs no task: {lines[-1]}",
            remedy=f"`ray status` says more, and so do the logs in {_ray_logs()}",
        )
    else:
        yield Finding(name="ray", text=lines[-1])


def _ray_logs() -> Path:
    return Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray/session_latest/logs")


def _run(code: str, *, limit_s: float) -> tuple[int, list[str]]:
    """Return the status of a program and the lines that it prints, the last one of its error."""
    with tempfile.TemporaryDirectory() as folder:
        # A file, as ranks that are spawned import the program.
        path = Path(folder, "check.py")
        path.write_text(code, encoding="utf-8")
        with subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.communicate()
                return 1, [f"it took more than {limit_s:.0f} s"]
    if process.returncode:
        said = [line for line in err.splitlines() if line.strip()]
        return process.returncode, said[-1:] or [f"its status is {process.returncode}"]
    return 0, out.splitlines()
