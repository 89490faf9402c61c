"""The kit on a worker that keeps every rule: as a suite of pytest, and as a plain function."""

import pytest
from plain_conformance_case import plain_case
from rl_interfaces.testing import WorkerConformance

pytestmark = [pytest.mark.promise, pytest.mark.needs("rl-interfaces[testing]")]


@pytest.fixture(scope="module")
def worker_case(tmp_path_factory):
    return plain_case(tmp_path_factory.mktemp("model"))


class TestPlainWorker(WorkerConformance):
    pass
