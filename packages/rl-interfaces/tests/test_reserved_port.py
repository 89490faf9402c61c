"""A port that is held for a listener that comes later."""

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from rl_interfaces.backend.runtime import ReservedPort

pytestmark = pytest.mark.needs("rl-interfaces[backend]")


def test_nobody_else_gets_the_port():
    with ReservedPort() as port:
        for host in ("", "127.0.0.1"):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((host, port.number))
        with ReservedPort() as another:
            assert another.number != port.number
    with socket.socket() as other:
        other.bind(("", port.number))


def test_a_store_listens_on_it():
    with ReservedPort() as port:
        limit = timedelta(seconds=10)
        store = dist.TCPStore("127.0.0.1", port.number, 1, is_master=True, timeout=limit)
        port.close()
        client = dist.TCPStore("127.0.0.1", port.number, 1, is_master=False, timeout=limit)
        store.set("key", "value")
        assert client.get("key") == b"value"
