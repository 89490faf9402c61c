"""Sources in vLLM's own weight-transfer backends, which need CUDA to transfer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import source_ranks
import torch
from patience import PATIENCE_S
from rl_refit import ModuleSource, TensorSource

pytestmark = [pytest.mark.vllm, pytest.mark.needs("rl-refit[vllm]")]
KINDS = [ModuleSource, lambda module: TensorSource(module.named_parameters())]


@pytest.mark.parametrize("kind", KINDS)
def test_vllms_sender_takes_each_tensor_for_what_its_metadata_says(kind):
    nccl = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    source = kind(source_ranks.build())
    checked = nccl.NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata())
    for (name, tensor), (own_name, own) in zip(checked, source, strict=True):
        assert name == own_name
        assert torch.equal(tensor, own)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_those_of_vllms_own_sources(kind):
    base = pytest.importorskip("vllm.distributed.weight_transfer.base")
    source = kind(source_ranks.build())
    asked = {name for name in dir(base.WeightSource) if not name.startswith("_")}
    assert asked == {"metadata", "held_names", "groups", "iter_groups"}
    assert all(hasattr(source, name) for name in asked)
    assert source.groups() == base.layerwise_groups([meta.name for meta in source.metadata()])
    for (names, tensors), (own_names, own) in zip(
        base.WeightSource.iter_groups(source), source.iter_groups(), strict=True
    ):
        assert names == own_names
        assert all(torch.equal(a, b) for a, b in zip(tensors, own, strict=True))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_vllms_ipc_backend_transfers_our_source(tmp_path):
    pytest.importorskip("vllm")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRITON_F32_DEFAULT": "ieee",
        # vLLM sends its own handles to the engine's process pickled.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    script = Path(__file__).with_name("vllm_own_backend.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "model")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "all refits are as they should be" in done.stdout
