"""Random faults on the way. None may commit a version, hang, or leave anything behind."""

import os

import pytest
from rl_refit.testing import RefitPair, TransportConformance

pytestmark = pytest.mark.needs("rl-refit[testing]")

# Of each fault; `nox -s drills` asks for hundreds.
DRILLS = int(os.environ.get("REFIT_DRILLS", "20"))


class Faults(TransportConformance):
    groups = ("faults",)


class TestShm(Faults):
    pair = RefitPair("shm")
    num_cases = DRILLS // 4


@pytest.mark.slow
class TestShmOften(Faults):
    pair = RefitPair("shm")
    num_cases = DRILLS // 2


@pytest.mark.slow
class TestGolden(Faults):
    pair = RefitPair("golden")
    num_cases = DRILLS // 4


@pytest.mark.slow
class TestCollective(Faults):
    pair = RefitPair("collective")
    num_cases = DRILLS // 4


@pytest.mark.slow
class TestChain(Faults):
    pair = RefitPair("chain")
    num_cases = DRILLS // 4


@pytest.mark.slow
class TestShmStaging(TransportConformance):
    pair = RefitPair("shm")
    groups = ("staging",)
    num_cases = DRILLS
