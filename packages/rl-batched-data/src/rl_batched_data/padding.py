"""Sizes and right padding: checks, rounding, widening tensors, and detecting left padding."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def check_positive(name: str, value: int) -> None:
    """Raise a `ValueError` that names `name` and `value` if `value` is less than 1."""
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def pad_right(tensor: torch.Tensor, length: int, *, dim: int = 1, value: float = 0) -> torch.Tensor:
    """Return `tensor` padded with `value` to `length` along `dim`; itself if it has that length.

    Raises:
        ValueError: `tensor` is longer than `length` along `dim`.
    """
    missing = length - tensor.shape[dim]
    if missing < 0:
        raise ValueError(f"dim {dim} has size {tensor.shape[dim]}, longer than length={length}")
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, value)], dim=dim)


def verify_right_padding(data: Mapping[str, object], *, pad_token_id: int | None = None) -> None:
    """Raise if a row of `input_ids` is not right-padded to the length in `input_lengths`.

    Padding may be any constant. With `pad_token_id`, a row that starts with it, but whose padding
    is another token, counts as left-padded.

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
    # Without a pad token, the last column is the reference: right padding is constant up to it.
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


def _ids_and_lengths(data: Mapping[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    input_ids = _tensor(data, "input_ids", num_axes=2)
    lengths = _tensor(data, "input_lengths", num_axes=1)
    if len(lengths) != len(input_ids):
        raise ValueError(
            f"'input_lengths' has {len(lengths)} rows, 'input_ids' has {len(input_ids)}"
        )
    return input_ids, lengths.to(input_ids.device)


def _tensor(data: Mapping[str, object], key: str, *, num_axes: int) -> torch.Tensor:
    if key not in data:
        raise ValueError(f"{key!r} is missing; the batch has {sorted(data)}")
    value = data[key]
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{key!r} is a {type(value).__name__}, expected a tensor")
    if value.ndim != num_axes:
        raise ValueError(f"{key!r} has shape {list(value.shape)}, expected {num_axes} axes")
    return value


def _first(mask: torch.Tensor) -> int:
    return int(mask.nonzero()[0])


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return `tensor` on `device`, without waiting for it where the tensor is on the CPU.

    `Tensor.to` waits until a GPU has done all that was queued before the copy. A copy from pageable
    memory need not: CUDA stages the bytes before the call returns. One to the CPU has to wait.
    """
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")
