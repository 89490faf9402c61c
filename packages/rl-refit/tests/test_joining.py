"""The meeting of a transport's sides: its limit, and what is raised."""

import threading

import pytest
from rl_refit.deadline import Deadline
from rl_refit.errors import RefitError, RefitTimeoutError
from rl_refit.joining import join_watching


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
