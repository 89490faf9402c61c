"""A sender or a receiver is killed at a random moment of a refit."""

import os

import pytest
from rl_interfaces.testing.transports import TransportConformance
from rl_refit.drills import RefitPair

CASES = int(os.environ.get("REFIT_DRILLS", "20"))
pytestmark = [pytest.mark.timeout(60 + 10 * CASES), pytest.mark.needs("rl-refit[testing]")]


class TestShm(TransportConformance):
    pair = RefitPair("shm")
    groups = ("kills",)
    num_cases = CASES


class TestGolden(TransportConformance):
    pair = RefitPair("golden")
    groups = ("kills",)
    num_cases = CASES


class TestCollective(TransportConformance):
    pair = RefitPair("collective")
    groups = ("kills",)
    num_cases = CASES // 4
