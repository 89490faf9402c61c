import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import ray
import yaml
from patience import PATIENCE_S
from ray.exceptions import RayActorError
from rl_policy import cli as rl_policy_cli
from rl_policy.cli import build_app, main
from rl_policy.config import load_run_config, parse_run_config
from rl_policy.data.tiny_model import build_tiny_model, tiny_model_config
from rl_policy.ray.failures import to_exception
from typer.testing import CliRunner

pytestmark = [pytest.mark.usefixtures("ray_apart"), pytest.mark.needs("rl-policy[dtensor]")]

ONE_CYCLE = [
    "policy.scheduler.name=torch.optim.lr_scheduler.OneCycleLR",
    "policy.scheduler.kwargs={max_lr: 0.001, total_steps: 10}",
]
MODULE = [sys.executable, "-c", "from rl_policy.cli import main; main()"]


def run_apart(*arguments, cwd, **environment):
    """Return what a process of the command line leaves."""
    return subprocess.run(
        [*MODULE, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "COLUMNS": "200", **environment},
        check=False,
    )


@pytest.fixture
def rl_policy(tmp_path, monkeypatch):
    """Return a function that runs the command line here, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    return partial(CliRunner().invoke, build_app())


@pytest.mark.promise
def test_help_explains_every_flag_and_loads_nothing_heavy(tmp_path):
    result = run_apart("grpo", "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for flag in ("--config", "--out", "--resume", "--show-config", "SECTION.KEY=VALUE"):
        assert flag in result.stdout
    assert result.stdout.count("default:") == 5
    code = "import sys, rl_policy.cli; print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.stdout.strip() == "set()", loaded.stderr


# What a driver loads for what it does with it, and not by the way: each takes tenths of a second.
UNUSED_BEFORE_RAY = (
    "matplotlib",
    "rl_dtensor_worker.engine",
    "tensorboard",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "transformers.modeling_utils",
    "transformers.models.qwen2.modeling_qwen2",
)
# transformers loads these with the class of a model's config, or with `AutoTokenizer`.
UNUSED_BEFORE_A_MODEL = (
    *UNUSED_BEFORE_RAY,
    "accelerate",
    "sympy",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.generation.utils",
)
IMPORTS_OF_A_DRIVER = """
import os, sys
import ray
import rl_policy.recipes.grpo, rl_policy.recipes.sft, rl_policy.recipes.dpo, rl_policy.run.session
from rl_policy import backends, cli

def show(names):
    print([name for name in names if name in sys.modules], flush=True)

def stop(*_, **__):
    show(UNUSED_BEFORE_RAY)
    os._exit(0)

backends.load("dtensor")
show(UNUSED_BEFORE_A_MODEL)
ray.init = stop
sys.argv = ["rl-policy", "grpo", "--out", "run"]
cli.main()
"""


def test_a_driver_imports_before_ray_starts_what_it_uses_and_no_more(tmp_path):
    names = f"{UNUSED_BEFORE_RAY=}\n{UNUSED_BEFORE_A_MODEL=}\n"
    loaded = subprocess.run(
        [sys.executable, "-c", names + IMPORTS_OF_A_DRIVER],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert loaded.stdout.splitlines() == ["[]", "[]"], loaded.stderr


@pytest.mark.parametrize("recipe", ["dpo", "grpo", "sft"])
@pytest.mark.promise
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


def deep(tmp_path):
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "[" * 5000 + "]" * 5000)
    return str(path)


def below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    return str(tmp_path / "file" / "out")


def deep_problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": ' + "[" * 100_000 + "\n")
    return f"data.path={path}"


def half_a_character(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "\\ud800", "answer": "1"}\n')
    return f"data.path={path}"


def unknown_type(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nope"}')
    return f"policy.model_name={tmp_path}"


def without_weights(tmp_path):
    return f"policy.model_name={save_model(tmp_path, 'model.safetensors', b'')}"


def truncated(tmp_path):
    path = save_model(tmp_path, "", b"")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-1000])
    return f"policy.model_name={path}"


def broken_tokenizer(tmp_path):
    return f"policy.model_name={save_model(tmp_path, 'tokenizer.json', b'{')}"


def save_model(tmp_path, name, content):
    """Write a model's directory in which one file is replaced, or missing without content."""
    path = tmp_path / "model"
    sizes = load_run_config("grpo").tiny_model
    build_tiny_model(path, config=tiny_model_config(sizes, max_sequence_length=64), seed=0)
    if name and content:
        (path / name).write_bytes(content)
    elif name:
        (path / name).unlink()
    return path


def scheduler(name, **kwargs):
    return f"policy.scheduler={json.dumps({'name': f'{SCHEDULERS}.{name}', 'kwargs': kwargs})}"


KWARGS, SCHEDULERS = "policy.optimizer.kwargs", "torch.optim.lr_scheduler"
TEMPLATE = ["data.use_chat_template=true", "policy.generation.max_new_tokens=6"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[
            ([f"{KWARGS}.{key}={value}"], f"{KWARGS}.{key}")
            for key, values in {
                "lr": [".nan", ".inf", -1, "abc", "null"],
                "weight_decay": ["abc"],
                "betas": ["[2,3]", 3],
                "eps": [-1],
                "fused": ["maybe"],
            }.items()
            for value in values
        ],
        ([scheduler("StepLR", step_size=0)], "policy.scheduler.kwargs={'step_size': 0}"),
        ([scheduler("LinearLR", start_factor=-1)], "policy.scheduler.kwargs"),
        ([scheduler("ReduceLROnPlateau")], "policy.scheduler.kwargs={} make no schedule"),
        *[
            ([f"policy.optimizer.name=torch.optim.{name}"], f"'torch.optim.{name}' cannot train")
            for name in ("LBFGS", "SparseAdam")
        ],
        *[
            ([f"{key}=.inf"], f"{key}=inf: input should be a finite number")
            for key in (
                *("loss.clip_high", "loss.dual_clip", "loss.kl_coef", "loss.importance_cap"),
                "tiny_model.initializer_range",
            )
        ],
        (["policy.generation.temperature=1e-30"], "policy.generation.temperature=1e-30"),
        (["policy.generation.stop_token_ids=[1,99999]"], "stop_token_ids[1]=99999 is not in the"),
        (["policy.generation.pad_token_id=99999"], "policy.generation.pad_token_id=99999"),
        (["policy.generation.stop_strings=['']"], "policy.generation.stop_strings[0]=''"),
        (["policy.max_grad_norm=0"], "policy.max_grad_norm=0 must be above 0"),
        (["policy.timeout_s=1e-9"], "policy.timeout_s=1e-09 must be at least 1"),
        ([f"seed={10**29}"], f"seed={10**29}: input should be less than"),
        ([f"policy.seed={10**29}"], f"policy.seed={10**29} must be below"),
        (
            ["policy.generation.model_name=other"],
            "generation.model_name='other' contradicts",
        ),
        (["policy.generation.vllm_cfg.nope=3"], "policy.generation.vllm_cfg.nope is not a known"),
        (["policy.megatron_cfg.nope=3"], "policy.megatron_cfg.nope is not a known key"),
        (["grpo.steps=3", "grpo.steps=4"], "grpo.steps is given twice, as grpo.steps=3 and"),
        (
            [*ONE_CYCLE, "grpo.steps=7", "grpo.epochs_per_step=2", "grpo.warm_up=false"],
            "OneCycleLR ends after 10 steps, and the run takes 14 (grpo.steps=7, grpo.epochs_per_",
        ),
        (
            [*ONE_CYCLE, "grpo.steps=7", "grpo.warm_up=true", "sft.steps=11"],
            "sft.policy.scheduler.kwargs={'max_lr': 0.001, 'total_steps': 10}: torch.optim.lr_sch",
        ),
        (["cluster.placement_group_strategy=NOPE"], "cluster.placement_group_strategy='NOPE'"),
        (["refit.transport=nope"], "refit.transport='nope' is not among"),
        (["data.path="], "data.path= has no value"),
        (["data.path=''"], "data.path='' cannot be read"),
        (["reward.answer_pattern=(a|a)*$"], "reward.answer_pattern='(a|a)*$' takes more than"),
        (
            ["policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.enabled=true"],
            "policy.dtensor_cfg.enabled=True and policy.megatron_cfg.enabled=True",
        ),
        (["cluster.bundle_ct_per_node_list=[5000]"], "ask for 5000 ranks on"),
        (
            ["cluster.bundle_ct_per_node_list=[1000]", "cluster.use_gpus=true"],
            "cluster.bundle_ct_per_node_list[0]=1000 is more than cluster.num_gpus_per_node=8",
        ),
        (
            ["cluster.bundle_ct_per_node_list=[8,8]", "cluster.use_gpus=true"],
            "ask for 16 GPUs, and there are",
        ),
        (["cluster.placement_group_strategy=STRICT_SPREAD"], "'STRICT_SPREAD' needs a machine"),
        ([f"data.max_number={10**29}"], f"data.max_number={10**29}: input should be less"),
        (["tiny_model.hidden_size=65536"], "hidden_size=65536 and intermediate_size=256 give"),
        ([without_weights], "has weights that cannot be read"),
        ([truncated], "has weights that cannot be read"),
        ([broken_tokenizer], "policy.model_name="),
        ([unknown_type], "policy.model_name="),
        (["policy.model_name=nobody/nothing"], "policy.model_name='nobody/nothing'"),
        (["nothing"], "policy.model_name='nothing' is no directory, and no model that loads by"),
        (["sft"], "MODEL='sft' is a recipe: rl-policy sft runs it"),
        (["--config", deep], "deep.yaml: it is nested too deeply"),
        (["--out", below_a_file], "Not a directory"),
        (["--out", "/proc/below"], "--out /proc/below cannot be created"),
        (["--out", "x" * 300], "File name too long"),
        (["--out", "a\0b"], "cannot be created: "),
        ([deep_problems], "problems.jsonl:1: not JSON that can be read: it is nested too deeply"),
        ([half_a_character], "problems.jsonl:1: 'prompt' has half of a surrogate pair"),
        (
            [*TEMPLATE, "policy.tokenizer.chat_template={% if"],
            "policy.tokenizer.chat_template cannot render the prompt 'a question': TemplateSyntax",
        ),
        (
            [*TEMPLATE, "policy.tokenizer.chat_template={{ messages[7].x.y }}"],
            "policy.tokenizer.chat_template cannot render the prompt 'a question'",
        ),
        (
            [*TEMPLATE, "policy.tokenizer.chat_template=Hello"],
            "policy.tokenizer.chat_template leaves the prompt out: it renders 'Hello'",
        ),
        (["grpo.stepz=3"], "grpo.stepz is not a known key"),
        (["policy.train_global_batch_size=33"], "policy.train_global_batch_size=33"),
        (["policy.model_name=./absent"], "policy.model_name='./absent' is no directory"),
        (["policy.optimizer=null"], "policy.optimizer"),
        (["policy.dtensor_cfg.tensor_parallel_size=3"], "tensor_parallel_size=3"),
        (
            ["data.max_number=99", "data.num_heldout=100"],
            "data.max_number=99 gives 100 problems",
        ),
        (["policy.generation.max_new_tokens=3"], "policy.generation.max_new_tokens=3"),
        (
            ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.max_model_len=9"],
            "it exceeds policy.generation.vllm_cfg.max_model_len=9",
        ),
        (["reward.answer_pattern=("], "reward.answer_pattern"),
        (["data.use_chat_template=true"], "data.use_chat_template=True"),
        ([malformed_problems], "problems.jsonl:2 has no 'answer'; its keys are prompt"),
        ([long_problems], "has 40 tokens"),
        (
            [long_answers, "grpo.warm_up=true", "reward.answer_pattern=[0-9]"],
            "have 45 tokens, more than policy.max_total_sequence_length=32",
        ),
        (["sft.policy.max_total_sequence_length=7"], "more than sft.policy.max_total_sequence_len"),
        (["--config", "absent.yaml"], "absent.yaml"),
        (["logger=wandb"], "logger=[wandb]"),
        (["--out", "."], "the run directory . exists"),
        (["--resume", "."], "config.yaml"),
        (["--resume", "a", "--out", "b"], "--out b contradicts --resume a"),
    ],
)
def test_bad_input_ends_in_one_line_before_anything_starts(
    tmp_path, rl_policy, monkeypatch, arguments, message
):
    given = [each(tmp_path) if callable(each) else each for each in arguments]
    before = sorted(tmp_path.iterdir())
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    result = rl_policy(["grpo", *given])
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert result.stdout == ""
    assert sorted(tmp_path.iterdir()) == before
    assert not ray.is_initialized()


@pytest.mark.parametrize("source", ["RAY_ADDRESS", "ray start"])
def test_a_ray_that_does_not_answer_is_named_before_anything_starts(
    tmp_path, rl_policy, monkeypatch, source
):
    temporary = tmp_path / "temporary"
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        if source == "RAY_ADDRESS":
            monkeypatch.setenv("RAY_ADDRESS", address)
        else:
            (temporary / "ray").mkdir(parents=True)
            source = str(temporary / "ray/ray_current_cluster")
            Path(source).write_text(address)
        result = rl_policy(["grpo"])
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {source}={address} cannot be reached within 5 s (")
    assert line.endswith("start that Ray, or set RAY_ADDRESS=local for one of this machine alone")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("address", ["head", "head:", "127.0.0.1:6379x", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_named(rl_policy, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    result = rl_policy(["grpo"])
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert f"RAY_ADDRESS={address} " in line
    assert "RAY_ADDRESS=local" in line


def test_a_ray_that_does_not_start_ends_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    environment = {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(tmp_path / "file")}
    result = run_apart("grpo", "--out", "run", cwd=tmp_path, **environment)
    assert result.returncode == 1
    *_, line, way_on = result.stderr.splitlines()
    assert "Traceback" not in result.stderr
    assert line.startswith("error: Ray did not start within ")
    assert "file" in line
    assert "`rl-policy doctor limits ray` looks for the cause" in line
    assert way_on == "continue with: rl-policy grpo --resume run"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "error: Missing option '--gpus'. (rl-policy plan --help)"),
        (["grop"], "error: No such command 'grop'. Did you mean 'grpo'? (rl-policy --help)"),
        (["grpo", "--nope"], "error: No such option: --nope (rl-policy grpo --help)"),
        (["serve", "x", "--port", "99999"], "error: Invalid value for '--port'"),
    ],
)
def test_an_option_that_is_wrong_or_missing_is_one_line(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr("sys.argv", ["rl-policy", *arguments])
    monkeypatch.setattr("gc.set_threshold", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(said)


@pytest.mark.parametrize(("arguments", "said"), [(["--version"], "0.2"), ([], "Usage: rl-policy")])
def test_what_is_asked_of_the_command_alone(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr("sys.argv", ["rl-policy", *arguments])
    monkeypatch.setattr("gc.set_threshold", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert said in capsys.readouterr().out


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


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.promise
def test_a_signal_ends_a_run_in_order_and_says_how_to_go_on(
    tmp_path, rl_policy, monkeypatch, request, number, status
):
    ends = []

    def execute(inputs, directory):
        try:
            os.kill(os.getpid(), number)
            time.sleep(3600)
        finally:
            ends.append(signal.getsignal(number))

    # A shell's background job ignores Ctrl-C, and so would a run that it starts.
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, own))
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(rl_policy_cli, "_execute", execute)
    result = rl_policy(["grpo", "--out", "out", "data.max_number=999"])
    assert result.exit_code == status
    assert result.stderr == "interrupted; continue with: rl-policy grpo --resume out\n"
    assert ends == [signal.SIG_DFL], "a second signal has to end the process at once"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture
def failing(tmp_path, rl_policy, monkeypatch):
    """Return a function that lets a run fail, and returns the lines of it."""

    def fail(error):
        def execute(inputs, directory):
            raise error

        monkeypatch.setattr(rl_policy_cli, "_execute", execute)
        result = rl_policy(["grpo", "--out", "out", "data.max_number=999"])
        assert result.exit_code == 1
        return result.stderr.splitlines()

    return fail


def test_a_death_of_a_rank_is_three_lines_and_a_file(tmp_path, failing):
    report = "The worker died unexpectedly.\n" * 70 + "connection error code 2. End of file."
    died = to_exception(RayActorError(error_msg=report), rank=1, group="lm_policy", method="train")
    first, second, third = failing(died)
    assert first.startswith("error: rank 1 of lm_policy died during train: its process was killed")
    assert "GiB of this machine's memory are free" in first
    assert second == "all that Ray reports of it is in out/failure.txt"
    assert third == "continue with: rl-policy grpo --resume out"
    assert "Traceback" in (tmp_path / "out" / "failure.txt").read_text()


def test_a_full_disk_is_named_without_a_traceback(failing):
    full = OSError(errno.ENOSPC, "No space left on device", "out/metrics.jsonl")
    first, second, third = failing(full)
    assert first == "error: [Errno 28] No space left on device: 'out/metrics.jsonl'"
    assert second == "the checkpoints before it are whole"
    assert third == "continue with: rl-policy grpo --resume out"


def test_any_other_failure_keeps_its_traceback(rl_policy, monkeypatch):
    def execute(inputs, directory):
        raise KeyError("a fault of ours")

    monkeypatch.setattr(rl_policy_cli, "_execute", execute)
    result = rl_policy(["grpo", "--out", "out", "data.max_number=999"])
    assert isinstance(result.exception, KeyError)
