"""What the mean reward on held-out problems is called."""

from types import SimpleNamespace

import pytest
from rl_policy.config import RewardSection, load_run_config
from rl_policy.data.datasets import ExactMatch
from rl_policy.data.rewards import GivenReward, WeightedRewards, is_solved_share
from rl_policy.recipes.grpo import GrpoMetrics
from rl_policy.recipes.sft import SftMetrics, SftSection
from rl_policy.report.charts import build_charts
from rl_policy.report.run_data import RunData
from rl_policy.run.evaluation import name_score
from rl_policy.run.inputs import build_reward, prepare_inputs
from rl_policy.run.metrics import find_scores

pytestmark = pytest.mark.needs("rl-policy[dtensor]")


def ten(completions, problems):
    return [10.0 for _ in completions]


@pytest.mark.parametrize(
    ("function", "weights", "is_share"),
    [
        (None, None, True),
        ("exact_match", None, True),
        (["exact_match"], [1.0], True),
        (["exact_match"], [10.0], False),
        (GivenReward(ten), None, False),
        ([GivenReward(ten), "exact_match"], None, False),
    ],
)
def test_an_accuracy_is_the_mean_of_the_built_in_reward_alone(function, weights, is_share):
    section = RewardSection(function=function, weights=weights)
    assert section.is_solved_share == is_share
    assert is_solved_share(build_reward(section)) == is_share


def test_weights_alone_make_a_share_something_else():
    assert is_solved_share(WeightedRewards({"a": ExactMatch()}, [1.0]))
    assert not is_solved_share(WeightedRewards({"a": ExactMatch()}, [0.5]))
    both = WeightedRewards({"a": ExactMatch(), "b": ExactMatch()}, [1.0, 1.0])
    assert not is_solved_share(both)


def test_the_mean_of_another_reward_is_a_column_of_its_own():
    solved = SimpleNamespace(measures_solved=True)
    other = SimpleNamespace(measures_solved=False)
    assert name_score(0.5, inputs=solved) == (0.5, {})
    assert name_score(2.5, inputs=other) == (None, {"reward": 2.5})
    assert name_score(None, inputs=other) == (None, {})
    accuracy, extra = name_score(2.5, inputs=other)
    metrics = GrpoMetrics(step=3, accuracy=accuracy, extra=extra)
    assert metrics.row()["accuracy"] is None
    assert metrics.score() == metrics.row()["reward"] == 2.5
    assert metrics.shown()["held-out reward"] == 2.5
    assert SftMetrics(step=3, accuracy=0.25).score() == 0.25
    rows = [metrics.row(), SftMetrics(step=4).row()]
    assert find_scores(rows, "accuracy") == ("reward", [2.5])
    assert find_scores(rows[1:], "accuracy") == ("accuracy", [])
    assert find_scores(rows, None) == (None, [])


def test_it_has_a_chart_of_its_own():
    rows = [{"step": 0, "accuracy": None, "reward": 1.5}, {"step": 1, "reward": 2.5}]
    run = RunData(name="a", recipe="grpo", score_column="reward", rows=rows, config={}, defaults={})
    charts = build_charts([run])
    assert "Held-out accuracy" not in charts
    assert list(charts["Held-out reward"].data[0].y) == [1.5, 2.5]
    assert run.scores() == [1.5, 2.5]


@pytest.mark.parametrize("recipe", ["sft", "grpo", "ppo", "distill"])
def test_a_pass_rate_to_stop_at_refuses_other_rewards_before_the_start(recipe, tmp_path):
    (tmp_path / "rewards.py").write_text("def ten(completions, problems):\n    return [10.0]\n")
    overrides = [
        f"reward.function={tmp_path}/rewards.py:ten",
        "cluster.bundle_ct_per_node_list=[1]",
    ]
    config = load_run_config(recipe, overrides=[*overrides, "sft.stop_pass_rate=0.95"])
    with pytest.raises(ValueError, match=r"sft.stop_pass_rate=0.95 is a share of solved problems"):
        prepare_inputs(config)
    # The default of the built-in model is not meant for them.
    section = load_run_config(recipe, overrides=overrides).section(SftSection)
    assert section.stop_pass_rate is None
