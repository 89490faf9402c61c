"""`rl-policy eval` and `rl-policy merge` on a real run, and what they refuse."""

import contextlib
import filecmp
import itertools
import json
from pathlib import Path

import pytest
import torch
from recipe_runs import CONFIG, measured
from rl_policy import SFTTrainer
from rl_policy.cli import build_app
from rl_policy.commands.verbs import with_model_key
from rl_policy.config import load_run_config, nest
from rl_policy.recipes.evaluate import pass_at_k
from rl_policy.run.export import merge
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

pytestmark = pytest.mark.needs("rl-policy[dtensor]")

PROBLEMS = [{"prompt": f"{number}?", "answer": str(number % 2)} for number in range(60)]
ONE_RANK = "cluster.bundle_ct_per_node_list=[1]"


@pytest.fixture(scope="module")
def run(shared_ray, tmp_path_factory):
    """Return the directory of a run that was fine-tuned a little, with two checkpoints."""
    path = tmp_path_factory.mktemp("runs") / "run"
    settings = nest({**CONFIG, "sft.steps": 4, "sft.stop_pass_rate": None} | {"sft": {}})
    settings["policy"] |= CONFIG["sft"]["policy"]
    SFTTrainer(data=PROBLEMS, config=settings, out=path, progress=False).train()
    return path


def execute(*arguments, cwd):
    with contextlib.chdir(cwd):
        return CliRunner().invoke(build_app(), [*map(str, arguments)], catch_exceptions=False)


def greedy_completions(model):
    """Return transformers' own completions, up to the end token."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = []
    for row in PROBLEMS:
        ids = tokenizer(row["prompt"], return_tensors="pt")
        out = loaded.generate(**ids, max_new_tokens=2, do_sample=False)
        text = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
        texts.append(text.partition(tokenizer.eos_token)[0])
    return texts


@pytest.mark.slow
def test_a_model_is_measured_on_all_problems_of_a_file(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    settings = ["data.path=rows.jsonl", "policy.generation.max_new_tokens=2", ONE_RANK]
    result = execute("eval", run / "final", *settings, "--out", "measured", cwd=tmp_path)
    assert result.exit_code == 0, result.stderr
    expected = greedy_completions(run / "final")
    lines = (tmp_path / "measured/completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["completion"] for row in rows] == expected
    solved = [float(text == row["answer"]) for text, row in zip(expected, PROBLEMS, strict=True)]
    assert [row["reward"] for row in rows] == solved
    (row,) = measured(tmp_path / "measured")
    assert row["accuracy"] == row["pass@1"] == pytest.approx(sum(solved) / len(solved))
    assert row["problems"] == 60
    assert f"Measured accuracy {row['accuracy']:.3f}" in result.stdout
    samples = (tmp_path / "measured/samples.jsonl").read_text().splitlines()
    assert json.loads(samples[0])["completion"] == expected[0]
    refused = execute("eval", run / "final", cwd=tmp_path)
    assert (refused.exit_code, "data.path is not set" in refused.stderr) == (2, True)


@pytest.mark.slow
def test_pass_at_k_is_over_all_samples_of_a_problem(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    settings = ["data.path=rows.jsonl", "policy.generation.max_new_tokens=2", ONE_RANK]
    samples = ["eval.samples=4", "eval.pass_at=[2,4]", "eval.limit=20"]
    result = execute("eval", run / "final", *settings, *samples, "--out", "m", cwd=tmp_path)
    assert result.exit_code == 0, result.stderr
    lines = (tmp_path / "m/completions.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward"] for line in lines]
    assert len(rewards) == 80
    groups = [rewards[at : at + 4] for at in range(0, 80, 4)]
    # By its definition: over all subsets of the samples.
    for k in (2, 4):
        rates = [
            sum(map(any, subsets)) / len(subsets)
            for subsets in ([*itertools.combinations(group, k)] for group in groups)
        ]
        assert measured(tmp_path / "m")[0][f"pass@{k}"] == pytest.approx(sum(rates) / len(rates))


@pytest.mark.slow
def test_a_checkpoint_becomes_a_model(run, tmp_path):
    assert merge(run, tmp_path / "newest") == f"step 4 of {run}"
    assert filecmp.cmp(
        tmp_path / "newest/model.safetensors", run / "final/model.safetensors", shallow=False
    )


@pytest.mark.slow
def test_an_earlier_checkpoint_becomes_a_model(run, tmp_path):
    result = execute("merge", run, "--out", "earlier", "--step", 2, cwd=tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "step 2 of" in result.stdout
    assert not filecmp.cmp(
        tmp_path / "earlier/model.safetensors", run / "final/model.safetensors", shallow=False
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "earlier")
    assert AutoTokenizer.from_pretrained(tmp_path / "earlier")


@pytest.mark.slow
def test_what_merge_lacks_is_named(run, tmp_path):
    (tmp_path / "there").mkdir()
    for arguments, message in [
        ((run, tmp_path / "there"), "there exists, and is not overwritten"),
        (
            (tmp_path, tmp_path / "out"),
            "holds no run, as there is no .*/config.yaml, and no adapters, as there is no",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            merge(*arguments)
    with pytest.raises(ValueError, match=r"has no checkpoint of step 3: there are \[2, 4\]"):
        merge(run, tmp_path / "out", step=3)
    with pytest.raises(ValueError, match="--model x is for adapters"):
        merge(run, tmp_path / "out", model="x")
    result = execute("merge", tmp_path, "--out", "out", cwd=tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["there"]


def test_pass_at_k_of_hand_counted_samples():
    assert pass_at_k(4, 1, k=2) == pytest.approx(0.5)
    assert [pass_at_k(3, 0, k=2), pass_at_k(3, 2, k=2), pass_at_k(1, 1, k=1)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["eval.samples=2", "eval.pass_at=[4]"],
            "needs 4 samples of a problem, and eval.sam",
        ),
        (["eval.samples=2", "eval.greedy=true"], "makes the eval.samples=2 of a problem equal"),
        (["data.path=a", "data.heldout_path=b"], "data.heldout_path=b is for a training"),
        (["policy.head=reward"], "policy.head='reward' gives scores"),
    ],
)
def test_a_contradiction_is_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_run_config("eval", overrides=overrides)


def test_a_model_may_be_named_without_its_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    for name in ("model", "org/name", "gpt2", "gpt2.5"):
        named = with_model_key([name, "seed=1"], recipe="sft")
        assert named == [f"policy.model_name={name}", "seed=1"]
    for unchanged in ([], [""], ["seed"], ["sft.steps"], ["grpo.steps"], ["data.path=a/b"]):
        assert with_model_key(unchanged, recipe="sft") == unchanged
    # A directory may have any name.
    Path("grpo").mkdir()
    assert with_model_key(["grpo"], recipe="sft") == ["policy.model_name=grpo"]


def test_a_recipe_is_not_taken_for_a_model():
    with pytest.raises(ValueError, match=r"MODEL='dpo' is a recipe: rl-policy dpo runs it"):
        with_model_key(["dpo"], recipe="grpo")
    with pytest.raises(ValueError, match="the recipe 'gpro' is not installed"):
        with_model_key(["gpt2"], recipe="gpro")
