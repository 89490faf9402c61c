"""The GPU report: what fails, hangs or is not written is a row, and the parts after it run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S, wait_until

from checks import gpu_report
from checks.gpu_report import Figure, Part, lines_of, run
from checks.workspace import ROOT

WRITES = """
import json, pathlib, sys
pathlib.Path(sys.argv[1], "table.json").write_text(json.dumps({"rows": [
    {"way": "a", "ratio": 0.9}, {"way": "b", "ratio": 1.2}]}))
sys.exit(int(sys.argv[2]))
"""


def part(*command: str, figures: tuple[Figure, ...] = (), limit_s: float = PATIENCE_S) -> Part:
    return Part(name="part", command=command, limit_s=limit_s, figures=figures)


def ended_lines(one: Part, out: Path) -> list[tuple[str, str]]:
    ended = run(one, out, device="cpu", python=sys.executable, limit_s=one.limit_s)
    return [(line.what, line.verdict) for line in lines_of(one, ended, out)]


def test_each_row_of_a_table_is_judged(tmp_path: Path) -> None:
    figure = Figure(table="table", column="ratio", named_by=("way",), at_most=1.0)
    lines = ended_lines(part("-c", WRITES, "{out}", "0", figures=(figure,)), tmp_path)
    assert lines == [("ratio (way a)", "held"), ("ratio (way b)", "missed")]


def test_a_benchmark_that_fails_after_its_table_has_failed(tmp_path: Path) -> None:
    figure = Figure(table="table", column="ratio", where={"way": "a"}, at_least=0.5)
    lines = ended_lines(part("-c", WRITES, "{out}", "3", figures=(figure,)), tmp_path)
    assert lines == [("ratio", "held"), ("-", "failed")]


@pytest.mark.parametrize(
    "figure",
    [
        Figure(table="missing", column="ratio"),
        Figure(table="table", column="other"),
        Figure(table="table", column="ratio", where={"way": "c"}),
    ],
)
def test_a_figure_that_is_not_there_has_failed(figure: Figure, tmp_path: Path) -> None:
    lines = ended_lines(part("-c", WRITES, "{out}", "0", figures=(figure,)), tmp_path)
    assert lines == [("-", "failed")]


def test_a_part_that_hangs_ends_at_its_limit_with_its_children(tmp_path: Path) -> None:
    hang = (
        "import subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    # A busy machine may not have started the child within the first limits.
    for limit_s in (2, 20, 200):
        assert ended_lines(part("-c", hang, limit_s=limit_s), tmp_path) == [("-", "failed")]
        if pid := (tmp_path / "log.txt").read_text().strip():
            break
    status = Path("/proc", pid, "status")
    wait_until(lambda: not status.exists() or "\tZ" in status.read_text(), what=f"{pid}'s end")


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("def test_a(): pass", "held"),
        ("def test_a(): assert 0", "missed"),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass", "missed"),
        ("", "no aim"),
        ("import nothing_like_that", "missed"),
    ],
)
def test_tests_have_to_run_and_pass(body: str, verdict: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(body)
    command = ("-m", "pytest", str(tmp_path), "-q", "-c", "/dev/null", "--rootdir", str(tmp_path))
    one = part(*command, "--junitxml={out}/results.xml")
    assert [each for _, each in ended_lines(one, tmp_path / "out")] == [verdict]


def test_a_step_is_read_as_its_ratio_to_trl(tmp_path: Path) -> None:
    results = [
        {"side": "rl-policy (workers)", "measured": {"step": [0.3, 0.4]}},
        {"side": "TRL (workers)", "measured": {"step": [0.6, 0.5]}},
    ]
    (tmp_path / "grpo_step.json").write_text(json.dumps([{"work": "toy", "results": results}]))
    assert gpu_report.rows_of(tmp_path / "grpo_step.json") == [
        {
            "work": "toy",
            "side": "rl-policy (workers)",
            "wall / TRL": 0.5,
            "processor / TRL": 0.8,
        }
    ]


def test_every_benchmark_that_is_read_exists_and_names_its_table() -> None:
    for device in ("cpu", "cuda"):
        for one in gpu_report.parts(device):
            if one.figures:
                script = (gpu_report.ROOT / one.command[0]).read_text()
                for figure in one.figures:
                    assert f'"{figure.table}"' in script, (one.name, figure.table)


def test_the_page_is_written_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Figure(table="table", column="ratio", where={"way": "a"}, at_most=1.0)
    good = part("-c", WRITES, "{out}", "0", figures=(figure,))
    monkeypatch.setattr(
        gpu_report, "parts", lambda device: [part("-c", "1/0", figures=(figure,)), good]
    )
    assert gpu_report.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "report.md").read_text()
    assert "ZeroDivisionError" in text
    assert "| part | ratio | 0.9 | at most 1 | held |" in text
    assert json.loads((tmp_path / "01" / "table.json").read_text())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_benchmarks_write_the_columns_that_are_read(device: str) -> None:
    """A column that is renamed in a benchmark would be a failed row on the day of the GPU."""
    sources = [*(ROOT / "packages").glob("*/benchmarks/**/*.py"), Path(gpu_report.__file__)]
    written = {source: source.read_text() for source in sources}
    for one in gpu_report.parts(device):
        for figure in one.figures:
            # Those of `grpo_step` are made by the report itself.
            own = [ROOT / one.command[0], *(ROOT / one.command[0]).parent.glob("*/*.py")]
            texts = [written[source] for source in (*own, sources[-1]) if source in written]
            names = [
                part for name in (figure.column, *figure.named_by) for part in name.split(" / ")
            ]
            if "grpo_step" not in one.name:
                texts.pop()
            for name in names:
                assert any(name in text for text in texts), f"{one.name}: no column {name!r}"
