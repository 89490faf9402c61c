"""Training and generation backends, found by entry point and never imported by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from rl_interfaces import PolicyConfig, WeightSendingWorker, check_contract_version

if TYPE_CHECKING:
    from rl_interfaces import GenerationInterface, PolicyWorker

ENTRY_POINT_GROUP = "rl_policy.workers"
"""Worker classes of training backends, by name."""
GENERATION_ENTRY_POINT_GROUP = "rl_policy.generation"
"""Engine classes, such as `VllmGeneration`, by name."""
WORKERS_OWN = "hf"
"""The `generation.backend` without an engine: the training workers sample."""
_SUFFIX = "_cfg"


class BackendNotInstalledError(ImportError, ValueError):
    """No installed package registers the backend that the config enables.

    An ImportError, as an installation is the remedy, and a ValueError, as the config is invalid.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBackend:
    """A training backend: its name and its worker class."""

    name: str
    worker_class: type[PolicyWorker]

    @classmethod
    def of_config(cls, config: Mapping[str, object]) -> TrainingBackend:
        """Return the backend that a `PolicyConfig` enables; see `enabled_backend` and `load`."""
        name = enabled_backend(config)
        return cls(name=name, worker_class=load(name))

    def require(self, capability: type, *, lack: str) -> None:
        """Raise `NotImplementedError` unless the backend has an optional capability.

        Args:
            capability: A protocol of `rl_interfaces`.
            lack: The message's verb phrase: "the backend does not ...".
        """
        wanted = [method for method in dir(capability) if not method.startswith("_")]
        missing = [method for method in wanted if not hasattr(self.worker_class, method)]
        if missing:
            raise NotImplementedError(
                f"the backend {self.name!r} does not {lack}: {self.worker_class.__name__} lacks "
                f"{', '.join(missing)} of rl_interfaces.{capability.__name__}"
            )

    def require_sending(self) -> None:
        """Raise `NotImplementedError` unless the backend sends weights to inference engines."""
        self.require(WeightSendingWorker, lack="hand its weights to inference engines")


def installed_backends() -> list[str]:
    """Return the names of the backends that installed packages register, sorted."""
    return _installed(ENTRY_POINT_GROUP)


def enabled_backend(config: Mapping[str, object], *, path: str = "policy") -> str:
    """Return the name of the backend whose section `<name>_cfg` has `enabled` true.

    Args:
        config: A `PolicyConfig`; an undocumented section is that of a third party's backend.
        path: Prefix of the keys in errors.

    Raises:
        ValueError: None is enabled, or more than one.
    """
    sections = {
        key: section
        for key, section in config.items()
        if key.endswith(_SUFFIX) and isinstance(section, Mapping)
    }
    enabled = [key for key, section in sections.items() if section.get("enabled")]
    if len(enabled) == 1:
        return enabled[0].removesuffix(_SUFFIX)
    if enabled:
        names = " and ".join(f"{path}.{key}.enabled=True" for key in enabled)
        raise ValueError(f"{names}: enable one backend")
    documented = [key for key in PolicyConfig.__annotations__ if key.endswith(_SUFFIX)]
    known = [*documented, *(key for key in sections if key not in documented)]
    names = " or ".join(f"{path}.{key}.enabled" for key in known)
    raise ValueError(f"no backend is enabled: set {names} to true")


def load(name: str) -> type[PolicyWorker]:
    """Return the worker class that is registered under `name`.

    Raises:
        BackendNotInstalledError: No installed package registers it; says how to install it.
        ContractVersionError: It was written for another version of the contract.
        ValueError: Two packages register it.
        Exception: Whatever the import of a broken backend raises.
    """
    return load_entry(_find_entry(ENTRY_POINT_GROUP, name))


def import_backend(name: str) -> None:
    """Import all that a rank of a backend needs; see `load` for errors.

    A backend's class alone is light, where its engine is found when the first is constructed.
    """
    from rl_interfaces.backend.worker import EngineWorker

    worker_class = load(name)
    if isinstance(worker_class, type) and issubclass(worker_class, EngineWorker):
        worker_class.find_engine()


def installed_engines() -> list[str]:
    """Return the names of the engines that installed packages register, sorted."""
    return _installed(GENERATION_ENTRY_POINT_GROUP)


def check_generation_backend(config: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless the generation backend of a resolved policy config is installed."""
    name = config["generation"]["backend"] if "generation" in config else WORKERS_OWN
    known = [WORKERS_OWN, *installed_engines()]
    if name not in known:
        raise ValueError(
            f"policy.generation.backend={name!r} is not installed: there are "
            f"{', '.join(map(repr, known))}, where {WORKERS_OWN!r} is the training worker's own "
            "sampler"
        )


def load_engine(name: str) -> type[GenerationInterface]:
    """Return the class that is registered under `name`.

    It is constructed like `VllmGeneration`: with a cluster, a `GenerationConfig`, a tokenizer, a
    name for its processes, and the keywords `seed` and `timeout_s`.

    Raises:
        BackendNotInstalledError: No installed package registers it.
        ContractVersionError: It was written for another version of the contract.
        ValueError: Two packages register it.
    """
    return load_entry(_find_entry(GENERATION_ENTRY_POINT_GROUP, name))


def load_entry(entry: EntryPoint) -> Any:
    """Return the class of an entry point, if its `contract_version` is compatible with ours.

    Raises:
        ContractVersionError: It is not; names both versions and what to upgrade.
        Exception: Whatever the import of a broken backend raises.
    """
    backend = entry.load()
    owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
    check_contract_version(backend, owner=owner)
    return backend


def _find_entry(group: str, name: str) -> EntryPoint:
    entries = list(entry_points(group=group, name=name))
    if not entries:
        is_ours = group == ENTRY_POINT_GROUP and name + _SUFFIX in PolicyConfig.__annotations__
        install = (
            f'Install it with: pip install "rl-policy[{name}]"'
            if is_ours
            else f'Install the package that registers it in the entry-point group "{group}"'
        )
        kind = "backend" if group == ENTRY_POINT_GROUP else "generation backend"
        raise BackendNotInstalledError(
            f'The "{name}" {kind} is not installed. {install} '
            f"(installed {kind}s: {', '.join(_installed(group)) or 'none'})"
        )
    if len({entry.value for entry in entries}) > 1:
        owners = ", ".join(
            f"{entry.dist.name if entry.dist else 'an unnamed package'} ({entry.value})"
            for entry in entries
        )
        raise ValueError(f"The {name!r} backend is registered more than once: {owners}")
    return entries[0]


def _installed(group: str) -> list[str]:
    return sorted({entry.name for entry in entry_points(group=group)})
