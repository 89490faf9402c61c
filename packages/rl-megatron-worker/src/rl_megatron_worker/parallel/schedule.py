"""Megatron-core's pipeline schedules, over the micro-batches of one step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from rl_interfaces.backend.runtime.agreement import failing_together

from rl_megatron_worker.attention.layout import PackedLayout
from rl_megatron_worker.model.build import (
    output_matrix,
    run_chunk,
    unwrapped,
    uses_transformer_engine,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from rl_interfaces.backend.steps import Step
    from torch import nn

    from rl_megatron_worker.runtime import Runtime

Scored = Any
"""Whatever a function of the last stage returns for a micro-batch."""


class _Failure:
    """What is raised at the end of the model, kept until the other stages are done.

    A rank that left a schedule early would leave the others waiting for it.
    """

    def __init__(self) -> None:
        self._first: Exception | None = None

    @contextmanager
    def kept(self) -> Generator[None, None, None]:
        """Go on after the body where it raises."""
        try:
            yield
        except Exception as error:
            self._first = self._first or error

    def raise_everywhere(self) -> None:
        """Raise on all ranks what was kept on any. Collective.

        Raises:
            RuntimeError: It was kept on other ranks; the message names rank and error.
        """
        with failing_together():
            if self._first is not None:
                raise self._first


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Runs the chunks of this rank, and those of the other stages, over micro-batches."""

    chunks: list[nn.Module]
    runtime: Runtime

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the end of the model."""
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    @property
    def takes_cache(self) -> bool:
        """Whether attention can keep what it has seen, see `KeyValueCache`."""
        shared = parallel_state.get_context_parallel_world_size() > 1
        dtype = unwrapped(self.chunks[0]).config.params_dtype
        return not shared and not uses_transformer_engine(self.runtime, dtype)

    def lay_out(self, step: Step) -> list[PackedLayout]:
        """Return the micro-batches of a step, and after them those that complete a schedule."""
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
        """Return what `score` gives for each micro-batch; nothing on stages before the last.

        Args:
            layouts: The micro-batches, from `lay_out`.
            score: Is given a micro-batch's layout and hidden states `[own tokens, hidden]`. What
                it raises is raised on every rank.
        """
        failure = _Failure()

        def on_last_stage(layout: PackedLayout, hidden: torch.Tensor, **_: bool) -> Scored:
            with failure.kept():
                return score(layout, hidden)
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
        """Like `run`, and add the gradients of the sum of all losses.

        Args:
            layouts: The micro-batches, from `lay_out`.
            loss: Returns a micro-batch's part of the loss, 0-d, and what this returns of it. What
                it raises is raised on every rank, of which some have gradients then.
        """
        failure = _Failure()

        def on_last_stage(
            layout: PackedLayout, hidden: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, Scored]:
            # No tokens: the gradients are not divided, as the losses have been.
            num_tokens = torch.zeros((), dtype=torch.int, device=hidden.device)
            with failure.kept():
                value, scored = loss(layout, hidden)
                if not value.requires_grad:
                    value = value + self._no_loss(hidden)
                return value, num_tokens, scored
            return self._no_loss(hidden), num_tokens, None

        found = self._run_layouts(layouts, on_last_stage, forward_only=False)
        failure.raise_everywhere()
        return found

    @torch.no_grad()
    def run_one(
        self, layout: PackedLayout, score: Callable[[PackedLayout, torch.Tensor], Scored]
    ) -> Scored | None:
        """Return what `score` gives for one micro-batch; None on stages before the last."""
        # What completes a schedule of several chunks is to leave no trace in a cache.
        idle = replace(layout, rows=replace(layout.rows, cache=None))
        layouts = [layout] + [idle] * (self._num_passes(1) - 1)

        def on_last_stage(layout: PackedLayout, hidden: torch.Tensor, **_: bool) -> Scored:
            return score(layout, hidden)

        found = self._run_layouts(
            layouts, on_last_stage, forward_only=True, collect_non_loss_data=True
        )
        return found[0] if found else None

    def _run_layouts(
        self, layouts: Sequence[PackedLayout], on_last_stage: Callable[..., Any], **options: Any
    ) -> list[Scored]:
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
                # Stages tell each other the shapes, which differ.
                seq_length=max(layout.packed.total_length for layout in layouts),
                micro_batch_size=1,
                **options,
            )

    def _no_loss(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a zero of which every parameter has the gradients that a loss gives it.

        Gradients are reduced once all of them are there, each as often as in the first step.
        """
        matrix = output_matrix(self.chunks[-1])
        return (hidden.float().sum() + matrix.float().sum()) * 0.0

    def _num_passes(self, num_micro_batches: int) -> int:
        """Return how many micro-batches a schedule can run of at least so many.

        Where each rank has several chunks they take turns by groups of as many micro-batches as
        there are stages.
        """
        if len(self.chunks) == 1:
            return num_micro_batches
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        return -(-num_micro_batches // stages) * stages
