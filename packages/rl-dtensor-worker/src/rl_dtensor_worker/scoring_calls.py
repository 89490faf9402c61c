"""The calls that score tokens without training on them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_batched_data import BatchedDataDict
from rl_batched_data.batch_checks import check_scoring_batch

from rl_dtensor_worker.forward import score_rows
from rl_dtensor_worker.modes import evaluating
from rl_dtensor_worker.worker_parts import WorkerParts, positive

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch
    from rl_interfaces import LogprobOutputSpec, ReferenceLogprobOutputSpec


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
        return BatchedDataDict({"logprobs": self._score(data, micro_batch_size)})

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return `reference_logprobs`: the same under the reference model.

        Raises:
            RuntimeError: The worker was built with `init_reference_model=False`.
        """
        self._residency.require("get_reference_policy_logprobs")
        with self.use_reference_model():
            scores = self._score(data, micro_batch_size)
        return BatchedDataDict({"reference_logprobs": scores})

    @contextmanager
    def use_reference_model(self) -> Generator[None, None, None]:
        """Give the model the reference weights inside; on exit it has its own, bit for bit."""
        if self._reference is None:
            raise RuntimeError("there is no reference model: init_reference_model was False")
        with self._reference.swapped_in(self.model):
            yield

    def _score(self, data: BatchedDataDict[Any], micro_batch_size: int | None) -> torch.Tensor:
        check_scoring_batch(data, pad_token_id=self._pad_token_id)
        steps = self._steps(
            data,
            local_batch_size=None,
            given=positive("micro_batch_size", micro_batch_size),
            default=self._config.logprob_batch_size,
        )
        with evaluating(self.model, self._device):
            return score_rows(self._forward.logprobs, data, steps=steps, device=self._device)
