"""Calls that may never return: their limit, and what is raised."""

import threading

import pytest
from patience import PATIENCE_S
from rl_refit.errors import RefitError, RefitTimeoutError
from rl_refit.protocol.waiting import Deadline, join_transport, run_bounded


def test_a_transport_that_knows_no_limit_is_waited_for_until_it_is_over():
    released = threading.Event()
    with pytest.raises(RefitTimeoutError, match="no join of the transport's sides within"):
        join_transport(lambda deadline: released.wait(), Deadline(0.1), lambda: None)
    released.set()


def test_what_a_transport_says_of_its_limit_comes_first():
    def join(deadline):
        threading.Event().wait(deadline.seconds + 0.1)
        raise RuntimeError("nobody is at the port")

    with pytest.raises(RefitError, match="cannot join the other side: nobody is at the port"):
        join_transport(join, Deadline(0.1), lambda: None)


def test_a_transport_that_keeps_the_limit_says_so_itself():
    def join(deadline):
        threading.Event().wait(deadline.seconds + 0.1)
        deadline.remaining("seat at the table")

    with pytest.raises(RefitTimeoutError, match=r"no seat at the table within 0\.1 s"):
        join_transport(join, Deadline(0.1), lambda: None)


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
        run_bounded(join, Deadline(0.1), "group", discard=discard)
    assert results == []
    released.set()
    assert discarded.wait(PATIENCE_S)
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
        run_bounded(join, Deadline(PATIENCE_S), "group", discard=results.append, watch=watch)
    assert results == ["unwanted"]
