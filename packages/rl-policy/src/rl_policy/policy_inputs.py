"""What a policy is built from, checked and made to mean the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_policy.generation.backends import WORKERS_OWN, installed_engines

if TYPE_CHECKING:
    from rl_interfaces import Cluster

PathLike = str | os.PathLike[str]
"""A path in a file system that every rank sees."""


def absolute(path: PathLike | None) -> str | None:
    """Return `path` as it is called in whatever directory a worker runs."""
    return None if path is None else os.path.abspath(path)


def existing(name: str, path: PathLike | None) -> str | None:
    """Return the absolute `path`, or raise a `ValueError` that names it if there is nothing."""
    if path is not None and not os.path.exists(path):
        raise ValueError(f"{name}={os.fspath(path)!r} does not exist")
    return absolute(path)


def with_absolute_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved config whose paths mean the same in whatever directory a worker runs."""
    paths = {"profile_dir": os.path.abspath(config["profile_dir"])}
    if os.path.isdir(config["model_name"]):
        paths["model_name"] = os.path.abspath(config["model_name"])
    lora = config["dtensor_cfg"]["lora"]
    if lora.get("adapter_path"):
        lora = lora | {"adapter_path": os.path.abspath(lora["adapter_path"])}
    return config | paths | {"dtensor_cfg": config["dtensor_cfg"] | {"lora": lora}}


def check_generation_backend(config: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless a resolved config generates with what is installed."""
    name = config["generation"]["backend"] if "generation" in config else WORKERS_OWN
    known = [WORKERS_OWN, *installed_engines()]
    if name not in known:
        raise ValueError(
            f"policy.generation.backend={name!r} is not installed: there are "
            f"{', '.join(map(repr, known))}, where {WORKERS_OWN!r} is the training worker's own "
            "sampler"
        )


def bundles_per_node(
    cluster: Cluster, workers_per_node: int | Sequence[int] | None
) -> list[int] | None:
    """Return how many bundles of each node to use; None for all of them."""
    if isinstance(workers_per_node, int):
        return [workers_per_node] * len(cluster.get_placement_groups())
    return None if workers_per_node is None else list(workers_per_node)
