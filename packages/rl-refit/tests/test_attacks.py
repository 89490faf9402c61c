"""A sender's control socket under attack: its own receivers are served within the limit."""

import os
import resource
import secrets
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from rl_refit import AuthenticationError, RefitError
from rl_refit.private_directory import PrivateDirectory
from rl_refit.protocol.endpoint import (
    MAGIC,
    MOST_GUESTS,
    NONCE_BYTES,
    PREFIX,
    Endpoint,
    connect,
    dial,
)
from rl_refit.protocol.waiting import Deadline
from rl_refit.testing.pair import LIMIT_S, RefitPair, World, some_tensors

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
    """Begin as if a frame of the greatest length followed, 2^63 where it is read as 8 bytes."""
    with dial(endpoint, Deadline(1)) as sock:
        sock.sendall(struct.pack("!Q", 1 << 63) + b"\xff" * 8)
        sock.settimeout(0.2)
        sock.recv(100)


def send_slowly(endpoint):
    """Send a reply one byte at a time, and stop before its end."""
    with dial(endpoint, Deadline(1)) as sock:
        for _ in range(20):
            sock.sendall(b"\0")
            time.sleep(0.01)


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
    """Repeat an attack in a thread, from before this block until its end; yield the outcomes."""
    ended = threading.Event()
    started = threading.Event()
    outcomes = []

    def run():
        while not ended.is_set():
            try:
                attack(endpoint)
            except (OSError, RefitError) as error:
                # The sender hangs up on it, or does not listen to anybody for a while.
                outcomes.append(error)
            else:
                outcomes.append(None)
            started.set()
            time.sleep(0.005)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait(5)
    try:
        yield outcomes
    finally:
        ended.set()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@TRANSPORTS
def test_refits_go_on_under_attack(world, attack):
    with repeated(attack, endpoint_of(world)) as outcomes:
        for version in (1, 2):
            world.good_refit(version)
    assert outcomes
    world.good_refit(3)


@TRANSPORTS
def test_a_thousand_silent_connections_keep_no_receiver_out(world):
    with ExitStack() as stack, repeated(hang_up, endpoint_of(world)):
        silent = []

        def crowd():
            for _ in range(1000):
                try:
                    sock = dial(endpoint_of(world), Deadline(LIMIT_S))
                except RefitError:
                    return
                silent.append(stack.enter_context(sock))

        # The backlog is shorter than the crowd, which is let in while the sender waits.
        thread = threading.Thread(target=crowd, daemon=True)
        thread.start()
        world.good_refit(1)
        world.good_refit(2)
        world.sender.close()
        thread.join(LIMIT_S)
        assert silent


def test_a_crowd_is_bounded_and_its_oldest_are_closed_first():
    endpoint = Endpoint(host="127.0.0.1", token=TOKEN)
    before = len(os.listdir("/proc/self/fd"))
    most = []
    with ExitStack() as stack:
        stack.callback(endpoint.close)

        def knock():
            crowd = [stack.enter_context(dial(endpoint.address, Deadline(5))) for _ in range(300)]
            most.append(len(os.listdir("/proc/self/fd")) - before - len(crowd))
            # The first has been closed after its greeting, as its place was needed.
            crowd[0].settimeout(5)
            while crowd[0].recv(100):
                pass
            sock = dial(endpoint.address, Deadline(5))
            stack.callback(connect(sock, token=TOKEN, rank=0, deadline=Deadline(5)).close)

        thread = threading.Thread(target=knock, daemon=True)
        thread.start()
        served = endpoint.accept(1, deadline=Deadline(20))
        thread.join(20)
        assert list(served) == [0]
        served[0].close()
    assert most
    # The guests, and a connection that is being accepted.
    assert most[0] <= MOST_GUESTS + 1
    assert len(os.listdir("/proc/self/fd")) <= before


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
            with client, socket.create_connection((host, int(port)), 5) as server:
                client.sendall(server.recv(len(MAGIC) + NONCE_BYTES))
                recorded.extend(client.recv(REPLY_BYTES, socket.MSG_WAITALL))
                server.sendall(recorded)
                client.sendall(server.recv(32))

        def be_a_receiver():
            address = f"tcp:127.0.0.1:{proxy.getsockname()[1]}"
            sock = dial(address, Deadline(5))
            connect(sock, token=TOKEN, rank=0, deadline=Deadline(5)).close()

        threads = [threading.Thread(target=run, daemon=True) for run in (record, be_a_receiver)]
        for thread in threads:
            thread.start()
        endpoint.accept(1, deadline=Deadline(5))[0].close()
        for thread in threads:
            thread.join(5)
        assert len(recorded) == REPLY_BYTES

        replay = stack.enter_context(socket.create_connection((host, int(port)), 5))
        replay.sendall(recorded)
        with pytest.raises(RefitError, match=r"\[\] of 1 receivers"):
            endpoint.accept(1, deadline=Deadline(0.5))
        replay.settimeout(1)
        answer = replay.recv(200, socket.MSG_WAITALL)
        # Nothing but a greeting: the nonce is another, and with it the proof that is due.
        assert len(answer) == len(MAGIC) + NONCE_BYTES


def test_exhausted_descriptors_end_with_the_crowd_that_holds_them():
    """The server has no descriptor left: it closes silent guests to let the receiver in."""
    endpoint = Endpoint(host="127.0.0.1", token=TOKEN)
    server_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The attackers are another process, so that only the server's descriptors run out.
    read, write = os.pipe()
    crowd = os.fork()
    if crowd == 0:
        _crowd(endpoint.address, write)
    os.close(write)
    try:
        assert os.read(read, 1) == b"k"
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, server_limit[1]))
        started = time.process_time()
        served = endpoint.accept(1, deadline=Deadline(20))
        assert list(served) == [0]
        served[0].close()
        assert os.read(read, 1) == b"r"
        assert time.process_time() - started < 5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, server_limit)
        endpoint.close()
        os.close(read)
        os.kill(crowd, 9)
        os.waitpid(crowd, 0)


def _crowd(address, write):
    """Hold silent connections, then connect as a receiver; never return."""
    try:
        silent = [dial(address, Deadline(5)) for _ in range(60)]
        os.write(write, b"k")
        sock = dial(address, Deadline(5))
        connect(sock, token=TOKEN, rank=0, deadline=Deadline(20))
        os.write(write, b"r")
        time.sleep(60)
        assert silent
    finally:
        os._exit(1)


def test_without_descriptors_and_guests_waiting_takes_no_processor_time():
    endpoint = Endpoint(host="127.0.0.1", token=TOKEN)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(endpoint.close)
        stack.enter_context(dial(endpoint.address, Deadline(1)))
        taken = [os.dup(0) for _ in range(4)]
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, limit[1]))
        try:
            held = []
            while True:
                try:
                    held.append(os.dup(0))
                except OSError:
                    break
            started = time.process_time()
            with pytest.raises(RefitError, match="of 1 receivers"):
                endpoint.accept(1, deadline=Deadline(1))
            assert time.process_time() - started < 0.5
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            for descriptor in taken + held:
                os.close(descriptor)
        assert used


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
        with pytest.raises(RefitError, match="of 1 receivers"):
            accept_beside(endpoint, lambda: seen.append(_as_another_user(path)), seen := [])
        assert seen == ["nothing"]
    finally:
        endpoint.close()


def accept_beside(endpoint, call, seen):
    """Wait for a receiver for a second while `call` runs in a thread."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        endpoint.accept(1, deadline=Deadline(1))
    finally:
        thread.join(10)
        assert seen


def _as_another_user(path):
    """Return what a process of the user `nobody` reads from a socket, or its error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(5)
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
