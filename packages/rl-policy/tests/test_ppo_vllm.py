"""PPO through the command line with a real vLLM engine beside policy and value model."""

import pytest
from ppo_runs import run
from recipe_runs import write_workplace
from rl_policy.run.metrics import read_metrics
from tolerances import ENGINE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.needs("rl-policy[all]"),
]

MISMATCH = ENGINE


def test_engines_sample_from_the_policys_weights_alone(shared_ray, tmp_path, monkeypatch):
    # Beside both models, which take turns; engines of their own devices get weights as in GRPO.
    pytest.importorskip("vllm")
    monkeypatch.chdir(write_workplace(tmp_path))
    run(
        # An absolute one, as ranks and engines were started in another directory.
        *["--config", "run.yaml", "--out", str(tmp_path / "out"), "data.path=problems.jsonl"],
        *["ppo.warm_up=false", "ppo.steps=2", "ppo.prompts_per_step=16", "ppo.eval_every=2"],
        *["policy.generation.backend=vllm", "policy.generation.vllm_cfg.enforce_eager=true"],
        *["refit.verify=logprobs", f"refit.max_mismatch={MISMATCH}"],
    )
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [row["weight_version"] for row in rows] == [0, 0, 1]
    assert all(row["mismatch_max_abs"] < MISMATCH for row in rows)
    assert all(row["refit_bytes"] > 0 for row in rows)
    assert all(row["value_loss"] > 0 for row in rows[1:])
