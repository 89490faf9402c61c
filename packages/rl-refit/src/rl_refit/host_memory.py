"""How much of the host's memory a process may still take."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_KIB = 1024


def available_bytes(*, meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the bytes that can be allocated without swapping, within the container's limit.

    Args:
        meminfo: The kernel's report of the machine's memory.
        cgroup: The directory of this process's control group, version 2; it may have no limit.

    Raises:
        RuntimeError: The kernel does not report its available memory.
    """
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * _KIB
            break
    else:
        raise RuntimeError(f"{meminfo} has no line MemAvailable")
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        held = int(used.read_text()) - _reclaimable_bytes(cgroup / "memory.stat")
        available = min(available, int(text) - held)
    return max(available, 0)


def _reclaimable_bytes(stat: Path) -> int:
    """Return the bytes of cached files that the kernel drops first, such as a checkpoint's.

    `memory.current` counts them as used, while `MemAvailable` counts them as available.
    """
    if not stat.exists():
        return 0
    counts = dict(line.split() for line in stat.read_text().splitlines())
    return int(counts.get("inactive_file", 0))
