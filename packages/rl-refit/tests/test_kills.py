"""A sender or a receiver is killed at a random moment of a refit."""

import os

import pytest
from rl_refit.testing import RefitPair, TransportConformance

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
class TestShmOften(Kills):
    pair = RefitPair("shm")
    num_cases = DRILLS
