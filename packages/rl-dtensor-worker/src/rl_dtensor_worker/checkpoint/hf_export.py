"""A directory for `from_pretrained`, written a file at a time.

No rank holds more than one file's tensors, besides the shards it has anyway.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rl_interfaces.backend.runtime.agreement import failing_together
from rl_refit.source import block_of
from safetensors.torch import save_file
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from rl_dtensor_worker.weights.source import ModelWeights

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Tensors = dict[str, torch.Tensor]

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


def write_hf_directory(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    max_file_bytes: int,
) -> None:
    """Write the model in float32 under the names that its checkpoint had, and what belongs to it.

    What adapters change is written as changed. Collective: every rank takes part in gathering, the
    first one writes.

    Raises:
        RuntimeError: The first rank could not write.
    """
    is_writer = dist.get_rank() == 0
    with failing_together():
        if is_writer:
            # Without tensors: the config, the generation config and the code of a remote model.
            model.save_pretrained(directory, state_dict={})
            _write_config(model, directory)
            tokenizer.save_pretrained(directory)
    device = next(model.parameters()).device
    weights = ModelWeights(model, wire_dtype=torch.float32, device=device)
    files = plan_files(model, weights, max_file_bytes=max_file_bytes)
    file_of: dict[str, str] = {}
    for index, groups in enumerate(files, start=1):
        several = f"model-{index:05d}-of-{len(files):05d}.safetensors"
        file_name = _SINGLE_FILE if len(files) == 1 else several
        tensors = _gather(model, weights, groups, keep=is_writer)
        file_of |= dict.fromkeys(tensors, file_name)
        with failing_together():
            if is_writer:
                save_file(tensors, directory / file_name, metadata={"format": "pt"})
    with failing_together():
        if is_writer and len(files) > 1:
            _write_index(directory, file_of, total_size=sum(_num_bytes(weights).values()))


def plan_files(
    model: nn.Module, weights: ModelWeights, *, max_file_bytes: int
) -> list[list[list[str]]]:
    """Return, for each file, the groups of tensors that go into it, in the order of the model.

    A group is what is converted together: a tensor, or a layer's where the model has conversions
    from other tensors than its own. A file has at least one.
    """
    num_bytes = _num_bytes(weights)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    conversions = getattr(model, "_weight_conversions", None) or []
    by_layer = any(isinstance(each, WeightConverter) for each in conversions)
    groups: dict[str, list[str]] = {}
    for name in num_bytes:
        if name not in ignored:
            groups.setdefault((by_layer and block_of(name)) or name, []).append(name)
    files: list[list[list[str]]] = []
    free = 0
    for group in groups.values():
        size = sum(num_bytes[name] for name in group)
        if not files or size > free:
            files.append([])
            free = max_file_bytes
        files[-1].append(group)
        free -= size
    return files


def _gather(
    model: nn.Module, weights: ModelWeights, groups: list[list[str]], *, keep: bool
) -> Tensors:
    """Return the tensors of a file on the CPU, where they are to be kept. Collective."""
    converted: Tensors = {}
    for group in groups:
        gathered: Tensors = {}
        for name, whole in weights.gather(group):
            if keep:
                gathered[name] = whole.cpu()
        if keep:
            converted |= revert_weight_conversion(model, gathered)  # type: ignore[arg-type]
    return {name: tensor.contiguous() for name, tensor in converted.items()}


def _write_index(directory: Path, file_of: dict[str, str], *, total_size: int) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
    (directory / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _write_config(model: PreTrainedModel, directory: Path) -> None:
    """Write the config again, with the dtype of what is exported instead of the model's."""
    config = copy.deepcopy(model.config)
    config.dtype = torch.float32
    config.save_pretrained(directory)


def _num_bytes(weights: ModelWeights) -> dict[str, int]:
    return {
        name: torch.Size(shape).numel() * dtype.itemsize
        for name, dtype, shape in weights.metadata()
    }
