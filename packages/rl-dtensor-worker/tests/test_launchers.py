"""The worker under torchrun; `pools` in every other test is torch.multiprocessing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle import LOGPROB_TOLERANCE, load, plain_logprobs
from rl_interfaces.backend.runtime import RankEnvironment
from tiny_model import make_batch

_SCRIPT = """
import os, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
import scoring_ranks
from tiny_model import make_batch, make_config
scores = scoring_ranks.score(config=make_config({model!r}), batch=make_batch(5))
torch.save(scores, f"{out}/scores_{{os.environ['RANK']}}.pt")
"""


@pytest.mark.slow
def test_under_torchrun(tiny_model, tmp_path):
    script = tmp_path / "job.py"
    tests = str(Path(__file__).parent)
    script.write_text(_SCRIPT.format(tests=tests, model=tiny_model, out=tmp_path))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    # Without a place for its logs, torchrun leaves an empty directory in the temporary one.
    command += ["--log-dir", str(tmp_path / "logs")]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    scores = torch.cat([torch.load(tmp_path / f"scores_{rank}.pt") for rank in (0, 1)])
    expected = plain_logprobs(load(tiny_model), make_batch(5))
    torch.testing.assert_close(scores, expected, atol=LOGPROB_TOLERANCE, rtol=0)


def test_a_missing_variable_is_named(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(RuntimeError, match="MASTER_PORT"):
        RankEnvironment.from_environment()
