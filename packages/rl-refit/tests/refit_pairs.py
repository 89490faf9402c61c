"""A sender and its receivers in threads of one process."""

import torch
from patience import PATIENCE_S
from rl_refit import RefitReceiver, RefitSender, TensorSource
from rl_refit.testing.pair import RefitPair, must, outcomes, some_tensors

__all__ = [
    "DeltaPair",
    "Engine",
    "make_sender",
    "must",
    "outcomes",
    "refit",
    "same",
    "some_tensors",
]


class DeltaPair(RefitPair):
    """A pair whose senders send what has changed; for processes that find it by its name."""

    def open_sender(self, weights, **options):
        return super().open_sender(weights, delta=True, **options)


class Engine:
    """Holds what a receiver has loaded, as an inference engine would."""

    def __init__(self, address, rank=0, **options):
        self.receiver = RefitReceiver(address, rank, **{"timeout_s": PATIENCE_S, **options})
        self.weights = {}
        self.order = []
        self.load_keeps = True

    def load(self, tensors):
        for name, tensor in tensors:
            self.weights[name] = tensor.clone()
            self.order.append(name)

    def refit(self, version):
        self.order.clear()
        self.receiver.begin(version)
        return self.receiver.receive(version, self.load, load_keeps=self.load_keeps)


def same(left, right):
    """Whether two dicts of tensors are equal bit by bit, in the same order."""
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].contiguous().view(-1).view(torch.uint8).tolist()
        == right[name].contiguous().view(-1).view(torch.uint8).tolist()
        for name in left
    )


def make_sender(tensors, transport="shm", num_receivers=1, **options):
    options = {"bucket_bytes": 16 << 10, "timeout_s": PATIENCE_S, **options}
    return RefitSender(TensorSource(tensors), transport, num_receivers, **options)


def refit(sender, engines, version):
    """Run one refit; return the outcomes of the sender and of each engine."""
    return outcomes(
        lambda: sender.send(version), *[lambda e=engine: e.refit(version) for engine in engines]
    )
