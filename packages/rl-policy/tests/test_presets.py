"""Presets of the policy gradient in whole runs through the command line."""

import pytest
from recipe_runs import write_workplace
from rl_policy.cli import build_app
from rl_policy.run.metrics import read_metrics
from typer.testing import CliRunner

pytestmark = [pytest.mark.slow, pytest.mark.needs("rl-policy[dtensor]")]

REWARDS = '''
def one(completions, problems):
    """Reward what can be learnt in a few steps: always the same answer."""
    return [float(completion.strip() == "1") for completion in completions]
'''
SETTINGS = [
    "policy.model_name=warm/final",
    "reward.function=rewards.py:one",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=16",
    "policy.optimizer.kwargs.lr=2e-3",
    # Room beyond the answer and its end token, which the overlong penalty counts.
    "policy.generation.max_new_tokens=6",
    "grpo.steps=16",
    "grpo.samples_per_prompt=8",
    "grpo.eval_every=16",
    "checkpoint.every=16",
    "report.at_end=false",
]


def execute(*arguments):
    command = [*arguments, "--config", "run.yaml", "data.path=problems.jsonl"]
    result = CliRunner().invoke(build_app(), command, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, shared_ray):
    """Return a directory with a model that answers with digits, `warm/final`."""
    path = write_workplace(tmp_path_factory.mktemp("presets"))
    (path / "rewards.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        execute("sft", "--out", "warm")
    return path


@pytest.mark.parametrize("preset", ["gspo", "dapo", "reinforce_pp"])
def test_a_run_with_a_preset_learns(workplace, monkeypatch, preset):
    monkeypatch.chdir(workplace)
    execute("grpo", "--out", preset, f"loss.preset={preset}", *SETTINGS)
    rows = read_metrics(workplace / preset / "metrics.jsonl")
    rewards = [row.get("dynamic_reward_mean", row["reward_mean"]) for row in rows[1:]]
    assert sum(rewards[-3:]) / 3 > 0.9 > sum(rewards[:3]) / 3
    last = rows[-1]
    assert ("dynamic_rounds" in last) == (preset == "dapo")
    assert ("overlong_penalty" in last) == (preset == "dapo")
    assert ("reward_kl" in last) == (preset == "reinforce_pp")
