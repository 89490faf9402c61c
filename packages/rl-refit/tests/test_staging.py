"""Staged refits: what the kit's rules do not reach, and the memory that staging takes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from patience import PATIENCE_S
from refit_pairs import make_sender, some_tensors
from rl_refit import RefitError, RefitReceiver, RefitSender, TensorSource
from rl_refit.ends import session as session_module
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
            go_on.wait(PATIENCE_S)
            yield from tensors.items()

    with RefitSender(Slow(), timeout_s=PATIENCE_S) as sender, ThreadPoolExecutor(2) as pool:
        receiver = RefitReceiver(sender.address, timeout_s=PATIENCE_S)
        receiver.begin(1, swap=lambda: None)
        receiving = pool.submit(receiver.receive, 1, lambda pairs: None)
        if sender_begins:
            sending = pool.submit(sender.send, 1)
            assert reached.wait(PATIENCE_S)
        else:
            while receiver._connector._connecting is None:
                assert not receiving.done()
        receiver.close()
        with pytest.raises(RefitError, match="the receiver was closed"):
            receiving.result(PATIENCE_S)
        go_on.set()
        if sender_begins:
            with pytest.raises(RefitError, match="receiver is gone"):
                sending.result(PATIENCE_S)


def test_a_receiver_is_closed_while_another_thread_opens_its_connection(monkeypatch):
    opening, hung_up = threading.Event(), threading.Event()

    def slow_dial(endpoint, deadline):
        opening.set()
        assert hung_up.wait(PATIENCE_S)
        return dial(endpoint, deadline)

    def hang_up(connector):
        hang_up_once(connector)
        hung_up.set()

    dial, hang_up_once = session_module.dial, session_module.Connector.hang_up
    monkeypatch.setattr(session_module, "dial", slow_dial)
    monkeypatch.setattr(session_module.Connector, "hang_up", hang_up)
    with make_sender(some_tensors()) as sender, ThreadPoolExecutor(1) as pool:
        receiver = RefitReceiver(sender.address, timeout_s=PATIENCE_S)
        receiver.begin(1, swap=lambda: None)
        receiving = pool.submit(receiver.receive, 1, lambda pairs: None)
        assert opening.wait(PATIENCE_S)
        receiver.close()
        with pytest.raises(RefitError, match="the receiver was closed"):
            receiving.result(PATIENCE_S)


def test_no_version_begins_while_another_thread_receives():
    with make_sender(some_tensors()) as sender, ThreadPoolExecutor(1) as pool:
        receiver = RefitReceiver(sender.address, timeout_s=PATIENCE_S)
        receiver.begin(1, swap=lambda: None)
        receiving = pool.submit(receiver.receive, 1, lambda pairs: None)
        while not receiver._reading.locked():
            assert not receiving.done()
        for call in (receiver.catch_up, lambda: receiver.begin(2)):
            with pytest.raises(RefitError, match="another thread still receives version 1: close"):
                call()
        sender.send(1)
        assert receiving.result(PATIENCE_S).version == 1
        receiver.commit(1)
        receiver.begin(2)
        receiver.close()


def test_a_receiver_into_its_own_tensors_does_not_stage():
    with make_sender({"w": torch.ones(3)}) as sender:
        receiver = RefitReceiver(sender.address, into={"w": torch.zeros(3)})
        with pytest.raises(ValueError, match="`into` overwrites what is served"):
            receiver.begin(1, swap=lambda: None)
        receiver.close()


def write_memory(tmp_path, *, limit, used, cached=0):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    2000 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"file {2 * cached}\ninactive_file {cached}\n")
    return {"meminfo": tmp_path / "meminfo", "cgroup": tmp_path}


@pytest.mark.parametrize(
    ("limit", "used", "cached", "available"),
    [
        (None, 0, 0, 2000 * 1024),
        ("max", 0, 0, 2000 * 1024),
        (5000, 1000, 0, 4000),
        (5000, 6000, 0, 0),
        # Cached files give way.
        (5000, 4900, 3000, 3100),
        (1 << 40, 0, 0, 2000 * 1024),
    ],
)
def test_memory_is_that_of_the_machine_within_the_limit_of_the_container(
    tmp_path, limit, used, cached, available
):
    paths = write_memory(tmp_path, limit=limit, used=used, cached=cached)
    assert available_bytes(**paths) == available


def test_a_kernel_that_reports_no_available_memory_is_an_error(tmp_path):
    paths = write_memory(tmp_path, limit=None, used=0)
    paths["meminfo"].write_text("MemTotal: 9000 kB\n")
    with pytest.raises(RuntimeError, match="no line MemAvailable"):
        available_bytes(**paths)


def test_this_machine_reports_its_memory():
    assert 0 < available_bytes() < 1 << 50
