"""Timelines of a run: what is written by several threads, read, and drawn."""

import threading
import time

import pytest
from rl_policy.run.timeline import Span, Timeline, num_busy, plot_timeline, read_timeline

pytestmark = pytest.mark.needs("rl-policy[plot]")


def test_spans_of_several_threads_are_read_again(tmp_path):
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path)
    before = time.time()

    def work(number):
        for id in range(50):
            with timeline.span("environment", 100 * number + id):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.flush()
    timeline.record("train", 7, 1.0, 3.5)
    timeline.flush()
    spans = read_timeline(path)
    assert sorted(span.id for span in spans[:-1]) == sorted(
        100 * number + id for number in range(4) for id in range(50)
    )
    assert all(before - 1 < span.start <= span.end < time.time() + 1 for span in spans[:-1])
    assert (spans[-1].what, spans[-1].id) == ("train", 7)
    assert spans[-1].end - spans[-1].start == pytest.approx(2.5, abs=1e-3)
    # The last line of a run that is killed.
    with path.open("a") as file:
        file.write('{"what": "train", "id"')
    assert read_timeline(path) == spans
    # What resumes it writes after that.
    resumed = Timeline(path)
    resumed.record("train", 8, 4.0, 5.0)
    resumed.flush()
    assert read_timeline(path)[:-1] == spans
    assert read_timeline(path)[-1].id == 8


def test_a_timeline_without_a_file_keeps_nothing(tmp_path):
    timeline = Timeline(None)
    with timeline.span("refit", 1):
        pass
    timeline.flush()
    assert not list(tmp_path.iterdir())


def test_a_timeline_that_is_full_says_so_once(tmp_path, caplog):
    timeline = Timeline(tmp_path / "timeline.jsonl", most_spans=2)
    for id in range(5):
        timeline.record("engine", id, 0.0, 1.0)
    timeline.flush()
    assert [span.id for span in read_timeline(tmp_path / "timeline.jsonl")] == [0, 1]
    (record,) = caplog.records
    assert "is full" in record.getMessage()


def test_how_many_are_busy():
    spans = [Span("engine", 0, 0, 2), Span("engine", 1, 1, 3), Span("train", 1, 0, 9)]
    assert num_busy(spans, "engine") == ([0, 1, 2, 3], [1, 2, 1, 0])
    # One ends when another begins.
    after = [Span("engine", 0, 0, 2), Span("engine", 1, 2, 3)]
    assert num_busy(after, "engine") == ([0, 2, 3], [1, 1, 0])
    assert num_busy(spans, "refit") == ([], [])


def test_a_picture_is_drawn(tmp_path):
    spans = [Span("engine", 0, 0, 2), Span("environment", 0, 2, 3), Span("refit", 1, 3, 4)]
    plot_timeline(spans, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    plot_timeline([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
