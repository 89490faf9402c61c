"""GRPO with an environment: whole runs, their log-probabilities, and what is refused."""

import json
import logging
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from kept_clusters import kept_cluster
from patience import PATIENCE_S, wait_until
from processes import descendants
from recipe_runs import CONFIG, forked_command, measured
from rl_interfaces import EnvironmentStep
from rl_policy import DPOTrainer, GRPOTrainer, Policy
from rl_policy.cli import build_app
from rl_policy.config import TinyModelSection, load_run_config
from rl_policy.data.batches import ProblemEncoder, completion_batch
from rl_policy.data.datasets import Problem
from rl_policy.data.tiny_model import build_tiny_model, build_tokenizer, tiny_model_config
from rl_policy.environments.pool import GivenEnvironment, ThreadPool
from rl_policy.environments.rollouts import EpisodePlayer
from rl_policy.run.export import merge
from rl_policy.run.inputs import prepare_inputs
from rl_policy.run.metrics import read_metrics
from rl_policy.run.samples import read_samples
from tolerances import LOGPROBS, REPEATED, assert_close, expected_of
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

pytestmark = [pytest.mark.needs("rl-policy[dtensor]")]

ENVIRONMENT = """
import os, signal, time
from pathlib import Path

def takes(marker):
    try:
        os.unlink(marker)
    except FileNotFoundError:
        return False
    return True

def num_resets():
    return Path("resets").stat().st_size

class Rows:
    '''Two turns, or three for every third problem; more reward for smaller first bytes.'''

    made = 0

    def __init__(self):
        Rows.made += 1

    def reset(self, problem):
        self.number = int(problem.prompt[:-1])
        self.turn = 0
        with open("resets", "a") as file:
            file.write(".")
        return f"{self.number % 4}?"

    def step(self, text):
        self.turn += 1
        # Evaluations have one episode in a process.
        limit = Path("most resets")
        if limit.exists() and num_resets() > int(limit.read_text()):
            raise RuntimeError("on purpose")
        if self.turn == 2 and (takes("die") or (Rows.made > 1 and takes("die in a group"))):
            os.kill(os.getpid(), signal.SIGKILL)
        while Path("wait").exists():
            time.sleep(0.01)
        reward = 1 - (text.encode() or b"0")[0] / 256
        return f"{self.turn}:", reward, self.turn == 2 + (self.number % 3 == 0)

class Always:
    def reset(self, problem):
        return None

    def step(self, text):
        raise RuntimeError("on purpose")
"""
OVERRIDES = [
    "environment.function=my_environment.py:Rows",
    "policy.max_total_sequence_length=24",
    "grpo.steps=2",
    "grpo.eval_every=2",
    "checkpoint.every=1",
    "data.num_heldout=4",
]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """Write the environment, problems and a configuration; return the directory."""
    monkeypatch.chdir(tmp_path)
    problems = [{"prompt": f"{number}?"} for number in range(200)]
    Path("problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    Path("my_environment.py").write_text(ENVIRONMENT)
    Path("run.yaml").write_text(json.dumps(CONFIG | {"data": {"path": "problems.jsonl"}}))
    return tmp_path


def grpo(*arguments, out="out"):
    command = ["grpo", "--config", "run.yaml", "--out", out]
    return CliRunner().invoke(build_app(), [*command, *with_environment(arguments)])


@pytest.mark.slow
def test_a_run_outlives_a_killed_environment_and_says_so(shared_ray, workplace, caplog):
    Path("die").touch()
    with caplog.at_level(logging.WARNING):
        result = grpo()
    assert result.exit_code == 0, result.output
    # The first evaluation meets it, which has groups of one episode each.
    (record,) = [each for each in caplog.records if "left out" in each.getMessage()]
    assert "environment.function='my_environment.py:Rows'" in record.getMessage()
    assert "its process ended with status -9, for the prompt '" in record.getMessage()
    assert "in turn 2: its group is left out" in record.getMessage()
    rows = read_metrics(Path("out/metrics.jsonl"))
    assert [row.get("environment_failures") for row in rows] == [None, 0.0, 0.0]
    assert all(2 <= row["turns_mean"] <= 3 for row in rows[1:])
    assert all(row["loss"] is not None and row["kl"] is not None for row in rows[1:])
    samples = read_samples(Path("out/samples.jsonl"))
    assert {each.kind for each in samples} == {"eval", "train"}
    for each in samples:
        is_whole = each.turns[-1]["role"] == "policy" and len(each.turns) in (3, 5)
        # The process died in the middle of one.
        assert is_whole or each.reward == 0.0
        assert len(each.sampled) == len(each.tokens) == len(each.logprobs)
        observed = [token for token, own in zip(each.tokens, each.sampled, strict=True) if not own]
        texts = [turn["text"] for turn in each.turns if turn["role"] == "environment"]
        assert "".join(observed) == "".join(texts)


@pytest.mark.slow
def test_a_step_whose_evaluation_fails_is_taken_again(shared_ray, workplace):
    assert grpo("checkpoint.every=5", "grpo.steps=2", out="whole").exit_code == 0
    # The last four are those of the last evaluation.
    Path("most resets").write_text(str(Path("resets").stat().st_size - 4))
    Path("resets").unlink()
    result = grpo("checkpoint.every=5", "grpo.steps=2")
    assert result.exit_code == 1
    assert "on purpose" in result.output + str(result.exception)
    # Its weights would be those of step 2.
    assert not list(Path("out/checkpoints").glob("step_1"))
    Path("most resets").unlink()
    assert CliRunner().invoke(build_app(), ["grpo", "--resume", "out"]).exit_code == 0
    assert measured(Path("out")) == measured(Path("whole"))


@pytest.mark.slow
def test_a_group_that_has_lost_its_process_is_counted_and_not_trained(
    shared_ray, workplace, caplog
):
    Path("die in a group").touch()
    with caplog.at_level(logging.WARNING):
        result = grpo("grpo.steps=1", "grpo.eval_every=1", "report.samples=16")
    assert result.exit_code == 0, result.output
    (last,) = read_metrics(Path("out/metrics.jsonl"))[1:]
    assert last["environment_failures"] == 1.0
    assert 0 < last["reward_mean"] < 3
    lost = [each for each in read_samples(Path("out/samples.jsonl")) if each.reward == 0.0]
    assert [each.advantage for each in lost] == [0.0] * 4


@pytest.mark.slow
def test_a_run_whose_environment_always_fails_ends_with_its_name(shared_ray, workplace):
    result = grpo("environment.function=my_environment.py:Always")
    assert result.exit_code == 1
    assert "has failed in all 4 groups of episodes: it raised RuntimeError: on purpose" in (
        result.output + str(result.exception)
    )


def start(*arguments):
    command = forked_command("grpo", *arguments)
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def processes_of(driver):
    """Return the processes of a driver's environments, the parent of the others first."""
    own = []
    for pid in descendants(driver.pid):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "rl_policy.environments.server" in line:
            own.append(pid)
    return own


@pytest.mark.slow
def test_kills_from_outside(workplace, wait_until_gone):
    new = ["--config", "run.yaml", *with_environment(["grpo.steps=3", "grpo.eval_every=3"])]
    Path("wait").touch()
    run = start(*new, "--out", "killed")
    # The first evaluation has begun, in as many processes as problems.
    wait_until(lambda: len(processes_of(run)) == 5, what="five processes of environments")
    time.sleep(1)
    os.kill(processes_of(run)[2], signal.SIGKILL)
    time.sleep(1)
    Path("wait").unlink()
    metrics = Path("killed/metrics.jsonl")
    wait_until(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, what="two steps"
    )
    Path("wait").touch()
    time.sleep(1)
    left = processes_of(run)
    assert len(left) >= 2
    run.kill()
    wait_until_gone(left)
    Path("wait").unlink()
    output = run.communicate()[0]
    assert output.count("its process ended with status -9, for the prompt '") == 1
    resumed = start("--resume", "killed")
    text = resumed.communicate(timeout=PATIENCE_S)[0]
    assert resumed.returncode == 0, text
    rows = read_metrics(metrics)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["environment_failures"] for row in rows[1:]] == [0.0] * 3


@pytest.mark.slow
def test_a_resumed_run_plays_the_episodes_of_one_that_was_not_interrupted(shared_ray, workplace):
    for result in (grpo(out="whole"), grpo("grpo.steps=1", out="parts")):
        assert result.exit_code == 0, result.output
    more = ["grpo", "--resume", "parts", "grpo.steps=2"]
    assert CliRunner().invoke(build_app(), more).exit_code == 0
    whole, parts = measured(Path("whole")), measured(Path("parts"))
    # The last step of a run is evaluated, which the first one of two is not.
    for row in (whole[1], parts[1]):
        row.pop("accuracy")
    assert parts == whole


class Count:
    """Three turns, the first of which are answered by their number."""

    seen: list[str] = []  # noqa: RUF012 # shared with the program on purpose

    def reset(self, problem):
        self.turns = 0

    def step(self, text):
        Count.seen.append(text)
        self.turns += 1
        return EnvironmentStep(f"{self.turns}\n", float(len(text)), done=self.turns == 3)


@pytest.mark.slow
def test_a_class_of_the_program_plays_and_has_to_be_given_again(shared_ray, workplace):
    settings = {
        "cluster": CONFIG["cluster"],
        "policy": {**CONFIG["policy"], "max_total_sequence_length": 24},
        "data": {"num_heldout": 4},
        "grpo": {"steps": 1, "eval_every": 1, "prompts_per_step": 4, "samples_per_prompt": 4},
        "checkpoint": {"every": 1},
    }
    trainer = GRPOTrainer(
        data="problems.jsonl", environment=Count, config=settings, out="out", progress=False
    )
    trainer.train()
    (row,) = read_metrics(Path("out/metrics.jsonl"))[1:]
    assert row["turns_mean"] == 3.0
    assert len(Count.seen) >= 3 * 16
    # Its model can be had without the class.
    merge(Path("out"), Path("merged"), step=1)
    assert AutoModelForCausalLM.from_pretrained("merged")
    more = {"grpo.steps": 2}
    with pytest.raises(ValueError, match="was given by a Python program"):
        GRPOTrainer(resume="out", config=more)
    with pytest.raises(ValueError, match=r"has environment\.function=<Count>, and other\.py:A is"):
        GRPOTrainer(resume="out", environment="other.py:A", config=more)
    GRPOTrainer(resume="out", environment=Count, config=more, progress=False).train()
    assert [row["step"] for row in read_metrics(Path("out/metrics.jsonl"))] == [0, 1, 2]


@pytest.mark.promise
def test_sampler_and_trainer_agree_on_the_sampled_tokens(shared_ray, tmp_path):
    shape = tiny_model_config(TinyModelSection(), max_sequence_length=64)
    build_tiny_model(tmp_path / "model", config=shape, seed=0)
    encoder = ProblemEncoder(build_tokenizer())
    settings = {
        "model_name": str(tmp_path / "model"),
        "precision": "float32",
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "max_total_sequence_length": 64,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}},
        "generation": {"max_new_tokens": 4, "temperature": 0.7},
        "dtensor_cfg": {"enabled": True},
    }
    player = EpisodePlayer(
        pool=ThreadPool(GivenEnvironment(OneEndsEarly), limit_s=PATIENCE_S, max_groups=8),
        encoder=encoder,
        max_turns=4,
        max_length=64,
        max_new_tokens=4,
        role="user",
    )
    cluster = kept_cluster([2])
    policy = Policy(cluster, settings, encoder.tokenizer)
    try:
        policy.prepare_for_generation()
        # Of three rows on two ranks, and of one row on two ranks.
        problems = [Problem("first"), Problem("second one"), Problem("a third")]
        episodes = player.play(policy, problems, group_size=1)
        batch = completion_batch(episodes, advantages=torch.ones(3))
        scored = policy.get_logprobs(batch)["logprobs"]
    finally:
        policy.shutdown()
        cluster.shutdown()
    assert episodes["num_turns"].tolist() == [1, 4, 4]
    mask = batch["token_mask"].bool()
    assert int(mask.sum()) >= 9
    generated = batch["generation_logprobs"][mask]
    atol = REPEATED * float(scored.abs().max())
    torch.testing.assert_close(scored[mask], generated, rtol=0, atol=atol)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for row in range(3):
        length = int(batch["input_lengths"][row])
        tokens = batch["input_ids"][row, :length]

        def compute(model, tokens=tokens):
            logits = model(tokens[None]).logits[0, :-1] / 0.7
            return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]

        own = mask[row, 1:length]
        got = batch["generation_logprobs"][row, 1:length][own]
        assert_close(got, expected_of(compute, model, LOGPROBS)[own])


class OneEndsEarly(Count):
    """The same, where one problem has one turn and the others four."""

    def reset(self, problem):
        self.turns, self.last = 0, 1 if problem.prompt == "first" else 4

    def step(self, text):
        self.turns += 1
        return " higher ", 0.0, self.turns == self.last


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment.max_turns=0"], r"environment\.max_turns=0: .*greater than or equal to 1"),
        (["environment.timeout_s=0"], r"environment\.timeout_s=0: "),
        (["environment.processes=0"], r"environment\.processes=0: "),
        (["environment.role=system"], r"environment\.role='system': "),
        (
            ["environment.function=[a.py:A]"],
            r"environment\.function='\[a\.py:A\]' cannot be loaded",
        ),
        (["environment.function="], r"environment\.function= has no value"),
        (["environment.function=A"], r"environment\.function='A' must be FILE\.py:NAME or"),
        (["environment.function=absent.py:A"], r"environment\.function='absent\.py:A' cannot be"),
        (
            ["environment.function=my_environment.py:Absent"],
            "cannot be loaded: my_environment.py has no function Absent",
        ),
        (
            ["reward.function=a.py:f"],
            r"'my_environment\.py:Rows' contradicts reward\.function=a\.py:f: .* leave one",
        ),
        (["reward.weights=[1.0]"], r"contradicts reward\.weights=\[1\.0\]"),
        (["reward.answer_pattern=x"], r"contradicts reward\.answer_pattern=x"),
        (["grpo.overlong_share=0.5"], r"contradicts grpo\.overlong_share=0\.5: .* set it to 0"),
        (["data.path=null", "grpo.warm_up=false"], r"cannot start an episode: .*ValueError"),
        (["grpo.warm_up=true"], r"problems\.jsonl:1 has no 'answer'"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(workplace, overrides, message):
    with pytest.raises(ValueError, match=message):
        prepare_inputs(
            load_run_config("grpo", path=Path("run.yaml"), overrides=with_environment(overrides))
        )


def with_environment(overrides):
    """Return overrides with the environment, unless they have one."""
    keys = {each.partition("=")[0] for each in overrides}
    common = [each for each in OVERRIDES if each.partition("=")[0] not in keys]
    return [*common, *overrides]


def test_a_class_of_the_program_does_not_go_on_beside_the_training():
    settings = {
        "policy.generation": {"backend": "vllm", "colocated": {"enabled": False}},
        "async.max_staleness": 4,
    }
    with pytest.raises(
        ValueError, match=r"contradicts environment\.function='<Count>', which runs"
    ):
        GRPOTrainer(data=[{"prompt": "1?"}], environment=Count, config=settings)


def test_a_recipe_without_environments_refuses_one():
    with pytest.raises(ValueError, match=r"the recipe 'dpo' has no environments"):
        DPOTrainer(environment="a.py:A")
    with pytest.raises(ValueError, match=r"environment=.*dict.* has no method 'reset'"):
        GRPOTrainer(environment=dict)
