"""Processes of users' environments: what they are asked, and what their failures cost."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S, wait_until
from processes import descendants
from rl_interfaces import Environment
from rl_policy.data.datasets import Problem
from rl_policy.environments.calculator import Calculator, multiply
from rl_policy.environments.exchange import Failure
from rl_policy.environments.guessing import Guess
from rl_policy.environments.pool import GivenEnvironment, ProcessPool, ThreadPool, probe

pytestmark = pytest.mark.needs("rl-policy[dtensor]")

ENVIRONMENTS = """
import asyncio, os, subprocess, sys, time

class Echo:
    count = 0

    def reset(self, problem):
        Echo.count += 1
        self.number = Echo.count
        return f"{problem.prompt}{problem.answer}{problem.columns.get('more', '')}"

    def step(self, text):
        {
            "hang": lambda: time.sleep(60),
            "raise": lambda: 1 / 0,
            "die": lambda: os._exit(7),
            "exit": lambda: sys.exit(3),
            "exit late": self.exit_late,
            "slow": lambda: time.sleep(0.6),
            "print": lambda: print("not a reply"),
        }.get(text, lambda: None)()
        wrong = {
            "none": None, "two": ("", 1.0), "nan": ("", float("nan"), True),
            "text": ("", "1", True), "infinite": ("", float("inf"), True),
            "number": (3, 1.0, True), "maybe": ("", 1.0, "yes"), "half": ("\\ud800", 1.0, False),
            "half message": ([{"role": "user", "content": "\\ud800"}], 1.0, False),
            "roleless": ([{"content": "x"}], 1.0, False), "nothing": ([], 1.0, False),
            "messages": (({"role": "tool", "content": "x", "more": 1},), 1.0, False),
        }
        if text in wrong:
            return wrong[text]
        return f"{text}{os.getpid()}", self.number, text == "end"

    def exit_late(self):
        self.linger_s = 0.5
        sys.exit(3)

    def __del__(self):
        time.sleep(getattr(self, "linger_s", 0.0))

class Later(Echo):
    num_waiting = 0

    async def reset(self, problem):
        self.loop = asyncio.get_running_loop()
        return None

    async def step(self, text):
        assert asyncio.get_running_loop() is self.loop
        if text == "all 20":
            Later.num_waiting += 1
            while Later.num_waiting < 20:
                await asyncio.sleep(0.01)
        else:
            await asyncio.sleep(float(text))
        return "", 1.0, False

class Starts(Echo):
    def step(self, text):
        child = subprocess.Popen(["sleep", "300"])
        return str(child.pid), 0.0, False

class StartsAndHangs(Starts):
    def step(self, text):
        super().step(text)
        time.sleep(3600)

class ResetFails(Echo):
    def reset(self, problem):
        return 3

class NoStep:
    def reset(self, problem):
        return None

def returns_nothing():
    return None

def needs(argument):
    return Echo()

constant = 3
"""
PROBLEM = Problem("p", "a", {"more": 1})


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "my_environments.py"
    path.write_text(ENVIRONMENTS)
    return path


@pytest.fixture
def pool(file):
    """Return a function that opens processes of one of the file's."""
    opened = []

    def open_pool(name="Echo", limit_s=PATIENCE_S):
        opened.append(ProcessPool(f"{file}:{name}", limit_s=limit_s, max_groups=8))
        return opened[-1]

    yield open_pool
    for each in opened:
        each.close()


def started(pool, groups=3, episodes=2):
    """Start episodes of some groups; return what they were answered."""
    return pool.play({group: dict.fromkeys(range(episodes), PROBLEM) for group in range(groups)})


def pids(pool):
    return {group: process.pid for group, process in pool._processes.items()}


def is_gone(pid):
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.promise
def test_a_group_has_a_process_and_each_episode_its_own_environment(pool):
    processes = pool()
    assert started(processes) == {
        group: {0: {"prompt": "pa1"}, 1: {"prompt": "pa1"}} for group in range(3)
    }
    assert len(set(pids(processes).values())) == 3
    outcomes = processes.play({1: {1: "x", 0: "end"}})
    pid = pids(processes)[1]
    # The module was imported once, before: each process counts from 1.
    assert outcomes == {
        1: {
            0: {"observation": f"end{pid}", "reward": 1.0, "done": True},
            1: {"observation": f"x{pid}", "reward": 2.0, "done": False},
        }
    }


def test_the_examples_are_environments():
    assert isinstance(Guess(), Environment)
    assert isinstance(Calculator(), Environment)
    assert not isinstance(object(), Environment)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", r"it raised ZeroDivisionError: .*my_environments\.py:\d+"),
        ("die", "its process ended with status 7"),
        ("exit", "its process ended with status 3"),
        ("exit late", "its process ended with status 3"),
        ("hang", r"a call took more than environment\.timeout_s=2"),
        ("none", r"step returned None, a NoneType: expected \(observation, reward, done\)"),
        ("two", r"step returned \('', 1\.0\), a tuple: expected"),
        ("nan", "the reward of step: it returned nan"),
        ("infinite", "the reward of step: it returned inf"),
        ("text", "the reward of step: it returned '1', a str"),
        ("number", "step returned 3, a int: expected a text or messages as observation"),
        ("maybe", "step returned done='yes', a str: expected True or False"),
        ("half", "step returned half of a surrogate pair"),
        ("half message", r"step returned\[0\]: 'content' has half of a surrogate pair"),
        ("roleless", r"what step returned\[0\]: 'role' must be a text that is not empty"),
        ("nothing", "what step returned must be a text or messages, and has none"),
    ],
)
def test_a_failure_costs_its_group_and_nothing_else(pool, text, reason):
    processes = pool(limit_s=2.0 if text == "hang" else PATIENCE_S)
    started(processes)
    before = pids(processes)
    outcomes = processes.play({0: {0: "x", 1: "x"}, 1: {0: "x", 1: text}, 2: {0: "x", 1: "x"}})
    assert isinstance(outcomes[1], Failure)
    assert re.search(reason, outcomes[1].reason), outcomes[1].reason
    assert [len(outcomes[group]) for group in (0, 2)] == [2, 2]
    assert is_gone(before[1])
    # The next episode of the group has a new process, the others go on with theirs.
    assert started(processes)[1] == {0: {"prompt": "pa1"}, 1: {"prompt": "pa1"}}
    after = pids(processes)
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] != before[1]


def test_a_parent_that_is_killed_costs_the_episodes_that_go_on_and_is_replaced_once(pool):
    processes = pool()
    started(processes)
    server = processes._server._process
    os.kill(server.pid, signal.SIGKILL)
    server.wait(PATIENCE_S)
    # One starts, for which there is another parent; the others have lost their environments.
    outcomes = processes.play({0: {0: PROBLEM}, 1: {0: "x"}, 2: {0: "x"}})
    assert outcomes[0] == {0: {"prompt": "pa1"}}
    for group in (1, 2):
        assert outcomes[group].reason == "the parent of its processes has died, and they with it"
    replaced = processes._server._process.pid
    assert started(processes)[2] == {0: {"prompt": "pa1"}, 1: {"prompt": "pa1"}}
    assert processes._server._process.pid == replaced


def test_what_is_said_may_be_messages(pool):
    processes = pool()
    started(processes, groups=1, episodes=1)
    (outcome,) = processes.play({0: {0: "messages"}}).values()
    assert outcome[0]["observation"] == [{"role": "tool", "content": "x", "more": 1}]


def test_each_call_has_its_own_limit(pool):
    processes = pool(limit_s=1.5)
    started(processes, groups=1, episodes=5)
    # 0.6 s each and 3 s for all of them, which is beyond the limit and its margin of 1 s.
    outcomes = processes.play({0: dict.fromkeys(range(5), "slow")})
    assert [len(each) for each in outcomes.values()] == [5]


def test_a_process_that_is_killed_is_replaced(pool):
    processes = pool()
    started(processes)
    os.kill(pids(processes)[2], signal.SIGKILL)
    outcomes = processes.play({group: {0: "x"} for group in range(3)})
    assert outcomes[2] == Failure("its process ended with status -9")
    assert [type(outcomes[group]) for group in (0, 1)] == [dict, dict]
    assert set(started(processes)) == {0, 1, 2}


def test_the_parent_that_is_killed_is_replaced(pool):
    processes = pool()
    started(processes)
    before = pids(processes)
    processes._server._process.kill()
    processes._server._process.wait()
    wait_until(lambda: all(map(is_gone, before.values())), what="the end of the processes")
    outcomes = processes.play({group: {0: "x"} for group in range(3)})
    assert all(isinstance(outcome, Failure) for outcome in outcomes.values())
    assert started(processes)[2] == {0: {"prompt": "pa1"}, 1: {"prompt": "pa1"}}


def test_what_is_awaited_waits_together_in_one_loop(pool):
    processes = pool("Later")
    assert started(processes, groups=1, episodes=20)[0][3] == {"prompt": None}
    # Each waits for all of them: one after the other, the first would not end.
    outcomes = processes.play({0: dict.fromkeys(range(20), "all 20")})
    assert len(outcomes[0]) == 20


def test_what_is_awaited_has_a_limit(pool):
    processes = pool("Later", limit_s=2.0)
    started(processes)
    outcomes = processes.play({0: {0: "0.01"}, 1: {0: "0.01", 1: "60"}})
    assert isinstance(outcomes[0], dict)
    assert outcomes[1] == Failure("a call took more than environment.timeout_s=2")


def test_what_it_prints_is_no_reply(pool, capfd):
    processes = pool()
    started(processes, groups=1)
    assert len(processes.play({0: {0: "print"}})[0]) == 1
    processes.close()
    assert capfd.readouterr() == ("", "not a reply\n")


def test_long_texts_in_both_directions(pool):
    processes = pool()
    started(processes, groups=1, episodes=4)
    text = "long" * 500_000
    outcomes = processes.play({0: dict.fromkeys(range(4), text)})[0]
    assert all(outcomes[each]["observation"].startswith(text) for each in range(4))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("my_environments.py", "must be FILE.py:NAME or PACKAGE.MODULE:NAME"),
        ("missing.py:Guess", r"cannot be loaded: .*missing\.py is no file"),
        ("no_such_package.module:Guess", "cannot be loaded: it raised ModuleNotFoundError"),
        ("my_environments.py:missing", "cannot be loaded: .* has no function missing"),
        ("my_environments.py:constant", "has no function constant"),
        (
            "my_environments.py:needs",
            "needs must take no arguments, or, as an agent, .*: missing .*'argument'",
        ),
        ("my_environments.py:NoStep", "NoStep has no method 'step'"),
        ("broken.py:f", "cannot be loaded: it raised SyntaxError"),
        ("ends.py:f", "ended its process with status 5"),
        ("slow.py:f", r"took more than 2 s to be loaded"),
    ],
)
def test_what_cannot_be_loaded_is_refused(file, monkeypatch, name, reason):
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.py").write_text("def f(:")
    (file.parent / "ends.py").write_text("import os; os._exit(5)")
    (file.parent / "slow.py").write_text("while True: pass")
    with pytest.raises(ValueError, match=rf"environment\.function='.*{reason}"):
        ProcessPool(
            name, limit_s=PATIENCE_S, max_groups=1, load_limit_s=2 if "slow" in name else PATIENCE_S
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ResetFails", "reset returned 3, a int: expected a text or messages, or None"),
        ("returns_nothing", "NoneType has no method 'reset'"),
    ],
)
def test_an_episode_that_cannot_start_is_refused(pool, name, reason):
    with pytest.raises(ValueError, match=rf"{name}' cannot start an episode: {reason}.*'p'"):
        probe(pool(name), PROBLEM)


def test_what_an_environment_starts_ends_with_it(pool):
    processes = pool("Starts")
    started(processes, groups=2, episodes=1)
    outcomes = processes.play({0: {0: "x"}, 1: {0: "x"}})
    first, second = (int(outcomes[group][0]["observation"]) for group in range(2))
    os.kill(pids(processes)[0], signal.SIGKILL)
    wait_until(lambda: is_gone(first), what="the end of the first process")
    assert not is_gone(second)
    processes.close()
    wait_until(lambda: is_gone(second), what="the end of the second process")


DRIVER = """
import sys
from rl_policy.environments.pool import ProcessPool
from rl_policy.data.datasets import Problem
pool = ProcessPool(sys.argv[1], limit_s=3600, max_groups=8)
pool.play({group: {0: Problem("p", "a")} for group in range(3)})
print("started", flush=True)
pool.play({group: {0: "x"} for group in range(3)})
"""


def test_nothing_is_left_of_a_driver_that_is_killed(file):
    command = [sys.executable, "-c", DRIVER, f"{file}:StartsAndHangs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as driver:
        assert driver.stdout.readline() == b"started\n"
        # The parent, a process for each group, and what each of these has started.
        wait_until(lambda: len(descendants(driver.pid)) == 7, what="seven processes")
        processes = descendants(driver.pid)
        driver.kill()
    wait_until(lambda: all(map(is_gone, processes)), what="the end of the processes")


def given(factory, limit_s=PATIENCE_S):
    return ThreadPool(GivenEnvironment(factory), limit_s=limit_s, max_groups=8)


class Shared:
    """Counts its calls in the program."""

    calls: list[str] = []  # noqa: RUF012 # shared on purpose
    release = threading.Event()

    def reset(self, problem):
        self.problem = problem
        return problem.prompt

    def step(self, text):
        Shared.calls.append(text)
        if text == "hang":
            Shared.release.wait(PATIENCE_S)
        if text == "raise":
            raise RuntimeError("on purpose")
        if text == "exit":
            sys.exit(1)
        return text, 1.0, False


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "it raised RuntimeError: on purpose"),
        ("hang", r"a call took more than environment\.timeout_s=2"),
        ("exit", "it ended its thread"),
    ],
)
def test_a_class_of_the_program_shares_its_state_and_fails_by_group(text, reason):
    Shared.calls.clear()
    Shared.release.clear()
    threads = given(Shared, limit_s=2.0 if text == "hang" else PATIENCE_S)
    assert started(threads)[2] == {0: {"prompt": "p"}, 1: {"prompt": "p"}}
    first = threads._host._environments[1, 1]
    outcomes = threads.play({0: {0: "a", 1: "b"}, 1: {0: "c", 1: text}, 2: {0: "d", 1: "e"}})
    assert isinstance(outcomes[1], Failure)
    assert reason.replace("\\", "") in outcomes[1].reason
    assert [outcomes[group][1]["observation"] for group in (0, 2)] == ["b", "e"]
    Shared.release.set()
    time.sleep(0.2)
    # A call that comes back late makes no others.
    assert Shared.calls == ["a", "b", "c", text, "d", "e"]
    started(threads)
    assert threads._host._environments[1, 1] is not first


def test_a_class_of_the_program_may_be_async():
    class Later:
        async def reset(self, problem):
            return None

        async def step(self, text):
            return text, 0.0, True

    threads = given(Later)
    started(threads)
    assert threads.play({0: {0: "a"}, 1: {1: "b"}})[1][1]["observation"] == "b"


def test_what_is_no_environment_is_refused():
    with pytest.raises(ValueError, match=r"environment=.*dict has no method 'reset'"):
        GivenEnvironment(dict)


def test_a_calculator_multiplies():
    assert multiply(" 37*48") == "1776"
    assert multiply("37+48") == multiply("") == multiply("1*2*3") == "error"
    game = Calculator()
    game.reset(Problem("37*48", "1776"))
    assert game.step("?37*48") == ("1776\n", 0.0, False)
    assert game.step("=1776") == ("", 1.0, True)
    assert game.step("1776") == game.step("=1426") == ("", 0.0, True)


def test_a_game_of_guesses():
    def play(guesses):
        game = Guess()
        assert game.reset(Problem("game 17: ", "", {"secret": 5})) is None
        return [game.step(guess) for guess in guesses]

    assert play("1467") == [(hint, 0.0, False) for hint in (" + ", " + ", " - ", " - ")]
    assert play("5") == [("", 1.0, True)]
    assert play("245")[-1] == ("", pytest.approx(0.8), True)
    assert play(["0"]) == play(["x"]) == play([""]) == [("", 0.0, True)]
