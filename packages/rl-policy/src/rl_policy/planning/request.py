"""`plan_memory`: asks a process of its own for a plan, as the trace changes torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rl_policy.planning.result import MemoryPlan

# Ten times what a model of 70 billion parameters takes on a quiet machine.
_LIMIT_S = 600.0
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
DEFAULT_RESERVE = 3 * 2**30
"""Bytes of a device that no tensor has: the CUDA context and the kernels of every process on it,
NCCL's buffers, and what the caching allocator cannot use as it is in pieces. About 1 GiB for a
process, and rather more where an engine shares the device."""


def parse_bytes(text: str, *, key: str) -> int:
    """Return a size with a unit in bytes.

    Example:
        parse_bytes("80GB", key="--memory") -> 80_000_000_000
        parse_bytes("1.5GiB", key="--memory") -> 1_610_612_736

    Raises:
        ValueError: It has no unit, or is not positive; names the key.
    """
    match = _SIZE.fullmatch(text.strip())
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(
            f"{key}={text!r} must be a number with a unit, one of {', '.join(_UNITS)}: for "
            f"example {key}=80GB"
        )
    size = int(float(match[1]) * units[match[2].lower()])
    if size <= 0:
        raise ValueError(f"{key}={text!r} must be positive")
    return size


def plan_memory(
    settings: Sequence[str] = (),
    *,
    gpus: int,
    memory: str,
    recipe: str = "grpo",
    config: Path | None = None,
    gpus_per_node: int = 8,
    reserve: str | None = None,
    all_layers: bool = False,
) -> MemoryPlan:
    """Return what each rank of a run holds in each phase of a step.

    A process of its own runs the worker on a device that allocates nothing; there need not be a
    GPU, nor the model's weights.

    Args:
        settings: As on the command line: `section.key=value`.
        gpus: Devices of the policy.
        memory: Of each device, with a unit: `80GB`.
        recipe: The command that is planned.
        config: A YAML file with the configuration.
        gpus_per_node: Devices of a node.
        reserve: What is left to the driver, with a unit; None: `DEFAULT_RESERVE`.
        all_layers: Trace all layers of the model, not two shallow ones.

    Raises:
        ValueError: The settings cannot be run, or a size cannot be read; one line that names key,
            value and way out.
        RuntimeError: The trace failed.
    """
    device_bytes = parse_bytes(memory, key="--memory")
    reserve_bytes = DEFAULT_RESERVE if reserve is None else parse_bytes(reserve, key="--reserve")
    # The default is for a GPU, and a plan for the CPU needs none.
    if reserve is not None and reserve_bytes >= device_bytes:
        raise ValueError(
            f"--reserve={reserve} leaves nothing of --memory={memory}: give a smaller one"
        )
    request = {
        "settings": list(settings),
        "config": None if config is None else str(config),
        "recipe": recipe,
        "bundles": _bundles(gpus, gpus_per_node=gpus_per_node),
        "memory": device_bytes,
        "reserve": reserve_bytes,
        "all_layers": all_layers,
    }
    return MemoryPlan.from_json(_run(request))


def _bundles(gpus: int, *, gpus_per_node: int) -> list[int]:
    """Return the devices of each node. Example, 16 in nodes of 8: [8, 8]."""
    for key, value in (("--gpus", gpus), ("--gpus-per-node", gpus_per_node)):
        if value < 1:
            raise ValueError(f"{key}={value} must be at least 1")
    if gpus <= gpus_per_node:
        return [gpus]
    if gpus % gpus_per_node:
        raise ValueError(
            f"--gpus={gpus} is not a multiple of --gpus-per-node={gpus_per_node}: give whole "
            "nodes, or another --gpus-per-node"
        )
    return [gpus_per_node] * (gpus // gpus_per_node)


def _run(request: dict[str, object]) -> dict[str, object]:
    # Without a GPU, whose device the worker would take, and without a compiler of graphs.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "plan.json")
        command = [sys.executable, "-m", "rl_policy.planning", str(result)]
        try:
            finished = subprocess.run(
                command,
                input=json.dumps(request),
                env={**environment, "TMPDIR": scratch},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the plan took more than {_LIMIT_S:.0f} s") from error
        if not result.is_file():
            raise RuntimeError(
                f"the process of the plan ended with status {finished.returncode}: "
                f"{finished.stdout[-4000:]}"
            )
        answer = json.loads(result.read_text())
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer
