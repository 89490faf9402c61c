"""The table at the end of a run of nox, and the promises that the documentation lists."""

import re
import subprocess

import pytest

from checks import report
from checks.workspace import ROOT

JUNIT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase name="a"/><testcase name="b"><skipped message="needs a GPU"/></testcase>
<testcase name="c"><failure message="no"/></testcase>
<testcase name="d"><error message="no"/></testcase>
<testcase name="e"><skipped message="needs a GPU"/></testcase>
</testsuite></testsuites>"""


class Session:
    name = "tests(rl-policy)"
    parallel = True


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    return tmp_path / "results"


def write_junit(session):
    path = report.results_option(session).removeprefix("--junitxml=")
    with open(path, "w") as file:
        file.write(JUNIT)


def test_a_session_is_recorded_with_its_tests_and_its_log(results, capfd):
    @report.recorded
    def run(session):
        write_junit(session)
        write_junit(session)  # a session may run pytest more than once
        subprocess.run(["echo", "seen in the log alone"], check=True)

    run(Session())
    report.print_results(since=0)  # a single session has no table
    assert capfd.readouterr().out == ""
    assert "seen in the log alone" in (results / "tests-rl-policy.log").read_text()
    assert report.read_tests("tests(rl-policy)") == (
        {"passed": 2, "skipped": 4, "failed": 4},
        {"needs a GPU": 4},
    )


def test_a_session_that_fails_prints_its_log(results, capfd):
    @report.recorded
    def run(session):
        subprocess.run(["echo", "the reason"], check=True)
        raise RuntimeError("failed")

    with pytest.raises(RuntimeError):
        run(Session())
    assert "the reason" in capfd.readouterr().out


def test_the_table_has_counts_reasons_and_what_failed():
    good = report.SessionResult("lint", "passed", 0.1, 0.1)
    bad = report.SessionResult(
        "tests(a)", "failed", 2.0, 3.0, {"passed": 5, "failed": 1, "skipped": 2}, {"no GPU": 2}
    )
    table = report.format_results([good, bad], minutes=2.5)
    rows = [line.split() for line in table.splitlines()]
    assert ["tests(a)", "FAILED", "5", "1", "2", "2.0", "3.0"] in rows
    assert ["all", "5", "1", "2", "2.5", "3.1"] in rows
    assert ["2", "no", "GPU"] in rows
    assert "Failed: tests(a)" in table


def test_every_listed_promise_has_a_test():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (table,) = re.findall(r"\| promise \| tests \|\n(.*?)\n\n", text, re.DOTALL)
    named = re.findall(r"`([\w/-]+\.py)`", table)
    assert len(named) > 10
    without = [name for name in named if "pytest.mark.promise" not in (ROOT / name).read_text()]
    assert without == []
