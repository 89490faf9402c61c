"""Tensors that pickle as numpy views, so that pickle protocol 5 moves their bytes out of band.

A tensor pickles by copying its whole storage. A numpy array hands its memory to the transport
instead: an object store writes it once, and every reader on the machine maps the same bytes.
"""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# numpy has no bfloat16 or float8: the bytes travel as integers of the same width.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorView:
    """The memory of a tensor as a numpy array of integers, and the dtype it stands for."""

    array: npt.NDArray[Any]
    dtype: torch.dtype


TensorOrView = TensorView | torch.Tensor | None


def to_picklable(tensor: torch.Tensor) -> TensorView | torch.Tensor:
    """Return `tensor` as a numpy view of its own memory, or itself where numpy cannot view it.

    Only dense CPU tensors without a gradient are viewed. One that is not contiguous is copied.
    """
    carrier = _CARRIERS.get(tensor.element_size())
    plain = (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_complex()
        and not tensor.is_quantized
    )
    if not plain or carrier is None:
        return tensor
    return TensorView(tensor.contiguous().view(carrier).numpy(), tensor.dtype)


def from_picklable(value: TensorView | torch.Tensor) -> torch.Tensor:
    """Return the tensor that `to_picklable` was given, on the memory that the pickle came with."""
    if isinstance(value, torch.Tensor):
        return value
    if not value.array.flags.writeable:
        return _from_read_only(value.array).view(value.dtype)
    return torch.from_numpy(value.array).view(value.dtype)


def _from_read_only(array: npt.NDArray[Any]) -> torch.Tensor:
    if array.size == 0:
        return torch.from_numpy(np.empty_like(array))
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so once: readers of a batch know not to write.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
