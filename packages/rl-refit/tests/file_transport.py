"""A third party's transport: one file per sender, mapped at both ends."""

import mmap
import os
from pathlib import Path

import torch
from rl_refit.transports import ReceivingSide, SendingSide, Transport

NAME = "buffers"


def map_buffers(path, context, flags, access):
    """Return the file's memory, and the buffers in it."""
    descriptor = os.open(path, flags, 0o600)
    try:
        size = max(1, context.num_buffers * context.buffer_bytes)
        if flags & os.O_CREAT:
            os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size, access=access)
    finally:
        os.close(descriptor)
    memory_view = torch.frombuffer(memory, dtype=torch.uint8)
    starts = [index * context.buffer_bytes for index in range(context.num_buffers)]
    return [memory_view[start : start + context.buffer_bytes] for start in starts]


class FileSender(SendingSide):
    def __init__(self, context):
        self.path = context.directory / NAME
        self.buffers = map_buffers(
            self.path, context, os.O_RDWR | os.O_CREAT | os.O_EXCL, mmap.ACCESS_WRITE
        )

    def grant(self, rank):
        return {"path": str(self.path)}, []

    def close(self):
        self.buffers = []
        self.path.unlink(missing_ok=True)


class FileReceiver(ReceivingSide):
    def __init__(self, context):
        # Copied on writing, as torch has no memory that is only for reading.
        path = Path(context.grant["path"])
        self.buffers = map_buffers(path, context, os.O_RDONLY, mmap.ACCESS_COPY)

    def fetch(self, bucket, nbytes, deadline):
        return self.buffers[bucket % len(self.buffers)][:nbytes]

    def close(self):
        self.buffers = []


class FileTransport(Transport):
    def open_sender(self, context):
        return FileSender(context)

    def open_receiver(self, context):
        return FileReceiver(context)
