"""What the benchmark of a whole GRPO step computes from what it measures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.needs("rl-policy[dtensor]")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


PHASES = """
import os, sys, time
from pathlib import Path
from whole_step.clocks import PhaseMeter

def burn(seconds):
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        pass

meter = PhaseMeter(Path(sys.argv[1]), root=os.getpid())
meter.end_step(0)
with meter.phase("move"):
    burn(0.05)
    with meter.phase("refit"):
        time.sleep(0.05)
meter.set_base("train")
burn(0.03)
meter.end_step(1)
"""


def test_each_moment_is_in_the_innermost_phase(tmp_path):
    # A process of its own: what other tests left running would count as this one's.
    path = tmp_path / "phases.jsonl"
    subprocess.run(
        [sys.executable, "-c", PHASES, path], check=True, timeout=PATIENCE_S, cwd=BENCHMARKS
    )
    start, step = map(json.loads, path.read_text().splitlines())
    assert start["used"] > 0
    phases = step["phases"]
    assert set(phases) == {"other", "move", "refit", "train"}
    assert phases["move"][1] == pytest.approx(0.05, abs=0.02)
    assert phases["refit"][0] >= 0.05
    assert phases["refit"][1] < 0.02, "sleep takes no processor"
    assert phases["train"][1] == pytest.approx(0.03, abs=0.02)
    # Up to the search for new processes, which belongs to no step.
    assert sum(wall for wall, _ in phases.values()) <= step["at"] - start["at"]


def test_processor_time_is_that_of_children_too():
    from whole_step.clocks import ProcessTree, descendants

    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    tree = ProcessTree(os.getpid())
    before = tree.seconds()
    child.stdout.readline()
    used = tree.seconds() - before
    assert child.pid in descendants(os.getpid())
    child.communicate(b"\n", timeout=PATIENCE_S)
    assert 0.2 < used < 1
    assert tree.seconds() - before >= used, "what it has used is not forgotten when it ends"


def comparison(*, with_peer=True, ranks=1, train=1.0):
    from whole_step.results import Comparison, Result

    own = dict.fromkeys(("start", "first step", "step", "generate", "score"), (1.0, 2.0))
    own |= {"train": (train, 0.5), "move": (0.25, 0.25), "refit": (0.0, 0.0), "other": (0.1, 0.1)}
    own["beside"] = (0.25, 0.25)
    peer = own | {"step": (2.0, 8.0), "move": (0.0, 0.0)}
    results = [Result(side="rl-policy (workers)", measured=own)]
    if with_peer:
        results.append(Result(side="TRL (workers)", measured=peer))
    return Comparison(
        work="toy",
        description="a toy",
        ranks=ranks,
        sampler="workers",
        date="2026-01-31",
        machine="2 cores",
        rounds=1,
        results=results,
        bare_start=(0.5, 4.0),
    )


def test_a_table_has_ratios_with_their_numbers():
    from whole_step.results import table

    rows = {row[0]: row[1:] for row in table(comparison())}
    assert rows["step"] == ["**0.50** (1.000 / 2.000)", "**0.25** (2.000 / 8.000)"]
    assert rows["move"] == ["(0.250 / 0)", "(0.250 / 0)"], "TRL has no such phase"
    assert "refit" not in rows, "neither side has it"
    assert "other" in rows
    assert rows["start, bare Ray"] == ["**0.50** (0.500 / 1.000)", "**2.00** (4.000 / 2.000)"]


def test_plain_transformers_is_measured_where_one_process_trains_and_samples():
    from whole_step.work import APART, TOY, WORKERS, runs_of

    def sides(ranks, sampler, **options):
        return [run.side for run in runs_of(TOY, ranks=ranks, samplers=(sampler,), **options)]

    assert sides(1, WORKERS)[-2:] == ["plain transformers", "TRL"]
    for ranks, sampler in ((2, WORKERS), (1, APART)):
        assert "plain transformers" not in sides(ranks, sampler)
    assert "plain transformers" not in sides(1, WORKERS, with_trl=False)


def test_log_probabilities_of_sampling_are_reused_where_the_trainer_samples(tmp_path):
    from whole_step.work import APART, TOY, WORKERS, runs_of, settings

    def reused(sampler):
        runs = runs_of(TOY, ranks=1, samplers=(sampler,))
        return [run.variant for run in runs if "grpo.old_logprobs" in settings(run, tmp_path)]

    assert reused(WORKERS) == ["shared, reused"]
    assert reused(APART) == []


def test_plain_transformers_has_columns_of_its_own():
    from whole_step.results import Result, table

    own = comparison()
    (measured,) = (each.measured for each in own.others())
    own.results.append(
        Result(side="plain transformers (workers)", measured=measured | {"step": (1.5, 2.0)})
    )
    head, *rows = table(own)
    assert head[3:] == [
        "plain transformers: wall clock / TRL",
        "plain transformers: processor / TRL",
    ]
    step = next(row for row in rows if row[0] == "step")
    assert step[3:] == ["**0.75** (1.500 / 2.000)", "**0.25** (2.000 / 8.000)"]


PLAIN_STEP = """
import json, sys
from pathlib import Path
from whole_step import plain_side
from whole_step.work import Work, write_inputs

work = Work(
    name="any", num_layers=1, hidden_size=32, prompts=4, samples=2, gbs=4, mbs=2,
    max_new_tokens=3, max_length=32, steps=2,
)
inputs = Path(sys.argv[1])
write_inputs(work, inputs)
plain_side.main(vars(work) | {"inputs": str(inputs)})
"""


def test_plain_transformers_takes_steps(tmp_path):
    subprocess.run(
        [sys.executable, "-c", PLAIN_STEP, tmp_path], check=True, timeout=PATIENCE_S, cwd=BENCHMARKS
    )
    start, *steps = map(json.loads, (tmp_path / "phases.jsonl").read_text().splitlines())
    assert start["step"] == 0
    assert [each["step"] for each in steps] == [1, 2]
    assert all({"generate", "score", "train"} <= set(each["phases"]) for each in steps)


def test_without_trl_a_table_has_shares_of_a_step():
    from whole_step.results import table

    head, *rows = table(comparison(with_peer=False))
    assert head[1:] == ["wall clock of a step", "processor of a step"]
    assert {row[0]: row[1:] for row in rows}["move"] == ["0.25", "0.12"]


def test_a_later_measurement_replaces_the_earlier_one_of_the_same_work(tmp_path):
    from whole_step.results import load, merge, save

    path = tmp_path / "results.json"
    assert load(path) == []
    save([comparison(), comparison(ranks=2)], path)
    later = comparison(ranks=2, train=3.0)
    assert merge(load(path), [later]) == [comparison(), later]


def test_the_page_says_when_and_where_and_what_differs(tmp_path):
    from whole_step.page import write_page

    write_page(tmp_path / "page.md", [comparison(ranks=2), comparison()])
    text = (tmp_path / "page.md").read_text()
    assert "2026-01-31" in text
    assert "2 cores" in text
    assert "up to 25% of the processors" in text
    assert "DistributedDataParallel in TRL" in text
    assert text.index("One training process") < text.index("2 training processes")
    assert "| step | **0.50** (1.000 / 2.000) | **0.25** (2.000 / 8.000) |" in text


def test_the_page_says_why_trl_is_not_beside_our_engines():
    from dataclasses import replace

    from whole_step.page import render

    alone = replace(comparison(with_peer=False), sampler="vLLM, colocated")
    text = render([comparison(), alone])
    assert text.count("What is not the same") == 1
    assert text.index("## vLLM samples") < text.index("has no attribute 'weight_loader'")
    assert "| move | 0.25 | 0.12 |" in text


def test_a_meter_that_sees_no_training_is_an_error():
    from whole_step.measure import summarize

    line = {"at": 1.0, "used": 1.0, "busy": 1.0, "phases": {"other": [1.0, 1.0]}}
    with pytest.raises(RuntimeError, match="no generate and no score and no train"):
        summarize([line] * 3, started=0.0)


def test_both_sides_draw_the_same_problems(tmp_path):
    from rl_policy.config import load_run_config
    from rl_policy.data.datasets import ShuffledStream
    from rl_policy.run.inputs import prepare_inputs
    from whole_step.work import IN_ORDER, RAGGED, Run, settings, write_inputs

    write_inputs(RAGGED, tmp_path)
    chosen = settings(Run(side="rl-policy", work=RAGGED, ranks=1), tmp_path)
    config = load_run_config("grpo", overrides=[f"{key}={value}" for key, value in chosen.items()])
    drawn = ShuffledStream(prepare_inputs(config).problems.train, seed=config.seed).take(64)
    lines = (tmp_path / IN_ORDER).read_text().splitlines()
    assert [each.prompt for each in drawn] == [json.loads(line)["prompt"] for line in lines[:64]]
