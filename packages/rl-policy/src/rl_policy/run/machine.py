"""What this machine has for a run: its devices, and the files of the model.

Looked at before anything starts, and without Ray, whose import takes longer than all of it.
"""

from __future__ import annotations

import os

import torch
from rl_interfaces.backend.checkpoint.hf_files import (
    SafetensorsFiles,
    find_checkpoint,
    load_model_config,
)
from transformers import PreTrainedConfig

from rl_policy.config import BUILTIN_MODEL, RunConfig, Settings
from rl_policy.ray.address import check_running_ray, find_running_ray

# Ranks without a GPU take turns on the cores; more than these only wait, each with a torch of its
# own in memory.
_RANKS_PER_CORE = 16


def check_devices(config: RunConfig) -> None:
    """Raise `ValueError` if a Ray that is started here could not hold the ranks.

    One that runs already has to answer. It may have any number of machines, and says itself what
    it lacks.
    """
    if find_running_ray() is not None:
        check_running_ray()
        return
    key, counts = "cluster.bundle_ct_per_node_list", config.cluster.bundle_ct_per_node_list
    strategy = config.cluster.placement_group_strategy
    if strategy == "STRICT_SPREAD" and max(counts) > 1:
        raise ValueError(
            f"cluster.placement_group_strategy='STRICT_SPREAD' needs a machine for each of the "
            f"{max(counts)} ranks of a node by {key}={counts}, and there is one"
        )
    asked = f"{key}={counts}"
    if config.has_engines and not config.is_colocated:
        counts = [*counts, *config.engine_bundles]
        asked = f"{asked} and policy.generation.colocated.resources ({config.engine_bundles})"
    num_gpus, num_cores = torch.cuda.device_count(), os.cpu_count() or 1
    uses_gpus = config.cluster.use_gpus
    if num_gpus > 0 if uses_gpus is None else uses_gpus:
        if sum(counts) > num_gpus:
            raise ValueError(
                f"{asked} ask for {sum(counts)} GPUs, and there are {num_gpus}: take fewer, set "
                "cluster.use_gpus=false, or set RAY_ADDRESS to a Ray that has them"
            )
    elif sum(counts) > _RANKS_PER_CORE * num_cores:
        raise ValueError(
            f"{asked} ask for {sum(counts)} ranks on {num_cores} cores, more than "
            f"{_RANKS_PER_CORE} for each: take fewer, or set RAY_ADDRESS to a Ray with more cores"
        )


def check_model_files(policy: Settings, *, key: str = "policy.model_name") -> None:
    """Raise `ValueError` unless a model's directory has weights that can be read to their end.

    Only headers and sizes are read. A model that is not a directory is left to the ranks, which
    download it.

    Args:
        policy: The complete section.
        key: The key that names the model.
    """
    name = policy["model_name"]
    if name == BUILTIN_MODEL or not os.path.isdir(name):
        return
    try:
        SafetensorsFiles(
            path for path in find_checkpoint(name, model_config(policy)) if _is_safe(path)
        )
    except (
        Exception
    ) as error:  # of safetensors, which has one class of its own, and of transformers
        raise ValueError(f"{key}={name!r} has weights that cannot be read: {error}") from error


def model_config(policy: Settings) -> PreTrainedConfig:
    """Return the transformers config of the model of a section `policy`, not one built here.

    Raises:
        ValueError: It cannot be found or read; names `policy.model_name`.
    """
    return load_model_config(policy["model_name"], trust_remote_code=policy["trust_remote_code"])


def _is_safe(path: str) -> bool:
    return path.endswith(".safetensors")
