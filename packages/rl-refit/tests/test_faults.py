"""Random faults on the way. None may commit a version, hang, or leave anything behind."""

import os

import pytest
from rl_interfaces.testing.transports import TransportConformance
from rl_refit.drills import RefitPair

pytestmark = pytest.mark.needs("rl-refit[testing]")

# Of each fault, over all transports.
CASES = int(os.environ.get("REFIT_DRILLS", "20"))


class TestShm(TransportConformance):
    pair = RefitPair("shm")
    groups = ("faults",)
    num_cases = CASES // 2


class TestGolden(TransportConformance):
    pair = RefitPair("golden")
    groups = ("faults",)
    num_cases = CASES // 4


class TestCollective(TransportConformance):
    pair = RefitPair("collective")
    groups = ("faults",)
    num_cases = CASES // 4
