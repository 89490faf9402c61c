"""The transport `chain`: who sends which bytes, and how a lost receiver is passed over."""

import hmac
import socket
import threading
import time

import msgspec
import pytest
import torch
from patience import PATIENCE_S, wait_until
from rl_refit.protocol.waiting import Deadline
from rl_refit.testing.pair import RefitPair, World, some_tensors
from rl_refit.transports import ReceiverContext, SenderContext, chain, frames, relay

NBYTES = 3 << 20
CPU = torch.device("cpu")

pytestmark = pytest.mark.needs("rl-refit[testing]")


class Chain:
    """The sides of a sender and its receivers, without the protocol around them."""

    def __init__(self, num_receivers):
        shape = {"num_buffers": 2, "buffer_bytes": NBYTES, "device": CPU, "host": "127.0.0.1"}
        transport = chain.ChainTransport()
        self.sender = transport.open_sender(
            SenderContext(
                **shape, ranks=tuple(range(num_receivers)), directory=None, timeout_s=PATIENCE_S
            )
        )
        self.receivers = []
        for rank in range(num_receivers):
            context = ReceiverContext(
                **shape,
                grant=self.sender.grant(rank)[0],
                descriptors=[],
                rank=rank,
                timeout_s=PATIENCE_S,
            )
            self.receivers.append(transport.open_receiver(context))
            self.receivers[rank].join(Deadline(PATIENCE_S))

    def fill(self, bucket):
        generator = torch.Generator().manual_seed(bucket)
        data = torch.randint(0, 255, (NBYTES,), generator=generator, dtype=torch.uint8)
        self.sender.buffers[bucket % 2].copy_(data)
        return data

    def publish(self, bucket):
        data = self.fill(bucket)
        self.sender.publish(bucket, NBYTES, Deadline(PATIENCE_S))
        return data

    def expect(self, bucket, ranks):
        for rank in ranks:
            self.receivers[rank].expect(bucket, NBYTES, Deadline(PATIENCE_S))

    def fetch(self, bucket, rank):
        return self.receivers[rank].fetch(bucket, NBYTES, Deadline(PATIENCE_S))

    def served(self):
        """Return what the sender and each receiver have sent, in buckets."""
        sides = [self.sender._server, *(each._server for each in self.receivers)]
        return [each.bytes_served / NBYTES for each in sides]

    def close(self):
        for side in (*self.receivers, self.sender):
            side.close()


@pytest.fixture
def chain_of():
    """`chain_of(n)` gives a chain of so many receivers."""
    made = []

    def make(num_receivers):
        made.append(Chain(num_receivers))
        return made[-1]

    yield make
    for each in made:
        each.close()


def assert_served(members, expected):
    # A sender counts what it has sent, which may have arrived before.
    wait_until(lambda: members.served() == expected, what="what was served")


def ask(sock, request):
    frames.send_frame(sock, msgspec.msgpack.encode(request))
    frames.receive_exactly(sock, 1)


def test_the_sender_sends_each_byte_once_and_no_receiver_sends_it_twice(chain_of):
    members = chain_of(4)
    for bucket in range(3):
        members.expect(bucket, range(4))
        data = members.publish(bucket)
        for rank in range(4):
            assert torch.equal(members.fetch(bucket, rank), data)
        assert_served(members, [bucket + 1] * 4 + [0])


@pytest.mark.parametrize("num_receivers", [1, 5])
def test_a_refit_sends_the_model_once_however_many_receive_it(num_receivers):
    with World(RefitPair("chain"), some_tensors(), num_receivers) as world:
        for version in range(1, 4):
            world.good_refit(version)
            side = world.sender._connections.side
            expected = version * sum(each.nbytes for each in world.sender.plan.buckets)
            wait_until(lambda s=side, e=expected: s.bytes_served == e, what="served bytes")


def test_what_has_arrived_is_passed_on_before_the_rest_is_there(chain_of):
    members = chain_of(3)
    data = members.fill(0)
    members.expect(0, range(3))
    members.sender._ring.extend(0, 0, NBYTES // 2)
    assert_served(members, [0.5, 0.5, 0.5, 0])
    members.sender._ring.extend(0, 0, NBYTES)
    assert torch.equal(members.fetch(0, 2), data)


def test_the_next_one_goes_on_at_its_byte_if_a_relay_dies_in_a_bucket(chain_of):
    members = chain_of(4)
    data = members.fill(0)
    members.expect(0, range(4))
    members.sender._ring.extend(0, 0, NBYTES // 2)
    assert_served(members, [0.5, 0.5, 0.5, 0.5, 0])
    members.receivers[1].close()
    members.sender._ring.extend(0, 0, NBYTES)
    for rank in (0, 2, 3):
        assert torch.equal(members.fetch(0, rank), data)
    # The peer before the lost one has its place: the sender sends no byte again.
    assert_served(members, [1, 1, 0.5, 1, 0])


def test_the_sender_takes_the_place_of_the_first_receiver(chain_of):
    members = chain_of(2)
    data = members.fill(0)
    members.expect(0, range(2))
    members.sender._ring.extend(0, 0, NBYTES // 2)
    assert_served(members, [0.5, 0.5, 0])
    members.receivers[0].close()
    members.sender._ring.extend(0, 0, NBYTES)
    assert torch.equal(members.fetch(0, 1), data)
    assert_served(members, [1, 0.5, 0])


def test_a_receiver_that_is_busy_with_its_load_passes_buckets_on(chain_of):
    members = chain_of(2)
    members.expect(0, range(2))
    members.publish(0)
    members.fetch(0, 1)
    data = members.publish(1)
    assert torch.equal(members.fetch(1, 1), data)  # receiver 0 has not asked for it
    assert_served(members, [2, 2, 0])
    assert torch.equal(members.fetch(1, 0), data)
    assert_served(members, [2, 2, 0])


def test_a_silent_relay_is_passed_over_and_asked_again_later(chain_of, monkeypatch):
    monkeypatch.setattr(relay, "STALL_S", 0.5)
    monkeypatch.setattr(relay, "AVOID_S", 1.0)
    members = chain_of(2)
    server = members.receivers[0]._server
    kept, server._fetch = server._fetch, lambda pull: False
    members.expect(0, [1])
    data = members.publish(0)
    assert torch.equal(members.fetch(0, 1), data)
    assert_served(members, [1, 0, 0])
    server._fetch = kept
    time.sleep(1.0)
    members.expect(0, [0])
    for bucket in (1, 2):
        data = members.publish(bucket)
        assert torch.equal(members.fetch(bucket, 1), data)
    assert members.served()[1] > 0


def test_a_receiver_fails_if_the_sender_is_gone(chain_of):
    members = chain_of(2)
    members.expect(0, range(2))
    members.sender.close()
    for rank in range(2):
        with pytest.raises(OSError, match=r"ended|refused|reset"):
            members.fetch(0, rank)


def test_a_stranger_gets_nothing(chain_of):
    members = chain_of(1)
    members.publish(0)
    for key, request in [
        (b"0" * 32, relay.Pull(0, 0, 0, NBYTES)),
        (members.sender._key, relay.Pull(0, 0, 0, NBYTES + 1)),
    ]:
        with socket.create_connection(members.sender._server.address, PATIENCE_S) as sock:
            nonce = frames.receive_exactly(sock, 32)
            sock.sendall(hmac.digest(key, nonce, "sha256"))
            with pytest.raises(ConnectionError):
                ask(sock, request)
    assert_served(members, [0, 0])


def test_frames_larger_than_the_sockets_buffers_arrive():
    left, right = socket.socketpair()
    data = bytes(range(256)) * (1 << 14)
    with left, right:
        thread = threading.Thread(target=frames.send_frame, args=(left, data))
        thread.start()
        assert frames.receive_exactly(right, frames.receive_length(right)) == data
        thread.join(PATIENCE_S)
