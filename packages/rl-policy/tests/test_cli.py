import os
import subprocess
import sys
import time
from functools import partial

import pytest
import ray
import yaml
from rl_policy.cli import build_app
from rl_policy.config import parse_run_config
from typer.testing import CliRunner

pytestmark = [pytest.mark.usefixtures("ray_apart"), pytest.mark.needs("rl-policy[dtensor]")]

MODULE = [sys.executable, "-c", "from rl_policy.cli import main; main()"]


def run_apart(*arguments, cwd):
    """Return what a process of the command line leaves."""
    return subprocess.run(
        [*MODULE, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )


@pytest.fixture
def rl_policy(tmp_path, monkeypatch):
    """Return a function that runs the command line here, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    return partial(CliRunner().invoke, build_app())


def test_help_explains_every_flag_and_loads_nothing_heavy(tmp_path):
    started = time.monotonic()
    result = run_apart("grpo", "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for flag in ("--config", "--out", "--resume", "--show-config", "SECTION.KEY=VALUE"):
        assert flag in result.stdout
    assert result.stdout.count("default:") == 5
    code = "import sys, rl_policy.cli; print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.stdout.strip() == "set()", loaded.stderr
    assert time.monotonic() - started < 60


def test_a_driver_imports_neither_plots_nor_events_nor_models_before_it_uses_them():
    code = """
import sys
import rl_policy.recipes.grpo, rl_policy.recipes.sft, rl_policy.recipes.dpo, rl_policy.run.session
from rl_policy import backends
backends.load("dtensor")
unused = ("matplotlib", "tensorboard", "torch.utils.tensorboard")
models = [name for name in sys.modules if name.startswith("transformers.models.")]
print([name for name in unused if name in sys.modules])
print([name for name in models if name.rpartition(".")[2].startswith("modeling_qwen")])
"""
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert loaded.stdout.splitlines() == ["[]", "[]"], loaded.stderr


@pytest.mark.parametrize("recipe", ["dpo", "grpo", "sft"])
def test_the_configuration_is_shown_and_nothing_is_written(tmp_path, rl_policy, recipe):
    result = rl_policy([recipe, "--show-config", "grpo.steps=3"])
    assert result.exit_code == 0, result.stderr
    config = parse_run_config(yaml.safe_load(result.stdout))
    assert (config.recipe, config.grpo.steps) == (recipe, 3)
    assert list(tmp_path.iterdir()) == []


def malformed_problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2="}\n')
    return f"data.path={path}"


def long_problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(f'{{"prompt": "{n:040}", "answer": "1"}}\n' for n in range(600)))
    return f"data.path={path}"


def long_answers(tmp_path):
    path = tmp_path / "problems.jsonl"
    lines = (f'{{"prompt": "{n:04}", "answer": "{1:040}"}}\n' for n in range(600))
    path.write_text("".join(lines))
    return f"data.path={path}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grpo.stepz=3"], "grpo.stepz is not a known key"),
        (["policy.train_global_batch_size=33"], "policy.train_global_batch_size=33"),
        (["policy.model_name=./absent"], "policy.model_name='./absent' is no directory"),
        (["policy.optimizer=null"], "policy.optimizer"),
        (["policy.dtensor_cfg.tensor_parallel_size=3"], "tensor_parallel_size=3"),
        (["data.max_number=99"], "data.max_number=99 gives 100 problems"),
        (["policy.generation.max_new_tokens=3"], "policy.generation.max_new_tokens=3"),
        (
            ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.max_model_len=9"],
            "it exceeds policy.generation.vllm_cfg.max_model_len=9",
        ),
        (["reward.answer_pattern='('"], "reward.answer_pattern"),
        (["data.use_chat_template=true"], "data.use_chat_template=True"),
        ([malformed_problems], "problems.jsonl:2: 'answer' must be a text"),
        ([long_problems], "has 40 tokens"),
        (
            [long_answers, "grpo.warm_up=true", "reward.answer_pattern='[0-9]'"],
            "have 45 tokens, more than policy.max_total_sequence_length=32",
        ),
        (["sft.policy.max_total_sequence_length=7"], "more than sft.policy.max_total_sequence_len"),
        (["--config", "absent.yaml"], "absent.yaml"),
        (["--out", "."], "the run directory . exists"),
        (["--resume", "."], "config.yaml"),
        (["--resume", "a", "--out", "b"], "--out b contradicts --resume a"),
    ],
)
def test_bad_input_ends_in_one_line_before_anything_starts(tmp_path, rl_policy, arguments, message):
    given = [each(tmp_path) if callable(each) else each for each in arguments]
    before = sorted(tmp_path.iterdir())
    result = rl_policy(["grpo", *given])
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert result.stdout == ""
    assert sorted(tmp_path.iterdir()) == before
    assert not ray.is_initialized()


def test_a_process_with_bad_input_ends_with_a_status_and_one_line(tmp_path):
    result = run_apart("grpo", "data.use_chat_template=true", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")


def test_a_run_of_the_other_recipe_is_not_resumed(tmp_path, rl_policy):
    (tmp_path / "config.yaml").write_text(rl_policy(["sft", "--show-config"]).stdout)
    result = rl_policy(["grpo", "--resume", "."])
    assert result.exit_code == 2
    assert "use rl-policy sft" in result.stderr
