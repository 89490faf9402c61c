"""A sender's control socket under attack: its own receivers are served within the limit."""

import gc
import os
import resource
import secrets
import select
import selectors
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from patience import PATIENCE_S
from rl_refit import AuthenticationError, RefitError
from rl_refit.private_directory import PrivateDirectory
from rl_refit.protocol import endpoint as endpoint_module
from rl_refit.protocol.endpoint import (
    MAGIC,
    MAX_PENDING,
    NONCE_BYTES,
    PREFIX,
    Endpoint,
    connect,
    dial,
)
from rl_refit.protocol.waiting import Deadline
from rl_refit.testing.pair import RefitPair, World, some_tensors

TOKEN = bytes(range(32))
REPLY_BYTES = NONCE_BYTES + 4 + 32
# A socket of the kernel's in a directory, and a TCP port.
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "collective"], ids=["unix", "tcp"])


@pytest.fixture
def world(transport):
    with World(RefitPair(transport), some_tensors(), 2) as world:
        yield world


def endpoint_of(world):
    return str(world.sender.address["endpoint"])


def guess_the_token(endpoint):
    """Shake hands with a wrong token."""
    with dial(endpoint, Deadline(1)) as sock, pytest.raises(AuthenticationError):
        connect(sock, token=secrets.token_bytes(32), rank=0, deadline=Deadline(1))


def send_garbage(endpoint):
    """Send more random bytes than a handshake has, and never read."""
    with dial(endpoint, Deadline(1)) as sock:
        sock.sendall(secrets.token_bytes(100_000))


def send_a_huge_length(endpoint):
    """Send a length of 2^63, were one read before the handshake is complete."""
    with dial(endpoint, Deadline(1)) as sock:
        sock.sendall(struct.pack("!Q", 1 << 63) + b"\xff" * 8)
        sock.settimeout(0.2)
        sock.recv(100)


def send_slowly(endpoint):
    """Send a reply one byte at a time, and stop before its end."""
    with dial(endpoint, Deadline(1)) as sock:
        for _ in range(5):
            sock.sendall(b"\0")
            time.sleep(0.002)


def hang_up(endpoint):
    """Connect and close at once."""
    dial(endpoint, Deadline(1)).close()


def claim_a_rank_that_is_taken(endpoint):
    """Reply in the name of rank 1, with a proof that is none."""
    with dial(endpoint, Deadline(1)) as sock:
        sock.sendall(secrets.token_bytes(NONCE_BYTES) + struct.pack("!I", 1) + bytes(32))
        time.sleep(0.05)


ATTACKS = [
    guess_the_token,
    send_garbage,
    send_a_huge_length,
    send_slowly,
    hang_up,
    claim_a_rank_that_is_taken,
]


@contextmanager
def repeated(attack, endpoint):
    """Repeat an attack in a thread until the end of this block; raise what it raises there.

    Yields an event that is set once an attempt has run to its end: the others may find that the
    sender hangs up on them, or listens to nobody between refits.
    """
    ended, completed = threading.Event(), threading.Event()

    def run():
        try:
            while not ended.is_set():
                with suppress(OSError, RefitError):
                    attack(endpoint)
                    completed.set()
                time.sleep(0.005)
        finally:
            completed.set()  # also by an error, for which nobody needs to wait

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield completed
        finally:
            ended.set()
            running.result(PATIENCE_S)


@contextmanager
def process(run):
    """Fork a process that calls `run(write)`, `write` being a pipe; yield the end to read from."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run(write)
        finally:
            os._exit(1)
    os.close(write)
    try:
        yield read
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)


def crowd_around(address, count):
    """Return a function for `process` that holds silent connections, a byte written for each."""

    def run(write):
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        sockets = []
        for _ in range(count):
            sockets.append(dial(address, Deadline(PATIENCE_S)))
            os.write(write, b"+")
        time.sleep(3600)

    return run


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@TRANSPORTS
def test_refits_go_on_under_attack(world, attack):
    with repeated(attack, endpoint_of(world)) as completed:
        version = 0
        # As many as it takes: a sender answers nobody between refits, and each lasts milliseconds.
        while version < 2 or not completed.is_set():
            version += 1
            world.good_refit(version)
    world.good_refit(version + 1)


@TRANSPORTS
def test_a_thousand_silent_connections_keep_no_receiver_out(world):
    with process(crowd_around(endpoint_of(world), 1000)) as crowd:
        # The backlog is full before the first receiver connects.
        for _ in range(129):
            assert os.read(crowd, 1)
        for version in (1, 2):
            world.good_refit(version)


def test_pending_connections_are_bounded_and_a_receiver_gets_through():
    endpoint = Endpoint(host="127.0.0.1", token=TOKEN)
    server = os.getpid()
    # What earlier tests left open must not be closed in between.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))

    def knock(write):
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        sockets = [dial(endpoint.address, Deadline(PATIENCE_S)) for _ in range(1000)]
        held = len(os.listdir(f"/proc/{server}/fd")) - before
        # The first was closed after its nonce, to make room.
        sockets[0].settimeout(PATIENCE_S)
        while sockets[0].recv(100):
            pass
        sockets.append(dial(endpoint.address, Deadline(PATIENCE_S)))
        connect(sockets[-1], token=TOKEN, rank=0, deadline=Deadline(PATIENCE_S))
        os.write(write, struct.pack("!I", held))
        time.sleep(3600)

    try:
        with process(knock) as read:
            served = endpoint.accept(1, deadline=Deadline(PATIENCE_S))
            assert list(served) == [0]
            (held,) = struct.unpack("!I", os.read(read, 4))
            served[0].close()
        # Beside them the pipe, and a connection that is being accepted.
        assert MAX_PENDING // 2 < held <= MAX_PENDING + 2
        endpoint.admit(settle_s=PATIENCE_S)
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        endpoint.close()


def test_a_recorded_handshake_is_of_no_use():
    endpoint = Endpoint(host="127.0.0.1", token=TOKEN)
    host, port = endpoint.address.removeprefix("tcp:").split(":")
    recorded = bytearray()
    with ExitStack() as stack:
        stack.callback(endpoint.close)
        proxy = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def record():
            """Stand between a receiver and the endpoint, and keep what the receiver says."""
            client, _ = proxy.accept()
            with client, socket.create_connection((host, int(port)), PATIENCE_S) as server:
                client.sendall(server.recv(len(MAGIC) + NONCE_BYTES))
                recorded.extend(client.recv(REPLY_BYTES, socket.MSG_WAITALL))
                server.sendall(recorded)
                client.sendall(server.recv(32))

        def be_a_receiver():
            address = f"tcp:127.0.0.1:{proxy.getsockname()[1]}"
            sock = dial(address, Deadline(PATIENCE_S))
            connect(sock, token=TOKEN, rank=0, deadline=Deadline(PATIENCE_S)).close()

        threads = [threading.Thread(target=run, daemon=True) for run in (record, be_a_receiver)]
        for thread in threads:
            thread.start()
        endpoint.accept(1, deadline=Deadline(PATIENCE_S))[0].close()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(recorded) == REPLY_BYTES

        replay = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
        replay.sendall(recorded)
        with pytest.raises(RefitError, match=r"\[\] of 1 receivers"):
            endpoint.accept(1, deadline=Deadline(0.5))
        replay.settimeout(PATIENCE_S)
        answer = replay.recv(200, socket.MSG_WAITALL)
        # Nothing but a greeting: the nonce is another, and with it the proof that is due.
        assert len(answer) == len(MAGIC) + NONCE_BYTES


@contextmanager
def descriptors_left(count):
    """Let this process open that many more files and sockets, and no other."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is on the number of a descriptor; those below are filled up first.
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, limit[1]))
    held = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for descriptor in held:
            os.close(descriptor)


def test_a_receiver_gets_through_where_silent_connections_hold_all_descriptors():
    endpoint = Endpoint(host="127.0.0.1", token=TOKEN)

    def knock(write):
        sockets = [dial(endpoint.address, Deadline(PATIENCE_S)) for _ in range(60)]
        os.write(write, b"+")
        sockets.append(dial(endpoint.address, Deadline(PATIENCE_S)))
        connect(sockets[-1], token=TOKEN, rank=0, deadline=Deadline(PATIENCE_S))
        os.write(write, b"+")
        time.sleep(3600)

    try:
        with process(knock) as read:
            assert os.read(read, 1)
            with descriptors_left(8):
                served = endpoint.accept(1, deadline=Deadline(PATIENCE_S))
            assert list(served) == [0]
            served[0].close()
            assert os.read(read, 1)
    finally:
        endpoint.close()


def test_waiting_for_a_descriptor_does_not_spin(monkeypatch):
    num_polls = 0

    def count(selector, timeout=None):
        nonlocal num_polls
        num_polls += 1
        return polled(selector, timeout)

    polled = selectors.EpollSelector.select
    monkeypatch.setattr(selectors.EpollSelector, "select", count)
    endpoint = Endpoint(host="127.0.0.1", token=TOKEN)
    try:
        timed_out = pytest.raises(RefitError, match="of 1 receivers")
        with dial(endpoint.address, Deadline(1)), descriptors_left(0), timed_out:
            endpoint.accept(1, deadline=Deadline(0.5))
    finally:
        endpoint.close()
    # One every 10 ms at most.
    assert 1 < num_polls <= 52


def test_a_reply_that_has_arrived_is_read_before_a_new_connection_takes_its_place(monkeypatch):
    monkeypatch.setattr(endpoint_module, "MAX_PENDING", 1)
    monkeypatch.setattr(endpoint_module, "_REPLY_WITHIN_S", 0.0)
    endpoint = Endpoint(host="127.0.0.1", token=TOKEN)
    try:
        # Behind the first, so that its place is wanted at once.
        first = dial(endpoint.address, Deadline(PATIENCE_S))
        with dial(endpoint.address, Deadline(PATIENCE_S)), ThreadPoolExecutor(1) as pool:
            assert endpoint.admit() == {}
            shaking = pool.submit(
                connect, first, token=TOKEN, rank=0, deadline=Deadline(PATIENCE_S)
            )
            (served,) = endpoint._pending._pending
            assert select.select([served], [], [], PATIENCE_S)[0]
            admitted = endpoint.admit()
            assert list(admitted) == [0]
            admitted[0].close()
            shaking.result(PATIENCE_S).close()
    finally:
        endpoint.close()


def test_a_fork_that_closes_takes_nothing_from_its_parent():
    endpoint = Endpoint(host="127.0.0.1", token=TOKEN)
    try:
        sock = dial(endpoint.address, Deadline(PATIENCE_S))
        while not endpoint._pending._pending:
            assert endpoint.admit() == {}
        with process(lambda write: (endpoint.close(), os.write(write, b"+"))) as closed:
            assert os.read(closed, 1)
        with ThreadPoolExecutor(1) as pool:
            shaking = pool.submit(connect, sock, token=TOKEN, rank=0, deadline=Deadline(PATIENCE_S))
            endpoint.accept(1, deadline=Deadline(PATIENCE_S))[0].close()
            shaking.result(PATIENCE_S).close()
    finally:
        endpoint.close()


def test_a_link_in_place_of_a_directory_leads_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "lock").touch()
    (victim / "precious").write_text("kept")
    link = tmp_path / f"{PREFIX}planted"
    link.symlink_to(victim)
    inside = tmp_path / f"{PREFIX}mine"
    inside.mkdir(mode=0o700)
    (inside / "lock").symlink_to(victim / "lock")
    with PrivateDirectory(PREFIX) as made:
        assert made.path not in (link, inside)
    assert (victim / "precious").read_text() == "kept"
    assert (victim / "lock").exists()
    assert link.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_kept_out_by_the_directory_and_by_its_credentials():
    endpoint = Endpoint(host=None, token=TOKEN)
    path = Path(endpoint.address.removeprefix("unix:"))
    try:
        assert _as_another_user(path) == "PermissionError"
        # Were the modes wrong, the kernel still says who connects.
        path.parent.chmod(0o777)
        path.chmod(0o777)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(_as_another_user, path)
            with pytest.raises(RefitError, match="of 1 receivers"):
                endpoint.accept(1, deadline=Deadline(1))
            assert reading.result(PATIENCE_S) == "nothing"
    finally:
        endpoint.close()


def _as_another_user(path):
    """Return what a process of the user `nobody` reads from a socket, or its error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(PATIENCE_S)
                sock.connect(str(path))
                os.write(write, b"something" if sock.recv(100) else b"nothing")
        except OSError as error:
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as said:
        return said.read().decode()
