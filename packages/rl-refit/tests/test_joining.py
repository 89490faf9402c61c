"""The meeting of a transport's sides: its limit, and what is raised."""

import threading

import pytest
from rl_refit.deadline import Deadline
from rl_refit.errors import RefitError, RefitTimeoutError
from rl_refit.joining import join_apart, join_watching


class Side:
    """Joins as it is told to, whatever the limit says."""

    def __init__(self, join):
        self.join = join


def test_a_transport_that_knows_no_limit_is_waited_for_until_it_is_over():
    released = threading.Event()
    side = Side(lambda deadline: released.wait())
    with pytest.raises(RefitTimeoutError, match="no meeting of the transport's sides within"):
        join_watching(side, Deadline(0.1), lambda: None)
    released.set()


def test_what_a_transport_says_of_its_limit_comes_first():
    def join(deadline):
        threading.Event().wait(deadline.remaining("anything") + 0.1)
        raise RuntimeError("nobody is at the port")

    with pytest.raises(RefitError, match="cannot join the other side: nobody is at the port"):
        join_watching(Side(join), Deadline(0.1), lambda: None)


def test_a_transport_that_keeps_the_limit_says_so_itself():
    def join(deadline):
        threading.Event().wait(deadline.remaining("anything") + 0.1)
        deadline.remaining("seat at the table")

    with pytest.raises(RefitTimeoutError, match=r"no seat at the table within 0\.1 s"):
        join_watching(Side(join), Deadline(0.1), lambda: None)


def test_a_result_that_comes_too_late_is_discarded():
    released, discarded = threading.Event(), threading.Event()
    results = []

    def join():
        released.wait()
        return "late"

    def discard(result):
        results.append(result)
        discarded.set()

    with pytest.raises(RefitTimeoutError, match=r"no group within 0\.1 s"):
        join_apart(join, Deadline(0.1), "group", discard=discard)
    assert results == []
    released.set()
    assert discarded.wait(10)
    assert results == ["late"]


def test_a_result_that_came_when_the_watch_raised_is_discarded():
    started = threading.Event()
    results = []

    def join():
        started.wait()
        return "unwanted"

    def watch():
        started.set()
        threading.Event().wait(0.1)
        raise RefitError("killed")

    with pytest.raises(RefitError, match="killed"):
        join_apart(join, Deadline(10), "group", discard=results.append, watch=watch)
    assert results == ["unwanted"]
