"""How the bytes of a bucket get from a sender to its receivers: `base`, and one module for each."""

from __future__ import annotations

from importlib.metadata import entry_points

from rl_refit.transports.base import (
    Grant,
    ReceiverContext,
    ReceivingSide,
    SenderContext,
    SendingSide,
    Transport,
)

GROUP = "rl_refit.transports"

__all__ = [
    "Grant",
    "ReceiverContext",
    "ReceivingSide",
    "SenderContext",
    "SendingSide",
    "Transport",
    "find_transport",
]


def find_transport(name: str) -> Transport:
    """Return the transport registered under that name.

    Raises:
        ValueError: None is registered; the message lists those that are.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise ValueError(f"transport={name!r} is not among {sorted(found)}")
    return found[name].load()()
