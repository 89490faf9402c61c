"""Inference engines, found by entry point, as a third party's are."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from rl_policy.backends import BackendNotInstalledError, find_entry, load_entry

if TYPE_CHECKING:
    from rl_interfaces import GenerationInterface

ENTRY_POINT_GROUP = "rl_policy.generation"
WORKERS_OWN = "hf"
"""The `generation.backend` that is no engine: the training workers sample."""


def installed_engines() -> list[str]:
    """Return the names of the engines that installed packages register, sorted."""
    return sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})


def load_engine(name: str) -> type[GenerationInterface]:
    """Return the class that is registered under `name`.

    It is called as `VllmGeneration` is: with a cluster, a `GenerationConfig`, a tokenizer, a name
    for its processes, and `seed` and `timeout_s` by keyword.

    Raises:
        BackendNotInstalledError: No installed package registers it.
        ContractVersionError: It was written for another version of the contract.
        ValueError: Two packages register it.
    """
    entry = find_entry(ENTRY_POINT_GROUP, name)
    if entry is None:
        raise BackendNotInstalledError(
            f'The "{name}" generation backend is not installed. Install the package that registers '
            f'it in the entry-point group "{ENTRY_POINT_GROUP}" '
            f"(installed: {', '.join(installed_engines()) or 'none'})"
        )
    return load_entry(entry)
