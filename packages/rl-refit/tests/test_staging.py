"""Staged refits: what the kit's rules do not reach, and the memory that staging takes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from refit_pairs import LIMIT_S, make_sender, some_tensors
from rl_refit import RefitError, RefitReceiver, RefitSender, TensorSource
from rl_refit.host_memory import available_bytes


@pytest.mark.parametrize("sender_begins", [False, True])
def test_a_receiver_is_closed_while_another_thread_receives(sender_begins):
    """Whether the thread waits for a handshake, or for a bucket of a sender that is slow."""
    tensors = some_tensors()
    reached, go_on = threading.Event(), threading.Event()

    class Slow:
        def metadata(self):
            return TensorSource(tensors).metadata()

        def __iter__(self):
            reached.set()
            go_on.wait(LIMIT_S)
            yield from tensors.items()

    with RefitSender(Slow(), timeout_s=LIMIT_S) as sender, ThreadPoolExecutor(2) as pool:
        receiver = RefitReceiver(sender.address, timeout_s=LIMIT_S)
        receiver.begin(1, swap=lambda: None)
        receiving = pool.submit(receiver.receive, 1, lambda pairs: None)
        if sender_begins:
            sending = pool.submit(sender.send, 1)
            assert reached.wait(LIMIT_S)
        else:
            while receiver._connector._connecting is None:
                assert not receiving.done()
        receiver.close()
        with pytest.raises(RefitError, match="the receiver was closed"):
            receiving.result(LIMIT_S / 4)
        go_on.set()
        if sender_begins:
            with pytest.raises(RefitError, match="receiver is gone"):
                sending.result(LIMIT_S)


def test_a_receiver_into_its_own_tensors_does_not_stage():
    with make_sender({"w": torch.ones(3)}) as sender:
        receiver = RefitReceiver(sender.address, into={"w": torch.zeros(3)})
        with pytest.raises(ValueError, match="`into` overwrites what is served"):
            receiver.begin(1, swap=lambda: None)
        receiver.close()


def write_memory(tmp_path, *, limit, used):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    2000 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
    return {"meminfo": tmp_path / "meminfo", "cgroup": tmp_path}


@pytest.mark.parametrize(
    ("limit", "used", "available"),
    [
        (None, 0, 2000 * 1024),
        ("max", 0, 2000 * 1024),
        (5000, 1000, 4000),
        (5000, 6000, 0),
        (1 << 40, 0, 2000 * 1024),
    ],
)
def test_memory_is_that_of_the_machine_within_the_limit_of_the_container(
    tmp_path, limit, used, available
):
    assert available_bytes(**write_memory(tmp_path, limit=limit, used=used)) == available


def test_a_kernel_that_reports_no_available_memory_is_an_error(tmp_path):
    paths = write_memory(tmp_path, limit=None, used=0)
    paths["meminfo"].write_text("MemTotal: 9000 kB\n")
    with pytest.raises(RuntimeError, match="no line MemAvailable"):
        available_bytes(**paths)


def test_this_machine_reports_its_memory():
    assert 0 < available_bytes() < 1 << 50
