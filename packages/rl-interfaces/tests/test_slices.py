"""Slices in place of full tensors, where they cannot be sent."""

import pytest
import torch
from rl_interfaces.backend.transfer import LayeredSource, WeightTransfer
from rl_refit import RefitError
from rl_refit.source import TensorSource

pytestmark = pytest.mark.needs("rl-interfaces[backend]")


@pytest.fixture
def transfer(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    source = TensorSource({"weight": torch.zeros(2, 2)})
    source.shards = dict
    device = torch.device("cpu")
    transfer = WeightTransfer(source, rank=0, device=device, device_id="cpu", timeout_s=5.0)
    yield transfer
    transfer.close()


def test_slices_go_to_all_receivers_or_none(transfer):
    address = transfer.open(receivers_per_rank=[2], slices=True, transport="shm")
    assert address
    with pytest.raises(RefitError, match=r"not to \[1\] alone: .*slices=False"):
        transfer.send(1, receivers=[1])


def test_a_source_without_shards_names_itself():
    class Gathered(LayeredSource):
        def metadata(self):
            return []

        def gather(self, names):
            yield from ()

    with pytest.raises(ValueError, match="Gathered has no shards: send full tensors"):
        Gathered().shards()
