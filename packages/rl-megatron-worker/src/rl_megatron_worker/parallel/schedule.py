"""Megatron-core's pipeline schedules over the micro-batches of one step.

One forward-backward function serves all layouts: without pipelining, 1F1B, and interleaved 1F1B.
Scores and losses are computed on the last stage only; `stages` broadcasts them to the others.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from rl_interfaces.backend.runtime import failing_together

from rl_megatron_worker.attention.layout import PackedLayout
from rl_megatron_worker.model.chunks import run_chunk, unwrapped
from rl_megatron_worker.model.config import uses_transformer_engine
from rl_megatron_worker.model.heads import output_matrix
from rl_megatron_worker.parallel.stages import with_plain_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from rl_interfaces.backend.engine import Scored, Tensors
    from rl_interfaces.backend.steps import Step
    from torch import nn

    from rl_megatron_worker.runtime import Runtime


class _Failure:
    """An exception of the last stage, deferred until the schedule is complete.

    A rank that left the schedule early would leave the other stages blocked in their receives.
    """

    def __init__(self) -> None:
        self._first: Exception | None = None

    @contextmanager
    def deferred(self) -> Generator[None, None, None]:
        """Suppress and store an exception of the body."""
        try:
            yield
        except Exception as error:
            self._first = self._first or error

    def raise_everywhere(self) -> None:
        """Raise a stored exception on all ranks. Collective.

        Raises:
            RuntimeError: Another rank failed; the message names rank and error.
        """
        with failing_together():
            if self._first is not None:
                raise self._first


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Runs the model's chunks over micro-batches, in step with the other pipeline stages."""

    chunks: list[nn.Module]
    runtime: Runtime

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the last pipeline stage."""
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    @property
    def takes_cache(self) -> bool:
        """Whether the attention supports a `KeyValueCache`."""
        shared = parallel_state.get_context_parallel_world_size() > 1
        dtype = unwrapped(self.chunks[0]).config.params_dtype
        return not shared and not uses_transformer_engine(self.runtime, dtype)

    def lay_out(self, step: Step) -> list[PackedLayout]:
        """Return the packed micro-batches of a step, then empty ones that complete a schedule."""
        num_passes = self._num_passes(len(step.spans))
        return [
            PackedLayout.of(micro_batch)
            for micro_batch in step.micro_batches(self.runtime.device, num_passes=num_passes)
        ]

    @torch.no_grad()
    def run(
        self,
        layouts: Sequence[PackedLayout],
        score: Callable[[PackedLayout, torch.Tensor], Scored],
    ) -> list[Scored]:
        """Return `score` of each micro-batch; an empty list on stages before the last.

        Args:
            layouts: The micro-batches, from `lay_out`.
            score: Called with a micro-batch's layout and hidden states `[own tokens, hidden]`. Its
                exceptions are raised on every rank.
        """
        failure = _Failure()

        def on_last_stage(layout: PackedLayout, hidden: torch.Tensor, **_: bool) -> Scored | None:
            with failure.deferred():
                return with_plain_metrics(score(layout, hidden))
            return None

        found = self._run_layouts(
            layouts, on_last_stage, forward_only=True, collect_non_loss_data=True
        )
        failure.raise_everywhere()
        return found

    def run_backward(
        self,
        layouts: Sequence[PackedLayout],
        loss: Callable[[PackedLayout, torch.Tensor], tuple[torch.Tensor, Scored]],
    ) -> list[Scored]:
        """Like `run`, and accumulate the gradients of the sum of all losses.

        Args:
            layouts: The micro-batches, from `lay_out`.
            loss: Returns a micro-batch's share of the loss, 0-d, and its result for the returned
                list. Its exceptions are raised on every rank; gradients are then undefined.
        """
        failure = _Failure()

        def on_last_stage(
            layout: PackedLayout, hidden: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, Scored | None]:
            # With a token count of 0 `finalize_model_grads` does not divide the gradients: the loss
            # is already divided by the global count.
            num_tokens = torch.zeros((), dtype=torch.int, device=hidden.device)
            with failure.deferred():
                value, scored = loss(layout, hidden)
                if not value.requires_grad:
                    value = value + self._zero_loss(hidden)
                return value, num_tokens, with_plain_metrics(scored)
            return self._zero_loss(hidden), num_tokens, None

        found = self._run_layouts(layouts, on_last_stage, forward_only=False)
        failure.raise_everywhere()
        return found

    @torch.no_grad()
    def run_one(
        self, layout: PackedLayout, score: Callable[[PackedLayout, torch.Tensor], Tensors]
    ) -> Tensors | None:
        """Return `score` of one micro-batch; None on stages before the last."""
        # Passes that only complete an interleaved schedule must not write to the cache.
        idle = replace(layout, rows=replace(layout.rows, cache=None))
        layouts = [layout] + [idle] * (self._num_passes(1) - 1)

        def on_last_stage(layout: PackedLayout, hidden: torch.Tensor, **_: bool) -> Tensors:
            return score(layout, hidden)

        found = self._run_layouts(
            layouts, on_last_stage, forward_only=True, collect_non_loss_data=True
        )
        return found[0] if found else None

    def _run_layouts(
        self, layouts: Sequence[PackedLayout], on_last_stage: Callable[..., Any], **options: Any
    ) -> list[Any]:
        def forward_step(
            iterator: Iterator[PackedLayout], chunk: nn.Module
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            layout = next(iterator)
            return run_chunk(chunk, layout.tokens, layout.rows), partial(on_last_stage, layout)

        iterators = [iter(layouts) for _ in self.chunks]
        with self.runtime.scope():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(layouts),
                # An upper bound: with `variable_seq_lengths` stages exchange the actual shapes.
                seq_length=max(layout.packed.total_length for layout in layouts),
                micro_batch_size=1,
                **options,
            )

    def _zero_loss(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a zero loss that reaches every parameter.

        `overlap_grad_reduce` starts a bucket's reduction when all of its gradients have arrived,
        each as often as in the first step: without a backward pass the ranks would not match.
        """
        matrix = output_matrix(self.chunks[-1])
        return (hidden.float().sum() + matrix.float().sum()) * 0.0

    def _num_passes(self, num_micro_batches: int) -> int:
        """Return the number of micro-batches, rounded up for an interleaved schedule.

        It needs a multiple of the number of stages, as chunks alternate in groups of that size.
        """
        if len(self.chunks) == 1:
            return num_micro_batches
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        return -(-num_micro_batches // stages) * stages
