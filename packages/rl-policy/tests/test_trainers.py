"""Trainers of Python programs: whole runs, held against those of the command line."""

import json
import subprocess
from pathlib import Path

import pytest
import ray
import torch
from patience import PATIENCE_S
from recipe_runs import CONFIG, MODULE, measured, write_workplace
from rl_policy import DPOTrainer, GRPOTrainer, SFTTrainer
from rl_policy.cli import build_app
from rl_policy.config import nest
from rl_policy.data.rewards import RewardError
from rl_policy.run.export import merge
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

pytestmark = pytest.mark.needs("rl-policy[dtensor]")

PROBLEMS = [{"prompt": f"{number}?", "answer": str(number % 2)} for number in range(200)]
SHORT = {"grpo.warm_up": False, "grpo.steps": 2, "grpo.eval_every": 2, "checkpoint.every": 1}
SETTINGS = {key: value for key, value in CONFIG.items() if key not in ("grpo", "checkpoint")}
SETTINGS |= {"grpo.prompts_per_step": 4, "grpo.samples_per_prompt": 4, **SHORT}


def first_digit(completions, problems):
    return [
        float(each[:1] == problem.answer)
        for each, problem in zip(completions, problems, strict=True)
    ]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def had_ray():
    """Return whether other tests of this process hold a Ray, which a trainer then joins."""
    return ray.is_initialized()


@pytest.mark.promise
def test_a_run_from_python_is_that_of_the_command_line(shared_ray, workplace):
    write_workplace(workplace)
    trainer = GRPOTrainer(data=PROBLEMS, config=nest(SETTINGS), out="python", progress=False)
    summary = trainer.train()
    assert (summary.steps, summary.final) == (2, Path("python/final"))
    overrides = [f"{key}={json.dumps(value)}" for key, value in SHORT.items()]
    run = ["grpo", "--config", "run.yaml", "data.path=problems.jsonl", "--out", "shell"]
    CliRunner().invoke(build_app(), [*run, *overrides], catch_exceptions=False)
    assert measured(Path("python")) == measured(Path("shell"))


@pytest.mark.slow
def test_with_keeps_its_processes_and_all_calls_are_of_the_trained_model(workplace, had_ray):
    seen = []

    def reward(completions, problems):
        seen.append(len(completions))
        return first_digit(completions, problems)

    with GRPOTrainer(
        data=({**each, "room": 3} for each in PROBLEMS),
        reward=reward,
        config=nest(SETTINGS),
        out="run",
        progress=False,
    ) as trainer:
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
        greedy = trainer.generate(["12?", "7?"], greedy=True)
        assert trainer.generate(["7?"], greedy=True) == greedy[1:]
        assert ray.is_initialized()
        trainer.save("saved")
    assert ray.is_initialized() is had_ray
    rows = measured(Path("run"))
    assert [before["step"], after["step"]] == [0, 2]
    assert before["accuracy"] == rows[0]["accuracy"]
    assert after["accuracy"] == rows[2]["accuracy"]
    assert set(seen) == {16}
    assert "reward/reward" in rows[1]

    model = AutoModelForCausalLM.from_pretrained("saved", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained("saved")
    for prompt, completion in zip(["12?", "7?"], greedy, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        rows = model.generate(**ids, max_new_tokens=2, do_sample=False)
        text = tokenizer.decode(rows[0, ids["input_ids"].shape[1] :], skip_special_tokens=False)
        assert text.removesuffix(tokenizer.eos_token) == completion

    with pytest.raises(ValueError, match="saved exists, and is not overwritten"):
        trainer.save("saved")
    # Data that had no file has one in the run's directory; a function has none.
    kept = [json.loads(line) for line in Path("run/data.jsonl").read_text().splitlines()]
    assert kept[0] == {**PROBLEMS[0], "room": 3}
    assert f"path: {Path('run/data.jsonl').absolute()}" in Path("run/config.yaml").read_text()
    refused = subprocess.run(
        [*MODULE, "grpo", "--resume", "run"], timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "reward.function=['<reward>'] was given by a Python program" in refused.stderr


@pytest.mark.slow
def test_a_run_whose_reward_fails_is_saved_and_continued_with_a_mended_one(shared_ray, workplace):
    calls = []

    def reward(completions, problems):
        calls.append(len(completions))
        # Two calls measure the start, the third is of the first step.
        if len(calls) == 4:
            raise ZeroDivisionError("the judge is away")
        return first_digit(completions, problems)

    settings = nest(SETTINGS | {"checkpoint.every": 10})
    trainer = GRPOTrainer(data=PROBLEMS, reward=reward, config=settings, out="run", progress=False)
    with pytest.raises(RewardError, match="'reward': it raised ZeroDivisionError: the judge is"):
        trainer.train()
    # What failed is asked of each sample alone, to name it; none fails there.
    assert [row["step"] for row in measured(Path("run"))] == [0, 1]
    # Its model can be had, though its reward is nobody's to load.
    merge(Path("run"), Path("merged"), step=1)
    assert AutoModelForCausalLM.from_pretrained("merged")
    assert trainer.train().steps == 2

    def other(completions, problems):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=r"has reward.function=\['<reward>'\], and \['<other>'\]"):
        GRPOTrainer(reward=other, resume="run")
    resumed = GRPOTrainer(reward=reward, resume="run", config={"grpo.steps": 3})
    assert resumed.train().steps == 3
    assert [row["step"] for row in measured(Path("run"))] == [0, 1, 2, 3]


@pytest.mark.slow
def test_fine_tuning_and_preferences(workplace):
    own = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "1"}]}
        for n in range(40)
    ]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = nest({**SETTINGS, "sft": {"steps": 2}, "policy.tokenizer.chat_template": template})
    with SFTTrainer(data=own, config=settings, out="sft", progress=False) as trainer:
        assert trainer.train().steps == 2
        # The template is that of the texts alone, and so a conversation is the text.
        prompts = ["3?", [{"role": "user", "content": "3?"}]]
        assert len(set(trainer.generate(prompts, greedy=True))) == 1
    pairs = [{"prompt": f"{n}?", "chosen": "1", "rejected": "0"} for n in range(40)]
    settings = nest({**SETTINGS, "dpo.steps": 2})
    trainer = DPOTrainer(data=pairs, config=settings, out="dpo", progress=False)
    trainer.train()
    rows, found = measured(Path("dpo")), trainer.evaluate()
    assert found["heldout_margin"] == rows[-1]["heldout_margin"] != 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "./absent"}, r"policy.model_name='./absent'"),
        ({"data": [{"prompt": "1?"}]}, r"data.path\[0\] has no 'answer'"),
        ({"data": []}, "data.path has no rows"),
        ({"data": ["a.jsonl", 3]}, "data: row 0 must be a mapping, got str"),
        ({"data": 3}, "data.path=3 must be a path, rows, or a function"),
        ({"data": {"train": []}}, "got a mapping with 'train': take one of them"),
        ({"data": [{"prompt": "1?", "answer": {1}}]}, r"data.path\[0\] cannot be kept as JSON"),
        ({"config": {"grpo.stepz": 1}}, "grpo.stepz is not a known key, did you mean 'steps'"),
        ({"config": {"grpo.steps": 0}}, "grpo.steps=0"),
        (
            {"config": {"grpo.steps": 1, "grpo": {"steps": 2}}},
            "grpo.steps is given twice",
        ),
        ({"data": "a.jsonl", "config": {"data.path": "b.jsonl"}}, "data.path is given twice"),
        ({"reward": "absent.py:f"}, "reward.function='absent.py:f' cannot be loaded"),
        ({"out": "."}, "the run directory . exists"),
        ({"resume": "absent"}, "cannot read the config absent/config.yaml"),
        ({"resume": "absent", "data": PROBLEMS}, "data.path contradicts resume=absent"),
        ({"resume": "absent", "out": "x"}, "out contradicts resume=absent"),
        ({"config": "absent.yaml"}, "cannot read the config absent.yaml"),
    ],
)
def test_bad_input_is_named_before_anything_starts(workplace, arguments, message):
    with pytest.raises(ValueError, match=message):
        GRPOTrainer(**arguments)
    assert list(workplace.iterdir()) == []


def test_what_a_recipe_lacks_is_refused(workplace):
    with pytest.raises(ValueError, match="the recipe 'dpo' has no rewards"):
        DPOTrainer(reward=first_digit)
    with pytest.raises(TypeError, match="<lambda> must take completions and problems"):
        GRPOTrainer(reward=lambda completions: [])


def test_a_prompt_that_is_none_or_too_long_is_refused(workplace):
    trainer = SFTTrainer(data=PROBLEMS, config=nest(SETTINGS))
    with pytest.raises(ValueError, match=r"prompts\[1\] must be a text that is not empty"):
        trainer.generate(["a", ""])
    with pytest.raises(ValueError, match=r"prompts\[0\]\[0\]: 'content' must be a text"):
        trainer.generate([[{"role": "user"}]])
    with pytest.raises(ValueError, match=r"max_new_tokens=2 it exceeds policy.max_total_sequence"):
        trainer.generate(["a" * 40])
    assert trainer.generate([]) == []
    with pytest.raises(ValueError, match=r"has no checkpoint"):
        trainer.save("somewhere")
