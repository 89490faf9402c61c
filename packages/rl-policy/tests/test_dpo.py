"""DPO through the command line: a real Ray, a real model, pairs that stay together."""

import pytest
from rl_policy.cli import build_app
from rl_policy.config import load_run_config
from rl_policy.run.metrics import read_metrics
from typer.testing import CliRunner

SETTINGS = [
    "dpo.steps=6",
    "dpo.eval_every=3",
    "data.num_heldout=32",
    "data.max_number=499",
    "policy.train_global_batch_size=64",
    "policy.train_micro_batch_size=16",
    "policy.logprob_batch_size=64",
    "policy.optimizer.kwargs.lr=3e-3",
]


@pytest.mark.timeout(240)
def test_the_reward_margin_rises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = "cluster.bundle_ct_per_node_list=[1]"
    result = CliRunner().invoke(
        build_app(), ["dpo", "--out", "out", *SETTINGS, alone], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    margins = [row["heldout_margin"] for row in rows if row["heldout_margin"] is not None]
    assert [row["step"] for row in rows if row["accuracy"] is not None] == [0, 3, 6]
    # Policy and reference are equal at first: no row has a reward.
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert margins[0] < margins[1] < margins[2]
    assert rows[1]["loss"] == pytest.approx(0.693147, abs=1e-4)
    assert rows[-1]["loss"] < rows[1]["loss"]
    assert rows[-1]["accuracy"] > 0.6
    assert "Held-out accuracy" in result.output


@pytest.mark.parametrize("key", ["train_global_batch_size", "train_micro_batch_size"])
def test_half_a_pair_is_refused(key):
    with pytest.raises(ValueError, match=f"policy.{key}=5 is not even"):
        load_run_config("dpo", overrides=[f"policy.{key}=5"])
