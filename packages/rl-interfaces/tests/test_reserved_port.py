"""A port that is held for a listener that comes later."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_S
from rl_interfaces.backend.runtime import RankEnvironment, ReservedPort, init_process_group

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
        limit = timedelta(seconds=PATIENCE_S)
        store = dist.TCPStore("127.0.0.1", port.number, 1, is_master=True, timeout=limit)
        port.close()
        client = dist.TCPStore("127.0.0.1", port.number, 1, is_master=False, timeout=limit)
        store.set("key", "value")
        assert client.get("key") == b"value"


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        environment = RankEnvironment(
            rank=0, world_size=1, local_rank=0, device=torch.device("cpu")
        )
        with pytest.raises(OSError, match=f"rank 0 cannot listen on MASTER_PORT={port}: Address"):
            init_process_group(environment, timeout_s=10)
