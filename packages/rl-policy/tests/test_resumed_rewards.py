"""A run that a reward function has ended continues with the numbers of a run that it has not."""

import json

import pytest
from recipe_runs import measured
from rl_policy import GRPOTrainer
from rl_policy.data.rewards import RewardError

pytestmark = pytest.mark.needs("rl-policy[dtensor]")

PROBLEMS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)[:1]} for n in range(40)]
SETTINGS = {
    "cluster.bundle_ct_per_node_list": [1],
    "cluster.fork_workers": False,
    "grpo.warm_up": False,
    "grpo.prompts_per_step": 4,
    "grpo.samples_per_prompt": 4,
    "grpo.steps": 3,
    "grpo.eval_every": 3,
    "grpo.eval_at_start": False,
    "policy.train_global_batch_size": 16,
    "policy.train_micro_batch_size": 16,
    "report.at_end": False,
}
TIMES = ("_s", "_per_s", "per_device", "peak_memory_gib", "mfu")


def numbers(path):
    return [
        {name: value for name, value in row.items() if not name.endswith(TIMES)}
        for row in measured(path)
    ]


@pytest.mark.slow
def test_a_failed_reward_changes_no_number(shared_ray, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []

    def reward(completions, problems):
        calls.append(completions)
        if len(calls) == 2 and may_fail:
            raise ZeroDivisionError("the judge is away")
        return [float(len(each)) for each in completions]

    may_fail = False
    options = {"data": PROBLEMS, "reward": reward, "progress": False}
    GRPOTrainer(config=SETTINGS, out="whole", **options).train()
    may_fail, calls = True, []
    failing = GRPOTrainer(config=SETTINGS, out="failed", **options)
    with pytest.raises(RewardError, match="the judge is away"):
        failing.train()
    assert json.loads((tmp_path / "failed/checkpoints/step_1/state.json").read_text())["step"] == 1
    may_fail = False
    GRPOTrainer(resume="failed", reward=reward, progress=False).train()
    assert numbers(tmp_path / "failed") == numbers(tmp_path / "whole")
    assert (tmp_path / "failed/final/model.safetensors").read_bytes() == (
        tmp_path / "whole/final/model.safetensors"
    ).read_bytes()
