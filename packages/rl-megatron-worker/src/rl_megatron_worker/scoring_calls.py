"""The calls that score tokens without training on them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_batched_data import BatchedDataDict
from rl_interfaces.backend.batch_checks import check_scoring_batch, positive
from rl_interfaces.backend.scoring import RowScores

from rl_megatron_worker.modes import evaluating
from rl_megatron_worker.parallel.stages import broadcast_tensors_from_last_stage
from rl_megatron_worker.worker_parts import WorkerParts

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import torch
    from rl_interfaces import (
        LogprobOutputSpec,
        ReferenceLogprobOutputSpec,
        TopkLogitsOutputSpec,
    )

    from rl_megatron_worker.attention.layout import PackedLayout
    from rl_megatron_worker.model.heads import TokenHead


class ScoringCalls(WorkerParts):
    """Scores of the policy and of its reference."""

    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return `logprobs`, `[batch, seq]` float32 on the CPU; position 0 and padding are 0.

        Raises:
            ValueError: The batch lacks a key.
            ResidencyError: The model is not on the device.
        """
        self._residency.require("get_logprobs")
        return BatchedDataDict(
            self._score_rows(
                lambda head, layout, hidden: {"logprobs": head.logprobs(layout, hidden)},
                data,
                micro_batch_size,
            )
        )

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return `reference_logprobs`: the same under the reference model.

        Raises:
            RuntimeError: The worker was built with `init_reference_model=False`.
        """
        self._residency.require("get_reference_policy_logprobs")
        with self.use_reference_model():
            scores = self.get_logprobs(data, micro_batch_size)
        return BatchedDataDict({"reference_logprobs": scores["logprobs"]})

    def get_topk_logits(
        self, data: BatchedDataDict[Any], k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """Return `topk_logits` and `topk_indices`, `[batch, seq, k]` on the CPU; 0 at padding.

        Those of position `t` are of token `t + 1`, largest first, temperature applied; the last
        token of a row has them too.

        Raises:
            ValueError: `k` is not within the vocabulary.
        """
        self._residency.require("get_topk_logits")
        vocab_size = self._architecture.vocab_size
        if not 1 <= k <= vocab_size:
            raise ValueError(f"k={k} is not within 1..{vocab_size}, the vocabulary")
        return BatchedDataDict(
            self._score_rows(
                lambda head, layout, hidden: head.topk_logits(layout, hidden, k=k),
                data,
                micro_batch_size,
            )
        )

    @contextmanager
    def use_reference_model(self) -> Generator[None, None, None]:
        """Give the model the reference weights inside; on exit it has its own, bit for bit."""
        if self._reference is None:
            raise RuntimeError("there is no reference model: init_reference_model was False")
        with self._reference.swapped_in(self.model):
            yield

    def _score_rows(
        self,
        score: Callable[[TokenHead, PackedLayout, torch.Tensor], dict[str, torch.Tensor]],
        data: BatchedDataDict[Any],
        micro_batch_size: int | None,
    ) -> dict[str, torch.Tensor]:
        check_scoring_batch(data, pad_token_id=self._pad_token_id)
        steps = self._steps(
            data,
            local_batch_size=None,
            given=positive("micro_batch_size", micro_batch_size),
            default=self._config.logprob_batch_size,
        )
        found = RowScores(data)

        def on_last_stage(layout: PackedLayout, hidden: torch.Tensor) -> None:
            assert self._head is not None, "only the last stage has hidden states to score"
            found.put(layout.micro_batch.span, score(self._head, layout, hidden))

        with evaluating(self.model, self._runtime):
            for step in steps:
                self._schedule.run(self._schedule.lay_out(step), on_last_stage)
        scores = broadcast_tensors_from_last_stage(found.scores, device=self._device)
        return {key: values.cpu() for key, values in scores.items()}
