"""The policy over Ray. The names below are imported when they are first used."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_policy.policy import PathLike, Policy
    from rl_policy.ray.cluster import RayVirtualCluster
    from rl_policy.ray.sharding import NamedSharding
    from rl_policy.ray.worker_group import RayWorkerGroup
    from rl_policy.trainers import (
        DistillationTrainer,
        DPOTrainer,
        GRPOTrainer,
        PPOTrainer,
        RecipeTrainer,
        RewardTrainer,
        SFTTrainer,
    )

__all__ = [
    "DPOTrainer",
    "DistillationTrainer",
    "GRPOTrainer",
    "NamedSharding",
    "PPOTrainer",
    "PathLike",
    "Policy",
    "RayVirtualCluster",
    "RayWorkerGroup",
    "RecipeTrainer",
    "RewardTrainer",
    "SFTTrainer",
]

_HOMES = {
    "DPOTrainer": "rl_policy.trainers",
    "DistillationTrainer": "rl_policy.trainers",
    "GRPOTrainer": "rl_policy.trainers",
    "NamedSharding": "rl_policy.ray.sharding",
    "PPOTrainer": "rl_policy.trainers",
    "PathLike": "rl_policy.policy",
    "Policy": "rl_policy.policy",
    "RayVirtualCluster": "rl_policy.ray.cluster",
    "RayWorkerGroup": "rl_policy.ray.worker_group",
    "RecipeTrainer": "rl_policy.trainers",
    "RewardTrainer": "rl_policy.trainers",
    "SFTTrainer": "rl_policy.trainers",
}

# Ray reads this when it is imported. Under `uv run` it would otherwise ship the working directory
# to its workers and build a second environment for them; ours run in the driver's environment.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
