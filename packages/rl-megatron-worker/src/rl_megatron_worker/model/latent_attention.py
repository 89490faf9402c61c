"""Multi-head latent attention (arXiv:2405.04434) of Megatron-core, without Transformer Engine.

Keys and values are projected up from a latent vector of each token, and keys have a rotated part
that all heads share. The projections down to latent vectors are replicated over tensor-parallel
ranks: Megatron-core's column-parallel ones would not sum the shared part's gradient over ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn

from rl_megatron_worker.compat.versions import latent_layers
from rl_megatron_worker.model.layers import SumGradient

if TYPE_CHECKING:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules

    from rl_megatron_worker.model.config import DecoderConfig


class LatentAttention(MLASelfAttention):
    """Megatron-core's attention, with replicated projections down to latent vectors.

    Args:
        config: Megatron-core's config of the model.
        arguments: Those of Megatron-core's class.
    """

    def __init__(self, config: DecoderConfig, *args: Any, **arguments: Any) -> None:
        super().__init__(config, *args, **arguments)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _LatentProjection(config, config.q_lora_rank)
        self.linear_kv_down_proj = _LatentProjection(
            config, config.kv_lora_rank, shared_size=config.qk_pos_emb_head_dim
        )

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        return latent_layers(submodules)

    def _run_core_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> torch.Tensor:
        # Megatron-core 0.19 pads values to the size of keys here, and trims the output as if heads
        # were a dimension of it; ours takes values of any size.
        return self.core_attention(query, key, value, attention_mask, **arguments)


class _LatentProjection(nn.Module):
    """Projects tokens to latent vectors, on every tensor-parallel rank with the same weight.

    Under sequence parallelism each rank projects its own tokens: Megatron-core then all-reduces the
    weight's gradient, as that of norms.

    Args:
        config: Megatron-core's config of the model.
        latent_size: Size of the latent vector.
        shared_size: Size of what follows it and goes to all heads, on every rank to its own.
    """

    def __init__(self, config: DecoderConfig, latent_size: int, *, shared_size: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(
                latent_size + shared_size,
                config.hidden_size,
                dtype=config.params_dtype,
                device=torch.cuda.current_device(),
            )
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._sizes = [latent_size, shared_size]
        # Under sequence parallelism the gather of the shared part's tokens sums its gradient.
        self._sums_shared = shared_size > 0 and not config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return `[..., latent_size + shared_size]`, and no bias."""
        output = F.linear(hidden, self.weight)
        if self._sums_shared:
            latent, shared = output.split(self._sizes, dim=-1)
            # Each rank has the gradient of its own heads only; that of the latent vector is summed
            # in the projections up.
            output = torch.cat([latent, cast("torch.Tensor", SumGradient.apply(shared))], dim=-1)
        return output, None
