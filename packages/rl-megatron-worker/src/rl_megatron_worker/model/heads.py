"""Scores of tokens from the last stage's hidden states and the output matrix.

Log-probabilities never materialise all logits. Full logits are gathered over the vocabulary only
for generation and for losses that ask for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from rl_batched_data.logprobs import target_scores
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rl_megatron_worker.model.build import OutputMatrix, unwrapped

if TYPE_CHECKING:
    import torch.distributed as dist
    from rl_batched_data import TokenScores
    from torch import nn

    from rl_megatron_worker.layout import PackedLayout


def output_matrix(chunk: nn.Module) -> torch.Tensor:
    """Return this rank's shard of the output matrix, `[padded vocab / tp, hidden]`."""
    model = unwrapped(chunk)
    assert model.post_process
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return cast("torch.Tensor", model.output_layer.weight)


class HeadOptions(TypedDict):
    """Keyword arguments of `rl_batched_data.logprobs.target_scores`."""

    output_matrix: torch.Tensor
    vocab_start: int
    tp_group: dist.ProcessGroup
    soft_cap: float | None


def scoring_options(chunk: nn.Module) -> HeadOptions:
    """Return the arguments that score hidden states, without the vocabulary's padding."""
    layer = cast("OutputMatrix", unwrapped(chunk).output_layer)
    matrix = output_matrix(chunk)
    start = layer.tp_group.rank() * len(matrix)
    return {
        "output_matrix": matrix[: max(layer.vocab_size - start, 0)],
        "vocab_start": start,
        "tp_group": layer.tp_group,
        "soft_cap": layer.soft_cap,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenHead:
    """Logits and scores of the last chunk's hidden states `[own tokens, hidden]`."""

    chunk: nn.Module

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without padding."""
        return cast("OutputMatrix", unwrapped(self.chunk).output_layer).vocab_size

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return gathered logits, `[tokens, vocab]` float32."""
        product = copy_to_tensor_model_parallel_region(hidden) @ output_matrix(self.chunk).T
        own = self._capped(product)
        # All-gathered with the padding of the vocabulary, as shards have to be of one size.
        logits = gather_from_tensor_model_parallel_region(own.contiguous())
        return logits[..., : self.vocab_size].float()

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits, `[tokens, vocab / tp]` float32, fewer on the last ranks."""
        matrix = scoring_options(self.chunk)["output_matrix"]
        # Identity in the forward pass; the backward pass sums the hidden states' gradients, of
        # which each rank has the part of its shard of the vocabulary.
        return self._capped(copy_to_tensor_model_parallel_region(hidden) @ matrix.T).float()

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = cast("OutputMatrix", unwrapped(self.chunk).output_layer).soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def scores(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
    ) -> TokenScores:
        """Return the scores of `targets`, replicated over tensor-parallel ranks."""
        options = scoring_options(self.chunk)
        return target_scores(hidden, targets, temperature=temperature, top_k=top_k, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedOutput:
    """The output of a micro-batch: a `rl_interfaces.backend.engine.ForwardOutput`.

    Results are in the caller's row layout, gathered over context-parallel ranks, and replicated
    over tensor-parallel ranks unless they are asked for sharded.
    """

    head: TokenHead
    layout: PackedLayout
    hidden: torch.Tensor
    """`[own tokens, hidden]`, the hidden states of the last stage."""

    def logprobs(self, *, temperature: float = 1.0) -> torch.Tensor:
        """Return token log-probabilities, `[batch, seq]` float32; 0 at 0 and padding."""
        scores = self.head.scores(self.hidden, self.layout.targets, temperature=temperature)
        return self.layout.targets_to_rows(scores.logprobs)

    def logits(self, *, temperature: float = 1.0, sharded: bool = False) -> torch.Tensor:
        """Return the logits, `[batch, seq, vocab]` float32.

        Args:
            temperature: Divides the logits.
            sharded: Return a `DTensor` of that shape, sharded along the vocabulary over the
                tensor-parallel ranks. Without tensor parallelism it is a plain tensor all the same.
        """
        group = scoring_options(self.head.chunk)["tp_group"]
        if not sharded or group.size() == 1:
            return self.layout.to_rows(self.head.logits(self.hidden) / temperature)
        local = self.layout.to_rows(self.head.local_logits(self.hidden) / temperature)
        shape = torch.Size([*local.shape[:-1], self.head.vocab_size])
        # Ranks hold ceil(vocab / tp) rows of the output matrix and the last ones fewer, just as
        # DTensor shards a size that does not divide.
        return DTensor.from_local(
            local,
            DeviceMesh.from_group(group, local.device.type),
            [Shard(local.ndim - 1)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    def topk_logits(self, k: int) -> dict[str, torch.Tensor]:
        """Return `topk_logits` and `topk_indices`, `[batch, seq, k]`; 0 at padding.

        Position `t` predicts token `t + 1`.
        """
        scores = self.head.scores(self.hidden, self.layout.targets, top_k=k)
        assert scores.top_k_logits is not None
        assert scores.top_k_indices is not None
        return {
            "topk_logits": self.layout.to_rows(scores.top_k_logits),
            "topk_indices": self.layout.to_rows(scores.top_k_indices),
        }
