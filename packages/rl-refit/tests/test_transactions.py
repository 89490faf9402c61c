import os
import pickle
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S
from refit_pairs import Engine, make_sender, must, outcomes, refit, same, some_tensors
from rl_refit import (
    PlanMismatchError,
    PoisonedError,
    RefitError,
    RefitTimeoutError,
    TensorSource,
    VerificationError,
)
from rl_refit.ends.outbound import Connections, Receivers
from rl_refit.protocol.channel import Channel
from rl_refit.protocol.endpoint import MAGIC, NONCE_BYTES, dial
from rl_refit.protocol.waiting import Deadline
from rl_refit.transports import collective
from rl_refit.transports.shared_memory import ShmTransport

pytestmark = pytest.mark.promise


@pytest.fixture
def tensors():
    return some_tensors()


@pytest.fixture
def pair(tensors):
    with make_sender(tensors) as sender:
        engine = Engine(sender.address)
        yield sender, engine
        engine.receiver.close()


def test_the_senders_commit_is_noticed(pair):
    sender, engine = pair
    must(refit(sender, [engine], 1))
    sender.commit(1)
    assert engine.receiver.require_ready() == 1
    engine.receiver.commit(1)
    must(refit(sender, [engine], 2))
    sender.commit(2)
    sender.close()
    assert engine.receiver.version == 2


def test_the_next_refit_may_start_before_the_commit_is_noticed(pair):
    sender, engine = pair
    must(refit(sender, [engine], 1))
    sender.commit(1)
    thread = threading.Thread(target=sender.send, args=(2,))
    thread.start()
    assert engine.receiver.require_ready() == 1
    engine.refit(2)
    thread.join()
    engine.receiver.commit(2)
    assert engine.receiver.version == 2


def test_what_was_not_sent_cannot_be_committed(pair):
    sender, engine = pair
    with pytest.raises(RefitError, match="version 1 was not sent"):
        sender.commit(1)
    with pytest.raises(RefitError, match="version 1 cannot be committed"):
        engine.receiver.commit(1)
    must(refit(sender, [engine], 1))
    with pytest.raises(RefitError, match="version 2"):
        engine.receiver.commit(2)
    with pytest.raises(RefitError, match="not begun"):
        engine.receiver.receive(2, engine.load)


def test_a_sender_of_another_version_is_refused(pair):
    sender, engine = pair
    results = outcomes(lambda: sender.send(1), lambda: engine.refit(2))
    assert all(isinstance(result, RefitError) for result in results)
    assert "version 1 where 2" in str(results[0])
    with pytest.raises(PoisonedError):
        engine.receiver.require_ready()


def test_a_receiver_whose_load_fails_stops_all_and_a_full_resend_heals(tensors):
    with make_sender(tensors, num_receivers=2) as sender:
        engines = [Engine(sender.address, rank) for rank in range(2)]
        must(refit(sender, engines, 1))
        load = engines[1].load
        engines[1].load = lambda pairs: 1 / 0
        sent, first, second = refit(sender, engines, 2)
        assert sent.rank == second.rank == 1
        assert sent.bucket == second.bucket == 0
        assert "embed.weight" in sent.tensor
        for error in (sent, first, second):
            assert "ZeroDivisionError" in str(error)
            assert str(pickle.loads(pickle.dumps(error))) == str(error)
        for engine in engines:
            with pytest.raises(PoisonedError, match="ZeroDivisionError"):
                engine.receiver.require_ready()
            with pytest.raises(PoisonedError):
                engine.receiver.commit(2)
        with pytest.raises(RefitError, match="not sent"):
            sender.commit(2)
        engines[1].load = load
        must(refit(sender, engines, 2))
        sender.commit(2)
        assert [engine.receiver.require_ready() for engine in engines] == [2, 2]
        assert all(same(engine.weights, tensors) for engine in engines)
        for engine in engines:
            engine.receiver.close()


@pytest.mark.parametrize("fault", ["raises", "ends early", "too long", "shape", "dtype", "order"])
def test_a_source_that_breaks_its_word_fails_at_both_ends(tensors, fault):
    sender = make_sender(tensors)

    class Source:
        def __iter__(self):
            pairs = list(tensors.items())
            if fault == "raises":
                yield from pairs[:4]
                raise OSError("no such shard")
            if fault == "ends early":
                pairs.pop()
            elif fault == "too long":
                pairs.append(("extra", torch.ones(1)))
            elif fault == "shape":
                pairs[3] = (pairs[3][0], pairs[3][1][:-1])
            elif fault == "dtype":
                pairs[3] = (pairs[3][0], pairs[3][1].double())
            else:
                pairs.insert(0, pairs.pop())
            yield from pairs

    sender._source = Source()
    engine = Engine(sender.address)
    sent, received = refit(sender, [engine], 1)
    assert isinstance(sent, OSError if fault == "raises" else RefitError)
    assert isinstance(received, RefitError)
    assert getattr(sent, "reason", str(sent)) in str(received)
    with pytest.raises(PoisonedError):
        engine.receiver.require_ready()
    sender.close()


def test_the_source_is_gone_through_to_its_end_though_a_receiver_fails(tensors):
    # Other trainer ranks would else wait in a gather for this one.
    taken = []
    sender = make_sender(tensors)

    class Source:
        def __iter__(self):
            for pair in tensors.items():
                taken.append(pair[0])
                yield pair

    sender._source = Source()
    engine = Engine(sender.address)
    engine.load = lambda pairs: 1 / 0
    sent, _ = refit(sender, [engine], 1)
    assert isinstance(sent, RefitError)
    assert taken == list(tensors)
    sender.close()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, OSError, ValueError])
def test_a_transport_that_cannot_be_opened_fails_at_both_ends(tensors, monkeypatch, error):
    taken = []

    class Source(TensorSource):
        def __iter__(self):
            for pair in super().__iter__():
                taken.append(pair[0])
                yield pair

    def open_sender(context):
        raise error("no room")

    with make_sender(tensors) as sender:
        sender._source = Source(tensors)
        engine = Engine(sender.address)
        with monkeypatch.context() as patch:
            patch.setattr(sender._transport, "open_sender", open_sender)
            sent, received = refit(sender, [engine], 1)
        assert isinstance(sent, error)
        assert isinstance(received, RefitError)
        assert "the sender reports" in str(received)
        assert "no room" in str(received)
        assert taken == list(tensors)
        must(refit(sender, [engine], 1))
        engine.receiver.close()


def test_a_newcomer_that_was_turned_away_is_not_counted_as_present(tensors):
    before = sorted(os.listdir("/proc/self/fd"))
    with make_sender(tensors, num_receivers=2) as sender:
        engines = [Engine(sender.address, rank) for rank in range(2)]
        must(refit(sender, engines, 1))
        limit, sender._timeout_s = sender._timeout_s, 1.0
        newcomer = Engine(sender.address, 1)
        sent, refused = refit(sender, [newcomer], 2)
        assert isinstance(sent, RefitTimeoutError)
        assert "[1] of 2 receivers" in str(sent)
        assert isinstance(refused, RefitError)
        sent, refused = refit(sender, engines[:1], 2)
        assert isinstance(sent, RefitTimeoutError)
        assert "[0] of 2 receivers" in str(sent)
        assert isinstance(refused, RefitError)
        sender._timeout_s = limit
        must(refit(sender, engines, 2))
        for engine in engines:
            engine.receiver.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_an_offer_that_the_engine_does_not_expect_is_refused(tensors):
    expected = [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    expected[0] = ("embed.weight", torch.float64, (64, 48))
    expected.append(("bias", torch.float32, (4,)))
    with make_sender(tensors) as sender:
        engine = Engine(sender.address, expected=expected)
        sent, received = refit(sender, [engine], 1)
        for error in (sent, received):
            assert isinstance(error, PlanMismatchError)
            assert "bias float32[4] is missing" in str(error)
            assert "embed.weight float32[64, 48] is offered where" in str(error)
        assert engine.weights == {}
        engine.receiver.close()


def test_a_receiver_that_does_not_come_is_waited_for_as_long_as_said(tensors):
    with make_sender(tensors, num_receivers=2, timeout_s=1.0) as sender:
        engine = Engine(sender.address)
        sent, received = refit(sender, [engine], 1)
        assert isinstance(sent, RefitTimeoutError)
        assert "[0] of 2 receivers" in str(sent)
        assert isinstance(received, RefitError)


def test_a_sender_that_does_not_come_is_waited_for_as_long_as_said(tensors):
    with make_sender(tensors) as sender:
        engine = Engine(sender.address, timeout_s=0.3)
        with pytest.raises(RefitTimeoutError):
            engine.refit(1)


@pytest.mark.parametrize("transport", ["shm", "collective"])
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("looks", [False, True])
def test_a_receiver_that_missed_a_refit_takes_part_in_the_next(tensors, transport, version, looks):
    with make_sender(tensors, transport) as sender:
        engine = Engine(sender.address)
        must(refit(sender, [engine], 1))
        engine.receiver.commit(1)
        limit, sender._timeout_s = sender._timeout_s, 0.2
        with pytest.raises(RefitTimeoutError, match="answer to the beginning"):
            sender.send(2)
        sender._timeout_s = limit
        if looks:
            assert engine.receiver.require_ready() == 1
        must(refit(sender, [engine], version))
        engine.receiver.commit(version)
        assert engine.receiver.require_ready() == version
        engine.receiver.close()


@pytest.mark.parametrize("transport", ["shm", "collective"])
@pytest.mark.parametrize("knows_version", [False, True])
def test_a_sender_that_failed_since_the_refit_began_is_heard(tensors, transport, knows_version):
    with make_sender(tensors, transport) as sender:
        engine = Engine(sender.address)
        must(refit(sender, [engine], 1))
        engine.receiver.commit(1)
        for version in (2, 3):
            open_refit = engine.receiver.begin if knows_version else engine.receiver.catch_up
            open_refit(*[version] * knows_version)
            limit, sender._timeout_s = sender._timeout_s, 0.2
            with pytest.raises(RefitTimeoutError, match="answer to the beginning"):
                sender.send(version)
            sender._timeout_s = limit
            if not knows_version:
                for _ in ("begin", "failure", "hang-up"):
                    assert engine.receiver.require_ready() == version - 1
                engine.receiver.begin(version)
            with pytest.raises(RefitError, match="answer to the beginning"):
                engine.receiver.receive(version, engine.load)
            with pytest.raises(PoisonedError, match="answer to the beginning"):
                engine.receiver.require_ready()
            # Later ones are not taken for this one.
            must(refit(sender, [engine], version))
            engine.receiver.commit(version)
        engine.receiver.close()


def test_a_refit_that_failed_before_it_began_here_is_not_taken_for_the_next(tensors, monkeypatch):
    with make_sender(tensors, num_receivers=2) as sender:
        engines = [Engine(sender.address, rank) for rank in range(2)]
        must(refit(sender, engines, 1))
        for engine in engines:
            engine.receiver.commit(1)
        engines[0].receiver.close()
        # Both as they may be for microseconds: the sender has not noticed that the first receiver
        # is gone, nor the second that the sender has hung up behind its failure.
        with monkeypatch.context() as patch:
            patch.setattr(Connections, "are_intact", lambda connections: True)
            with pytest.raises(RefitError, match="the receiver is gone"):
                sender.send(2)
            patch.setattr(Channel, "has_hung_up", lambda channel: False)
            engines[1].receiver.catch_up()
        must(refit(sender, engines, 2))
        assert all(same(engine.weights, tensors) for engine in engines)
        for engine in engines:
            engine.receiver.close()


def counted(monkeypatch, owner, name):
    """Return a semaphore that is released whenever that method is called."""
    calls = threading.Semaphore(0)
    original = getattr(owner, name)

    def call(*args):
        calls.release()
        return original(*args)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_a_transport_is_closed_with_its_sender(tensors, monkeypatch):
    closes = counted(monkeypatch, ShmTransport, "close")
    with make_sender(tensors):
        assert not closes.acquire(blocking=False)
    assert closes.acquire(blocking=False)


@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_who_knocks_without_the_token_disturbs_no_refit(tensors, transport, monkeypatch):
    with make_sender(tensors, transport, num_receivers=2) as sender:
        engines = [Engine(sender.address, rank) for rank in range(2)]
        must(refit(sender, engines, 1))

        answers = counted(monkeypatch, Receivers, "_receive")
        waits = counted(monkeypatch, Receivers, "wait_ready")

        def knock_and_receive():
            assert answers.acquire(timeout=PATIENCE_S)
            stranger = dial(sender.address["endpoint"], Deadline(PATIENCE_S))
            assert stranger.recv(len(MAGIC) + NONCE_BYTES, socket.MSG_WAITALL)
            stranger.close()
            assert all(waits.acquire(timeout=PATIENCE_S) for _ in ("before", "after"))
            return engines[1].refit(2)

        must(outcomes(lambda: sender.send(2), lambda: engines[0].refit(2), knock_and_receive))
        for engine in engines:
            engine.receiver.commit(2)
            engine.receiver.close()


def test_a_load_that_takes_too_long_is_named(tensors):
    release = threading.Event()
    with make_sender(tensors, timeout_s=2.0) as sender:
        engine = Engine(sender.address)

        def load(pairs):
            release.wait(PATIENCE_S)

        engine.load = load
        receiving = threading.Thread(target=outcomes, args=(lambda: engine.refit(1),))
        receiving.start()
        with pytest.raises(RefitTimeoutError, match=r"receiver 0, bucket 0, tensor embed\.weight"):
            sender.send(1)
        release.set()
        receiving.join()
        with pytest.raises(PoisonedError):
            engine.receiver.require_ready()


def test_a_receiver_that_fails_while_the_group_is_made_is_not_waited_for(tensors, monkeypatch):
    limits = {"timeout_s": PATIENCE_S}
    original = collective._CollectiveReceiver.join

    def join(side, deadline):
        if side._context.rank == 1:
            raise RuntimeError("killed")
        original(side, deadline)

    with make_sender(tensors, "collective", num_receivers=2, **limits) as sender:
        engines = [Engine(sender.address, rank, **limits) for rank in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(collective._CollectiveReceiver, "join", join)
            # It hangs for `outcomes` long before the limit.
            results = refit(sender, engines, 1)
        assert all(isinstance(error, RefitError) for error in results), results
        assert "killed" in str(results[0])
        must(refit(sender, engines, 1))
        assert all(same(engine.weights, tensors) for engine in engines)
        for engine in engines:
            engine.receiver.close()


def test_a_refit_has_its_whole_limit_however_late_its_group_was_made(tensors, monkeypatch):
    left_s = 2.0

    class Source(TensorSource):
        idle_s = 0.0

        def __iter__(self):
            time.sleep(self.idle_s)
            yield from super().__iter__()

    for side in (collective._CollectiveSender, collective._CollectiveReceiver):

        def join(side, deadline, original=side.join):
            original(side, Deadline(left_s))

        monkeypatch.setattr(side, "join", join)
    with make_sender(tensors, "collective") as sender:
        sender._source = Source(tensors)
        engine = Engine(sender.address)
        must(refit(sender, [engine], 1))
        sender._source.idle_s = 1.5 * left_s
        must(refit(sender, [engine], 2))
        engine.receiver.close()


def test_files_that_weights_go_through_are_the_owners_alone(tensors):
    with make_sender(tensors, "golden") as sender:
        engine = Engine(sender.address)
        must(refit(sender, [engine], 1))
        directory = Path(sender.address["endpoint"].removeprefix("unix:")).parent
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
        assert modes.keys() >= {"buffer-0.safetensors", "buffer-1.safetensors"}
        assert set(modes.values()) == {0o600}
        engine.receiver.close()


@pytest.mark.parametrize("when", ["while receiving", "after"])
def test_live_weights_are_compared_on_demand(tensors, when):
    with make_sender(tensors, verify="weights") as sender:
        engine = Engine(sender.address)

        def receive(version, read_back):
            engine.receiver.begin(version)
            if when == "while receiving":
                return engine.receiver.receive(version, engine.load, read_back=read_back)
            report = engine.receiver.receive(version, engine.load)
            engine.receiver.check_weights(read_back())
            return report

        def spoilt():
            broken = {name: tensor.clone() for name, tensor in engine.weights.items()}
            broken["layers.1.norm.weight"][7] += 1
            return broken.items()

        must(outcomes(lambda: sender.send(1), lambda: receive(1, lambda: engine.weights.items())))
        engine.receiver.commit(1)
        _, received = outcomes(lambda: sender.send(2), lambda: receive(2, spoilt))
        assert isinstance(received, VerificationError)
        assert received.tensor == "layers.1.norm.weight"
        with pytest.raises(PoisonedError):
            engine.receiver.commit(2)
        partly = dict(list(tensors.items())[1:])
        _, received = outcomes(lambda: sender.send(2), lambda: receive(2, partly.items))
        assert "embed.weight: it was received and is not live" in str(received)
        engine.receiver.close()


def test_live_weights_that_nobody_compared_are_warned_about(tensors, caplog):
    with make_sender(tensors, verify="weights") as sender:
        engine = Engine(sender.address)
        must(refit(sender, [engine], 1))
        engine.receiver.commit(1)
        assert "not compared" in caplog.text
        engine.receiver.close()


def test_arguments_are_checked_before_anything_starts(tensors):
    for options in ({"verify": "no"}, {"num_buffers": 0}, {"timeout_s": 0}, {"bucket_bytes": 1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            make_sender(tensors, **options)
    with pytest.raises(ValueError, match=r"transport='rdma' is not among .*'golden'.*'shm'"):
        make_sender(tensors, "rdma")
    idle = make_sender(tensors, num_receivers=0)
    with pytest.raises(ValueError, match="num_receivers=0"):
        Engine(idle.address)
