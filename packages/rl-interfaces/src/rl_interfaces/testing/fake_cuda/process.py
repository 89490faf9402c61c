"""Run a function in a process of its own that has loaded the no-op backend before torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LIMIT_S = 900.0


def run_on_fake_cuda(
    target: str, *, path: Sequence[str | Path] = (), limit_s: float = _LIMIT_S, **kwargs: Any
) -> Any:
    """Return `target(**kwargs)` of a new process; arguments and result travel as JSON.

    Args:
        target: `module:function`.
        path: Folders from which the process can import as well.
        limit_s: After this many seconds the process is ended.
        kwargs: The arguments.

    Raises:
        AssertionError: The function raised; the message has the end of its output.
        subprocess.TimeoutExpired: It took longer.
    """
    folders = [str(folder) for folder in path]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        finished = subprocess.run(
            [sys.executable, "-m", "rl_interfaces.testing.fake_cuda", target, str(result)],
            input=json.dumps(kwargs),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if finished.returncode != 0:
            raise AssertionError(f"{target} failed:\n{finished.stdout[-6000:]}")
        return json.loads(result.read_text())
