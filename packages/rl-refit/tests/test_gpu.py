"""Between two processes on one GPU. Not run on a machine without one."""

import multiprocessing as mp
import threading

import pytest
import torch
from gpu_receiver import receive
from pair_apart import PairApart
from patience import PATIENCE_S
from refit_pairs import same, some_tensors
from rl_refit import RefitError, TensorSource, VerificationError
from rl_refit.digest import keyed_sum_digest
from rl_refit.testing import DrillSender, Fault, TransportConformance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.needs("rl-refit[testing]"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda:0"
PAIR = PairApart("cuda_ipc", device=DEVICE)
# Each process of a case makes a context of CUDA first, which takes a second or more.
PAIR.patience = 10.0


class Pair:
    """A sender of GPU tensors here, and a receiver on the same GPU in another process."""

    def __init__(self, transport, tensors):
        self.sender = DrillSender(
            TensorSource(tensors),
            transport,
            bucket_bytes=16 << 10,
            device=DEVICE,
            timeout_s=PATIENCE_S,
        )
        context = mp.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(
            target=receive, args=(other, self.sender.address, DEVICE), daemon=True
        )
        self.process.start()

    def refit(self, version):
        self.pipe.send(version)
        errors = []

        def send():
            try:
                self.sender.send(version)
            except RefitError as error:
                errors.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        received = self.pipe.recv()
        thread.join()
        return errors, received

    def close(self):
        self.pipe.send(None)
        self.process.join(PATIENCE_S)
        self.sender.close()


def gpu_tensors():
    tensors = {name: tensor.to(DEVICE) for name, tensor in some_tensors().items()}
    return tensors | {"turned": torch.randn(30, 50, device=DEVICE).T}


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "golden"])
def test_gpu_tensors_arrive_on_the_gpu_bit_by_bit(transport):
    tensors = gpu_tensors()
    pair = Pair(transport, tensors)
    for version in range(1, 4):
        for tensor in tensors.values():
            tensor += 1
        errors, received = pair.refit(version)
        assert errors == []
        assert same(received, {name: tensor.cpu() for name, tensor in tensors.items()})
    pair.close()


class FlippedBit(Fault):
    def spoil(self, bucket, data):
        if bucket == 2:
            data[13] ^= 4


def test_a_flipped_bit_in_gpu_memory_is_found():
    pair = Pair("cuda_ipc", gpu_tensors())
    with pair.sender.tampered(FlippedBit(), timeout_s=PATIENCE_S):
        (sent,), received = pair.refit(1)
    assert isinstance(sent, VerificationError)
    assert isinstance(received, VerificationError)
    assert sent.bucket == received.bucket == 2
    errors, _ = pair.refit(1)
    assert errors == []
    pair.close()


def test_the_memory_of_a_killed_receiver_is_used_again():
    used = []
    with PAIR.open_sender(gpu_tensors(), timeout_s=PATIENCE_S) as sender:
        for version in range(1, 4):
            receiver = PAIR.open_receiver(sender.address, timeout_s=PATIENCE_S)
            thread = threading.Thread(target=sender.send, args=(version,))
            receiver.begin(version)
            thread.start()
            receiver.receive(version, lambda tensors: None)
            thread.join()
            receiver.kill()
            used.append(torch.cuda.memory_allocated(DEVICE))
    assert used == used[:1] * 3


def test_the_digest_is_the_same_on_both_devices():
    data = torch.randint(0, 255, ((9 << 20) + 256,), dtype=torch.uint8)
    assert keyed_sum_digest(data.to(DEVICE), position=5) == keyed_sum_digest(data, position=5)


class TestCudaIpc(TransportConformance):
    pair = PAIR
    num_cases = 4


class TestShmWithGpuTensors(TransportConformance):
    pair = PairApart("shm", device=DEVICE)
    groups = ("round_trips",)
    num_cases = 4
