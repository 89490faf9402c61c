"""Slices under the commit protocol: one trainer and two engines in threads."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from refit_pairs import LIMIT_S, must
from rl_refit import PoisonedError, RefitError, RefitReceiver, RefitSender, TensorSource
from rl_refit.errors import VerificationError
from rl_refit.resharding import Box, ReshardSender, Shard, SliceReceiver, Want

NUM_ENGINES = 2
SHAPE = (6, 5)


class Trainer:
    """Holds one tensor, whose storage changes with every version."""

    def __init__(self, **options):
        self.full = torch.randn(SHAPE)
        self.sender = ReshardSender(
            self.shards, num_receivers=NUM_ENGINES, **{"timeout_s": LIMIT_S, **options}
        )

    def shards(self):
        self.full = self.full.clone() + 1
        return {"w": Shard(SHAPE, Box.full(SHAPE), self.full)}


class Engine:
    """Wants a third of the rows, in bfloat16; the middle one is wanted by both engines."""

    def __init__(self, address, rank, *, fails=False):
        self.receiver = RefitReceiver(address, rank, timeout_s=LIMIT_S)
        self.slices = SliceReceiver(rank, timeout_s=LIMIT_S)
        self.box = Box((2 * rank, 0), (4, 5))
        self.data = torch.zeros(self.box.shape, dtype=torch.bfloat16)
        self.fails = fails
        self.seen = None

    def wanted(self, metadata):
        self.seen = metadata
        return [Want("w", SHAPE, self.box, self.data)]

    def load(self, tensors, version):
        self.report = self.slices.receive(tensors, version, self.wanted)
        if self.fails:
            raise OSError("the engine has no room")

    def refit(self, version):
        self.receiver.begin(version)
        self.receiver.receive(version, lambda tensors: self.load(tensors, version))

    def close(self):
        self.slices.close()
        self.receiver.close()


def refit(trainer, engines, version):
    """Return the error of the trainer and of each engine, None for none."""
    with ThreadPoolExecutor(NUM_ENGINES + 1) as pool:
        calls = [pool.submit(trainer.sender.send, version)]
        calls += [pool.submit(engine.refit, version) for engine in engines]
        return [call.exception() for call in calls]


@pytest.fixture
def trainer():
    trainer = Trainer()
    yield trainer
    trainer.sender.close()


@pytest.fixture
def engines(trainer):
    engines = [Engine(trainer.sender.address, rank) for rank in range(NUM_ENGINES)]
    yield engines
    for engine in engines:
        engine.close()


def check(trainer, engines, version):
    must(refit(trainer, engines, version))
    for engine in engines:
        with pytest.raises(RefitError, match="begun"):
            engine.receiver.require_ready()
        assert torch.equal(engine.data, engine.box.view_of(trainer.full).bfloat16())
        assert engine.report.bytes_received == engine.data.nbytes
        assert engine.seen == [("w", torch.float32, SHAPE)]
    trainer.sender.commit(version)
    assert {engine.receiver.require_ready() for engine in engines} == {version}


def test_engines_follow_versions_and_a_trainer_whose_tensors_move(trainer, engines):
    for version in (1, 2, 3):
        check(trainer, engines, version)


def test_an_engine_that_fails_poisons_all_and_the_next_refit_heals(trainer, engines):
    check(trainer, engines, 1)
    engines[1].fails = True
    for error in refit(trainer, engines, 2):
        assert isinstance(error, RefitError)
        assert "the engine has no room" in str(error)
    with pytest.raises(RefitError, match="was not sent"):
        trainer.sender.commit(2)
    for engine in engines:
        assert engine.receiver.version == 1
        with pytest.raises(PoisonedError, match="no room"):
            engine.receiver.require_ready()
    engines[1].fails = False
    check(trainer, engines, 2)


def test_wrong_bytes_fail_the_refit_on_every_side(trainer, engines):
    check(trainer, engines, 1)
    exchange = trainer.sender._member._exchange
    pack = exchange._pack

    def damaged(indices, message, sums):
        pack(indices, message, sums)
        message[3] ^= 1

    exchange._pack = damaged
    for error in refit(trainer, engines, 2):
        assert isinstance(error, VerificationError)
    for engine in engines:
        with pytest.raises(PoisonedError):
            engine.receiver.require_ready()
    check(trainer, engines, 2)


def test_a_new_engine_takes_the_place_of_another(trainer, engines):
    check(trainer, engines, 1)
    engines[0].close()
    engines[0] = Engine(trainer.sender.address, 0)
    check(trainer, engines, 2)


def test_an_engine_that_drops_its_connection_alone_joins_again(trainer, engines):
    check(trainer, engines, 1)
    engines[0].receiver.close()
    check(trainer, engines, 2)


def test_engines_on_other_machines_are_invited_by_tcp(trainer):
    far = Trainer(transport="collective")
    engines = [Engine(far.sender.address, rank) for rank in range(NUM_ENGINES)]
    for version in (1, 2):
        check(far, engines, version)
    for engine in engines:
        engine.close()
    far.sender.close()


def test_shards_that_are_other_than_before_are_refused(trainer, engines):
    check(trainer, engines, 1)
    trainer.sender._shards = lambda: {"w": Shard(SHAPE, Box((0, 0), (3, 5)), torch.zeros(3, 5))}
    start = time.monotonic()
    assert "w: this rank held" in str(refit(trainer, engines, 2)[0])
    assert time.monotonic() - start < LIMIT_S / 2, "the engines have waited for their limit"
    # In a new exchange nobody holds the rest.
    assert "of which the senders hold" in str(refit(trainer, engines, 2)[0])


@pytest.mark.parametrize("when", ["before it joins", "while it plans"])
def test_an_engine_that_cannot_take_slices_is_not_waited_for(trainer, engines, when):
    def fail(*arguments):
        raise RefitError("this engine takes no slices")

    if when == "before it joins":
        engines[1].slices.receive = fail
    else:
        engines[1].wanted = fail
    start = time.monotonic()
    for error in refit(trainer, engines, 1)[::2]:
        assert "takes no slices" in str(error)
    assert time.monotonic() - start < LIMIT_S / 2


def test_a_sender_of_tensors_is_no_sender_of_slices():
    with RefitSender(TensorSource({"w": torch.zeros(SHAPE)})) as sender:
        engine = Engine(sender.address, 0)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(sender.send, 1)
            with pytest.raises(RefitError, match="sends tensors, not slices: w"):
                engine.refit(1)
            assert "sends tensors, not slices" in str(sending.exception())
        engine.close()
