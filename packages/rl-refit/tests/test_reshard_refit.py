"""Slices under the commit protocol: one trainer and two engines in threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import slice_pairs
import torch
from rl_refit import PoisonedError, RefitError, RefitSender, TensorSource
from rl_refit.errors import VerificationError
from rl_refit.resharding import Box, Shard
from slice_pairs import refit

NUM_ENGINES = 2
SHAPE = (6, 5)


def make_trainer(**options):
    return slice_pairs.Trainer({"w": torch.randn(SHAPE)}, num_receivers=NUM_ENGINES, **options)


def make_engine(address, rank):
    """Return one that wants four rows; the middle ones are wanted by both engines."""
    return slice_pairs.Engine(address, rank, {"w": Box((2 * rank, 0), (4, 5))})


@pytest.fixture
def trainer():
    trainer = make_trainer()
    yield trainer
    trainer.close()


@pytest.fixture
def engines(trainer):
    engines = [make_engine(trainer.sender.address, rank) for rank in range(NUM_ENGINES)]
    yield engines
    for engine in engines:
        engine.close()


def check(trainer, engines, version):
    trainer.tensors["w"] = trainer.tensors["w"] + 1
    slice_pairs.check(trainer, engines, version)
    for engine in engines:
        assert engine.report.bytes_received == engine.places["w"].nbytes
        assert engine.seen == [("w", torch.float32, SHAPE)]


def fail():
    raise OSError("the engine has no room")


def test_engines_follow_versions_and_a_trainer_whose_tensors_move(trainer, engines):
    for version in (1, 2, 3):
        check(trainer, engines, version)


def test_an_engine_that_fails_poisons_all_and_the_next_refit_heals(trainer, engines):
    check(trainer, engines, 1)
    engines[1].check = fail
    for error in refit(trainer, engines, 2):
        assert isinstance(error, RefitError)
        assert "the engine has no room" in str(error)
    with pytest.raises(RefitError, match="was not sent"):
        trainer.sender.commit(2)
    for engine in engines:
        assert engine.receiver.version == 1
        with pytest.raises(PoisonedError, match="no room"):
            engine.receiver.require_ready()
    engines[1].check = lambda: None
    check(trainer, engines, 2)


def test_wrong_bytes_fail_the_refit_on_every_side(trainer, engines):
    check(trainer, engines, 1)
    messages = trainer.sender._member._exchange._messages
    pack = messages.pack

    def damaged(flow):
        pack(flow)
        flow.data[3] ^= 1

    messages.pack = damaged
    for error in refit(trainer, engines, 2):
        assert isinstance(error, VerificationError)
    for engine in engines:
        with pytest.raises(PoisonedError):
            engine.receiver.require_ready()
    check(trainer, engines, 2)


def test_a_new_engine_takes_the_place_of_another(trainer, engines):
    check(trainer, engines, 1)
    engines[0].close()
    engines[0] = make_engine(trainer.sender.address, 0)
    check(trainer, engines, 2)


def test_an_engine_that_drops_its_connection_alone_joins_again(trainer, engines):
    check(trainer, engines, 1)
    engines[0].receiver.close()
    check(trainer, engines, 2)


def test_engines_on_other_machines_are_invited_by_tcp(trainer):
    far = make_trainer(transport="collective")
    engines = [make_engine(far.sender.address, rank) for rank in range(NUM_ENGINES)]
    for version in (1, 2):
        check(far, engines, version)
    for engine in engines:
        engine.close()
    far.close()


def test_shards_that_are_other_than_before_are_refused(trainer, engines):
    check(trainer, engines, 1)
    trainer.sender._shards = lambda: {"w": Shard(SHAPE, Box((0, 0), (3, 5)), torch.zeros(3, 5))}
    assert "w: this rank held" in str(refit(trainer, engines, 2)[0])
    # In a new exchange nobody holds the rest.
    assert "of which the senders hold" in str(refit(trainer, engines, 2)[0])


@pytest.mark.parametrize("when", ["before it joins", "while it plans"])
def test_an_engine_that_cannot_take_slices_is_not_waited_for(trainer, engines, when):
    def refuse(*arguments):
        raise RefitError("this engine takes no slices")

    if when == "before it joins":
        engines[1].slices.receive = refuse
    else:
        engines[1].wanted = refuse
    for error in refit(trainer, engines, 1)[::2]:
        assert "takes no slices" in str(error)


def test_a_sender_of_tensors_is_no_sender_of_slices():
    with RefitSender(TensorSource({"w": torch.zeros(SHAPE)})) as sender:
        engine = make_engine(sender.address, 0)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(sender.send, 1)
            with pytest.raises(RefitError, match="sends tensors, not slices: w"):
                engine.refit(1)
            assert "sends tensors, not slices" in str(sending.exception())
        engine.close()
