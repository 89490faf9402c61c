"""Tensors in safetensors files, read in the slices that a rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
