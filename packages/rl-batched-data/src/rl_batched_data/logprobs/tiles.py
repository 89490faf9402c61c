"""Tiles of logits, sliced from given logits or computed from hidden states.

Shapes: `N` positions, `V` this rank's vocabulary shard, `H` hidden size; `n` and `v` are the
positions and tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Protocol

import torch

GradientTile = Callable[[slice, slice], torch.Tensor]
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Row and column slices; every pair is a tile."""

    rows: list[slice]
    cols: list[slice]

    @classmethod
    def of_logits(cls, num_positions: int, vocab_size: int, chunk_logits: int) -> Tiling:
        """Return tiles of `chunk_logits` logits that are as wide as the vocabulary, if they can."""
        height = max(1, min(chunk_logits // vocab_size, num_positions))
        width = min(vocab_size, chunk_logits // height)
        return cls(rows=_slices(num_positions, height), cols=_slices(vocab_size, width))

    @classmethod
    def of_products(cls, num_positions: int, vocab_size: int, chunk_logits: int) -> Tiling:
        """Return tiles of `chunk_logits` logits that are about as wide as high."""
        height = max(1, min(isqrt(chunk_logits), num_positions))
        width = min(vocab_size, chunk_logits // height)
        return cls(rows=_slices(num_positions, height), cols=_slices(vocab_size, width))


class LogitSource(Protocol):
    """A source of logit tiles, with its backward pass."""

    tiling: Tiling
    makes_tiles: bool
    """Whether a tile costs a matrix product, and so is worth keeping for the backward pass."""

    def tile(self, rows: slice, cols: slice) -> torch.Tensor:
        """Return a tile of logits, float32, that may be overwritten."""
        ...

    def backward(self, gradient_tile: GradientTile, needed: tuple[bool, bool, bool]) -> Gradients:
        """Return the gradients of inputs, matrix and bias, where `needed`.

        Args:
            gradient_tile: Returns the gradient of the logits of a tile, given its place.
            needed: Whether each of the three is needed.
        """
        ...


class GivenLogits:
    """Logits that exist already."""

    makes_tiles = False

    def __init__(self, logits_NV: torch.Tensor, chunk_logits: int) -> None:
        self.logits_NV = logits_NV
        num_positions, vocab_size = logits_NV.shape
        self.tiling = Tiling.of_logits(num_positions, vocab_size, chunk_logits)

    def tile(self, rows: slice, cols: slice) -> torch.Tensor:
        """Return a copy of a tile, in float32."""
        return self.logits_NV[rows, cols].to(torch.float32, copy=True)

    def backward(self, gradient_tile: GradientTile, needed: tuple[bool, bool, bool]) -> Gradients:
        """Return the gradient of the logits, in their dtype."""
        if not needed[0]:
            return None, None, None
        grad_NV = torch.empty_like(self.logits_NV)
        for rows in self.tiling.rows:
            for cols in self.tiling.cols:
                grad_NV[rows, cols] = gradient_tile(rows, cols)
        return grad_NV, None, None


class OutputHead:
    """Logits as products of hidden states and an output matrix, accumulated in float32."""

    makes_tiles = True

    def __init__(
        self,
        hidden_NH: torch.Tensor,
        matrix_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        chunk_logits: int,
    ) -> None:
        self.hidden_NH, self.matrix_VH, self.bias_V = hidden_NH, matrix_VH, bias_V
        self.tiling = Tiling.of_products(len(hidden_NH), len(matrix_VH), chunk_logits)

    def tile(self, rows: slice, cols: slice) -> torch.Tensor:
        """Return a tile of products, in float32."""
        raw_nv = _product(self.hidden_NH[rows], self.matrix_VH[cols].T)
        return raw_nv if self.bias_V is None else raw_nv.add_(self.bias_V[cols])

    def backward(self, gradient_tile: GradientTile, needed: tuple[bool, bool, bool]) -> Gradients:
        """Return the gradients, each in the dtype of its tensor.

        The vocabulary is the outer loop, so that each slice of the matrix gradient is accumulated
        in float32 once. Tiles run in reverse: the last one may be kept, and is freed first.
        """
        hidden, matrix, bias = self.hidden_NH, self.matrix_VH, self.bias_V
        grad_NH = torch.zeros_like(hidden, dtype=torch.float32) if needed[0] else None
        grad_VH = torch.empty_like(matrix) if needed[1] else None
        grad_V = torch.empty_like(bias) if needed[2] and bias is not None else None
        for cols in reversed(self.tiling.cols):
            grad_vH = torch.zeros_like(matrix[cols], dtype=torch.float32)
            grad_v = torch.zeros(len(grad_vH), device=matrix.device)
            for rows in reversed(self.tiling.rows):
                grad_nv = gradient_tile(rows, cols)
                if grad_V is not None:
                    grad_v += grad_nv.sum(0)
                # Tensor cores take both factors in the matrix's dtype.
                grad_nv = grad_nv.to(matrix.dtype) if grad_nv.is_cuda else grad_nv
                if grad_NH is not None:
                    _add_product(grad_NH[rows], grad_nv, matrix[cols])
                if grad_VH is not None:
                    _add_product(grad_vH, grad_nv.T, hidden[rows])
            if grad_VH is not None:
                grad_VH[cols] = grad_vH
            if grad_V is not None:
                grad_V[cols] = grad_v
        return None if grad_NH is None else grad_NH.to(hidden.dtype), grad_VH, grad_V


def _slices(size: int, step: int) -> list[slice]:
    return [slice(low, min(low + step, size)) for low in range(0, size, step)]


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if right.dtype == torch.float32:
        total.addmm_(left, right)
    elif right.is_cuda:
        total.add_(torch.mm(left, right, out_dtype=torch.float32))
    else:
        total.addmm_(left, right.float())
