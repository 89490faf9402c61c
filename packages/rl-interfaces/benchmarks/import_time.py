"""Measure what `import rl_interfaces` costs over the bare interpreter, in milliseconds."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

LIMIT_MS = 50.0


def start_ms(code: str) -> float:
    """Return how long an isolated interpreter takes to start, run `code` and end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
    return (time.perf_counter() - start) * 1e3


def main() -> int:
    """Print the medians; the exit status is 1 where the import costs more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30, help="interpreters started for each figure")
    runs = parser.parse_args().runs
    start_ms("import rl_interfaces")  # writes the byte code
    pairs = [(start_ms("pass"), start_ms("import rl_interfaces")) for _ in range(runs)]
    bare, loaded = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"bare interpreter {bare:.1f} ms, with rl_interfaces {loaded:.1f} ms")
    print(f"the import costs {loaded - bare:.1f} ms, the limit is {LIMIT_MS:.0f} ms ({runs} runs)")
    return 0 if loaded - bare <= LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
