"""PPO of adapters, and with a value model of another backend than the policy's."""

import pytest
import torch
from ppo_runs import SETTINGS, run
from recipe_runs import write_workplace
from rl_policy.run.metrics import read_metrics
from tolerances import KL
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("rl-policy[all]"),
]

LORA = ["policy.dtensor_cfg.lora.enabled=true", "policy.dtensor_cfg.lora.r=4"]
MEGATRON = [
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "ppo.value_policy.dtensor_cfg.enabled=true",
]


@pytest.mark.parametrize("settings", [LORA, MEGATRON], ids=["lora", "megatron"])
def test_policy_and_value_model_learn_and_resume(shared_ray, tmp_path, monkeypatch, settings):
    monkeypatch.chdir(write_workplace(tmp_path))
    begin = ["--config", "run.yaml", "data.path=problems.jsonl", *SETTINGS, *settings]
    run("--out", "out", *begin, "ppo.steps=2")
    run("--resume", "out", "ppo.steps=4")
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    # The reference of the first step is the policy itself.
    assert rows[1]["reward_kl"] == pytest.approx(0, abs=KL)
    assert all(row["reward_kl"] != 0 and row["grad_norm"] > 0 for row in rows[2:])
    losses = [row["value_loss"] for row in rows[1:]]
    assert losses[-1] < losses[0] / 2
    final = AutoModelForCausalLM.from_pretrained("out/final").state_dict()
    start = AutoModelForCausalLM.from_pretrained("out/tiny_model").state_dict()
    assert final.keys() == start.keys()
    assert any(not torch.equal(final[key], start[key]) for key in final)
