"""Tensors over a group that a driver names, between threads that stand for processes."""

import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from patience import PATIENCE_S
from rl_refit import RefitError, RefitTimeoutError
from rl_refit.compat.broadcast import BroadcastGroup
from rl_refit.protocol.waiting import Deadline
from rl_refit.transports.collective import ProcessGroup

pytestmark = pytest.mark.needs("rl-refit[testing]")


@pytest.fixture
def port():
    # Bound and never listening, so that the system gives it to nobody else.
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        yield reserved.getsockname()[1]


TENSORS = {
    "matrix": torch.randn(5, 3),
    "transposed": torch.randn(4, 6).T,
    "half": torch.randn(7).bfloat16(),
    "count": torch.tensor(3),
    "flags": torch.tensor([True, False]),
    "empty": torch.empty(0, 4),
}


def join(rank, world_size, port, **options):
    return BroadcastGroup("127.0.0.1", port, rank=rank, world_size=world_size, **options)


@pytest.mark.parametrize("num_receivers", [1, 3])
def test_every_tensor_arrives_bit_for_bit_every_time(num_receivers, port):
    world_size = num_receivers + 1
    info = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}

    def send():
        with join(0, world_size, port, timeout_s=PATIENCE_S) as group:
            for _ in range(2):
                group.send(TENSORS.items())

    def receive(rank):
        with join(rank, world_size, port, timeout_s=PATIENCE_S) as group:
            return [dict(group.receive(info)) for _ in range(2)]

    with ThreadPoolExecutor(world_size) as pool:
        sent = pool.submit(send)
        received = [pool.submit(receive, rank) for rank in range(1, world_size)]
        sent.result(timeout=PATIENCE_S)
        for passes in (future.result(timeout=PATIENCE_S) for future in received):
            for tensors in passes:
                assert list(tensors) == list(TENSORS)
                for name, tensor in tensors.items():
                    assert tensor.dtype == TENSORS[name].dtype
                    assert torch.equal(tensor, TENSORS[name])


def test_a_receiver_that_never_comes_is_an_error(port):
    with pytest.raises(RefitError):
        join(0, 2, port, timeout_s=1)


def test_a_trainer_that_never_comes_is_an_error(port):
    with pytest.raises(RefitError):
        join(1, 2, port, timeout_s=1)


def test_a_port_that_is_taken_is_an_error_at_once(port):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RefitError, match="cannot join"):
        join(0, 2, port, timeout_s=PATIENCE_S)


def test_a_group_that_hangs_while_it_is_made_is_given_up_and_closed_if_it_ends(port, monkeypatch):
    released, closed = threading.Event(), threading.Event()

    class LateGroup(ProcessGroup):
        def __init__(self, *arguments, limit_s):
            released.wait()
            super().__init__(*arguments[:-1], Deadline(PATIENCE_S), limit_s=limit_s)

        def close(self):
            super().close()
            closed.set()

    monkeypatch.setattr("rl_refit.compat.broadcast.ProcessGroup", LateGroup)
    with pytest.raises(RefitTimeoutError, match=r"no group of 1 ranks within 0\.3 s"):
        join(0, 1, port, timeout_s=0.3)
    assert not closed.is_set()
    released.set()
    assert closed.wait(PATIENCE_S)


def test_a_rank_outside_the_group_is_refused(port):
    with pytest.raises(ValueError, match="rank=2 is not within world_size=2"):
        join(2, 2, port)


LEAVER = """
import threading, time
from rl_refit.compat import broadcast
from rl_refit.transports import collective

end = collective._end

def slow_end(groups):
    time.sleep(0.5)
    end(groups)
    print("ended", flush=True)

collective._end = slow_end
make = lambda rank: groups.append(
    broadcast.BroadcastGroup("127.0.0.1", PORT, rank=rank, world_size=2, timeout_s=900)
)
groups = []
threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for group in groups:
    group.close()
"""


def test_a_process_that_ends_lets_its_groups_end_first(port):
    done = subprocess.run(
        [sys.executable, "-c", LEAVER.replace("PORT", str(port))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended") == 2
