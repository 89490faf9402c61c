"""The end of the model: hidden states, the output matrix, and the scores of tokens by the two.

Log-probabilities are taken from hidden states and the output matrix without materialising all
logits. For this the output layer is replaced, under its own name and with its own parameter, by
one that returns its input (`OutputMatrix`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from rl_batched_data.logprobs import target_scores
from torch import nn

from rl_megatron_worker.model.chunks import unwrapped

if TYPE_CHECKING:
    import torch.distributed as dist
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from rl_batched_data import TokenScores

    from rl_megatron_worker.attention.layout import PackedLayout


class OutputMatrix(nn.Module):
    """An output layer that returns its input; the scores multiply it with the weight.

    It has to stay a module that is called: with `overlap_param_gather` the forward hook of data
    parallelism waits for the all-gather of the weight.

    Args:
        layer: The layer whose weight it takes.
        vocab_size: Number of tokens, without padding.
    """

    def __init__(self, layer: ColumnParallelLinear, *, vocab_size: int) -> None:
        super().__init__()
        self.register_parameter("weight", layer.weight)
        self.vocab_size = vocab_size
        self.tp_group = cast("dist.ProcessGroup", layer.tp_group)
        self.sequence_parallel = layer.sequence_parallel

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, **unused: object
    ) -> tuple[torch.Tensor, None]:
        """Return the full hidden states `[seq, batch, hidden]`, gathered from sequence shards.

        The gradient has to be replicated over tensor-parallel ranks, as it is after the all-reduce
        over the vocabulary: the backward pass of the gather takes its slice without a reduction.
        """
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weight for a checkpoint, sharded along the vocabulary."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def output_matrix(chunk: nn.Module) -> torch.Tensor:
    """Return this rank's shard of the output matrix, `[padded vocab / tp, hidden]`."""
    model = unwrapped(chunk)
    assert model.post_process
    weight: Any = model.output_layer.weight
    if model.share_embeddings_and_output_weights:
        weight = model.shared_embedding_or_output_weight()
    return weight


class HeadOptions(TypedDict):
    """Keyword arguments of `rl_batched_data.logprobs.target_scores`."""

    output_matrix: torch.Tensor
    vocab_start: int
    tp_group: dist.ProcessGroup


def scoring_options(chunk: nn.Module) -> HeadOptions:
    """Return the arguments that score hidden states, without the vocabulary's padding."""
    layer = cast("OutputMatrix", unwrapped(chunk).output_layer)
    matrix = output_matrix(chunk)
    start = layer.tp_group.rank() * len(matrix)
    return {
        "output_matrix": matrix[: max(layer.vocab_size - start, 0)],
        "vocab_start": start,
        "tp_group": layer.tp_group,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenHead:
    """Scores of tokens from the hidden states of the last stage.

    All results are in the caller's row layout, `[batch, seq, ...]`, and replicated over tensor- and
    context-parallel ranks.
    """

    chunk: nn.Module
    """The last chunk of the model."""
    vocab_size: int
    temperature: float
    """Divides the logits, in every call."""

    def logprobs(self, layout: PackedLayout, hidden: torch.Tensor) -> torch.Tensor:
        """Return token log-probabilities, `[batch, seq]` float32; 0 at 0 and padding."""
        return layout.targets_to_rows(self._scores(layout, hidden).logprobs)

    def topk_logits(
        self, layout: PackedLayout, hidden: torch.Tensor, *, k: int
    ) -> dict[str, torch.Tensor]:
        """Return `topk_logits` and `topk_indices`, `[batch, seq, k]`; 0 at padding.

        Position `t` predicts token `t + 1`.
        """
        scores = self._scores(layout, hidden, top_k=k)
        assert scores.top_k_logits is not None
        assert scores.top_k_indices is not None
        return {
            "topk_logits": layout.to_rows(scores.top_k_logits),
            "topk_indices": layout.to_rows(scores.top_k_indices),
        }

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return gathered logits, `[tokens, vocab]` float32, not divided by the temperature."""
        matrix = output_matrix(self.chunk)
        own = copy_to_tensor_model_parallel_region(hidden) @ matrix.T
        logits = gather_from_tensor_model_parallel_region(own.contiguous())
        return logits[..., : self.vocab_size].float()

    def _scores(self, layout: PackedLayout, hidden: torch.Tensor, **asked: Any) -> TokenScores:
        return target_scores(
            hidden,
            layout.targets,
            temperature=self.temperature,
            **asked,
            **scoring_options(self.chunk),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedOutput:
    """The output of a micro-batch: a `rl_interfaces.backend.engine.ForwardOutput`."""

    head: TokenHead
    layout: PackedLayout
    hidden: torch.Tensor
    """`[own tokens, hidden]`, the hidden states of the last stage."""

    def logprobs(self) -> torch.Tensor:
        """Return token log-probabilities, `[batch, seq]` float32; 0 at 0 and padding."""
        return self.head.logprobs(self.layout, self.hidden)

    def logits(self, *, sharded: bool = False) -> torch.Tensor:
        """Return the logits with temperature, `[batch, seq, vocab]` float32, always gathered."""
        logits = self.head.logits(self.hidden) / self.head.temperature
        return self.layout.to_rows(logits)

    def topk_logits(self, k: int) -> dict[str, torch.Tensor]:
        """Return `topk_logits` and `topk_indices`, `[batch, seq, k]`; 0 at padding."""
        return self.head.topk_logits(self.layout, self.hidden, k=k)
