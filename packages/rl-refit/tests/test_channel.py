"""Channels between a sender's endpoint and its receivers: who is let in, and what is read."""

import os
import socket
import stat
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec import msgpack
from patience import PATIENCE_S
from rl_refit import AuthenticationError, RefitError, RefitPlan, RefitTimeoutError
from rl_refit.private_directory import remove_abandoned
from rl_refit.protocol import endpoint as endpoint_module
from rl_refit.protocol.channel import (
    MAX_MESSAGE_BYTES,
    AllLoaded,
    Begin,
    ChannelClosed,
    Failure,
    Loaded,
    Offer,
    decode,
    encode,
    require_message,
)
from rl_refit.protocol.endpoint import (
    MAGIC,
    NONCE_BYTES,
    PREFIX,
    Endpoint,
    connect,
    dial,
    remove_remains,
)
from rl_refit.protocol.waiting import Deadline

pytestmark = pytest.mark.promise

TOKEN = bytes(range(32))
HOSTS = pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["unix", "tcp"])


@pytest.fixture
def endpoint(request):
    opened = Endpoint(host=getattr(request, "param", None), token=TOKEN)
    yield opened
    opened.close()


def meet(endpoint, tokens, count=1, limit_s=PATIENCE_S):
    """Let clients with these tokens knock, in order; return what they and the server got."""
    results = []

    def knock():
        for rank, token in enumerate(tokens):
            sock = dial(endpoint.address, Deadline(limit_s))
            try:
                results.append(connect(sock, token=token, rank=rank, deadline=Deadline(limit_s)))
            except RefitError as error:
                results.append(error)

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        served = endpoint.accept(count, deadline=Deadline(limit_s))
    finally:
        thread.join()
    return results, served


@HOSTS
def test_both_sides_with_the_token_can_talk(host):
    endpoint = Endpoint(host=host, token=TOKEN)
    (client,), served = meet(endpoint, [TOKEN])
    served[0].send(Begin(3, "abc"), Deadline(1))
    assert client.receive(Deadline(1)) == Begin(3, "abc")
    client.send(Loaded(3, 0), Deadline(1))
    assert served[0].receive(Deadline(1)) == Loaded(3, 0)
    client.close()
    with pytest.raises(ChannelClosed):
        served[0].receive(Deadline(1))
    served[0].close()
    endpoint.close()


def test_a_channel_that_this_side_has_closed_says_so(endpoint):
    (client,), served = meet(endpoint, [TOKEN])
    served[0].close()
    with pytest.raises(ChannelClosed):
        served[0].send(Begin(3, "abc"), Deadline(1))
    with pytest.raises(ChannelClosed):
        served[0].send_descriptors([0], Deadline(1))
    with pytest.raises(ChannelClosed):
        served[0].receive_descriptors(1, Deadline(1))
    served[0].close(RefitError("late"))
    client.close()


@HOSTS
def test_a_wrong_token_is_turned_away_and_the_right_one_still_let_in(host):
    endpoint = Endpoint(host=host, token=TOKEN)
    (wrong, right), served = meet(endpoint, [b"x" * 32, TOKEN])
    assert isinstance(wrong, AuthenticationError)
    assert list(served) == [1]
    right.close()
    served[1].close()
    endpoint.close()


def test_who_has_no_token_reads_a_nonce_and_nothing_else(endpoint):
    intruder = dial(endpoint.address, Deadline(1))
    intruder.sendall(b"\0" * (NONCE_BYTES + 4 + 32))
    with pytest.raises(RefitTimeoutError, match="of 1 receivers"):
        endpoint.accept(1, deadline=Deadline(0.3))
    intruder.settimeout(PATIENCE_S)
    data = b""
    while chunk := intruder.recv(4096):
        data += chunk
    assert data[: len(MAGIC)] == MAGIC
    assert len(data) == len(MAGIC) + NONCE_BYTES
    intruder.close()


def test_a_silent_guest_keeps_nobody_waiting(endpoint):
    silent = [dial(endpoint.address, Deadline(1)) for _ in range(3)]
    for _ in silent:
        endpoint.admit()
    time.sleep(1.1 * endpoint_module._REPLY_WITHIN_S)
    (client,), served = meet(endpoint, [TOKEN])
    client.close()
    served[0].close()
    for sock in silent:
        sock.settimeout(PATIENCE_S)
        sock.recv(100)
        assert sock.recv(100) == b""
        sock.close()


def test_a_handshake_that_has_begun_goes_on_at_the_next_call(endpoint):
    newcomer = dial(endpoint.address, Deadline(1))
    (first,), served = meet(endpoint, [TOKEN])
    with ThreadPoolExecutor() as threads:
        reply = threads.submit(
            connect, newcomer, token=TOKEN, rank=7, deadline=Deadline(PATIENCE_S)
        )
        admitted = {}
        while not reply.done():
            admitted |= endpoint.admit()
    assert list(admitted) == [7]
    for channel in (first, reply.result(), *served.values(), *admitted.values()):
        channel.close()


def test_a_reply_that_has_arrived_is_in_time_although_nobody_is_missing(endpoint):
    (first,), served = meet(endpoint, [TOKEN])
    newcomer = dial(endpoint.address, Deadline(1))
    endpoint.admit()  # which sends it the nonce
    with ThreadPoolExecutor() as threads:
        reply = threads.submit(
            connect, newcomer, token=TOKEN, rank=7, deadline=Deadline(PATIENCE_S)
        )
        time.sleep(1.1 * endpoint_module._REPLY_WITHIN_S)
        channels = endpoint.accept(1, deadline=Deadline(PATIENCE_S), present=served)
        assert sorted(channels) == [0, 7]
        for channel in (first, reply.result(), *channels.values()):
            channel.close()


def dial_until_full(endpoint, crowd):
    for _ in range(300):
        crowd.append(dial(endpoint.address, Deadline(0.5)))


def test_a_full_backlog_is_waited_for(endpoint):
    crowd = []
    with pytest.raises(RefitTimeoutError, match="backlog"):
        dial_until_full(endpoint, crowd)
    (client,), served = meet(endpoint, [TOKEN])
    for sock in (*crowd, client, served[0]):
        sock.close()


def test_a_server_without_the_token_is_refused(endpoint):
    (client,), _ = meet_error(endpoint)
    assert isinstance(client, AuthenticationError)


def meet_error(endpoint):
    results = []

    def knock():
        sock = dial(endpoint.address, Deadline(2))
        try:
            results.append(connect(sock, token=TOKEN, rank=0, deadline=Deadline(2)))
        except RefitError as error:
            results.append(error)

    thread = threading.Thread(target=knock)
    thread.start()
    endpoint._listener.setblocking(True)
    sock, _ = endpoint._listener.accept()
    sock.sendall(MAGIC + b"n" * NONCE_BYTES)
    sock.recv(1000)
    sock.sendall(b"p" * 32)
    thread.join()
    sock.close()
    return results, None


@pytest.mark.parametrize("tamper", ["flip", "repeat", "swap"])
def test_a_changed_repeated_or_reordered_message_is_refused(endpoint, tamper):
    (client,), served = meet(endpoint, [TOKEN])
    sent = []
    raw = served[0]._socket
    served[0]._socket = Recorder(raw, sent)
    for bucket in range(2):
        served[0].send(Loaded(1, bucket), Deadline(1))
    first, second = sent
    if tamper == "flip":
        raw.sendall(first[:-1] + bytes([first[-1] ^ 1]))
    else:
        raw.sendall(first + first if tamper == "repeat" else second + first)
    if tamper == "repeat":
        assert client.receive(Deadline(1)) == Loaded(1, 0)
    with pytest.raises(AuthenticationError):
        client.receive(Deadline(1))
    client.close()
    raw.close()


class Recorder:
    def __init__(self, sock, sent):
        self.sock = sock
        self.sent = sent

    def settimeout(self, seconds):
        self.sock.settimeout(seconds)

    def sendall(self, data):
        self.sent.append(data)


def test_the_directory_and_its_files_are_the_owners_alone(endpoint):
    mode = stat.S_IMODE(endpoint.directory.stat().st_mode)
    assert mode == 0o700
    files = list(endpoint.directory.iterdir())
    assert {path.name for path in files} == {"control", "lock"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_closing_leaves_nothing(endpoint):
    directory = endpoint.directory
    endpoint.close()
    assert not directory.exists()


def test_a_living_senders_directory_is_left_alone_and_a_dead_ones_removed(endpoint):
    remove_abandoned(PREFIX)
    remove_remains(endpoint.address)
    assert endpoint.directory.exists()
    os.close(endpoint._private._lock)  # what the death of its process does
    endpoint._listener.close()
    with pytest.raises(RefitError, match="no sender listens"):
        dial(endpoint.address, Deadline(1))
    assert not endpoint.directory.exists()
    endpoint._private._lock = os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_an_endpoint_that_cannot_listen_leaves_nothing(tmp_path, monkeypatch, host):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(listener, *where):
        listeners.append(listener)
        raise OSError("no room")

    listeners = []
    monkeypatch.setattr(endpoint_module, "_listen_unix", fail)
    monkeypatch.setattr(endpoint_module, "_listen_tcp", fail)
    with pytest.raises(OSError, match="no room"):
        Endpoint(host=host, token=TOKEN)
    assert list(tmp_path.iterdir()) == []
    assert listeners[0].fileno() == -1


def test_another_users_process_is_not_greeted(endpoint, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(Path(endpoint.address.removeprefix("unix:"))))
    with pytest.raises(RefitTimeoutError):
        endpoint.accept(1, deadline=Deadline(0.2))
    assert sock.recv(100) == b""
    sock.close()


def test_waiting_ends_with_an_error(endpoint):
    with pytest.raises(RefitTimeoutError, match=r"0.1 s"):
        endpoint.accept(1, deadline=Deadline(0.1))
    (client,), served = meet(endpoint, [TOKEN])
    with pytest.raises(RefitTimeoutError, match="bucket 3"):
        client.receive(Deadline(0.1), "bucket 3")
    client.close()
    served[0].close()


UNREADABLE = {
    "another type": (encode(Begin("3", "abc")), r"Expected `int`, got `str` - at `\$.version`"),
    "a bool for an int": (encode(Loaded(1, True)), r"Expected `int`, got `bool` - at `\$.bucket`"),
    "a negative count": (encode(Loaded(1, -1)), r"Expected `int` >= 0 - at `\$.bucket`"),
    "an unknown field": (msgpack.encode({"type": "Join", "more": 1}), "unknown field `more`"),
    "a missing field": (msgpack.encode({"type": "Ready"}), "missing required field `version`"),
    "an unknown message": (msgpack.encode({"type": "Hello"}), "Invalid value 'Hello'"),
    "no message": (struct.pack("!I", 7), ""),
    "nothing": (b"", "truncated"),
    "no MessagePack": (b"\xc1", "malformed"),
    "a part of a message": (encode(Begin(1, "a"))[:-1], "truncated"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_is_no_message_is_refused(what):
    payload, reason = UNREADABLE[what]
    with pytest.raises(RefitError, match=f"unreadable message: .*{reason}"):
        decode(payload)


def test_messages_arrive_as_they_were_sent():
    plan = RefitPlan.of([("a", torch.bfloat16, (3, 4)), ("b", torch.float32, ())])
    grant = {"host": "::1", "port": 7, "handle": b"\x00", "nested": {"shape": [1, 2], "more": None}}
    offer = decode(encode(Offer(plan.to_wire(), 2, "digest", "xxh3", grant, 1, delta=True)))
    assert offer.grant == grant
    assert RefitPlan.from_wire(offer.plan) == plan
    failure = Failure("RefitError", "why", None, 3, "a")
    assert decode(encode(failure)) == failure


def test_a_message_that_is_too_large_is_refused_at_both_ends(endpoint):
    (client,), served = meet(endpoint, [TOKEN])
    with pytest.raises(RefitError, match=r"a Begin of \d+ bytes, at most"):
        served[0].send(Begin(1, "x" * MAX_MESSAGE_BYTES), Deadline(1))
    served[0]._socket.sendall(struct.pack("!I32s", MAX_MESSAGE_BYTES + 1, b""))
    with pytest.raises(AuthenticationError, match=r"of \d+ bytes, at most"):
        client.receive(Deadline(1))
    client.close()
    served[0].close()


def test_only_the_message_that_is_due_is_accepted():
    require_message(AllLoaded(2), AllLoaded(2), rank=1)
    with pytest.raises(RefitError, match=r"AllLoaded arrived where AllLoaded\(version=2\) was due"):
        require_message(AllLoaded(2), AllLoaded(1), rank=1)
    failure = Failure("RefitTimeoutError", "no bucket", None, 4, None)
    with pytest.raises(RefitTimeoutError, match="the sender reports: no bucket"):
        require_message(AllLoaded(2), failure, rank=1)
