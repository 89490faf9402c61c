"""Right padding: rounding lengths up, widening tensors, and telling left padding apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def check_positive(name: str, value: int) -> None:
    """Raise a `ValueError` that names `name`, unless `value` is at least 1."""
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def pad_right(tensor: torch.Tensor, length: int, *, dim: int = 1, value: float = 0) -> torch.Tensor:
    """Return `tensor` with `dim` widened to `length` by `value`; itself when it is that long.

    Raises:
        ValueError: `dim` is longer than `length` already.
    """
    missing = length - tensor.shape[dim]
    if missing < 0:
        raise ValueError(f"dim {dim} has size {tensor.shape[dim]}, longer than length={length}")
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, value)], dim=dim)


def verify_right_padding(data: Mapping[str, Any], *, pad_token_id: int | None = None) -> None:
    """Raise unless every row of `input_ids` is padded on the right, as `input_lengths` says.

    A row may be filled up with any constant. With `pad_token_id`, a row that starts with it but is
    filled up with something else is taken to be padded on the left.

    Args:
        data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any integers.
        pad_token_id: The tokenizer's padding token.

    Raises:
        ValueError: Names the key, the first offending row and its numbers.
    """
    input_ids, lengths = _ids_and_lengths(data)
    num_rows, width = input_ids.shape
    outside = (lengths < 1) | (lengths > width)
    if outside.any():
        row = _first(outside)
        raise ValueError(
            f"'input_lengths'[{row}]={int(lengths[row])} is not within 1..{width}, "
            f"the width of 'input_ids'"
        )
    if num_rows == 0:
        return
    in_tail = torch.arange(width, device=lengths.device) >= lengths[:, None]
    uneven = ((input_ids != input_ids[:, -1:]) & in_tail).any(dim=1)
    if pad_token_id is not None:
        fill_differs = (input_ids[:, -1] != pad_token_id) & (lengths < width)
        uneven |= (input_ids[:, 0] == pad_token_id) & fill_differs
    if uneven.any():
        row = _first(uneven)
        raise ValueError(
            f"'input_ids'[{row}] is not right-padded: 'input_lengths'[{row}]={int(lengths[row])} "
            f"of {width}, and what follows is not padding (pad on the right, not on the left)"
        )


def _ids_and_lengths(data: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    for key, num_axes in (("input_ids", 2), ("input_lengths", 1)):
        if key not in data:
            raise ValueError(f"{key!r} is missing; the batch has {sorted(data)}")
        if data[key].ndim != num_axes:
            raise ValueError(f"{key!r} has shape {list(data[key].shape)}, expected {num_axes} axes")
    input_ids: torch.Tensor = data["input_ids"]
    lengths: torch.Tensor = data["input_lengths"]
    if len(lengths) != len(input_ids):
        raise ValueError(
            f"'input_lengths' has {len(lengths)} rows, 'input_ids' has {len(input_ids)}"
        )
    return input_ids, lengths.to(input_ids.device)


def _first(mask: torch.Tensor) -> int:
    return int(mask.nonzero()[0])
