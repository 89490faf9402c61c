"""Slices in place of full tensors: to some receivers alone, and where they cannot be sent."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from patience import PATIENCE_S
from rl_interfaces.backend.transfer import LayeredSource, WeightTransfer
from rl_refit import RefitReceiver
from rl_refit.resharding import Box, SliceReceiver, Want, local_shards
from rl_refit.source import TensorSource

pytestmark = pytest.mark.needs("rl-interfaces[backend]")


@pytest.fixture
def transfer(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    tensors = {"weight": torch.arange(4.0).reshape(2, 2)}
    source = TensorSource(tensors)
    source.shards = lambda: local_shards(tensors)
    device = torch.device("cpu")
    transfer = WeightTransfer(source, rank=0, device=device, device_id="cpu", timeout_s=PATIENCE_S)
    yield transfer
    transfer.close()


def test_slices_go_to_those_alone_that_are_named(transfer):
    address = transfer.open(receivers_per_rank=[2], slices=True, transport="shm", min_receivers=1)
    place = torch.zeros(1, 2)
    wanted = [Want("weight", (2, 2), Box((1, 0), (1, 2)), place)]
    with (
        RefitReceiver(address, 1, timeout_s=PATIENCE_S) as receiver,
        SliceReceiver(1, timeout_s=PATIENCE_S) as slices,
        ThreadPoolExecutor() as threads,
    ):
        receiver.begin(1)
        received = threads.submit(
            receiver.receive, 1, lambda tensors: slices.receive(tensors, 1, wanted)
        )
        metrics = transfer.send(1, receivers=[1])
        received.result(timeout=PATIENCE_S)
    assert place.tolist() == [[2.0, 3.0]]
    assert (metrics["refit_bytes_sent"], metrics["refit_bytes"]) == (8, 16)


def test_a_source_without_shards_names_itself():
    class Gathered(LayeredSource):
        def metadata(self):
            return []

        def gather(self, names):
            yield from ()

    with pytest.raises(ValueError, match="Gathered has no shards: send full tensors"):
        Gathered().shards()
