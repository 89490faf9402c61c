"""What fails on one rank fails on all, so that none waits for a rank that has left."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_MAX_BYTES = 1024

Result = TypeVar("Result")


@contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Generator[None, None, None]:
    """Run the body on every rank; what it raises on any is raised on all. Collective.

    The body itself may only call collectives if it fails on all ranks alike.

    Raises:
        RuntimeError: The body raised on other ranks, and not on this one.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failures = _share(f"{type(error).__name__}: {error}" if error is not None else "", group)
    if error is not None:
        raise error
    for rank, text in enumerate(failures):
        if text:
            raise RuntimeError(f"rank {rank} failed: {text}")


def first_rank_first(function: Callable[[], Result]) -> Result:
    """Return `function()` of this rank; the first rank calls it before all others. Collective.

    For what leaves files behind that the others find.
    """
    with failing_together():
        result = function() if dist.get_rank() == 0 else None
    with failing_together():
        return function() if result is None else result


def _share(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Return every rank's text, as much of it as fits."""
    on_cpu = "cpu:" in str(dist.get_backend_config(group))
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    encoded = text.encode()[:_MAX_BYTES]
    own = torch.zeros(_MAX_BYTES, dtype=torch.uint8)
    own[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    texts = [
        torch.empty(_MAX_BYTES, dtype=torch.uint8, device=device)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(texts, own.to(device), group=group)
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in texts]
