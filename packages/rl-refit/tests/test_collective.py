"""The groups of the transport `collective`: how they are made, and that none is left behind."""

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from patience import PATIENCE_S
from rl_refit.protocol.waiting import Deadline
from rl_refit.transports import ReceiverContext, SenderContext, collective

VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
CPU = torch.device("cpu")


@pytest.fixture
def nccl(monkeypatch):
    """Stand in for NCCL, which needs GPUs; notes what the variable is in each call."""
    seen = []

    class FakeGroup:
        Options = SimpleNamespace

        def __init__(self, store, rank, size, options):
            seen.append(("begun", os.environ.get(VARIABLE)))
            time.sleep(0.2)
            seen.append(("made", os.environ.get(VARIABLE)))

        def eager_connect_single_device(self, device):
            seen.append((str(device), os.environ.get(VARIABLE)))

        def _set_default_timeout(self, limit):
            seen.append(("limit", limit.total_seconds()))

    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", FakeGroup, raising=False)
    monkeypatch.setattr("torch.cuda.device", contextlib.nullcontext)
    return seen


def make_nccl_group():
    device = torch.device("cuda", 3)
    return collective.ProcessGroup(
        None, 0, 2, "nccl", "127.0.0.1", device, Deadline(PATIENCE_S), limit_s=7.0
    )


@pytest.mark.parametrize("kept", [None, "3"])
def test_a_nccl_group_survives_errors_and_others_are_as_they_were(nccl, monkeypatch, kept):
    monkeypatch.delenv(VARIABLE, raising=False)
    if kept is not None:
        monkeypatch.setenv(VARIABLE, kept)
    make_nccl_group()
    assert nccl == [("begun", "2"), ("made", "2"), ("cuda:3", kept), ("limit", 7.0)]


@pytest.mark.parametrize("kept", [None, "3"])
def test_nccl_groups_that_are_made_at_once_do_not_mix_up_the_variable(nccl, monkeypatch, kept):
    monkeypatch.delenv(VARIABLE, raising=False)
    if kept is not None:
        monkeypatch.setenv(VARIABLE, kept)
    with ThreadPoolExecutor(2) as pool:
        for made in [pool.submit(make_nccl_group) for _ in range(2)]:
            made.result(timeout=PATIENCE_S)
    calls = [call for call in nccl if call[0] in ("begun", "made")]
    assert calls == [("begun", "2"), ("made", "2")] * 2
    assert os.environ.get(VARIABLE) == kept


def open_sides():
    shape = {"num_buffers": 2, "buffer_bytes": 64, "device": CPU, "host": "127.0.0.1"}
    transport = collective.CollectiveTransport()
    sender = transport.open_sender(
        SenderContext(**shape, ranks=(0,), directory=None, timeout_s=PATIENCE_S)
    )
    receiver = transport.open_receiver(
        ReceiverContext(
            **shape, grant=sender.grant(0)[0], descriptors=[], rank=0, timeout_s=PATIENCE_S
        )
    )
    return sender, receiver


@pytest.mark.parametrize("index", [0, 1], ids=["sender", "receiver"])
def test_a_group_that_is_made_after_its_side_was_closed_is_closed(monkeypatch, index):
    made, released = threading.Barrier(3), threading.Event()
    closed = []

    class LateGroup(collective.ProcessGroup):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.rank = arguments[1]
            made.wait(PATIENCE_S)
            assert released.wait(PATIENCE_S)

        def close(self):
            super().close()
            closed.append(self.rank)

    monkeypatch.setattr(collective, "ProcessGroup", LateGroup)
    sides = open_sides()
    with ThreadPoolExecutor(2) as pool:
        joins = [pool.submit(side.join, Deadline(PATIENCE_S)) for side in sides]
        made.wait(PATIENCE_S)
        sides[index].close()
        assert list(sides[index].buffers) == []
        assert closed == []
        released.set()
        for join in joins:
            join.result(timeout=PATIENCE_S)
    assert closed == [index]
    sides[1 - index].close()
    assert closed == [index, 1 - index]
