import json

import pytest
import torch
from rl_policy.recipes.grpo import GrpoMetrics
from rl_policy.recipes.sft import SftMetrics
from rl_policy.run import metrics as run_metrics
from rl_policy.run.metrics import MetricsLog, mean_metrics, plot_reward, read_metrics

KEYS = [
    "step",
    "reward_mean",
    "reward_std",
    "completion_length_mean",
    "completion_length_max",
    "truncated_share",
    "accuracy",
    "loss",
    "grad_norm",
    "kl",
    "entropy",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "tflops_per_s_per_device",
    "mfu",
    "peak_memory_gib",
    "step_s",
    "move_s",
    "generate_s",
    "reward_s",
    "logprob_s",
    "train_s",
    "refit_s",
    "zero_advantage_share",
    "staleness",
]


def path_of(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_an_object_per_step(tmp_path):
    with MetricsLog(path_of(tmp_path)) as log:
        log.write(GrpoMetrics(step=0, accuracy=0.25))
        measured = {"clip_fraction": 0.75}
        log.write(GrpoMetrics(step=1, reward_mean=0.5, kl=0.125, diagnostics=measured))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [list(row) for row in rows] == [KEYS, KEYS]
    assert (rows[0]["accuracy"], rows[0]["reward_mean"], rows[0]["refit_s"]) == (0.25, None, 0.0)
    assert (rows[1]["reward_mean"], rows[1]["kl"], rows[1]["accuracy"]) == (0.5, 0.125, None)


def test_what_engines_add_stands_beside_the_rest(tmp_path):
    engines = {"refit_s": 1.5, "refit_bytes": 8, "weight_version": 3, "mismatch_kl": 0.25}
    with MetricsLog(path_of(tmp_path)) as log:
        log.write(GrpoMetrics(step=4, loss=0.5, extra=engines))
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert list(row) == [*KEYS, "refit_bytes", "weight_version", "mismatch_kl"]
    assert {name: row[name] for name in engines} == engines


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    with MetricsLog(path_of(tmp_path)) as log:
        log.write(SftMetrics(step=0))
        assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_null(tmp_path, value):
    with MetricsLog(path_of(tmp_path)) as log:
        log.write(SftMetrics(step=3, grad_norm=value))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["grad_norm"] is None


def test_a_run_that_goes_on_drops_what_came_after_its_checkpoint(tmp_path):
    path = path_of(tmp_path)
    with MetricsLog(path) as log:
        for step in range(5):
            log.write(SftMetrics(step=step, loss=1.0))
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # the process died while it wrote
    with MetricsLog(path, resumed_step=2) as log:
        log.write(SftMetrics(step=3, loss=0.5))
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        (0, 1.0),
        (1, 1.0),
        (2, 1.0),
        (3, 0.5),
    ]


def test_metrics_add_up_over_micro_batches_and_are_averaged_over_steps():
    metrics = {"kl": [0.1, 0.2, 0.3, 0.4], "num_valid_samples": [2, 2, 2, 2]}
    loss, norm = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    result = {"loss": loss, "grad_norm": norm, "all_mb_metrics": metrics}
    expected = {"kl": pytest.approx(0.5), "num_valid_samples": 4.0, "loss": 1.5}
    assert mean_metrics(result) == expected | {"grad_norm": 4.0}
    assert mean_metrics(result | {"grad_norm": None}) == expected


def test_no_picture_without_matplotlib_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_metrics, "find_spec", lambda name: None)
    plot_reward([], tmp_path / "reward.png")
    assert (
        'reward.png is not drawn, as matplotlib is not installed: pip install "rl-policy[plot]"'
        in (caplog.text)
    )
    assert list(tmp_path.iterdir()) == []
