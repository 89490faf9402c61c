"""Checkpoints in quantised formats, read as the full-precision tensors that they stand for.

Block-FP8 (DeepSeek-V3, arXiv:2412.19437, section 3.3; `*-FP8` checkpoints of Qwen3) stores a matrix
in float8 and one `weight_scale_inv` per block of 128 x 128. A value is the product of the two.

MXFP4 (OCP Microscaling Formats specification 1.0, section 5; the experts of gpt-oss) stores pairs
of 4-bit values and one 8-bit exponent per 32 of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from rl_interfaces.backend.checkpoint.hf_files import SafetensorsFiles, take
from rl_refit.block_fp8 import BLOCK, SCALES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PreTrainedConfig

_BLOCKS, _EXPONENTS = "_blocks", "_scales"
_EXPONENT_BIAS = 127
# The values of 4 bits: sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BLOCK_SIZE = (BLOCK, BLOCK)  # transformers' default


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
    if method not in ("fp8", "mxfp4"):
        raise ValueError(
            f"policy.model_name={model_name!r} is quantised with quant_method={method!r}, which "
            "cannot be trained: give a checkpoint in full precision, in block-FP8 "
            "(quant_method='fp8') or in MXFP4 (quant_method='mxfp4')"
        )
    delattr(model_config, "quantization_config")
    return quantization


def quantized_files(paths: Iterable[str], quantization: Mapping[str, Any]) -> SafetensorsFiles:
    """Return the files of a checkpoint with that `quantization_config`, dequantised when read."""
    if quantization["quant_method"] == "mxfp4":
        return Mxfp4Files(paths)
    return BlockFp8Files(paths, quantization.get("weight_block_size"))


class BlockFp8Files(SafetensorsFiles):
    """Safetensors files whose float8 tensors are dequantised as they are read.

    Args:
        paths: The files.
        block_size: Rows and columns that share a scale.

    Raises:
        ValueError: A float8 tensor has no scales by the name of this format.
    """

    def __init__(self, paths: Iterable[str], block_size: Sequence[int] | None) -> None:
        super().__init__(paths)
        self._block_size = tuple(block_size or _BLOCK_SIZE)
        with self:
            for name in self.names:
                stored = self._file_of(name).get_slice(name).get_dtype()
                if stored.startswith("F8") and name + SCALES not in self._paths:
                    raise ValueError(
                        f"policy.model_name: the checkpoint's {name} is in float8 ({stored}), and "
                        f"there is no {name + SCALES}: other formats with quant_method='fp8' than "
                        "block-FP8 cannot be trained; give a checkpoint in full precision"
                    )

    @property
    def names(self) -> list[str]:
        """The names of all tensors; scales are part of those that they scale."""
        names = super().names
        present = set(names)
        return [n for n in names if not (n.endswith(SCALES) and n.removesuffix(SCALES) in present)]

    def read(self, name: str, indices: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """See `SafetensorsFiles.read`; a tensor with scales is returned in float32."""
        values = super().read(name, indices)
        if name + SCALES not in self._paths:
            return values
        scales = super().read(name + SCALES).float()
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
        scales = [name + SCALES for name in (left, right) if name + SCALES in self._paths]
        if len(scales) == 1 or not super().equal(left, right):
            return False
        return not scales or super().equal(*scales)


class Mxfp4Files(SafetensorsFiles):
    """Safetensors files whose MXFP4 tensors are dequantised as they are read.

    `X_blocks` `[experts, out, groups, 16]` and `X_scales` `[experts, out, groups]`, both uint8, are
    read as `X` `[experts, groups * 32, out]`, as gpt-oss multiplies by it.
    """

    @property
    def names(self) -> list[str]:
        """The names of all tensors; blocks and scales are one."""
        packed = {name.removesuffix(_BLOCKS) for name in super().names if self._is_blocks(name)}
        hidden = {name + suffix for name in packed for suffix in (_BLOCKS, _EXPONENTS)}
        return [*(name for name in super().names if name not in hidden), *sorted(packed)]

    def shape(self, name: str) -> torch.Size:
        """See `SafetensorsFiles.shape`."""
        if name in self._paths:
            return super().shape(name)
        experts, rows, groups, pairs = super().shape(name + _BLOCKS)
        return torch.Size([experts, groups * pairs * 2, rows])

    def read(self, name: str, indices: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """See `SafetensorsFiles.read`; an MXFP4 tensor is returned in float32."""
        if name in self._paths:
            return super().read(name, indices)
        whole = [torch.arange(length) for length in self.shape(name)]
        experts, columns, rows = indices or whole
        blocks = super().read(name + _BLOCKS, self._stored(name + _BLOCKS, experts, rows))
        exponents = super().read(name + _EXPONENTS, self._stored(name + _EXPONENTS, experts, rows))
        # The first value of a pair is in the low bits.
        codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2).int()
        values = torch.ldexp(
            torch.tensor(_E2M1)[codes], exponents.int()[..., None] - _EXPONENT_BIAS
        )
        full = values.flatten(-2).transpose(1, 2)
        kept = [torch.arange(len(experts)), columns, torch.arange(len(rows))]
        return take(full, kept).contiguous()

    def _is_blocks(self, name: str) -> bool:
        return name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _EXPONENTS in self._paths

    def _stored(self, name: str, experts: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the indices of some experts' rows in a stored tensor, with all its groups."""
        return [experts, rows, *(torch.arange(length) for length in super().shape(name)[2:])]
