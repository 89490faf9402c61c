"""The engine in a real vLLM, against plain transformers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

# What the tests of rl-policy start processes with.
sys.path.append(str(Path(__file__).parents[2] / "rl-policy" / "tests"))

from forked_python import rank_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.needs("rl-refit[vllm]")]


@pytest.mark.parametrize(
    ("transports", "ties", "ranks"), [("shm,golden", "tied", 1), ("collective", "untied", 2)]
)
def test_a_real_engine_follows_the_trainer(transports, ties, ranks, tmp_path):
    run_script("vllm_refits.py", transports, ties, str(ranks), str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("transport", "ties", "ranks"), [("shm", "tied", 1), ("collective", "untied", 2)]
)
def test_a_real_engine_applies_adapters(transport, ties, ranks, tmp_path):
    run_script("vllm_adapters.py", transport, ties, str(ranks), str(tmp_path / "model"))


@pytest.mark.parametrize(("kind", "ranks"), [("dense", 2), ("experts", 1)])
def test_a_real_engine_follows_trainers_that_send_slices(kind, ranks, tmp_path):
    run_script("vllm_slices.py", kind, str(ranks), str(tmp_path / "model"))


def test_slices_fill_what_the_loader_fills():
    # vLLM makes its group of experts for a model that has some.
    run_script("vllm_consumers.py", "experts", "dense")


def run_script(name, *arguments):
    pytest.importorskip("vllm")
    # A process of its own, as an engine does not give back all that it takes.
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        # Or helpers of vLLM would be compiled although the engines are eager.
        "TORCHDYNAMO_DISABLE": "1",
    }
    done = subprocess.run(
        [rank_python(), str(Path(__file__).with_name(name)), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,  # beside other engines; pytest allows 600
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "all refits are as they should be" in done.stdout
