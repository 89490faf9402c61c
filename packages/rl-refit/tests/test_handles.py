import gc
import json
import os
import pickle
import subprocess
import sys

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from rl_refit.compat.handles import HandleOwner, group_keys, rebuild
from rl_refit.transports import ReceiverContext, find_transport, shared_memory

READER = """
import pickle, sys, torch
from rl_refit.compat.handles import rebuild
handles = pickle.load(sys.stdin.buffer)
device = sys.argv[1] if len(sys.argv) > 1 else None
tensors = {name: rebuild(handle, device) for name, handle in handles.items()}
if tensors["a"].is_cuda:
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
torch.save({name: tensor.clone() for name, tensor in tensors.items()}, sys.stdout.buffer)
"""

SPECS = st.lists(st.tuples(st.text(max_size=3), st.integers(0, 50)), max_size=20)


def in_another_process(handles, *device):
    """Return the tensors as another process has rebuilt them."""
    import io

    done = subprocess.run(
        [sys.executable, "-c", READER, *device],
        input=pickle.dumps(handles),
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return torch.load(io.BytesIO(done.stdout))


def some_tensors():
    return {
        "a": torch.randn(13, 7),
        "b": torch.randn(5, 6).bfloat16().T,
        "c": torch.tensor(4),
        "d": torch.empty(0, 3),
        "e": torch.randint(0, 255, (9001,), dtype=torch.uint8),
    }


@given(SPECS, st.integers(0, 60))
def test_groups_keep_the_order_and_the_limit(specs, limit):
    groups = group_keys(specs, limit)
    sizes = iter(size for _, size in specs)
    assert [name for group in groups for name in group] == [name for name, _ in specs]
    totals = [[next(sizes) for _ in group] for group in groups]
    for index, total in enumerate(totals):
        assert sum(total) <= limit or len(total) == 1
        if index + 1 < len(totals):  # no group ends too early
            assert sum(total) + totals[index + 1][0] > limit


def test_groups_as_in_the_example():
    assert group_keys([("a", 4), ("b", 4), ("c", 9), ("d", 1)], 8) == [["a", "b"], ["c"], ["d"]]


def test_another_process_rebuilds_every_bit():
    tensors = some_tensors()
    with HandleOwner() as owner:
        handles = owner.export(tensors)
        assert json.loads(json.dumps(handles)) == handles
        rebuilt = in_another_process(handles)
    assert list(rebuilt) == list(tensors)
    for name, tensor in tensors.items():
        assert rebuilt[name].dtype == tensor.dtype
        assert torch.equal(rebuilt[name], tensor)


def test_what_was_rebuilt_outlives_its_owner():
    tensors = some_tensors()
    owner = HandleOwner()
    rebuilt = rebuild(owner.export(tensors)["a"])
    owner.close()
    gc.collect()
    assert torch.equal(rebuilt, tensors["a"])


def test_closing_drops_every_handle_and_leaves_no_descriptor():
    before = sorted(os.listdir("/proc/self/fd"))
    owner = HandleOwner()
    handles = {**owner.export(some_tensors()), **owner.export({"f": torch.ones(3)})}
    owner.close()
    owner.close()
    for handle in handles.values():
        if torch.Size(handle["shape"]).numel():
            with pytest.raises(RuntimeError, match="cannot be opened"):
                rebuild(handle)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_that_is_another_file_by_now_is_refused():
    with HandleOwner() as owner, HandleOwner() as other:
        handle = owner.export({"a": torch.ones(3)})["a"]
        owner.close()
        assert other.export({"b": torch.zeros(3)})["b"]["descriptor"] == handle["descriptor"]
        with pytest.raises(RuntimeError, match="closed"):
            rebuild(handle)


def test_a_process_that_is_gone_is_named():
    with HandleOwner() as owner:
        handle = owner.export({"a": torch.ones(3)})["a"]
        with pytest.raises(RuntimeError, match="process 4194305 cannot be opened"):
            rebuild({**handle, "pid": 4194305})


@pytest.mark.parametrize("change", [{"kind": "file"}, {"offset": "0"}, {"file": None}])
def test_a_malformed_handle_is_refused(change):
    with HandleOwner() as owner:
        handle = owner.export({"a": torch.ones(3)})["a"]
        with pytest.raises(msgspec.ValidationError):
            rebuild({**handle, **change})


# As `export_cuda` makes it where the owner's GPU is its second one.
GPU_HANDLE = {
    "kind": "cuda",
    "dtype": "uint8",
    "shape": [8],
    "stride": [1],
    "tensor_offset": 0,
    "storage_device": 1,
    "storage_handle": b"h" * 64,
    "storage_size_bytes": 8,
    "storage_offset_bytes": 0,
    "ref_counter_handle": b"/torch_1",
    "ref_counter_offset": 0,
    "event_handle": b"e" * 64,
    "event_sync_required": True,
}


class Opened(Exception):
    """Where GPU memory would be opened."""


@pytest.fixture
def opened(monkeypatch):
    """What torch is asked to open, where there is no GPU to open it on."""
    found = {}

    def open_memory(**arguments):
        found.update(arguments)
        raise Opened

    monkeypatch.setattr(shared_memory, "rebuild_cuda_tensor", open_memory)
    return found


@pytest.mark.parametrize(("device", "index"), [("cuda:0", 0), ("cuda:3", 3), (None, 1)])
def test_gpu_memory_is_opened_on_the_readers_own_device(opened, device, index):
    with pytest.raises(Opened):
        rebuild(GPU_HANDLE, device)
    assert opened["storage_device"] == index
    assert GPU_HANDLE["storage_device"] == 1


def test_cuda_ipc_opens_the_buffers_on_the_receivers_device(opened):
    context = ReceiverContext(
        num_buffers=1,
        buffer_bytes=8,
        grant={"buffers": GPU_HANDLE},
        descriptors=[],
        rank=0,
        device=torch.device("cuda:0"),
        host=None,
        timeout_s=1.0,
    )
    with pytest.raises(Opened):
        find_transport("cuda_ipc").open_receiver(context)
    assert opened["storage_device"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_memory_of_an_owner_that_sees_more_gpus_is_rebuilt():
    tensors = {name: tensor.cuda() for name, tensor in some_tensors().items()}
    with HandleOwner() as owner:
        handles = owner.export(tensors)
        for handle in handles.values():
            handle["storage_device"] += 5
        rebuilt = in_another_process(handles, "cuda:0")
    for name, tensor in tensors.items():
        assert torch.equal(rebuilt[name], tensor.cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_memory_is_rebuilt_in_another_process():
    tensors = {name: tensor.cuda() for name, tensor in some_tensors().items()}
    with HandleOwner() as owner:
        rebuilt = in_another_process(owner.export(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(rebuilt[name], tensor.cpu())


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_has_no_handles_is_refused_before_a_refit(name, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    with pytest.raises(ValueError, match=f"{name}=max_split.*'cuda_ipc' needs"):
        find_transport("cuda_ipc")
    find_transport("shm")
    monkeypatch.setenv(name, "expandable_segments:False")
    find_transport("cuda_ipc")
