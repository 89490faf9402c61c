"""Hugging Face model directories: finding and reading their files, and writing an export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.modeling_utils import _get_resolved_checkpoint_files

from rl_interfaces.backend.runtime import failing_together

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rl_interfaces.backend.engine import HfExport


def find_checkpoint(model_name: str, model_config: Any) -> list[str]:
    """Return the files of a model's weights, which transformers looks for and fetches.

    Raises:
        ValueError: There are none.
    """
    try:
        paths, _ = _get_resolved_checkpoint_files(
            pretrained_model_name_or_path=model_name,
            variant=None,
            gguf_file=None,
            use_safetensors=None,
            user_agent=None,
            is_remote_code=False,
            transformers_explicit_filename=getattr(model_config, "transformers_weights", None),
        )
    except OSError as error:
        raise ValueError(f"policy.model_name={model_name!r} has no weights: {error}") from error
    assert paths
    return paths


_BLOCK_BYTES = 64 * 2**20


class SafetensorsFiles:
    """The tensors of a few files by name. As a context, it closes the files that were read."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths: dict[str, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._open: dict[str, Any] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    self._paths[name] = path
                    self._shapes[name] = torch.Size(file.get_slice(name).get_shape())

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._paths)

    def shape(self, name: str) -> torch.Size:
        """Return the whole tensor's shape."""
        return self._shapes[name]

    def read(self, name: str, indices: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Return a tensor in its stored dtype, or of it what has `indices` in each dimension."""
        file = self._file_of(name)
        if indices is None or not indices:
            return file.get_tensor(name)
        if not all(len(index) for index in indices):
            # safetensors reads no empty slice.
            dtype = file.get_slice(name)[(slice(1),) * len(indices)].dtype
            return torch.empty([len(index) for index in indices], dtype=dtype)
        box = tuple(slice(int(index[0]), int(index[-1]) + 1) for index in indices)
        part = file.get_slice(name)[box]
        return take(part, [index - index[0] for index in indices])

    def equal(self, left: str, right: str) -> bool:
        """Return whether two tensors have the same shape and values, reading some rows a time."""
        if self.shape(left) != self.shape(right):
            return False
        rows, *others = self.shape(left)
        step = max(1, _BLOCK_BYTES // (4 * max(1, torch.Size(others).numel())))
        with self:
            for start in range(0, rows, step):
                block = slice(start, min(start + step, rows))
                one, other = (self._file_of(name).get_slice(name)[block] for name in (left, right))
                if not torch.equal(one, other):
                    return False
        return True

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def _file_of(self, name: str) -> Any:
        path = self._paths[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        return self._open[path]


def take(tensor: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what has `indices` in each dimension; a view where they follow each other."""
    for dim, index in enumerate(indices):
        length = len(index)
        if length == 0 or int(index[-1]) - int(index[0]) + 1 == length:
            start = int(index[0]) if length else 0
            tensor = tensor.narrow(dim, start, length)
        else:
            tensor = tensor.index_select(dim, index)
    return tensor


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
