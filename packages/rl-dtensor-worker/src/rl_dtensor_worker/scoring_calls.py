"""The calls that score tokens without training on them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_batched_data import BatchedDataDict
from rl_interfaces.backend.batch_checks import check_scoring_batch, positive

from rl_dtensor_worker.forward import Forward, score_rows
from rl_dtensor_worker.modes import evaluating
from rl_dtensor_worker.worker_parts import WorkerParts

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import torch
    from rl_interfaces import (
        LogprobOutputSpec,
        ReferenceLogprobOutputSpec,
        ScoreOutputSpec,
        TopkLogitsOutputSpec,
    )
    from rl_interfaces.backend.steps import MicroBatch


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
        forward = self._require_language_model("get_logprobs")
        return BatchedDataDict(
            self._score_rows(
                lambda batch: {"logprobs": forward.logprobs(batch)}, data, micro_batch_size
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
            ValueError: `k` is not within the vocabulary, or the model is no language model.
        """
        self._residency.require("get_topk_logits")
        forward = self._require_language_model("get_topk_logits")
        vocab_size: int = self.model.config.get_text_config().vocab_size  # type: ignore[union-attr,operator]
        if not 1 <= k <= vocab_size:
            raise ValueError(f"k={k} is not within 1..{vocab_size}, the vocabulary")
        return BatchedDataDict(
            self._score_rows(lambda batch: forward.topk_logits(batch, k), data, micro_batch_size)
        )

    def score(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ScoreOutputSpec]:
        """Return `scores`: `[batch]` of a reward model, `[batch, seq]` of a value model, float32.

        Raises:
            ValueError: The model is a language model.
        """
        self._residency.require("score")
        forward = self._forward
        if isinstance(forward, Forward):
            raise ValueError("score() needs policy.head='reward' or 'value', got 'language_model'")
        return BatchedDataDict(
            self._score_rows(
                lambda batch: {"scores": forward.scores(batch)}, data, micro_batch_size
            )
        )

    @contextmanager
    def use_reference_model(self) -> Generator[None, None, None]:
        """Give the model the reference weights inside; on exit it has its own, bit for bit."""
        if self._reference is None:
            raise RuntimeError(
                "there is no reference model: init_reference_model was False, or adapters are "
                "trained beside a layer of scores"
            )
        with self._reference.swapped_in(self.model):
            yield

    def _require_language_model(self, call: str) -> Forward:
        if not isinstance(self._forward, Forward):
            raise ValueError(
                f"{call}() needs policy.head='language_model', got {self._config.head!r}"
            )
        return self._forward

    def _score_rows(
        self,
        score: Callable[[MicroBatch], dict[str, torch.Tensor]],
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
        with evaluating(self.model, self._device):
            return score_rows(score, data, steps=steps, device=self._device)
