"""safetensors files in a private directory: slow, and obviously right."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec
import torch

from rl_refit.protocol.waiting import Deadline
from rl_refit.transports import (
    Grant,
    ReceiverContext,
    ReceivingSide,
    SenderContext,
    SendingSide,
    Transport,
)

_KEY = "bucket"


class _Entry(msgspec.Struct):
    """A tensor in a safetensors header; `data_offsets` are `(start, end)` in bytes."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class GoldenTransport(Transport):
    """One file per buffer, rewritten for every bucket. The others are tested against it."""

    survives_loss = True

    def open_sender(self, context: SenderContext) -> SendingSide:
        """Return buffers in this process's memory, and a file for each."""
        return _GoldenSender(context)

    def open_receiver(self, context: ReceiverContext) -> ReceivingSide:
        """Return the sender's files, read as they are announced."""
        return _GoldenReceiver(context)


class _GoldenSender(SendingSide):
    def __init__(self, context: SenderContext) -> None:
        self.buffers = context.buffers_of(torch.zeros(context.memory_bytes, dtype=torch.uint8))
        assert context.directory is not None
        self._directory = context.directory

    def grant(self, rank: int) -> tuple[Grant, list[int]]:
        return {"directory": str(self._directory)}, []

    def publish(self, bucket: int, nbytes: int, deadline: Deadline) -> None:
        index = bucket % len(self.buffers)
        _write(_path(self._directory, index), self.buffers[index][:nbytes])

    def close(self) -> None:
        for index in range(len(self.buffers)):
            _path(self._directory, index).unlink(missing_ok=True)
        self.buffers = []


class _GoldenReceiver(ReceivingSide):
    def __init__(self, context: ReceiverContext) -> None:
        self._directory = Path(str(context.grant["directory"]))
        self._num_buffers = context.num_buffers

    def fetch(self, bucket: int, nbytes: int, deadline: Deadline) -> torch.Tensor:
        path = _path(self._directory, bucket % self._num_buffers)
        data = _read(path)
        if len(data) != nbytes:
            raise ValueError(f"{path.name} has {len(data)} bytes, {nbytes} were announced")
        return data


def _write(path: Path, data: torch.Tensor) -> None:
    """Write bytes (`[size]`, uint8) as a safetensors file that only this user can read (0600)."""
    header = msgspec.json.encode({_KEY: _Entry("U8", list(data.shape), (0, data.nbytes))})
    # The format pads its header with spaces to a multiple of 8 bytes.
    header += b" " * (-len(header) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(data.numpy().data)


def _read(path: Path) -> torch.Tensor:
    """Return the bytes of a file of `_write`.

    Raises:
        ValueError: The file is incomplete.
        msgspec.MsgspecError: Its header is not that of a safetensors file.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entry = msgspec.json.decode(file.read(length), type=dict[str, _Entry])[_KEY]
        data = bytearray(file.read())
    if entry.dtype != "U8" or entry.data_offsets != (0, len(data)):
        raise ValueError(f"{path.name} has {len(data)} bytes and the header {entry}")
    # torch refuses an empty buffer, as of a bucket with nothing but empty tensors.
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _path(directory: Path, index: int) -> Path:
    return directory / f"buffer-{index}.safetensors"
