"""What stands in for the functions of `torch.cuda` that ask a driver."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.backend.fake.device import active

if TYPE_CHECKING:
    from rl_interfaces.backend.fake.device import FakeDevice

NUM_DEVICES = 8
_TOTAL_BYTES = 80 * 2**30


def waits(*_: object, **__: object) -> None:
    """Count a wait of the host."""
    for device in active:
        device.synchronised("synchronize")


class Stream:
    """A stream on which everything is done at once; waiting for it is counted."""

    device = torch.device("cuda", 0)
    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Return: the other stream has done everything."""

    def wait_event(self, event: object) -> None:
        """Return: the event has happened."""

    def is_capturing(self) -> bool:
        """Return False: nothing is captured into a graph."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that has happened."""
        return event or Event()

    def query(self) -> bool:
        """Return that everything is done."""
        return True

    def synchronize(self) -> None:
        """Count a wait of the host."""
        waits()


class Event:
    """An event that has happened; waiting for it on the host is counted."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        """Return: it has happened."""

    def wait(self, *_: object) -> None:
        """Return: it has happened, and only a stream would wait."""

    def query(self) -> bool:
        """Return that it has happened."""
        return True

    def synchronize(self) -> None:
        """Count a wait of the host."""
        waits()

    def elapsed_time(self, _: object) -> float:
        """Return no time."""
        return 0.0


_PROPERTIES = SimpleNamespace(
    uuid="0" * 8,
    name="fake",
    major=9,
    minor=0,
    total_memory=_TOTAL_BYTES,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)


def _nothing(*_: object, **__: object) -> None:
    pass


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


@contextmanager
def _entered(value: Any = None) -> Generator[Any, None, None]:
    yield value


def surface(device: FakeDevice) -> dict[str, Any]:
    """Return the attributes of `torch.cuda`, by name; memory figures are those of `device`."""
    return {
        "is_available": _always(True),
        "is_initialized": _always(True),
        "_lazy_init": _nothing,
        "device_count": _always(NUM_DEVICES),
        "current_device": _always(0),
        "set_device": _nothing,
        "device": _entered,
        "Stream": Stream,
        "Event": Event,
        "stream": _entered,
        "current_stream": Stream,
        "default_stream": Stream,
        "synchronize": waits,
        # Freeing memory synchronises the device.
        "empty_cache": waits,
        "memory_allocated": lambda *_: device.live_bytes,
        "memory_reserved": lambda *_: device.live_bytes,
        "max_memory_allocated": lambda *_: device.peak_bytes,
        "max_memory_reserved": lambda *_: device.peak_bytes,
        "reset_peak_memory_stats": lambda *_: device.reset_peak(),
        "mem_get_info": lambda *_: (_TOTAL_BYTES - device.live_bytes, _TOTAL_BYTES),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": _nothing,
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "initial_seed": _always(0),
        "default_generators": tuple(torch.Generator() for _ in range(NUM_DEVICES)),
        "get_device_properties": _always(_PROPERTIES),
        "get_device_capability": _always((9, 0)),
        "get_device_name": _always("fake"),
        "is_bf16_supported": _always(True),
        "is_current_stream_capturing": _always(False),
    }
