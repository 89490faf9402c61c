"""Every transport, ours and a third party's, proves itself by the kit; the drills are elsewhere."""

import sys

import pytest
from pair_apart import PairApart
from rl_refit.testing import RefitPair, TransportConformance

pytestmark = pytest.mark.needs("rl-refit[testing]")

WITHOUT_DRILLS = ("round_trips", "versions", "staging", "deltas", "losses")


@pytest.mark.promise
class TestShm(TransportConformance):
    pair = RefitPair("shm")
    groups = WITHOUT_DRILLS


class TestShmIntoOtherProcesses(TransportConformance):
    pair = PairApart("shm")
    groups = ("versions", "staging")


@pytest.mark.slow
class TestShmOfEveryKindIntoOtherProcesses(TransportConformance):
    pair = PairApart("shm")
    groups = ("round_trips", "faults")
    num_cases = 2


class TestGolden(TransportConformance):
    pair = RefitPair("golden")
    groups = WITHOUT_DRILLS


class TestCollective(TransportConformance):
    pair = RefitPair("collective")
    groups = WITHOUT_DRILLS


class TestChain(TransportConformance):
    pair = RefitPair("chain")
    groups = WITHOUT_DRILLS


@pytest.fixture(scope="class")
def third_party(tmp_path_factory):
    """Install a package whose entry point names a transport."""
    site = tmp_path_factory.mktemp("site")
    info = site / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    entry_point = "[rl_refit.transports]\nfile = file_transport:FileTransport\n"
    (info / "entry_points.txt").write_text(entry_point)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(site), *sys.path])
        yield


@pytest.mark.usefixtures("third_party")
class TestThirdParty(TransportConformance):
    pair = RefitPair("file")
    num_cases = 4
