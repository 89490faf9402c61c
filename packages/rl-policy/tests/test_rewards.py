"""Reward functions of the user's: what they are given, and what is made of all they do wrong."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S, wait_until
from recipe_runs import measured, write_workplace
from rl_policy.cli import build_app
from rl_policy.config import RewardSection
from rl_policy.data.datasets import Problem, read_problems
from rl_policy.data.reward_process import answer
from rl_policy.data.rewards import GivenReward, RewardError, RewardFunction, WeightedRewards
from rl_policy.run.inputs import build_reward
from typer.testing import CliRunner

pytestmark = pytest.mark.needs("rl-policy[dtensor]")

FUNCTIONS = """
import asyncio, os, time

def lengths(completions, problems):
    pairs = zip(completions, problems)
    return [len(each) + problem.columns.get("bonus", 0) for each, problem in pairs]

async def later(completions, problems):
    await asyncio.sleep(0.01)
    return [problem.answer == each for each, problem in zip(completions, problems)]

def as_tensor(completions, problems):
    import torch
    return torch.arange(len(completions)) / 2

def raises(completions, problems):
    return [1 / len(each) for each in completions]

def nan(completions, problems):
    return [float("nan") if each == "b" else 1.0 for each in completions]

def text(completions, problems):
    return ["1.0" for each in completions]

def too_few(completions, problems):
    return [1.0]

def nothing(completions, problems):
    return None

def hangs(completions, problems):
    while "hang" in completions:
        pass
    return [1.0] * len(completions)

def prints(completions, problems):
    print("not a reply", input_or_nothing())
    return [1.0] * len(completions)

def input_or_nothing():
    try:
        return input()
    except EOFError:
        return "nothing"

def dies(completions, problems):
    os._exit(7)

def one_argument(completions):
    return []

constant = 3
"""
PROBLEMS = [Problem("p", "a"), Problem("q", "b", {"bonus": 10}), Problem("r", "")]
COMPLETIONS = ["aa", "b", ""]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def function(file):
    """Return a function that opens one of the file's."""
    opened = []

    def open_function(name, limit_s=PATIENCE_S):
        opened.append(RewardFunction(f"{file}:{name}", limit_s=limit_s))
        return opened[-1]

    yield open_function
    for each in opened:
        each.close()


def is_gone(pid):
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("lengths", [2.0, 11.0, 0.0]), ("later", [0.0, 1.0, 1.0]), ("as_tensor", [0.0, 0.5, 1.0])],
)
def test_it_is_given_completions_and_problems_with_their_columns(function, name, expected):
    reward = function(name)
    for _ in range(2):
        assert reward(COMPLETIONS, PROBLEMS) == expected


def test_what_it_prints_and_reads_is_not_the_run_s(function, capfd):
    reward = function("prints")
    for _ in range(2):
        assert reward(["a"], PROBLEMS[:1]) == [1.0]
    assert capfd.readouterr().err == "not a reply nothing\n" * 2


def test_one_that_raises_late_is_not_said_to_take_too_long():
    calls = []

    def raises_late(completions, problems):
        calls.append(len(completions))
        time.sleep(0.5)
        return [1 / len(each) for each in completions]

    # Half of the limit is over after the first call: no sample is tried alone.
    reply = answer(raises_late, [*["a"] * 60, ""], PROBLEMS[:1] * 61, limit_s=1.0)
    assert calls == [61]
    assert reply.keys() == {"error"}
    assert "ZeroDivisionError" in reply["error"]


def test_a_module_of_the_working_directory_will_do(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    reward = RewardFunction("my_rewards:lengths", limit_s=PATIENCE_S)
    assert reward(["abc"], PROBLEMS[:1]) == [3.0]
    reward.close()


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (
            "raises",
            r"raised ZeroDivisionError: .*my_rewards.py:\d+\), for sample 2 of 3, the prompt "
            "'r' with the completion ''",
        ),
        ("nan", "returned nan, for sample 1 of 3, the prompt 'q' with the completion 'b'"),
        ("text", r"returned '1\.0', a str, for sample 0 of 3"),
        ("too_few", "returned 1 rewards for 3 completions, in a call with 3 samples"),
        ("nothing", "returned a NoneType, .*for sample 0 of 3"),
        ("dies", "its process ended with status 7"),
    ],
)
def test_what_is_no_reward_is_named_with_its_sample(function, name, named):
    with pytest.raises(RewardError, match=rf"reward\.function='.*:{name}'.*{named}"):
        function(name)(COMPLETIONS, PROBLEMS)


def test_one_that_hangs_is_ended(function):
    reward = function("hangs")
    assert reward(["a"], PROBLEMS[:1]) == [1.0]
    reward._limit_s = 0.5
    pid = reward._process.pid
    with pytest.raises(RewardError, match=r"hangs' took more than reward\.timeout_s=0\.5"):
        reward(["hang"], PROBLEMS[:1])
    assert is_gone(pid)
    with pytest.raises(RewardError, match="its process has ended"):
        reward(["a"], PROBLEMS[:1])


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("my_rewards.py", "must be FILE.py:NAME or PACKAGE.MODULE:NAME"),
        ("missing.py:f", r"cannot be loaded: .*missing\.py is no file"),
        ("no_such_package.module:f", "cannot be loaded: it raised ModuleNotFoundError"),
        ("my_rewards.py:missing", "cannot be loaded: my_rewards.py has no function missing"),
        ("my_rewards.py:constant", "my_rewards.py has no function constant"),
        ("my_rewards.py:one_argument", "one_argument must take completions and problems"),
        ("broken.py:f", r"cannot be loaded: it raised SyntaxError"),
        ("slow.py:f", r"took more than reward\.timeout_s=2"),
    ],
)
def test_what_cannot_be_loaded_is_refused(file, monkeypatch, name, named):
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.py").write_text("def f(:")
    (file.parent / "slow.py").write_text("while True: pass")
    with pytest.raises(ValueError, match=rf"reward\.function='.*{named}"):
        RewardFunction(name, limit_s=2 if "slow" in name else PATIENCE_S)


def test_its_process_ends_with_it_and_with_the_run(file):
    reward = RewardFunction(f"{file}:lengths", limit_s=PATIENCE_S)
    pid = reward._process.pid
    assert not is_gone(pid)
    del reward
    gc.collect()
    assert is_gone(pid)
    # A killed run, in the middle of a call that does not end.
    program = (
        "from rl_policy.data.rewards import RewardFunction\n"
        "from rl_policy.data.datasets import Problem\n"
        f"reward = RewardFunction({str(file) + ':hangs'!r}, limit_s=3600)\n"
        "print(reward._process.pid, flush=True)\n"
        "reward(['hang'], [Problem('p', 'a')])\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as run:
        pid = int(run.stdout.readline())
        time.sleep(0.2)
        os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid), what="the end of the reward's process")


def test_several_are_weighted_and_kept_apart(file):
    names = [f"{file}:lengths", "exact_match"]
    reward = build_reward(RewardSection(function=names, weights=[0.5, 2.0]))
    rewards = reward(["a", "b"], PROBLEMS[:2])
    assert isinstance(reward, WeightedRewards)
    assert rewards == [0.5 * 1 + 2.0, 0.5 * 11 + 2.0]
    assert rewards.parts == {"lengths": [1.0, 11.0], "exact_match": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"function": ["a.py:f", "exact_match"], "weights": [1.0]}, r"1 weights for the 2 func"),
        ({"function": ["a.py:f", "b.py:f"]}, "two functions of one name, .*: rename one"),
        ({"function": "a.py:f", "answer_pattern": "x"}, "is read by 'exact_match' alone"),
        ({"weights": [1.0]}, "1 weights for the 0 functions"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(section, named):
    with pytest.raises(ValueError, match=rf"reward\..*{named}"):
        build_reward(RewardSection(**section))


def test_further_fields_of_the_data_are_columns(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "p", "answer": "a", "bonus": 3, "tags": ["x"]}\n')
    (problem,) = read_problems(path, key="data.path")
    assert problem == Problem("p", "a")
    assert problem.columns == {"bonus": 3, "tags": ["x"]}


def reward_of(function, limit_s=PATIENCE_S):
    return build_reward(RewardSection(function=GivenReward(function), timeout_s=limit_s))


def test_a_function_of_the_program_may_share_its_state_and_be_async():
    seen = []

    async def share(completions, problems):
        seen.extend(problems)
        return [problem.answer == each for each, problem in zip(completions, problems, strict=True)]

    rewards = reward_of(share)(["a", "x", ""], PROBLEMS)
    assert (rewards, rewards.parts) == ([1.0, 0.0, 1.0], {"share": [1.0, 0.0, 1.0]})
    assert seen == PROBLEMS


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (lambda: [1.0, float("nan"), 1.0], "returned nan, in a call with 3 samples"),
        (lambda: [1.0], "returned 1 rewards for 3 completions"),
        (lambda: 1 / 0, "raised ZeroDivisionError"),
        (lambda: sys.exit(3), "ended its thread"),
    ],
)
def test_a_function_of_the_program_that_gives_no_rewards_is_named(values, named):
    def judge(completions, problems):
        # It fails with all samples alone: one at a time it has nothing to say.
        return values() if len(completions) > 1 else [0.0]

    with pytest.raises(RewardError, match=rf"'judge'.* {named}"):
        reward_of(judge)(COMPLETIONS, PROBLEMS)


def test_a_function_of_the_program_that_hangs_costs_its_limit():
    release = threading.Event()

    def hangs(completions, problems):
        release.wait(PATIENCE_S)
        return [0.0] * 3

    # Waited for, it would return rewards.
    with pytest.raises(RewardError, match=r"'hangs' took more than reward.timeout_s=0\.2"):
        reward_of(hangs, limit_s=0.2)(COMPLETIONS, PROBLEMS)
    release.set()


BREAKS = """
from pathlib import Path

def breaks(completions, problems):
    calls = Path("calls.txt")
    count = len(calls.read_text()) if calls.exists() else 0
    calls.write_text("x" * (count + 1))
    if count >= 5 and not Path("mended").exists():
        raise RuntimeError("on purpose")
    return [len(each) / 2 for each in completions]
"""


@pytest.mark.slow
def test_a_run_is_saved_before_it_ends_and_goes_on(shared_ray, tmp_path, monkeypatch):
    workplace = write_workplace(tmp_path)
    monkeypatch.chdir(workplace)
    (workplace / "my_rewards.py").write_text(BREAKS)
    settings = ["reward.function=[my_rewards.py:breaks,exact_match]", "grpo.warm_up=false"]
    run = ["grpo", "--config", "run.yaml", "data.path=problems.jsonl", "--out", "out"]
    every = ["grpo.steps=6", "grpo.eval_every=6", "checkpoint.every=6"]

    def execute(*command):
        return CliRunner().invoke(build_app(), command, catch_exceptions=False)

    broken = execute(*run, *settings, *every)
    assert broken.exit_code == 1, broken.stderr[-3000:]
    assert "raised RuntimeError: on purpose" in broken.stderr
    assert "Traceback" not in broken.stderr
    rows = measured(workplace / "out")
    # Two calls before the first step, and one for each.
    last = int(rows[-1]["step"])
    assert last == 3
    assert all({"reward/breaks", "reward/exact_match"} <= row.keys() for row in rows)
    assert (workplace / "out" / "checkpoints" / f"step_{last}").is_dir()
    # Not mended: the same end, and the checkpoint as it is.
    again = execute("grpo", "--resume", "out")
    assert again.exit_code == 1, again.stderr[-3000:]
    assert "raised RuntimeError: on purpose" in again.stderr
    (workplace / "mended").touch()
    mended = execute("grpo", "--resume", "out")
    assert mended.exit_code == 0, mended.stderr[-3000:]
    assert [int(row["step"]) for row in measured(workplace / "out")] == list(range(7))
