"""GRPO while real vLLM engines sample beside it: staleness, and a run that is killed.

`ROLLOUT_DRILLS` is how many random kills the drill makes; a few unless it says more.
"""

import json
import logging
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from patience import PATIENCE_S, wait_until
from processes import descendants
from recipe_runs import CONFIG, forked_command, write_workplace
from rl_policy.run.metrics import read_metrics
from rl_policy.run.samples import read_samples
from rl_policy.run.timeline import read_timeline
from safetensors import safe_open

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.needs("rl-policy[all]"),
]

STEPS, GROUPS = 10, 4
RUN = [
    *["grpo", "--config", "run.yaml", "--out", "out", "data.path=problems.jsonl"],
    *["policy.generation.backend=vllm", "policy.generation.colocated.enabled=false"],
    # Two optimizer steps a step.
    *["async.max_staleness=4", "async.refit_every=2"],
    # No test asks whether it learns.
    "grpo.warm_up=false",
]

EPISODES = [
    "environment.function=my_environment.py:Rows",
    "policy.max_total_sequence_length=32",
]

# Two turns, or three for every third problem; the observation has the turn and its length, as what
# is sampled need not be text.
ENVIRONMENT = """
import os, random, signal, time

class Rows:
    made = 0

    def __init__(self):
        Rows.made += 1

    def reset(self, problem):
        self.number, self.turn = int(problem.prompt[:-1]), 0

    def step(self, text):
        self.turn += 1
        # Evaluations have one episode in a process.
        if self.turn == 2 and Rows.made > 1 and os.path.exists("die"):
            os.unlink("die")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(random.random() * 0.3)
        done = self.turn == 2 + (self.number % 3 == 0)
        return f"{self.turn}{len(text)}:", float(text.startswith("1")), done
"""


NUM_KILLS = int(os.environ.get("ROLLOUT_DRILLS", "2"))


@pytest.fixture
def workplace(tmp_path):
    pytest.importorskip("vllm")
    path = write_workplace(tmp_path)
    grpo = {**CONFIG["grpo"], "steps": STEPS, "eval_every": STEPS}
    (path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "grpo": grpo}))
    return path


def ledger(workplace):
    return lines_of(workplace, "trained.jsonl")


def lines_of(workplace, name):
    path = workplace / "out" / name
    text = path.read_text() if path.exists() else ""
    # The last line may not be written to its end.
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def trained_once_despite_kills(begin, workplace, run):
    """Kill the engine of a run, then its driver, and resume it; return the rows of its steps."""
    killed = begin(*run)

    def is_running(reached):
        assert killed.poll() is None, killed.stderr.read()
        return reached()

    wait_until(lambda: is_running(lambda: len(ledger(workplace)) >= 2), what="two groups")
    (engine,) = processes_of(killed)["engine"]
    os.kill(engine, signal.SIGKILL)
    # At most five steps from here were sampled before, so that some are left to be resumed.
    wait_until(lambda: is_running(lambda: 1 in replacements(workplace)), what="a replaced engine")
    os.kill(killed.pid, signal.SIGKILL)
    _, errors = killed.communicate(timeout=PATIENCE_S)
    assert "all engines are replaced, and what they were sampling is sampled again" in errors
    assert errors.count("rank 0 of vllm died") == 1
    counts, before = replacements(workplace), ledger(workplace)
    assert (counts[0], counts[-1]) == (0, 1)
    resumed = begin("grpo", "--resume", "out")
    _, errors = resumed.communicate(timeout=PATIENCE_S)
    assert resumed.returncode == 0, errors[-6000:]
    # What the checkpoint has is not taken again.
    assert ledger(workplace)[:2] == before[:2]
    return rows_of_a_whole_run(workplace)


def replacements(workplace):
    """Return how often engines had been replaced, after each step of a run."""
    return [row["engine_replacements"] for row in lines_of(workplace, "metrics.jsonl")[1:]]


def rows_of_a_whole_run(workplace, *, steps=STEPS):
    """Hold that each problem was trained on once, within the bound; return the steps' metrics."""
    lines = ledger(workplace)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    ids = [id for line in lines for id in line["ids"]]
    assert sorted(ids) == list(range(steps * GROUPS))
    rows = read_metrics(workplace / "out" / "metrics.jsonl")[1:]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["staleness"] <= row["staleness_max"] <= 4
    return rows


class Runs:
    """A run and those that continue it, one at a time; their output is in a file.

    One ends with its driver, or where the parent of the environments costs a step all its groups.
    """

    def __init__(self, workplace):
        self.workplace, self.log = workplace, workplace / "log"
        self.current, self.killed = None, ""

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        if self.current is not None:
            self.current.kill()
            self.current.wait(PATIENCE_S)

    def begin(self, *arguments):
        self.killed = ""
        with self.log.open("a") as log:
            self.current = subprocess.Popen(
                forked_command(*arguments),
                cwd=self.workplace,
                env={**os.environ, "RAY_ADDRESS": "local"},
                stdout=log,
                stderr=log,
            )

    @property
    def has_ended(self):
        """Whether it has come to its end; it is continued where it was killed."""
        status = self.current.poll()
        if status in (None, 0):
            return status == 0
        text = self.log.read_text()[-6000:]
        assert self.killed == "driver" or "has failed in all" in text, text
        self.begin("grpo", "--resume", "out")
        return False

    def go_on_to_the_end(self):
        wait_until(lambda: self.has_ended, what="the end of the run")


def processes_of(driver):
    """Return the ids of a run's processes by what they are, as far as they have started."""
    kinds = ("worker", "engine", "environment", "parent")
    found = {"driver": [driver.pid]} | {kind: [] for kind in kinds}
    for pid in descendants(driver.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
            maps = Path(f"/proc/{pid}/maps").read_text() if "WorkerHost" in command else ""
            above = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if "rl_policy.environments.server" in command:
            found["parent" if above == driver.pid else "environment"].append(pid)
        elif maps:
            found["engine" if "/vllm/" in maps else "worker"].append(pid)
    return found


@pytest.mark.parametrize(
    "refit", [[], ["refit.slices=true", "refit.delta=true"]], ids=["full", "slices"]
)
def test_one_of_two_engines_that_dies_is_replaced_alone(begin, workplace, refit):
    engines = "policy.generation.colocated.resources.gpus_per_node=2"
    run = begin(*RUN, *refit, "async.too_old=wait", engines)

    def is_past():
        assert run.poll() is None, run.stderr.read()
        return len(ledger(workplace)) >= 2

    wait_until(is_past, what="the run is past the step")
    first, _ = processes_of(run)["engine"]
    os.kill(first, signal.SIGKILL)
    _, errors = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, errors[-6000:]
    assert "has died and is started anew" in errors
    assert "all engines are replaced" not in errors
    rows_of_a_whole_run(workplace)
    counts = replacements(workplace)
    assert (counts[0], counts[-1]) == (0, 1)


@pytest.mark.timeout(900 + 120 * NUM_KILLS)
def test_a_drill_of_random_kills_loses_no_sample_and_trains_on_none_twice(workplace):
    """Whatever a run consists of dies at random moments, also while others start."""
    (workplace / "my_environment.py").write_text(ENVIRONMENT)
    chance, steps, killed = random.Random(0), 4 + 4 * NUM_KILLS, []
    options = [f"grpo.steps={steps}", "grpo.eval_every=3", "cluster.restarts=1000"]
    with Runs(workplace) as runs:
        runs.begin(*RUN, *EPISODES, *options, "async.too_old=wait")
        # From the first checkpoint on, the run can be continued.
        checkpoints = workplace / "out" / "checkpoints"
        wait_until(lambda: runs.has_ended or [*checkpoints.glob("step_*")], what="a checkpoint")
        while len(killed) < NUM_KILLS and not runs.has_ended:
            time.sleep(chance.uniform(0, 12))
            target = chance.choice(["driver", "worker", "engine", "environment", "parent"])
            pids = processes_of(runs.current)[target]
            with suppress(ProcessLookupError):
                for pid in pids[:1]:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(target)
                    runs.killed = target
            if target == "driver":
                runs.current.wait(PATIENCE_S)
        runs.go_on_to_the_end()
    logging.getLogger(__name__).warning("killed: %s", ", ".join(killed))
    assert killed
    rows = rows_of_a_whole_run(workplace, steps=steps)
    assert {row["rollouts_dropped"] for row in rows} == {0}


def test_a_run_whose_processes_are_killed_trains_on_each_problem_once(begin, workplace):
    rows = trained_once_despite_kills(begin, workplace, [*RUN, "async.too_old=wait"])
    for row in rows:
        assert 0 <= row["oldest_wait_s"] <= row["generate_s"]
        assert row["rollouts_dropped"] == 0
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


def test_a_run_of_episodes_whose_processes_are_killed_trains_on_each_problem_once(begin, workplace):
    (workplace / "my_environment.py").write_text(ENVIRONMENT)
    (workplace / "die").touch()
    run = [
        *RUN,
        *EPISODES,
        f"report.samples={GROUPS * 4}",
        "grpo.eval_every=1",
        "async.too_old=drop",
    ]
    rows = trained_once_despite_kills(begin, workplace, run)
    for row in rows:
        assert 2 <= row["turns_mean"] <= 3
    # One process has died, which is lost with its step if that is taken again.
    assert sum(row["environment_failures"] for row in rows) <= 1
    assert not (workplace / "die").exists()
    spans = read_timeline(workplace / "out" / "timeline.jsonl")
    kinds = {"engine", "environment", "score", "train", "refit"}
    assert {span.what for span in spans} == kinds
    # Turns were sampled while the policy trained.
    training = [span for span in spans if span.what == "train"]
    assert any(
        turn.start < step.end and step.start < turn.end
        for turn in spans
        if turn.what == "engine"
        for step in training
    )
    samples = [
        each
        for each in read_samples(workplace / "out" / "samples.jsonl")
        if each.kind == "train" and each.turns[-1]["role"] == "policy"
    ]
    assert len(samples) > STEPS * GROUPS
    for each in samples:
        texts = [turn["text"] for turn in each.turns]
        assert texts[1::2] == [f"{turn}{len(text)}:" for turn, text in enumerate(texts[:-1:2], 1)]
        observed = [token for token, own in zip(each.tokens, each.sampled, strict=True) if not own]
        assert "".join(observed) == "".join(texts[1::2])
