"""A sender or a receiver is killed at a random moment of a refit."""

import os
import random
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
from leftovers import private_tempdir
from refit_actors import Actor, run_receiver, run_sender
from rl_refit import RefitError

# Before there is a private directory for temporary files, as the server has its own in there.
forkserver.ensure_running()

CASES = int(os.environ.get("REFIT_DRILLS", "20"))
LIMIT_S = 20.0
PATIENCE_S = 2 * LIMIT_S


class Cluster:
    """One sender and two receivers, each a process; whoever is killed is started again."""

    def __init__(self, transport, directory):
        self.transport = transport
        self.directory = str(directory)
        self.receivers = [Actor(run_receiver, rank, LIMIT_S) for rank in range(2)]
        self.version = 0
        self.start_sender()

    def start_sender(self):
        self.sender = Actor(run_sender, self.directory, self.transport, 2, LIMIT_S)
        self.address = self.sender.answer(PATIENCE_S)
        for receiver in self.receivers:
            receiver.order("attach", self.address)
            assert receiver.answer(PATIENCE_S) == "done"

    def order_refit(self):
        self.version += 1
        self.sender.order("send", self.version)
        for receiver in self.receivers:
            receiver.order("refit", self.version)

    def answers(self):
        return [actor.answer(PATIENCE_S) for actor in (self.sender, *self.receivers)]

    def good_refit(self):
        self.order_refit()
        assert self.answers() == ["done"] * 3
        self.sender.order("commit", self.version)
        assert self.sender.answer(PATIENCE_S) == "done"
        for receiver in self.receivers:
            receiver.order("ready")
            assert receiver.answer(PATIENCE_S) == (self.version, True)

    def kill_during_refit(self, rng, victim):
        """Kill one process; return whether the refit failed."""
        self.order_refit()
        time.sleep(rng.uniform(0, 0.04))
        if victim == "sender":
            self.sender.kill()
            answers = [receiver.answer(PATIENCE_S) for receiver in self.receivers]
            # Both or neither may have been done, or the one that the sender told first.
            assert all(a == "done" or isinstance(a, RefitError) for a in answers), answers
            self.nothing_is_committed(self.receivers)
            self.start_sender()
            return answers != ["done"] * 2
        index = rng.randrange(2)
        self.receivers[index].kill()
        other = self.receivers[1 - index]
        answers = [self.sender.answer(PATIENCE_S), other.answer(PATIENCE_S)]
        assert all(a == "done" or isinstance(a, RefitError) for a in answers), answers
        self.nothing_is_committed([other])
        self.receivers[index] = Actor(run_receiver, index, LIMIT_S)
        self.receivers[index].order("attach", self.address)
        assert self.receivers[index].answer(PATIENCE_S) == "done"
        return answers != ["done"] * 2

    def nothing_is_committed(self, survivors):
        for receiver in survivors:
            receiver.order("version")
            assert receiver.answer(PATIENCE_S) != self.version

    def close(self):
        for actor in (self.sender, *self.receivers):
            actor.join()


@pytest.mark.timeout(60 + 10 * CASES)
@pytest.mark.parametrize("transport", ["shm", "golden"])
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_who_is_killed_takes_nobody_along_and_a_full_resend_heals(transport, victim):
    failed = 0
    with private_tempdir() as directory:
        cluster = Cluster(transport, directory)
        cluster.good_refit()
        for case in range(CASES):
            failed += cluster.kill_during_refit(random.Random(f"{victim} {case}"), victim)
            left = sorted(path.name for path in directory.glob("rl-refit-*"))
            assert left == [Path(cluster.address["endpoint"].split(":")[1]).parent.name]
            cluster.good_refit()
        cluster.close()
        assert list(directory.glob("rl-refit-*")) == []
    assert failed >= CASES // 5  # or the moments were all too late
