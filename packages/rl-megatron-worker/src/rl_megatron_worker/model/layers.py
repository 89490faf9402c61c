"""Modules of layers that Megatron-core lacks, or that need a GPU there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from rl_megatron_worker.attention import window_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.dist_checkpointing.mapping import ShardedStateDict

    from rl_megatron_worker.layout import PackedRows
    from rl_megatron_worker.model.config import DecoderConfig

OutputWithBias = tuple[torch.Tensor, torch.Tensor | None]


class RMSNorm(nn.Module):
    """RMSNorm that supports sequence parallelism, which Megatron-core's `WrappedTorchNorm` refuses.

    The weight's gradient has to be all-reduced over the sequence shards: Megatron-core does so for
    parameters with the attribute `sequence_parallel`.

    Args:
        config: Megatron-core's config of the model.
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.
        unused: Arguments of other normalisations.
    """

    def __init__(
        self, config: DecoderConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> None:
        super().__init__()
        assert config.normalization == "RMSNorm", config.normalization
        self.eps = eps
        self._zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normalised `hidden`, `[..., hidden_size]`."""
        if not self._zero_centered:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        # In float32, as 16 bits hold small weights more precisely than their sums with 1.
        factor = 1.0 + self.weight.float()
        return F.rms_norm(hidden.float(), factor.shape, factor, self.eps).type_as(hidden)


class NormThenAdd(RMSNorm):
    """Normalises the output of attention or MLP before it is added to the residual.

    It stands in the place of Megatron-core's `get_bias_dropout_add`, and is called like it.

    Args:
        config: Megatron-core's config of the model.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, config.hidden_size, config.layernorm_epsilon)

    def forward(  # type: ignore[override]
        self, training: bool, fused: bool
    ) -> Callable[[OutputWithBias, torch.Tensor, float], torch.Tensor]:
        """Return the function of output, residual and dropout, as Megatron-core calls it."""

        def add(
            output_with_bias: OutputWithBias, residual: torch.Tensor, dropout: float
        ) -> torch.Tensor:
            output, bias = output_with_bias
            output = super(NormThenAdd, self).forward(output if bias is None else output + bias)
            return residual + F.dropout(output, dropout, training)

        return add


class _NormOfAllHeads(nn.Module):
    """RMSNorm of the queries, or keys, of all heads together, which are sharded over ranks.

    Args:
        config: Megatron-core's config of the model.
        hidden_size: Size of a head.
        eps: Added to the mean square.
        num_heads: Number of heads, over all tensor-parallel ranks.
    """

    def __init__(
        self, config: DecoderConfig, hidden_size: int, eps: float, *, num_heads: int
    ) -> None:
        super().__init__()
        self.eps = eps
        self._width = num_heads * hidden_size
        self.weight = nn.Parameter(
            torch.ones(
                self._width // config.tensor_model_parallel_size,
                dtype=config.params_dtype,
                device=torch.cuda.current_device(),
            )
        )
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the normalised `states`, `[..., heads / tp, head_size]`."""
        full = states.float()
        squares = full.pow(2).sum((-2, -1), keepdim=True)
        total = cast("torch.Tensor", _SumOverRanks.apply(squares))
        weight = self.weight.float().view(states.shape[-2:])
        return (full * torch.rsqrt(total / self._width + self.eps) * weight).type_as(states)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the weight for a checkpoint, sharded by heads."""
        group = cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group())
        return sharded_weight(self, prefix, sharded_offsets, metadata, tp_group=group)


class NormOfAllQueries(_NormOfAllHeads):
    """RMSNorm of the queries of all heads together; arguments as Megatron-core passes them."""

    def __init__(self, config: DecoderConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps, num_heads=config.num_attention_heads)


class NormOfAllKeys(_NormOfAllHeads):
    """RMSNorm of the keys of all heads together; arguments as Megatron-core passes them."""

    def __init__(self, config: DecoderConfig, hidden_size: int, eps: float) -> None:
        assert config.num_query_groups is not None
        super().__init__(config, hidden_size, eps, num_heads=config.num_query_groups)


def sharded_weight(
    module: nn.Module,
    prefix: str,
    offsets: tuple[tuple[int, int, int], ...],
    metadata: dict[str, Any] | None,
    *,
    tp_group: dist.ProcessGroup,
) -> ShardedStateDict:
    """Return what `sharded_state_dict` of a module does whose rows are sharded.

    Args:
        module: With the parameter `weight` alone.
        prefix: As Megatron-core passes it, like the next two.
        offsets: Of the layer.
        metadata: With the data-parallel group.
        tp_group: Whose ranks have the shards, along dimension 0.
    """
    assert metadata is not None
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        {"weight": 0},
        offsets,
        tp_group=tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )


class WindowRotaryAttention(SelfAttention):
    """Self-attention with rotary embeddings of its own in layers with a window.

    Args:
        config: Megatron-core's config of the model.
        arguments: Those of Megatron-core's class.
    """

    def __init__(self, config: DecoderConfig, *args: Any, **arguments: Any) -> None:
        super().__init__(config, *args, **arguments)
        self.rotary_pos_emb = None
        if window_of(config, self.layer_number) is not None:
            assert config.window_rotary_base is not None
            assert config.kv_channels is not None
            self.rotary_pos_emb = RotaryEmbedding(
                config.kv_channels,
                rotary_percent=1.0,
                # Annotated as an int, and only raised to a power.
                rotary_base=config.window_rotary_base,  # type: ignore[arg-type]
                cp_group=self.pg_collection.cp,
            )

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, *args: Any, **arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and its bias; Megatron-core's arguments."""
        if self.rotary_pos_emb is not None:
            rows = cast("PackedRows", arguments["packed_seq_params"])
            arguments["rotary_pos_emb"] = self.rotary_pos_emb(rows.max_seqlen_q, packed_seq=True)
        return super().forward(hidden_states, *args, **arguments)


class GatedAttention(SelfAttention):
    """Self-attention with gates on the outputs of its heads."""

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        # Megatron-core's is compiled when it is called, also where there is no compiler.
        return x * torch.sigmoid(gate.reshape(x.shape))


class _SumOverRanks(torch.autograd.Function):
    """The sum over tensor-parallel ranks, each of which goes on in a way of its own."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return _summed(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _summed(grad)


class SumGradient(torch.autograd.Function):
    """Identity, whose gradient is summed over tensor-parallel ranks.

    Megatron-core's `copy_to_tensor_model_parallel_region` sums a copy of a gradient that is not
    contiguous, and returns the gradient as it was.
    """

    @staticmethod
    def forward(ctx: Any, shared: torch.Tensor) -> torch.Tensor:
        """Return `shared`."""
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the sum of the gradients of all ranks."""
        return _summed(grad)


def _summed(values: torch.Tensor) -> torch.Tensor:
    values = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(values, group=parallel_state.get_tensor_model_parallel_group())
    return values
