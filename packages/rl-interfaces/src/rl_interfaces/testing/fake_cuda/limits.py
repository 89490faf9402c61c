"""The numbers of a worker on the device, and the committed list of maxima that holds them.

The list is a TOML file that a person edits: one table per case, see `Numbers`. No code writes it:
a number that grows fails a test until it is brought down, or until somebody raises its maximum and
says why in the commit.

    [tp2_packed]
    launches_per_layer = 310
    syncs_per_layer = 0
    offloaded_bytes = 0
    peak_bytes = { logprobs = 349184, train_again = 532480 }
    syncs = { "rl_dtensor_worker/optim.py step (read)" = 2 }
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

if TYPE_CHECKING:
    from rl_interfaces.backend.fake.device import Figures

# Of a `train` call, whatever its size: the ranks' rows, the losses' counts, and the results.
_READS_PER_CALL = 3
_PEAKS = ("logprobs", "train_again", "generate")
_MOVES = (
    "offload_before_refit",
    "offload_after_refit",
    "prepare_for_lp_inference",
    "prepare_for_training",
)


class Numbers(TypedDict):
    """What is held of one case."""

    launches_per_layer: float
    """Kernels of a `train` call for each layer that this rank has, forward and backward."""
    syncs_per_layer: float
    """Waits of the host in a `train` call that each layer adds; the aim is 0."""
    offloaded_bytes: int
    """Bytes on the device after `offload_after_refit`; the aim is 0."""
    peak_bytes: dict[str, int]
    """The most bytes at one time, by phase of `run_life`."""
    syncs: dict[str, int]
    """Waits of the host in one `train` call, by source: file, function and kind."""


class MeasuredLife(Numbers):
    """The numbers of one case, and what a message about them shows."""

    num_passes: int
    """Micro-batches of `train_again`."""
    moves: list[str]
    """Waits of the host in the calls that move the model, see `moving_syncs`."""
    left: list[str]
    """What is on the device after `offload_after_refit`."""
    lines: list[str]
    """Waits of the host in `train_again`, by line."""


def numbers_of(phases: Mapping[str, Figures], deeper: Figures, *, added_layers: int) -> Numbers:
    """Return the numbers of one case.

    Args:
        phases: From `run_life`.
        deeper: The first `train` call of the same case with more layers.
        added_layers: The layers that this rank has more of there, times the micro-batches of that
            call.
    """
    train = phases["train"]
    places: Counter[str] = Counter()
    for sync, count in phases["train_again"].syncs.items():
        places[sync.place] += count
    return {
        "launches_per_layer": (deeper.launches - train.launches) / added_layers,
        "syncs_per_layer": (deeper.num_syncs - train.num_syncs) / added_layers,
        "offloaded_bytes": phases["offload_after_refit"].live_bytes,
        "peak_bytes": {name: phases[name].peak_bytes for name in _PEAKS},
        "syncs": dict(sorted(places.items())),
    }


def moving_syncs(phases: Mapping[str, Figures]) -> list[str]:
    """Return the waits of the host in the calls that move the model, once per wait.

    Each tensor that is moved by itself waits once: a list that grows with the model.
    """
    return [
        f"{name}: {sync}"
        for name in _MOVES
        for sync in sorted(phases[name].syncs.elements(), key=str)
    ]


def measured_life(
    phases: Mapping[str, Figures], deeper: Figures, *, added_layers: int, num_passes: int
) -> MeasuredLife:
    """Return what `problems` judges.

    Args:
        phases: From `run_life`.
        deeper: See `numbers_of`.
        added_layers: See `numbers_of`.
        num_passes: Micro-batches of `train_again`.
    """
    return {
        **numbers_of(phases, deeper, added_layers=added_layers),
        "num_passes": num_passes,
        "moves": moving_syncs(phases),
        "left": phases["offload_after_refit"].left,
        "lines": sorted(f"{count} {sync}" for sync, count in phases["train_again"].syncs.items()),
    }


def read_limits(path: Path) -> dict[str, Numbers]:
    """Return the maxima of every case.

    Raises:
        ValueError: A table lacks a key, or has another one.
    """
    limits = tomllib.loads(path.read_text())
    for case, maxima in limits.items():
        if set(maxima) != set(Numbers.__annotations__):
            raise ValueError(
                f"{path.name} [{case}]: keys {sorted(maxima)}, expected "
                f"{sorted(Numbers.__annotations__)}"
            )
    return cast("dict[str, Numbers]", limits)


def exceeded(case: str, found: Numbers, limits: Mapping[str, Numbers]) -> list[str]:
    """Return a sentence for each number that is above its maximum, or that has none."""
    if case not in limits:
        return [f"[{case}] is not in the list of maxima; found {found}"]
    maxima = limits[case]
    pairs: list[tuple[str, float, float | None]] = [
        ("launches_per_layer", found["launches_per_layer"], maxima["launches_per_layer"]),
        ("syncs_per_layer", found["syncs_per_layer"], maxima["syncs_per_layer"]),
        ("offloaded_bytes", found["offloaded_bytes"], maxima["offloaded_bytes"]),
    ]
    for name, count in found["peak_bytes"].items():
        pairs.append((f"peak_bytes.{name}", count, maxima["peak_bytes"].get(name)))
    for place, count in found["syncs"].items():
        # A place that the list does not name must not wait at all.
        pairs.append((f"syncs.{place!r}", count, maxima["syncs"].get(place, 0)))
    return [
        f"[{case}] {name} is {value:g}, its maximum {'missing' if limit is None else f'{limit:g}'}"
        for name, value, limit in pairs
        if limit is None or value > limit
    ]


def problems(
    case: str,
    found: MeasuredLife,
    limits: Mapping[str, Numbers],
    *,
    num_steps: int,
    most_moving_waits: int,
    has_aim: bool = True,
) -> list[str]:
    """Return a sentence for each number above its maximum, and for each one that misses the aim.

    The aim is that a `train` call waits once for each micro-batch and step and a few times in all,
    that no layer adds a wait, and that nothing stays on the device after an offload.

    Args:
        case: Its name in `limits`.
        found: From `measured_life`.
        limits: The maxima of every case.
        num_steps: Of `train_again`.
        most_moving_waits: The most waits of the four calls that move the model.
        has_aim: Whether waits are held by more than the maxima.
    """
    lines = exceeded(case, found, limits)
    waits = sum(found["syncs"].values())
    most = found["num_passes"] + num_steps + _READS_PER_CALL
    misses = waits > most or found["syncs_per_layer"] > 0
    if (misses and has_aim) or found["offloaded_bytes"]:
        lines.append(
            f"[{case}] {waits} waits in {num_steps} steps of {found['num_passes']} micro-batches, "
            f"at most {most}; {found['syncs_per_layer']:g} in a layer, none allowed; left after an "
            f"offload: {found['left']}; waits at: {found['lines']}"
        )
    if has_aim and len(found["moves"]) > most_moving_waits:
        lines.append(f"[{case}] moving waits {len(found['moves'])} times: {found['moves']}")
    return lines
