"""A sender or a receiver is killed at a random moment of a refit."""

import os
from multiprocessing.context import SpawnContext

import pytest
from rl_refit.testing import RefitPair, TransportConformance
from rl_refit.testing.kills import Cluster, process_context
from rl_refit.testing.leftovers import private_tempdir

# `nox -s drills` asks for hundreds.
DRILLS = int(os.environ.get("REFIT_DRILLS", "20"))
pytestmark = [pytest.mark.timeout(60 + 10 * DRILLS), pytest.mark.needs("rl-refit[testing]")]


class Kills(TransportConformance):
    groups = ("kills",)


class TestShm(Kills):
    pair = RefitPair("shm")
    num_cases = DRILLS // 3


@pytest.mark.slow
class TestGolden(Kills):
    pair = RefitPair("golden")
    num_cases = DRILLS


@pytest.mark.slow
class TestCollective(Kills):
    pair = RefitPair("collective")
    num_cases = DRILLS // 4


@pytest.mark.slow
class TestChain(Kills):
    pair = RefitPair("chain")
    num_cases = DRILLS


@pytest.mark.slow
class TestShmOften(Kills):
    pair = RefitPair("shm")
    num_cases = DRILLS


def test_processes_on_a_gpu_are_no_forks():
    """CUDA refuses a process whose parent has asked for it: "Cannot re-initialize CUDA"."""
    context = process_context("cuda:0", preload=["torch"])
    assert isinstance(context, SpawnContext)
    with private_tempdir() as directory:
        cluster = Cluster(RefitPair("shm"), directory, context)
        cluster.good_refit()
        parents = {parent_of(each.process.pid) for each in (cluster.sender, *cluster.receivers)}
        cluster.close()
    assert parents == {os.getpid()}


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])
