"""DPO through the command line: a real Ray, a real model, pairs that stay together."""

import pytest
from rl_policy.cli import build_app
from rl_policy.config import load_run_config
from rl_policy.run.metrics import read_metrics
from typer.testing import CliRunner

pytestmark = [pytest.mark.needs("rl-policy[dtensor]")]

SETTINGS = [
    "dpo.steps=6",
    "dpo.eval_every=3",
    "data.num_heldout=33",
    "data.max_number=499",
    "policy.train_global_batch_size=64",
    "policy.train_micro_batch_size=16",
    "policy.logprob_batch_size=64",
    "policy.optimizer.kwargs.lr=3e-3",
]
COLUMNS = ("accuracy", "heldout_margin", "reward_margin", "chosen_reward", "loss", "grad_norm")


@pytest.fixture(scope="module")
def run_on(shared_ray, tmp_path_factory):
    """Return a function that trains on some ranks, and gives the metrics and what was printed."""

    def run_on(num_ranks):
        out = tmp_path_factory.mktemp("dpo") / "out"
        ranks = f"cluster.bundle_ct_per_node_list=[{num_ranks}]"
        result = CliRunner().invoke(
            build_app(), ["dpo", "--out", str(out), *SETTINGS, ranks], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
        return read_metrics(out / "metrics.jsonl"), result.output

    return run_on


@pytest.fixture(scope="module")
def alone(run_on):
    return run_on(1)


@pytest.mark.promise
def test_the_reward_margin_rises(alone):
    rows, output = alone
    margins = [row["heldout_margin"] for row in rows if row["heldout_margin"] is not None]
    assert [row["step"] for row in rows if row["accuracy"] is not None] == [0, 3, 6]
    # Policy and reference are equal at first: no row has a reward.
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert margins[0] < margins[1] < margins[2]
    assert rows[1]["loss"] == pytest.approx(0.693147, abs=1e-4)
    assert rows[-1]["loss"] < rows[1]["loss"]
    assert rows[-1]["accuracy"] > 0.6
    assert "Held-out accuracy" in output


@pytest.mark.slow
def test_two_ranks_train_and_measure_as_one_does(alone, run_on):
    # An odd number of held-out pairs: to give each rank half of the rows would part one of them.
    one, two = (
        {name: [row[name] for row in rows if row[name] is not None] for name in COLUMNS}
        for rows in (alone[0], run_on(2)[0])
    )
    assert two.pop("accuracy") == one.pop("accuracy")
    for name in one:
        # float32 sums in another order, over at most six steps of AdamW.
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("key", ["train_global_batch_size", "train_micro_batch_size"])
def test_half_a_pair_is_refused(key):
    with pytest.raises(ValueError, match=f"policy.{key}=5 is not even"):
        load_run_config("dpo", overrides=[f"policy.{key}=5"])
