"""A trainer that sends slices, and engines that want some, in threads of one process."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from patience import PATIENCE_S
from refit_pairs import must
from rl_refit import RefitError, RefitReceiver
from rl_refit.resharding import Box, ReshardSender, Shard, SliceReceiver, Want


class Trainer:
    """Holds tensors in full, whose storage changes with every refit.

    Attributes:
        tensors: By name; change them before a refit.
    """

    def __init__(self, tensors, *, num_receivers, **options):
        self.tensors = tensors
        options = {"timeout_s": PATIENCE_S, **options}
        self.sender = ReshardSender(self.shards, num_receivers=num_receivers, **options)

    def shards(self):
        self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return {
            name: Shard(tuple(tensor.shape), Box.full(tuple(tensor.shape)), tensor)
            for name, tensor in self.tensors.items()
        }

    def close(self):
        self.sender.close()


class Engine:
    """Wants a box of each tensor, in bfloat16 where it is of floats.

    Args:
        address: Of the trainer.
        rank: Of the receiver.
        boxes: By name of the tensor.

    Attributes:
        places: What it has received, by name.
        seen: What it was told of the trainer's tensors.
        report: Of the last exchange.
        check: Called before the refit is reported as loaded.
    """

    def __init__(self, address, rank, boxes, *, timeout_s=PATIENCE_S, round_bytes=None):
        self.receiver = RefitReceiver(address, rank, timeout_s=timeout_s)
        self.slices = SliceReceiver(rank, timeout_s=timeout_s, round_bytes=round_bytes)
        self.boxes, self.places = boxes, {}
        self.seen = self.report = None
        self.check = lambda: None

    def wanted(self, metadata):
        if self.seen != metadata:
            self.seen = metadata
            self.places = {
                name: torch.zeros(
                    self.boxes[name].shape,
                    dtype=torch.bfloat16 if dtype.is_floating_point else dtype,
                )
                for name, dtype, _ in metadata
            }
        return [
            Want(name, shape, self.boxes[name], self.places[name]) for name, _, shape in metadata
        ]

    def load(self, tensors, version):
        self.report = self.slices.receive(tensors, version, self.wanted) or self.report

    def refit(self, version):
        self.receiver.begin(version)
        return self.receiver.receive(
            version, lambda tensors: self.load(tensors, version), check=lambda: self.check()
        )

    def require_holds(self, tensors):
        """Fail unless every place has the bits of its slice."""
        for name, tensor in tensors.items():
            place = self.places[name]
            due = self.boxes[name].view_of(tensor).to(place.dtype).contiguous()
            assert torch.equal(place.view(-1).view(torch.uint8), due.view(-1).view(torch.uint8)), (
                name
            )

    def close(self):
        self.slices.close()
        self.receiver.close()


def refit(trainer, engines, version, *, settle_s=0.0, **options):
    """Return the report or the error of the trainer and of each engine.

    Args:
        settle_s: How long engines may connect before the trainer sends.
    """

    def outcome(call):
        return call.exception() or call.result()

    with ThreadPoolExecutor(len(engines) + 1) as pool:
        receiving = [pool.submit(engine.refit, version) for engine in engines]
        time.sleep(settle_s)
        sending = pool.submit(trainer.sender.send, version, **options)
        return [outcome(call) for call in (sending, *receiving)]


def check(trainer, engines, version):
    """Refit and commit; fail unless every engine has its slices."""
    must(refit(trainer, engines, version))
    for engine in engines:
        with pytest.raises(RefitError, match="begun"):
            engine.receiver.require_ready()
        engine.require_holds(trainer.tensors)
    trainer.sender.commit(version)
    assert {engine.receiver.require_ready() for engine in engines} == {version}
