"""GRPO while real vLLM engines sample beside it: staleness, and a run that is killed."""

import json
import os
import signal

import pytest
import yaml
from recipe_runs import CONFIG, wait_until, write_workplace
from rl_policy.run.metrics import read_metrics
from safetensors import safe_open

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.needs("rl-policy[all]"),
]

STEPS, GROUPS = 8, 4
RUN = [
    *["grpo", "--config", "run.yaml", "--out", "out", "data.path=problems.jsonl"],
    *["policy.generation.backend=vllm", "policy.generation.colocated.enabled=false"],
    # Two optimizer steps a step.
    *["async.max_staleness=4", "async.refit_every=2"],
]


@pytest.fixture
def workplace(tmp_path):
    pytest.importorskip("vllm")
    path = write_workplace(tmp_path)
    grpo = {**CONFIG["grpo"], "steps": STEPS, "eval_every": STEPS}
    (path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "grpo": grpo}))
    return path


def ledger(workplace):
    path = workplace / "out" / "trained.jsonl"
    text = path.read_text() if path.exists() else ""
    # The last line may not be written to its end.
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_a_run_that_is_killed_trains_on_each_problem_once(begin, workplace):
    killed = begin(*RUN)

    def is_past():
        assert killed.poll() is None, killed.stderr.read()
        return len(ledger(workplace)) >= 3

    wait_until(is_past, limit_s=600)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(60)
    before = ledger(workplace)
    resumed = begin("grpo", "--resume", "out")
    _, errors = resumed.communicate(timeout=600)
    assert resumed.returncode == 0, errors[-6000:]
    lines = ledger(workplace)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    ids = [id for line in lines for id in line["ids"]]
    assert sorted(ids) == list(range(STEPS * GROUPS))
    # What the checkpoint has is not taken again.
    assert lines[:2] == before[:2]
    rows = read_metrics(workplace / "out" / "metrics.jsonl")[1:]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["staleness"] <= row["staleness_max"] <= 4
        assert row["refit_staged"] == 1
        assert row["rollouts_trained"] == (row["step"] - 1) * GROUPS
    assert max(row["staleness_max"] for row in rows) > 0
    # Engines are sent weights after every other step, and where accuracy is measured.
    versions = [row["weight_version"] for row in rows]
    assert versions == sorted(versions)
    assert len(set(versions)) < STEPS
    with safe_open(
        workplace / "out" / "checkpoints" / f"step_{STEPS}" / "rollouts.safetensors", "pt"
    ) as file:
        content = json.loads(file.metadata()["buffer"])
    assert content["num_trained"] == STEPS * GROUPS
    assert (content["complete"], content["reopened"]) == ({}, [])
