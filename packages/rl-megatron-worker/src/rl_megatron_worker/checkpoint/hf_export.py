"""A directory for `from_pretrained`, written a file at a time.

No rank holds more than one file's tensors and two layers, besides the shards it has anyway.
"""

from __future__ import annotations

import copy
import json
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_interfaces.backend.runtime.agreement import failing_together
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from rl_megatron_worker.weights import MegatronWeights, WeightMeta

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


def write_hf_directory(
    weights: MegatronWeights,
    hf_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    generation_config: GenerationConfig | None = None,
    max_file_bytes: int,
) -> None:
    """Write the model under the names and with the config of its checkpoint, and its tokenizer.

    Collective: every rank takes part in gathering, the first one writes.

    Args:
        weights: The tensors; their wire dtype, one for all, is that of the files.
        hf_config: The config the model was built from.
        tokenizer: Written beside it.
        directory: It exists.
        generation_config: Written beside it where there is one.
        max_file_bytes: Of one file, where a tensor is not larger.

    Raises:
        RuntimeError: The first rank could not write.
    """
    is_writer = dist.get_rank() == 0
    metadata = weights.metadata()
    with failing_together():
        if is_writer:
            _write_configs(metadata, hf_config, generation_config, directory)
            tokenizer.save_pretrained(directory)
    files = plan_files(metadata, max_file_bytes=max_file_bytes)
    for file_name, names in files.items():
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in weights.gather(names):
            if is_writer:
                tensors[name] = tensor.cpu()
        with failing_together():
            if is_writer:
                save_file(tensors, directory / file_name, metadata={"format": "pt"})
    with failing_together():
        if is_writer and len(files) > 1:
            _write_index(directory, files, total_size=sum(map(_num_bytes, metadata)))


def plan_files(metadata: list[WeightMeta], *, max_file_bytes: int) -> dict[str, list[str]]:
    """Return the names of the tensors of each file, in their order; a file has at least one."""
    files: list[list[str]] = []
    free = 0
    for meta in metadata:
        size = _num_bytes(meta)
        if not files or size > free:
            files.append([])
            free = max_file_bytes
        files[-1].append(meta.name)
        free -= size
    if len(files) == 1:
        return {_SINGLE_FILE: files[0]}
    return {
        f"model-{index:05d}-of-{len(files):05d}.safetensors": names
        for index, names in enumerate(files, start=1)
    }


def _write_configs(
    metadata: list[WeightMeta],
    hf_config: Any,
    generation_config: GenerationConfig | None,
    directory: Path,
) -> None:
    (dtype,) = {meta.dtype for meta in metadata}
    written = copy.deepcopy(hf_config)
    written.dtype = dtype
    written.save_pretrained(directory)
    if generation_config is not None:
        generation_config.save_pretrained(directory)


def _write_index(directory: Path, files: dict[str, list[str]], *, total_size: int) -> None:
    file_of = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
    (directory / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _num_bytes(meta: WeightMeta) -> int:
    return math.prod(meta.shape) * meta.dtype.itemsize
