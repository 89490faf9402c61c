"""What has changed in slices: patches to those that have the rest, and what asks for all of it."""

import logging
import random
import time

import pytest
import torch
from refit_pairs import must
from rl_refit import RefitError, VerificationError
from rl_refit import delta as delta_module
from rl_refit.resharding import Box, ReshardSender
from rl_refit.resharding.bases import SlicePatch, patched
from slice_pairs import Engine, Trainer, check, refit

# Tensor, and the box that each of two engines wants of it: rows, columns that are strided in the
# trainer's memory, both in full, and an odd number of bytes.
LAYOUT = {
    "up": ((64, 48), [Box((0, 0), (40, 48)), Box((24, 0), (40, 48))]),
    "down": ((48, 64), [Box((0, 0), (48, 32)), Box((0, 32), (48, 32))]),
    "norm": ((33,), [Box((0,), (33,))] * 2),
    "mask": ((5, 3), [Box((0, 0), (5, 3)), Box((1, 1), (3, 1))]),
}


def some_tensors():
    tensors = {name: torch.randn(shape) for name, (shape, _) in LAYOUT.items()}
    return tensors | {"mask": torch.ones(LAYOUT["mask"][0], dtype=torch.bool)}


def change(tensors, share, generator):
    """Change a share of every tensor's elements in place."""
    for tensor in tensors.values():
        where = torch.rand(tensor.shape, generator=generator) < share
        tensor[where] = ~tensor[where] if tensor.dtype == torch.bool else tensor[where] * 1.5 + 1


class World:
    """A trainer with `delta`, and two engines."""

    def __init__(self, tensors, boxes, **options):
        self.boxes, self.round_bytes = boxes, options.get("round_bytes")
        self.trainer = Trainer(tensors, num_receivers=2, **{"delta": True, **options})
        self.engines = [self.make_engine(rank) for rank in range(2)]
        self.generator = torch.Generator().manual_seed(1)

    def make_engine(self, rank):
        boxes = {name: each[rank] for name, each in self.boxes.items()}
        address = self.trainer.sender.address
        return Engine(address, rank, boxes, round_bytes=self.round_bytes)

    def replace(self, rank):
        self.engines[rank].close()
        self.engines[rank] = self.make_engine(rank)

    def change(self, share=0.02):
        change(self.trainer.tensors, share, self.generator)

    def good_refit(self, version):
        """Refit and compare every bit; return for each engine whether it got changes alone."""
        check(self.trainer, self.engines, version)
        reports = [engine.report for engine in self.engines]
        assert self.trainer.sender.report.bytes_sent == sum(each.bytes_received for each in reports)
        for engine, report in zip(self.engines, reports, strict=True):
            assert report.bytes_full == sum(place.nbytes for place in engine.places.values())
        return [report.bytes_received < report.bytes_full for report in reports]

    def failing_refit(self, version, kind=RefitError):
        """Refit in vain; return the messages of the trainer and the engines."""
        errors = refit(self.trainer, self.engines, version)
        assert all(isinstance(error, kind) for error in errors), errors
        return [str(error) for error in errors]

    def close(self):
        for engine in self.engines:
            engine.close()
        self.trainer.close()


@pytest.fixture
def world():
    world = World(some_tensors(), {name: boxes for name, (_, boxes) in LAYOUT.items()})
    yield world
    world.close()


@pytest.mark.parametrize(("share", "most"), [(0.0, 0.001), (0.01, 0.03), (0.3, 1.0), (1.0, 1.0)])
def test_the_bytes_follow_the_share_that_has_changed(share, most):
    tensors = {"w": torch.randn(512, 768).bfloat16(), "v": torch.randn(256, 512).bfloat16()}
    boxes = {
        "w": [Box((0, 0), (256, 768)), Box((256, 0), (256, 768))],
        "v": [Box((0, 0), (256, 256)), Box((0, 256), (256, 256))],
    }
    world = World(tensors, boxes)
    assert world.good_refit(1) == [False, False]
    assert world.trainer.sender.report.changed is None
    world.change(share)
    for engine, is_delta in zip(world.engines, world.good_refit(2), strict=True):
        assert is_delta == (share < 1)
        assert engine.report.bytes_received <= most * engine.report.bytes_full
    assert abs(world.trainer.sender.report.changed - share) < 0.005
    world.close()


def test_any_version_of_a_long_chain_arrives_bit_exact(world):
    """With engines that are replaced, connect anew, fail, or get a version twice."""
    rng = random.Random(0)
    must_be_full = {0, 1}
    for version in range(1, 201):
        world.change(rng.choice([0, 0.01, 0.01, 0.2]))
        match rng.randrange(30):
            case 0:  # a late joiner
                rank = rng.randrange(2)
                world.replace(rank)
                must_be_full.add(rank)
            case 1:  # a connection that is lost, and nothing else
                world.engines[rng.randrange(2)].receiver.close()
            case 2:  # a load that fails, so that what has arrived counts for nothing
                failing = world.engines[rng.randrange(2)]
                failing.check = lambda: 1 / 0
                world.failing_refit(version)
                failing.check = lambda: None
            case 3:  # a version that is sent and not committed, and sent again as something else
                must(refit(world.trainer, world.engines, version))
                must_be_full.clear()
                world.change()
        is_delta = world.good_refit(version)
        for rank in must_be_full:
            assert not is_delta[rank]
        must_be_full.clear()


def test_whoever_lacks_what_was_sent_gets_everything_and_the_others_changes(world):
    assert world.good_refit(1) == [False, False]
    world.change()
    assert world.good_refit(2) == [True, True]
    world.change()
    world.replace(1)
    assert world.good_refit(3) == [True, False]
    world.change()
    world.engines[0].receiver.close()
    assert world.good_refit(4) == [True, True]
    # Other places for the same slices.
    world.change()
    world.engines[0].receiver.close()
    world.engines[0].seen = None
    assert world.good_refit(5) == [False, True]


def test_a_version_that_is_sent_in_vain_costs_the_next_one_the_changes(world):
    world.good_refit(1)
    world.change()
    world.engines[0].check = lambda: 1 / 0
    world.failing_refit(2)
    world.engines[0].check = lambda: None
    # The bits have arrived and were verified before the engine failed.
    assert world.good_refit(2) == [True, True]


def test_a_transfer_that_breaks_off_leaves_nobody_with_what_was_there_before():
    boxes = {name: boxes for name, (_, boxes) in LAYOUT.items()}
    world = World(some_tensors(), boxes, round_bytes=1024)
    world.good_refit(1)
    kept = {name: tensor.clone() for name, tensor in world.trainer.tensors.items()}
    world.change(0.9)
    messages = world.trainer.sender._member._exchange._messages
    unpacked, pack = [], messages.pack

    def breaks(flow):
        unpacked.append(flow)
        if len(unpacked) > 8:
            raise RefitError("the trainer breaks off")
        pack(flow)

    messages.pack = breaks
    error = refit(world.trainer, world.engines, 2)[0]
    told = []
    # A receiver's report of the lost connection is raised in its place, if it is there by then.
    while error is not None:
        told.append(str(error))
        error = error.__context__
    assert any("breaks off" in each for each in told), told
    # Nothing has changed since the version that was sent last, and yet the engines need it all.
    world.trainer.tensors = kept
    assert world.good_refit(2) == [False, False]
    world.close()


@pytest.mark.parametrize("case", range(6))
def test_a_bit_that_flips_on_its_way_fails_the_refit_and_the_next_one_is_full(world, case):
    world.good_refit(1)
    world.change()
    messages = world.trainer.sender._member._exchange._messages
    pack, rng = messages.pack, random.Random(case)

    def damaged(flow):
        pack(flow)
        assert flow.is_delta
        if flow.peer == 2:
            flow.data[rng.randrange(len(flow.data))] ^= 1 << rng.randrange(8)

    messages.pack = damaged
    for message in world.failing_refit(2, VerificationError):
        assert "rank 2" in message or "from rank 0" in message
    assert world.good_refit(2) == [False, False]
    world.change()
    assert world.good_refit(3) == [True, True]


def announce(world, size):
    """Let the trainer announce a size for the first slice of its messages; return its exchange."""
    exchange = world.trainer.sender._member._exchange
    pack = exchange._messages.pack

    def announced(flow):
        pack(flow)
        flow.sizes[0] = size

    exchange._messages.pack = announced
    return exchange


@pytest.mark.parametrize("size", [0, -1, 1 << 40])
def test_a_size_that_cannot_be_is_refused(world, size):
    world.good_refit(1)
    world.change()
    announce(world, size)
    assert f"announces {size} bytes for up" in world.failing_refit(2)[1]
    assert world.good_refit(2) == [False, False]


def test_a_trainer_that_sends_after_an_engine_has_failed_tells_the_others(world):
    """Its message cannot start, rather than fail while it waits."""
    world.good_refit(1)
    world.change()
    exchange = announce(world, -1)
    exchange_sizes = exchange._exchange_sizes

    def slow(flows, deadline):
        exchange_sizes(flows, deadline)
        time.sleep(1.0)  # until the engine's connection has broken

    exchange._exchange_sizes = slow
    world.failing_refit(2)
    assert world.good_refit(2) == [False, False]


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_memory_that_is_not_what_was_sent_fails_no_refit_or_this_one(world, side):
    world.good_refit(1)
    if side == "trainer":
        # Its comparison finds the wrong bit and sends the right one: nothing is lost.
        copies = world.trainer.sender._member.bases.sent._copies
        copies["up"][0].data.view(torch.int16)[0, 0] ^= 1
        assert world.good_refit(2) == [True, True]
    else:
        world.engines[0].places["up"].view(torch.int16)[0, 0] ^= 1
        errors = world.failing_refit(2, VerificationError)
        assert "digest of what rank 1 holds of up" in errors[1]
        assert world.good_refit(2) == [False, False]


def test_without_room_for_copies_everything_is_sent(world, monkeypatch, caplog):
    monkeypatch.setattr(delta_module, "available_bytes", lambda: 0)
    with caplog.at_level(logging.WARNING):
        for version in (1, 2):
            world.change()
            assert world.good_refit(version) == [False, False]
    said = [each for each in caplog.messages if "no memory for a copy" in each]
    assert len(said) == 1
    monkeypatch.undo()
    assert world.good_refit(3) == [False, False]
    assert world.good_refit(4) == [True, True]


def test_a_trainer_that_is_not_told_to_keeps_no_copies():
    world = World(some_tensors(), {name: boxes for name, (_, boxes) in LAYOUT.items()}, delta=False)
    for version in (1, 2):
        assert world.good_refit(version) == [False, False]
        assert world.trainer.sender.report.changed is None
    world.close()


def test_changes_of_messages_on_a_gpu_are_refused():
    with pytest.raises(ValueError, match=r"delta=True needs buffers in host memory.*'cuda'"):
        ReshardSender(dict, num_receivers=1, device="cuda", delta=True)


@pytest.mark.parametrize("shape", [(3,), (5, 7), (), (300, 300)])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.uint8, torch.bool])
def test_a_patch_makes_the_new_slice_of_the_old(shape, kind):
    generator = torch.Generator().manual_seed(0)
    for share in (0.0, 0.01, 0.9):
        old = torch.randint(0, 2, shape, generator=generator).to(kind)
        new = torch.where(torch.rand(shape, generator=generator) < share, 1 - old.int(), old)
        new = new.to(kind)
        patch = SlicePatch.between(old, new)
        data = torch.zeros(patch.writer.nbytes, dtype=torch.uint8)
        patch.writer.write(data)
        # In columns of a larger tensor too, whose memory is strided.
        places = [old.clone()]
        if len(shape) == 2:
            places.append(old.repeat(1, 2)[:, shape[1] :])
        for place in places:
            assert torch.equal(patched(place, data), new)
