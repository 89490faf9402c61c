"""GRPO through the command line with real vLLM engines, beside the policy and apart from it."""

import contextlib
import json

import pytest
import yaml
from patience import PATIENCE_S
from rl_policy.cli import build_app
from rl_policy.run.metrics import read_metrics
from tolerances import ENGINE
from typer.testing import CliRunner

pytestmark = [
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.vllm,
    pytest.mark.needs("rl-policy[all]"),
]

MISMATCH = ENGINE
PHASES = ("pause", "join", "gather", "pack", "wire", "load", "verify", "resume")
CONFIG = {
    "cluster": {"bundle_ct_per_node_list": [2]},
    "data": {"num_heldout": 16, "num_validation": 16},
    "policy": {
        "train_global_batch_size": 8,
        "train_micro_batch_size": 4,
        "logprob_batch_size": 8,
        "optimizer": {"kwargs": {"lr": 3.0e-3}},
        "generation": {"backend": "vllm", "max_new_tokens": 2},
        "timeout_s": PATIENCE_S,
    },
    "sft": {"steps": 20, "eval_every": 20, "stop_pass_rate": 0.99},
    "grpo": {"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4, "eval_every": 2},
    "checkpoint": {"every": 2, "keep_last": 2},
}


MEGATRON = [
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "policy.megatron_cfg.pipeline_model_parallel_size=2",
]


def run_grpo(settings, tmp_path):
    """Run the command; return the rows of its metrics."""
    pytest.importorskip("vllm")
    problems = [{"prompt": f"{number}?", "answer": str(number % 2)} for number in range(200)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    # Ranks and engines were started in another directory.
    out = str(tmp_path / "out")
    arguments = ["grpo", "--config", "run.yaml", "--out", out, "data.path=problems.jsonl"]
    with contextlib.chdir(tmp_path):
        result = CliRunner().invoke(build_app(), [*arguments, *settings], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return read_metrics(tmp_path / "out" / "metrics.jsonl")


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    "settings",
    [
        ["refit.verify=logprobs", f"refit.max_mismatch={MISMATCH}"],
        ["policy.generation.colocated.enabled=false", "refit.delta=true"],
        [*MEGATRON, "refit.transport=golden", "policy.generation.vllm_cfg.sleep_level=2"],
        ["refit.slices=true", "policy.generation.vllm_cfg.tensor_parallel_size=2"],
        [
            *MEGATRON,
            *["refit.slices=true", "refit.delta=true"],
            "policy.generation.colocated.enabled=false",
        ],
    ],
    ids=["colocated", "apart", "megatron-golden", "slices", "megatron-slices-apart"],
)
@pytest.mark.promise
def test_samples_come_from_the_weights_of_the_step_before(settings, tmp_path):
    rows = run_grpo(settings, tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["mismatch_mean_abs"] <= row["mismatch_max_abs"] < MISMATCH
        assert 1 <= row["token_mult_prob_error"] < 1 + MISMATCH
        assert abs(row["mismatch_kl"]) < MISMATCH
        assert row["refit_bytes"] > 0
        assert row["refit_gb_per_s"] > 0
        assert row["refit_s"] > 0
        assert all(row[f"refit_{phase}_s"] >= 0 for phase in PHASES)
    if "refit.slices=true" in settings:
        # Rank 0 sends what it holds, or its share of what all hold.
        assert all(0 < row["refit_bytes_sent"] < row["refit_bytes"] for row in rows)
    # Engines of their own devices stage, and pause for a part of the refit alone.
    is_apart = "policy.generation.colocated.enabled=false" in settings
    assert {row["refit_staged"] for row in rows} == {float(is_apart)}
    assert all(row["refit_pause_s"] > 0 for row in rows)
    # The first weights are sent in full, to engines that have no copy of any.
    deltas = [row.get("refit_changed") for row in rows]
    is_delta = "refit.delta=true" in settings
    assert [changed is not None for changed in deltas] == [False, False, is_delta, is_delta]
    assert all(0 < changed <= 1 for changed in deltas if changed is not None)
    assert {row["staleness"] for row in rows[1:]} == {0.0}
    versions = [row["weight_version"] for row in rows]
    # An engine that drops its weights to sleep gets them again, as a version of their own.
    drops = any("sleep_level=2" in setting for setting in settings)
    assert versions == sorted(versions)
    assert drops or versions == [0, 0, 1, 2]
    # The weights did change: a policy that stands still would agree without any refit.
    assert len({row["loss"] for row in rows[1:]}) == 3


ADAPTERS = [
    # How shards of adapters are gathered is the worker's, whose tests send them from every layout.
    "cluster.bundle_ct_per_node_list=[1]",
    "policy.dtensor_cfg.lora.enabled=true",
    "policy.dtensor_cfg.lora.r=4",
    "sft.policy.dtensor_cfg.lora.enabled=false",
    "policy.generation.max_new_tokens=4",
]


def check_adapters_alone(rows, *, is_apart):
    """The base goes once, which pauses the engines, and adapters of a tiny model in its place."""
    assert all(row["mismatch_max_abs"] < MISMATCH for row in rows)
    full = rows[0]["refit_bytes"]
    assert {row["refit_bytes"] for row in rows} == {full}
    sent = [row["refit_bytes_sent"] for row in rows]
    assert all(each >= full for each in sent[:2])
    assert all(0 < each < 0.1 * full for each in sent[2:])
    staged = [row["refit_staged"] for row in rows]
    assert staged == [0.0, 0.0, float(is_apart), float(is_apart)]
    assert [row["weight_version"] for row in rows] == [0, 0, 1, 2]
    assert len({row["loss"] for row in rows[1:]}) == 3


@pytest.mark.slow
def test_adapters_alone_do_what_merged_weights_do(tmp_path):
    apart, runs = "policy.generation.colocated.enabled=false", {}
    for way in ("merged", "alone"):
        (tmp_path / way).mkdir()
        runs[way] = run_grpo([*ADAPTERS, apart, f"refit.adapters={way}"], tmp_path / way)
    check_adapters_alone(runs["alone"], is_apart=True)
    for merged, alone in zip(runs["merged"], runs["alone"], strict=True):
        assert merged["mismatch_max_abs"] < MISMATCH
        assert merged["reward_mean"] == alone["reward_mean"]
        assert merged["loss"] == pytest.approx(alone["loss"], abs=MISMATCH)
        assert alone["refit_bytes"] > merged["refit_bytes"]


@pytest.mark.slow
def test_colocated_engines_get_adapters_alone(tmp_path):
    check_adapters_alone(run_grpo([*ADAPTERS, "refit.adapters=alone"], tmp_path), is_apart=False)
