"""PPO through the command line with a real vLLM engine beside policy and value model."""

import os
import subprocess

import pytest
from recipe_runs import MODULE, write_workplace
from rl_policy.run.metrics import read_metrics

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.needs("rl-policy[all]"),
]

MISMATCH = 1e-4


def test_engines_sample_from_the_policys_weights_alone(tmp_path):
    # Beside both models, which take turns; engines of their own devices get weights as in GRPO.
    pytest.importorskip("vllm")
    write_workplace(tmp_path)
    done = subprocess.run(
        [
            *MODULE,
            *["ppo", "--config", "run.yaml", "--out", "out", "data.path=problems.jsonl"],
            *["ppo.warm_up=false", "ppo.steps=2", "ppo.prompts_per_step=16", "ppo.eval_every=2"],
            *["policy.generation.backend=vllm", "policy.generation.vllm_cfg.enforce_eager=true"],
            *["refit.verify=logprobs", f"refit.max_mismatch={MISMATCH}"],
        ],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [row["weight_version"] for row in rows] == [0, 0, 1]
    assert all(row["mismatch_max_abs"] < MISMATCH for row in rows)
    assert all(row["refit_bytes"] > 0 for row in rows)
    assert all(row["value_loss"] > 0 for row in rows[1:])
