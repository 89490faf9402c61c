"""The engine in a real vLLM, against plain transformers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.needs("rl-refit[vllm]")]

CASES = [
    ("shm", "tied", 1),
    ("golden", "tied", 1),
    ("collective", "untied", 1),
    ("shm", "untied", 2),
]
SCRIPT = Path(__file__).with_name("vllm_refits.py")


@pytest.mark.parametrize(("transport", "ties", "ranks"), CASES)
def test_a_real_engine_follows_the_trainer(transport, ties, ranks, tmp_path):
    pytest.importorskip("vllm")
    # A process of its own, as an engine does not give back all that it takes.
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), transport, ties, str(ranks), str(tmp_path / "model")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "all refits are as they should be" in done.stdout
