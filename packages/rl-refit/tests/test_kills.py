"""A sender or a receiver is killed at a random moment of a refit."""

import os
from multiprocessing.context import ForkServerContext, SpawnContext

import pytest
import torch
from rl_refit.testing import RefitPair, TransportConformance, kills
from rl_refit.testing.kills import Cluster, process_context
from rl_refit.testing.leftovers import private_tempdir

# `nox -s drills` asks for hundreds.
DRILLS = int(os.environ.get("REFIT_DRILLS", "20"))
pytestmark = [pytest.mark.timeout(900 + 10 * DRILLS), pytest.mark.needs("rl-refit[testing]")]


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_forks_of_what_the_kit_imports_can_use_a_gpu():
    preload = ["torch", "rl_refit.testing"]
    assert isinstance(process_context("cuda:0", preload=preload), ForkServerContext)


def test_processes_are_no_forks_where_those_cannot_use_the_gpu(monkeypatch):
    """CUDA refuses a process whose parent has asked for it: "Cannot re-initialize CUDA"."""
    monkeypatch.setattr(kills, "_forks_can_use", lambda device: False)
    context = process_context("cuda:0", preload=["torch"])
    assert isinstance(context, SpawnContext)
    with private_tempdir() as directory:
        cluster = Cluster(RefitPair("shm"), directory, context)
        cluster.good_refit()
        parents = {parent_of(each.process.pid) for each in (cluster.sender, *cluster.receivers)}
        cluster.close()
    assert parents == {os.getpid()}


def test_a_device_that_is_not_there_is_not_used_by_forks():
    assert not kills._forks_can_use(torch.device("cuda", 99))


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])
