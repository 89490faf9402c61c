"""Between two processes over NCCL, which has each on a GPU of its own. Not run without two."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from pair_apart import PairApart
from patience import PATIENCE_S
from refit_pairs import Engine, outcomes, same, some_tensors
from rl_refit import PoisonedError, RefitError, TensorSource

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

OWN, OTHER = "cuda:0", "cuda:1"
PAIR = PairApart("collective", device=OWN)


class Dying:
    """A source in the middle of whose pass something happens."""

    def __init__(self, source, happen):
        self._source, self._happen = source, happen

    def metadata(self):
        return self._source.metadata()

    def __iter__(self):
        for count, pair in enumerate(self._source):
            if count == 5:
                self._happen()
            yield pair


@pytest.fixture
def tensors():
    return {name: tensor.to(OWN) for name, tensor in some_tensors().items()}


def refit(sender, receiver, version):
    """Return what has come, by name."""
    received = {}
    receiver.begin(version)
    thread = threading.Thread(target=sender.send, args=(version,))
    thread.start()
    receiver.receive(version, received.update)
    thread.join()
    return received


def test_tensors_arrive_bit_by_bit(tensors):
    with PAIR.open_sender(tensors, timeout_s=PATIENCE_S) as sender:
        receiver = PAIR.open_receiver(sender.address, timeout_s=PATIENCE_S, device=OTHER)
        for version in range(1, 4):
            for tensor in tensors.values():
                tensor += 1
            received = refit(sender, receiver, version)
            assert same(received, {name: tensor.cpu() for name, tensor in tensors.items()})
        receiver.close()


def test_a_killed_receiver_fails_the_refit_and_its_successor_gets_it(tensors):
    receivers = []
    source = Dying(TensorSource(tensors), lambda: receivers[0].kill())
    with PAIR.open_sender(source, timeout_s=PATIENCE_S) as sender:
        receivers.append(PAIR.open_receiver(sender.address, timeout_s=PATIENCE_S, device=OTHER))
        receivers[0].begin(1)
        sent, received = outcomes(
            lambda: sender.send(1), lambda: receivers[0].receive(1, lambda tensors: None)
        )
        assert isinstance(sent, RefitError)
        assert "the receiver is gone" in str(sent)
        assert isinstance(received, EOFError | OSError)
        sender._source = TensorSource(tensors)
        successor = PAIR.open_receiver(sender.address, timeout_s=PATIENCE_S, device=OTHER)
        received = refit(sender, successor, 1)
        assert same(received, {name: tensor.cpu() for name, tensor in tensors.items()})
        successor.close()


SENDER = """
import json, os, signal
from test_nccl import OWN, PAIR, Dying
from refit_pairs import some_tensors
from rl_refit import TensorSource

tensors = {name: tensor.to(OWN) for name, tensor in some_tensors().items()}
source = Dying(TensorSource(tensors), lambda: os.kill(os.getpid(), signal.SIGKILL))
sender = PAIR.open_sender(source, timeout_s=60)
print(json.dumps(sender.address), flush=True)
sender.send(1)
"""


def test_a_killed_sender_does_not_take_its_receiver_along(tensors):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    dying = subprocess.Popen(
        [sys.executable, "-c", SENDER], env=environment, stdout=subprocess.PIPE, text=True
    )
    engine = Engine(json.loads(dying.stdout.readline()), device=OTHER, timeout_s=PATIENCE_S)
    with pytest.raises(RefitError):
        engine.refit(1)
    assert dying.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    dying.stdout.close()
    with pytest.raises(PoisonedError):
        engine.receiver.require_ready()
    engine.receiver.close()
    # This process has outlived its group, and takes part in another one.
    with PAIR.open_sender(tensors, timeout_s=PATIENCE_S) as sender:
        successor = PAIR.open_receiver(sender.address, timeout_s=PATIENCE_S, device=OTHER)
        received = refit(sender, successor, 1)
        assert same(received, {name: tensor.cpu() for name, tensor in tensors.items()})
        successor.close()
