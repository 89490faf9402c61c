"""The data and the charts of a report; `test_report_browser.py` opens its page."""

import json
import re
from pathlib import Path

import pytest
from report_runs import HOSTILE, write_run
from rl_policy.cli import build_app
from typer.testing import CliRunner

pytestmark = pytest.mark.needs("rl-policy[report]")
pytest.importorskip("plotly", reason="comes with the extra report")
from rl_policy.report import page as report_page  # noqa: E402
from rl_policy.report.charts import build_charts, build_warm_up_charts  # noqa: E402
from rl_policy.report.page import MARK, render_page, write_page  # noqa: E402
from rl_policy.report.run_data import read_run  # noqa: E402


def data_of(page):
    """Return what the page's script reads."""
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    return json.loads(text)


def call(*arguments):
    return CliRunner().invoke(build_app(), [*map(str, arguments)])


def refusal(result):
    """Return the one line of a command that was refused."""
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_run_is_read_with_what_differs_from_the_defaults(tmp_path):
    run = read_run(write_run(tmp_path / "a", settings=["data.num_heldout=16", "loss.kl_coef=0.5"]))
    assert run.changed() == {
        "data.num_heldout": (16, None),
        "grpo.steps": (4, 60),
        "loss.kl_coef": (0.5, 0.001),
    }
    assert run.scores() == [0.125, 0.75, 0.75, 0.75, 0.75]
    assert (run.name, run.recipe, run.state) == ("a", "grpo", "finished")
    assert [row["step"] for row in run.warm_up] == [0, 1, 2]


def test_a_run_in_progress_is_read_up_to_its_last_complete_line(tmp_path):
    path = write_run(tmp_path / "a")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    (path / "final").rmdir()
    (path / "samples.jsonl").unlink()
    (path / "environment.json").unlink()
    run = read_run(path)
    assert run.rows[-1]["step"] == 4
    assert (run.samples, run.environment, run.state) == ([], {}, "running")
    render_page([run])


def test_the_charts_have_the_numbers_of_the_rows(tmp_path):
    charts = build_charts([read_run(write_run(tmp_path / "a"))])
    reward = charts["Reward"].data
    assert [trace.name for trace in reward] == ["reward_mean", "reward_std"]
    assert (list(reward[0].x), list(reward[0].y)) == ([0, 1, 2, 3, 4], [0.25, 0.5, 0.5, 0.5, 0.5])
    assert list(charts["own_column"].data[0].y) == [7.0] * 4
    assert list(charts["Parts of the reward"].data[0].y) == [0.5] * 4
    for title in ("Held-out accuracy", "Loss", "KL to the reference", "Entropy", "Staleness"):
        assert charts[title].data
    for title in ("Completion lengths", "Mismatch of sampler and trainer", "Peak memory"):
        assert charts[title].data
    assert "Model FLOPs utilization" not in charts  # not measured
    times = {trace.name: list(trace.y) for trace in charts["Time per phase"].data}
    assert times == {
        "generate": [0.3] * 4,
        "train": [0.4] * 4,
        "move": [0.1] * 4,
        "other": pytest.approx([0.2] * 4),
    }
    assert charts["Time per phase"].layout.barmode == "stack"


def test_several_runs_have_a_line_each(tmp_path):
    runs = [read_run(write_run(tmp_path / name, reward=at)) for name, at in (("a", 0.5), ("b", 1))]
    charts = build_charts(runs)
    assert [trace.name for trace in charts["Loss"].data] == ["a", "b"]
    assert len({trace.line.color for trace in charts["Loss"].data}) == 2
    lines = {trace.name: trace.y[-1] for trace in charts["Reward"].data}
    assert (lines["a: reward_mean"], lines["b: reward_mean"]) == (0.5, 1)
    (train,) = [trace for trace in charts["Time per phase"].data if trace.name == "train"]
    assert (list(train.x), list(train.y)) == (["a", "b"], pytest.approx([0.4, 0.4]))
    assert [trace.name for trace in build_warm_up_charts(runs)["Loss"].data] == ["a", "b"]


def test_a_page_takes_no_text_of_a_run_for_its_own(tmp_path):
    page = render_page([read_run(write_run(tmp_path / "<b>a", prompt=HOSTILE))])
    assert {sample["prompt"] for sample in data_of(page)["samples"]} == {HOSTILE}
    assert HOSTILE not in page
    assert "<b>a" not in page
    # Of our three scripts and the data alone.
    assert page.count("</script>") == 3


def test_a_page_fetches_nothing(tmp_path):
    page = render_page([read_run(write_run(tmp_path / "a"))])
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"']?(https?:)?//", page)


def test_report_writes_beside_the_run_and_again(tmp_path):
    path = write_run(tmp_path / "a")
    for _ in range(2):
        result = call("report", path)
        assert (result.exit_code, result.stdout.strip()) == (0, str(path / "report.html"))
    assert (path / "report.html").read_text().startswith(MARK)


def test_compare_says_what_differs_between_the_runs(tmp_path):
    paths = [
        write_run(tmp_path / "x" / "a", settings=["loss.kl_coef=0.5"]),
        write_run(tmp_path / "y" / "a", settings=["loss.kl_coef=0.25"]),
    ]
    out = tmp_path / "compare.html"
    result = call("compare", *paths, "--out", out)
    assert result.exit_code == 0, result.stderr
    page = out.read_text()
    assert "<th>key</th><th>a (1)</th><th>a (2)</th>" in page
    assert "<td>loss.kl_coef</td><td>0.5</td><td>0.25</td>" in page
    assert {sample["run"] for sample in data_of(page)["samples"]} == {"a (1)", "a (2)"}


def test_a_file_of_the_user_s_is_not_overwritten(tmp_path):
    path, out = write_run(tmp_path / "a"), tmp_path / "mine.html"
    out.write_text("mine")
    assert f"{out} exists and is no report" in refusal(call("report", path, "--out", out))
    assert out.read_text() == "mine"


def test_what_cannot_be_shown_is_refused_in_one_line(tmp_path):
    path, empty = write_run(tmp_path / "a"), tmp_path / "empty"
    for arguments in (["report", tmp_path], ["compare", path, tmp_path], ["watch", tmp_path]):
        line = refusal(call(*arguments))
        assert f"RUN_DIR={tmp_path} holds no run" in line
        assert "config.yaml" in line
    assert "give two or more" in refusal(call("compare", path))
    write_run(empty)
    (empty / "metrics.jsonl").unlink()
    assert f"RUN_DIR={empty} has no measurements yet" in refusal(call("report", empty))
    gone = tmp_path / "gone" / "report.html"
    assert f"{gone} cannot be written" in refusal(call("report", path, "--out", gone))


def test_without_plotly_the_remedy_is_said(tmp_path, monkeypatch):
    path = write_run(tmp_path / "a")
    monkeypatch.setattr(report_page, "find_spec", lambda name: None)
    assert 'pip install "rl-policy[report]"' in refusal(call("report", path))
    assert not (path / "report.html").exists()


def test_a_page_of_an_unwritable_directory_is_an_error_of_its_path(tmp_path):
    run = read_run(write_run(tmp_path / "a"))
    with pytest.raises(ValueError, match="cannot be written"):
        write_page([run], Path("/proc/report.html"))
