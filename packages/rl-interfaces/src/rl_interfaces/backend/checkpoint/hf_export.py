"""A directory for `from_pretrained`, written a file at a time.

No rank holds more than one file's tensors, besides the shards that it has anyway.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rl_interfaces.backend.runtime.agreement import failing_together

if TYPE_CHECKING:
    from rl_interfaces.backend.engine import HfExport

Tensors = dict[str, torch.Tensor]

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


def write_hf_directory(
    export: HfExport, tokenizer: Any, directory: Path, *, max_file_bytes: int
) -> None:
    """Write config, tokenizer and weights. Collective; the first rank writes.

    Args:
        export: The weights, and what else belongs to the model.
        tokenizer: A tokenizer of transformers.
        directory: An empty directory that all ranks name alike.
        max_file_bytes: A larger model is written as several files of at most this size, though
            each holds at least one group of `export`.

    Raises:
        RuntimeError: The first rank could not write.
    """
    is_writer = dist.get_rank() == 0
    with failing_together():
        if is_writer:
            export.write_config(directory)
            tokenizer.save_pretrained(directory)
    num_bytes = {
        name: torch.Size(shape).numel() * dtype.itemsize
        for name, dtype, shape in export.source.metadata()
    }
    groups = export.groups if export.groups is not None else [[name] for name in num_bytes]
    files = plan_files(groups, num_bytes, max_file_bytes=max_file_bytes)
    file_of: dict[str, str] = {}
    for index, names in enumerate(files, start=1):
        several = f"model-{index:05d}-of-{len(files):05d}.safetensors"
        file_name = _SINGLE_FILE if len(files) == 1 else several
        tensors = _gather(export, names, keep=is_writer)
        file_of |= dict.fromkeys(tensors, file_name)
        with failing_together():
            if is_writer:
                save_file(tensors, directory / file_name, metadata={"format": "pt"})
    with failing_together():
        if is_writer and len(files) > 1:
            metadata = {"total_size": sum(num_bytes.values())}
            text = json.dumps({"metadata": metadata, "weight_map": file_of}, indent=2)
            (directory / _INDEX_FILE).write_text(f"{text}\n")


def plan_files(
    groups: Sequence[Sequence[str]], num_bytes: dict[str, int], *, max_file_bytes: int
) -> list[list[Sequence[str]]]:
    """Return the groups of tensors that go into each file, in their order.

    Example: groups of 3, 4 and 5 bytes, max_file_bytes=8 -> [[3, 4], [5]]
    """
    files: list[list[Sequence[str]]] = []
    free = 0
    for group in groups:
        size = sum(num_bytes[name] for name in group)
        if not files or size > free:
            files.append([])
            free = max_file_bytes
        files[-1].append(group)
        free -= size
    return files


def _gather(export: HfExport, groups: Sequence[Sequence[str]], *, keep: bool) -> Tensors:
    """Return the tensors of a file on the CPU, on the rank that keeps them. Collective."""
    converted: Tensors = {}
    for group in groups:
        gathered: Tensors = {}
        for name, tensor in export.source.gather(group):
            if keep:
                gathered[name] = tensor.cpu()
        if keep:
            converted |= gathered if export.convert is None else export.convert(gathered)
    return {name: tensor.contiguous() for name, tensor in converted.items()}
