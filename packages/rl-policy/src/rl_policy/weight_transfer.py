"""Who sends weights to whom, and what came of it; plain values, no Ray here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_refit.compat.handles import group_keys

_GIB = 2**30
_RATE = "refit_gb_per_s"


def receivers_per_rank(num_receivers: int, *, world_size: int, is_paired: bool) -> list[int]:
    """Return how many receivers each trainer rank sends to.

    Where every rank has a receiver on its own device, it sends to that one. Otherwise the first
    rank sends to all.

    Example: 2 receivers, 2 ranks, paired -> [1, 1]; not paired -> [2, 0]

    Args:
        num_receivers: Receivers in all.
        world_size: Trainer ranks.
        is_paired: Whether receiver `i` shares the device of rank `i`.

    Raises:
        ValueError: There is nobody to send to.
    """
    if num_receivers < 1:
        raise ValueError(f"num_receivers={num_receivers} must be positive")
    if is_paired and num_receivers == world_size:
        return [1] * world_size
    return [num_receivers, *[0] * (world_size - 1)]


def address_per_receiver(
    addresses: Sequence[Mapping[str, Any] | None], receivers: Sequence[int]
) -> list[Mapping[str, Any]]:
    """Return the sender's address for each receiver, in the order of the receivers.

    Args:
        addresses: Of each trainer rank, None where it has no receiver.
        receivers: What `receivers_per_rank` returned.
    """
    found: list[Mapping[str, Any]] = []
    for address, count in zip(addresses, receivers, strict=True):
        assert (address is None) == (count == 0), "a rank has an address if it has receivers"
        found += [address] * count if address is not None else []
    return found


def merge_reports(
    reports: Sequence[Mapping[str, float]], receivers: Sequence[int]
) -> dict[str, float]:
    """Return one refit's numbers over all trainer ranks.

    Seconds are those of the slowest sender. Bytes are those of the model, once.

    Args:
        reports: Of each trainer rank, see `rl_refit.RefitReport.as_metrics`.
        receivers: What `receivers_per_rank` returned; ranks that only gather are left out.
    """
    senders = [report for report, count in zip(reports, receivers, strict=True) if count]
    slowest = max(senders, key=lambda report: report["refit_s"])
    seconds = {
        name: max(report[name] for report in senders)
        for name in slowest
        if name.endswith("_s") and name != _RATE
    }
    return {
        **seconds,
        "refit_bytes": slowest["refit_bytes"],
        _RATE: slowest["refit_bytes"] / slowest["refit_s"] / 1e9,
        "refit_slowest_rank": slowest["refit_slowest_rank"],
    }


def group_for_ipc(
    answers: Sequence[tuple[Sequence[tuple[str, int]], float]], *, limit_gib: float | None
) -> list[list[str]]:
    """Return the names of the tensors in groups that fit a buffer, in order.

    Args:
        answers: Of each trainer rank: name and bytes of every tensor, and the free bytes there.
        limit_gib: The size of the buffer in GiB. None: the smallest free memory of any rank.

    Raises:
        ValueError: The limit is not positive.
    """
    if limit_gib is not None and limit_gib <= 0:
        raise ValueError(f"_refit_buffer_size_gb={limit_gib} must be positive")
    free = min(free for _, free in answers)
    limit = free if limit_gib is None else limit_gib * _GIB
    return group_keys(answers[0][0], int(limit))
