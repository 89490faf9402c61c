"""Checkpoints in quantised formats, read as the full-precision tensors that they stand for.

Block-FP8 (DeepSeek-V3, arXiv:2412.19437, section 3.3; `*-FP8` checkpoints of Qwen3) stores a matrix
in float8 and one `weight_scale_inv` per block of 128 x 128. A value is the product of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from rl_interfaces.backend.checkpoint.hf_files import SafetensorsFiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedConfig

_SCALE = "_scale_inv"
_BLOCK_SIZE = (128, 128)  # transformers' default


def take_quantization(model_config: PreTrainedConfig, model_name: str) -> dict[str, Any] | None:
    """Remove `quantization_config` from a config, and return it; None if there is none.

    The model is trained and exported in full precision.

    Raises:
        ValueError: The format cannot be dequantised here; the message names it.
    """
    found: Any = getattr(model_config, "quantization_config", None)
    if found is None:
        return None
    quantization = cast("dict[str, Any]", found if isinstance(found, dict) else found.to_dict())
    method = quantization.get("quant_method")
    if method != "fp8":
        raise ValueError(
            f"policy.model_name={model_name!r} is quantised with quant_method={method!r}, which "
            "cannot be trained: give a checkpoint in full precision, or in block-FP8 "
            "(quant_method='fp8')"
        )
    del model_config.quantization_config
    return quantization


class BlockFp8Files(SafetensorsFiles):
    """Safetensors files whose float8 tensors are dequantised as they are read.

    Args:
        paths: The files.
        block_size: Rows and columns that share a scale.
    """

    def __init__(self, paths: Iterable[str], block_size: Sequence[int] | None) -> None:
        super().__init__(paths)
        self._block_size = tuple(block_size or _BLOCK_SIZE)

    @property
    def names(self) -> list[str]:
        """The names of all tensors; scales are part of those that they scale."""
        names = super().names
        present = set(names)
        return [n for n in names if not (n.endswith(_SCALE) and n.removesuffix(_SCALE) in present)]

    def read(self, name: str, indices: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """See `SafetensorsFiles.read`; a tensor with scales is returned in float32."""
        values = super().read(name, indices)
        if name + _SCALE not in self._paths:
            return values
        scales = super().read(name + _SCALE).float()
        if scales.numel() > 1:
            for dim, size in zip((-2, -1), self._block_size, strict=True):
                length = self.shape(name)[dim]
                index = indices[dim] if indices else torch.arange(length)
                scales = scales.index_select(dim, index // size)
            if indices and scales.ndim > 2:
                scales = scales.index_select(0, indices[0])
        return values.float() * scales

    def equal(self, left: str, right: str) -> bool:
        """See `SafetensorsFiles.equal`."""
        scales = [name + _SCALE for name in (left, right) if name + _SCALE in self._paths]
        if len(scales) == 1 or not super().equal(left, right):
            return False
        return not scales or super().equal(*scales)
