"""The calls that score tokens or rows without training on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_interfaces import RowScoringWorker, TopkLogitsWorker

from rl_policy import dispatch
from rl_policy.policy_parts import PolicyParts

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict
    from rl_interfaces import (
        GenerationDatumSpec,
        LogprobOutputSpec,
        ReferenceLogprobOutputSpec,
        ScoreOutputSpec,
        TopkLogitsOutputSpec,
    )


class ScoringCalls(PolicyParts):
    """Scores of the policy and of its reference."""

    def get_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec]
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return the log-probability of every token, see `LogprobOutputSpec`.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any number of rows.
        """
        return self._score("get_logprobs", data)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return the same under the frozen reference, see `ReferenceLogprobOutputSpec`.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any number of rows.
            micro_batch_size: Rows per forward per rank, instead of `policy.logprob_batch_size`.
        """
        return self._score("get_reference_policy_logprobs", data, micro_batch_size=micro_batch_size)

    def get_topk_logits(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        k: int,
        micro_batch_size: int | None = None,
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """Return the `k` largest logits of each position, see `TopkLogitsOutputSpec`.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any number of rows.
            k: How many; at most the vocabulary.
            micro_batch_size: Rows per forward per rank, instead of `policy.logprob_batch_size`.

        Raises:
            NotImplementedError: The backend gives no logits.
        """
        self._require(TopkLogitsWorker, lack="give logits")
        return self._score("get_topk_logits", data, micro_batch_size=micro_batch_size, k=k)

    def score(
        self, data: BatchedDataDict[GenerationDatumSpec], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ScoreOutputSpec]:
        """Return what a reward or value model, `policy.head`, says of each row.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any number of rows.
            micro_batch_size: Rows per forward per rank, instead of `policy.logprob_batch_size`.

        Raises:
            NotImplementedError: The backend runs no reward and value models.
        """
        self._require(RowScoringWorker, lack="run reward and value models")
        return self._score("score", data, micro_batch_size=micro_batch_size)

    def _score(
        self,
        method: str,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        **arguments: Any,
    ) -> BatchedDataDict[Any]:
        self._residency.require(method)
        planned = self._micro_batching("logprob_mb_tokens", micro_batch_size=micro_batch_size)
        dispatch.check_batch(data, **self._limits())
        shards, order = dispatch.shard_for_scoring(
            data, data_parallel=self._data_parallel, micro_batching=planned
        )
        parts = self._group.run_sharded(
            method, shards, micro_batch_size=micro_batch_size, **arguments
        )
        return dispatch.gather_scores(parts, width=data["input_ids"].shape[1], order=order)
