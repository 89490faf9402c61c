"""End the agents of a Ray whose driver has ended: a program, run by path, with Ray's psutil.

    python -I watcher.py '[[PID, CREATED], ...]' FOLDER-OF-PSUTIL

A driver that is killed takes Ray's head and node with it, as these ask the kernel for that. But the
agents are children of the node, and report its death to the head, which is gone as well, for a
minute. This program's standard input ends with the driver, which alone has the other end.
"""

from __future__ import annotations

import json
import sys

_GRACE_S = 3.0


def end(agents: list[tuple[int, float]]) -> None:
    """End those processes that are still the ones of that number and time of creation."""
    import psutil

    alive: list[psutil.Process] = []
    for pid, created in agents:
        try:
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.terminate()
                alive.append(process)
        except psutil.NoSuchProcess:
            continue  # it has ended by itself, as in every orderly end
    _, alive = psutil.wait_procs(alive, timeout=_GRACE_S)
    for process in alive:
        process.kill()


def main() -> None:
    """Wait for the end of the standard input, and then end the agents."""
    agents, folder = sys.argv[1:]
    sys.path.insert(0, folder)
    sys.stdin.buffer.read()
    end([(pid, created) for pid, created in json.loads(agents)])


if __name__ == "__main__":
    main()
