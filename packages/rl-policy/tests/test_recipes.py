"""The recipes through the command line: real processes, a real Ray, a real model."""

import json
import os
import shutil
import signal
import subprocess
from importlib.util import find_spec

import pytest
import ray
import torch
import yaml
from patience import PATIENCE_S, wait_until
from processes import descendants
from recipe_runs import (
    MODULE,
    PHASES,
    TWO_RANKS,
    forked_command,
    measured,
    write_workplace,
)
from rl_policy.cli import build_app
from rl_policy.run.metrics import read_metrics
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

pytestmark = pytest.mark.needs("rl-policy[dtensor]")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Return a directory with a configuration, and problems that are learnt in a few steps."""
    return write_workplace(tmp_path_factory.mktemp("recipes"))


@pytest.fixture(scope="module")
def environment(shared_ray):
    """Return the environment of commands that join the Ray of all tests."""
    return {**os.environ, "RAY_ADDRESS": shared_ray}


@pytest.fixture(scope="module")
def run(workplace, environment):
    """Return the process of a whole run; its directory is `first`."""
    arguments = ["grpo", "--config", "run.yaml", "--out", "first", "data.path=problems.jsonl"]
    result = subprocess.run(
        forked_command(*arguments),
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result


def execute(command, out, *settings, config="run.yaml"):
    """Run a command in this process, which has imported what it needs."""
    arguments = [command, "--config", config, "--out", out, "data.path=problems.jsonl"]
    result = CliRunner().invoke(build_app(), [*arguments, *settings], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr


@pytest.fixture
def start(workplace, environment, monkeypatch):
    """Return `execute`, in the directory of the module."""
    monkeypatch.chdir(workplace)
    return execute


# The fine-tuned model of `first`: a run that starts from it needs no warm-up.
WARM = "policy.model_name=first/warm_up/final"


@pytest.fixture(scope="module")
def warm(run, workplace, shared_ray):
    """Return the directory of a run from the fine-tuned model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace)
        execute("grpo", "warm", WARM)
    return workplace / "warm"


@pytest.mark.promise
def test_a_run_leaves_its_metrics(run, workplace):
    rows = read_metrics(workplace / "first" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["accuracy"] is not None for row in rows] == [True, False, True, False, True]
    before = {name for name, value in rows[0].items() if value is not None}
    assert before == {"step", "accuracy", "reward_mean", "refit_s"}
    for row in rows[1:]:
        # No peak of a CPU is known.
        assert {name for name, value in row.items() if value is None} <= {"accuracy", "mfu"}
        assert 0 <= row["reward_mean"] <= 1
        assert row["entropy"] > 0
        assert row["kl"] >= 0
        parts = sum(row[phase] for phase in PHASES)
        assert 0.95 * row["step_s"] < parts <= row["step_s"]
    rewards = [row["reward_mean"] for row in rows[1:]]
    assert 0 < sum(rewards) < 4, "rewards that are all equal would prove nothing here"
    assert f"-> {rows[-1]['accuracy']:.3f} in 4 steps" in run.stdout


def drawn(name, *, by):
    """Return the name of a file in a list, which is empty without the package of an extra."""
    return [name] if find_spec(by) else []


@pytest.mark.promise
def test_a_run_leaves_its_files(run, workplace):
    path = workplace / "first"
    assert {each.name for each in path.iterdir()} == {
        "config.yaml",
        "data.json",
        "metrics.jsonl",
        "samples.jsonl",
        "environment.json",
        "status.json",
        "checkpoints",
        "final",
        "tiny_model",
        "warm_up",
        *drawn("reward.png", by="matplotlib"),
        *drawn("report.html", by="plotly"),
    }
    assert yaml.safe_load((path / "config.yaml").read_text())["grpo"]["prompts_per_step"] == 4
    checkpoints = {each.name for each in (path / "checkpoints").iterdir()}
    assert checkpoints == {"step_2", "step_4", "latest"}
    assert {each.name for each in (path / "checkpoints" / "step_4").iterdir()} == {
        "weights",
        "optimizer",
        "tokenizer",
        "state.json",
    }
    state = json.loads((path / "checkpoints" / "step_4" / "state.json").read_text())
    assert (state["step"], state["data_position"]) == (4, 16)


@pytest.mark.slow
def test_the_warm_up_stops_by_its_criterion(run, workplace):
    rows = read_metrics(workplace / "first" / "warm_up" / "metrics.jsonl")
    rates = [row["pass_rate"] for row in rows if row["pass_rate"] is not None]
    assert all(rate < 0.7 for rate in rates[:-1])
    assert rates[-1] >= 0.7
    assert rows[-1]["step"] < 40


@pytest.mark.promise
def test_the_model_loads_with_transformers_alone(run, workplace):
    model = AutoModelForCausalLM.from_pretrained(workplace / "first" / "final")
    warm = AutoModelForCausalLM.from_pretrained(workplace / "first" / "warm_up" / "final")
    tokenizer = AutoTokenizer.from_pretrained(workplace / "first" / "final")
    tokens = torch.tensor([tokenizer("7?")["input_ids"]])
    assert (model(tokens).logits - warm(tokens).logits).abs().max() > 1e-3
    # Held-out accuracy of the last step, computed anew: every number answers 0 or 1.
    likely = tokenizer.decode(model(tokens).logits[0, -1].argmax())
    assert likely in ("0", "1")


@pytest.mark.slow
def test_a_run_directory_is_not_overwritten(run, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    before = measured(workplace / "first")
    arguments = ["grpo", "--config", "run.yaml", "--out", "first", "data.path=problems.jsonl"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 2
    assert "the run directory first exists" in result.stderr
    assert measured(workplace / "first") == before


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run(run, start, workplace):
    start("grpo", "second")
    assert measured(workplace / "second") == measured(workplace / "first")
    supervised = [measured(workplace / name / "warm_up") for name in ("first", "second")]
    assert supervised[0] == supervised[1]


@pytest.mark.slow
def test_without_staleness_a_run_is_the_synchronous_one(warm, start, workplace):
    start("grpo", "synchronous", WARM, "async.max_staleness=0", "async.refit_every=3")
    assert measured(workplace / "synchronous") == measured(warm)
    models = [
        AutoModelForCausalLM.from_pretrained(path / "final").state_dict()
        for path in (warm, workplace / "synchronous")
    ]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert not (workplace / "synchronous" / "trained.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("section", ["dynamic_batching", "sequence_packing"])
def test_planned_micro_batches_train_to_the_same_losses(warm, start, workplace, section):
    settings = [
        f"policy.{section}.enabled=true",
        f"policy.{section}.train_mb_tokens=32",
        "policy.max_total_sequence_length=32",
        f"policy.{section}.logprob_mb_tokens=48",
    ]
    if section == "dynamic_batching":
        settings.append("policy.dynamic_batching.sequence_length_round=2")
    start("grpo", section, WARM, *settings)
    planned, padded = measured(workplace / section), measured(warm)
    assert len(planned) == len(padded)
    losses = [[row["loss"] for row in rows[1:]] for rows in (planned, padded)]
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-5)
    assert len(set(losses[1])) > 1, "losses that do not move would prove nothing here"


@pytest.mark.promise
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(run, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    source, path = workplace / "first", workplace / "interrupted"
    shutil.copytree(source, path)
    for name in ("final", "checkpoints/step_4"):
        shutil.rmtree(path / name)
    # What a process leaves that dies while it saves, and while it writes a line.
    shutil.copytree(path / "checkpoints" / "step_2", path / "checkpoints" / "step_3.partial")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    resumed = CliRunner().invoke(build_app(), ["grpo", "--resume", str(path)])
    assert resumed.exit_code == 0, resumed.stderr
    assert measured(path) == measured(source)
    assert not (path / "checkpoints" / "step_3.partial").exists()
    models = [
        AutoModelForCausalLM.from_pretrained(each / "final").state_dict() for each in (source, path)
    ]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.slow
@pytest.mark.needs("rl-policy[lora]")
def test_adapters_alone_are_trained_after_a_warm_up_of_all(start, workplace):
    peft = pytest.importorskip("peft", reason="comes with the extra lora")
    lora = "policy.dtensor_cfg.lora.enabled"
    settings = [f"{lora}=true", f"sft.{lora}=false", "sft.steps=1", "grpo.steps=2", TWO_RANKS]
    start("grpo", "adapted", *settings)
    directory = workplace / "adapted"
    assert not (directory / "warm_up" / "adapters").exists()
    warm = AutoModelForCausalLM.from_pretrained(directory / "warm_up" / "final")
    merged = peft.PeftModel.from_pretrained(warm, directory / "adapters").merge_and_unload()
    final = dict(AutoModelForCausalLM.from_pretrained(directory / "final").named_parameters())
    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter, final[name]), name


@pytest.mark.slow
def test_the_supervised_part_alone_on_a_model_of_the_user(run, start, workplace):
    (workplace / "own.yaml").write_text(
        "policy:\n"
        "  generation: {max_new_tokens: 2}\n"
        "  optimizer: {kwargs: {lr: 3.0e-3}}\n"
        "data: {num_heldout: 16}\n"
    )
    model = "policy.model_name=first/tiny_model"
    start("sft", "own", model, "sft.steps=3", "sft.eval_every=3", config="own.yaml")
    rows = read_metrics(workplace / "own" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[3]["loss"] < rows[1]["loss"]
    assert {each.name for each in (workplace / "own").iterdir()} == {
        "config.yaml",
        "data.json",
        "metrics.jsonl",
        "samples.jsonl",
        "environment.json",
        "status.json",
        "checkpoints",
        "final",
        *drawn("report.html", by="plotly"),
    }
    AutoModelForCausalLM.from_pretrained(workplace / "own" / "final")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_nothing_behind(workplace, environment, number, status):
    out = f"stopped-{status}"
    # Clusters that are kept hold the others.
    cpus = ray.available_resources()["CPU"]
    arguments = ["grpo", "--config", "run.yaml", "--out", out, "data.path=problems.jsonl"]
    process = subprocess.Popen(
        forked_command(*arguments, TWO_RANKS),
        cwd=workplace,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # As under a terminal: a job in a shell's background inherits that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = workplace / out / "warm_up" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text(), what="a step")
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, errors
    assert f"interrupted; continue with: rl-policy grpo --resume {out}" in errors
    assert "Traceback" not in errors
    wait_until(lambda: ray.available_resources()["CPU"] == cpus, what="all CPUs are free again")


@pytest.mark.slow
def test_a_terminated_run_ends_the_ray_that_it_started(workplace, wait_until_gone):
    """With a Ray of its own: `ray.init` sets a handler of SIGTERM that would abort the run."""
    process = subprocess.Popen(
        [*MODULE, "sft", "--config", "run.yaml", "--out", "alone", "data.path=problems.jsonl"],
        cwd=workplace,
        env={**os.environ, "RAY_ADDRESS": "local"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = workplace / "alone" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text(), what="a step")
    children = descendants(process.pid)
    assert len(children) > 2
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143, errors
    assert errors.splitlines()[-1].startswith("interrupted; continue with: rl-policy sft --resume")
    assert "Traceback" not in errors
    assert "SIGABRT" not in errors
    wait_until_gone(children)
