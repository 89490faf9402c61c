"""The version of the contract, and the check that a backend is compatible with it."""

from __future__ import annotations

from typing import TypeGuard, cast

CONTRACT_VERSION = (1, 0)
"""Major and minor. A minor version adds calls or keys; a major version changes existing
ones."""


class ContractVersionError(ImportError, ValueError):
    """A backend implements a contract version that this rl-interfaces does not support.

    An ImportError because installing another version fixes it, and a ValueError because the config
    names the backend.
    """


def check_contract_version(backend: type, *, owner: str) -> None:
    """Raise unless `backend.contract_version` is compatible with `CONTRACT_VERSION`.

    Compatible: equal major versions, and a minor version that is not newer.

    Args:
        backend: A worker or an inference engine.
        owner: The package that provides it, for the message.

    Raises:
        ContractVersionError: The message names both versions, the package and what to upgrade.
    """
    theirs: object = getattr(backend, "contract_version", None)
    if not _is_version(theirs):
        raise ContractVersionError(
            f"{backend.__name__} of {owner} does not say which contract it was written for: "
            f"contract_version is {theirs!r}, where this rl-interfaces has {CONTRACT_VERSION}. "
            f"Upgrade {owner}, or give the class the version that it keeps"
        )
    if theirs[0] != CONTRACT_VERSION[0] or theirs[1] > CONTRACT_VERSION[1]:
        ours = _dotted(CONTRACT_VERSION)
        upgrade = "rl-interfaces" if theirs > CONTRACT_VERSION else owner
        raise ContractVersionError(
            f"{backend.__name__} of {owner} was written for version {_dotted(theirs)} of the "
            f"contract, and this rl-interfaces has version {ours}. Upgrade {upgrade}"
        )


def _is_version(value: object) -> TypeGuard[tuple[int, int]]:
    if not isinstance(value, tuple):
        return False
    parts = cast("tuple[object, ...]", value)
    return len(parts) == len(CONTRACT_VERSION) and all(type(part) is int for part in parts)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)
