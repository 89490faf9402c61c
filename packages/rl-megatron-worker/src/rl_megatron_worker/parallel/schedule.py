"""Megatron-core's pipeline schedules over the micro-batches of one step.

One forward-backward function serves all layouts: without pipelining, 1F1B, and interleaved 1F1B.
Scores and losses are computed on the last stage only, and then broadcast to the others.
"""

from __future__ import annotations

import json
import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from rl_interfaces.backend.engine import Scored
from rl_interfaces.backend.runtime import failing_together
from rl_interfaces.backend.steps import read_numbers

from rl_megatron_worker.layout import PackedLayout
from rl_megatron_worker.model.build import unwrapped
from rl_megatron_worker.model.config import uses_transformer_engine
from rl_megatron_worker.model.heads import output_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from megatron.core.transformer.transformer_config import TransformerConfig
    from rl_interfaces.backend.engine import Tensors
    from rl_interfaces.backend.steps import MicroBatch, Step
    from torch import nn

    from rl_megatron_worker.layout import PackedRows
    from rl_megatron_worker.model.config import DecoderConfig
    from rl_megatron_worker.model.routes import Routes
    from rl_megatron_worker.runtime import Runtime

T = TypeVar("T")


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
        # All ranks have completed the schedule: nobody is left in a receive.
        with failing_together():
            if self._first is not None:
                raise self._first


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Runs the model's chunks over micro-batches, in step with the other pipeline stages."""

    chunks: list[nn.Module]
    runtime: Runtime
    routes: Routes | None = None
    """Replays the choices of routers; None: each forward pass chooses."""

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the last pipeline stage."""
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    @property
    def takes_cache(self) -> bool:
        """Whether the attention supports a `KeyValueCache`."""
        shared = parallel_state.get_context_parallel_world_size() > 1
        return not shared and not self._uses_transformer_engine

    def lay_out(self, step: Step) -> list[PackedLayout]:
        """Return the packed micro-batches of a step, then empty ones that complete a schedule."""
        num_passes = self._num_passes(len(step.spans))
        return [
            self.lay_out_one(micro_batch)
            for micro_batch in step.micro_batches(self.runtime.device, num_passes=num_passes)
        ]

    def lay_out_one(self, micro_batch: MicroBatch) -> PackedLayout:
        """Return the layout of a packed micro-batch for this rank's layers."""
        return PackedLayout.of(micro_batch, offsets_on_host=not self._uses_transformer_engine)

    @property
    def _uses_transformer_engine(self) -> bool:
        config = cast("DecoderConfig", unwrapped(self.chunks[0]).config)
        return uses_transformer_engine(self.runtime, config)

    @torch.no_grad()
    def run(
        self,
        layouts: Sequence[PackedLayout],
        score: Callable[[PackedLayout, torch.Tensor], Scored],
    ) -> list[Scored]:
        """Return `score` of each micro-batch, on every stage. Collective.

        Args:
            layouts: The micro-batches, from `lay_out`.
            score: Called with a micro-batch's layout and hidden states `[own tokens, hidden]`. Its
                exceptions are raised on every rank.
        """
        failure = _Failure()

        def on_last_stage(layout: PackedLayout, hidden: torch.Tensor, **_: bool) -> Scored | None:
            with failure.deferred():
                return _checked_metrics(score(layout, hidden))
            # After a failure; the results are thrown away once the schedule is complete.
            return None

        found = self._run_layouts(layouts, on_last_stage, forward_only=True)
        failure.raise_everywhere()
        return _broadcast_scored(found, device=self.runtime.device)

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
                return value, num_tokens, _checked_metrics(scored)
            return self._zero_loss(hidden), num_tokens, None

        found = self._run_layouts(layouts, on_last_stage, forward_only=False)
        failure.raise_everywhere()
        return _broadcast_scored(found, device=self.runtime.device)

    @torch.no_grad()
    def run_one(
        self, layout: PackedLayout, score: Callable[[PackedLayout, torch.Tensor], Tensors]
    ) -> Tensors:
        """Return `score` of one micro-batch, on every stage. Collective."""
        # Passes that only complete an interleaved schedule must not write to the cache.
        idle = replace(layout, rows=replace(layout.rows, cache=None))
        layouts = [layout] + [idle] * (self._num_passes(1) - 1)

        def on_last_stage(layout: PackedLayout, hidden: torch.Tensor, **_: bool) -> Scored:
            return Scored(tensors=score(layout, hidden))

        found = self._run_layouts(layouts, on_last_stage, forward_only=True)
        # Passes that only complete a schedule have results as well.
        (scored,) = _broadcast_scored(found[:1], device=self.runtime.device)
        return scored.tensors

    def _run_layouts(
        self,
        layouts: Sequence[PackedLayout],
        on_last_stage: Callable[..., object],
        *,
        forward_only: bool,
    ) -> list[Scored]:
        """Return the last stage's results; an empty list on stages before it."""

        def forward_step(
            iterator: Iterator[PackedLayout], chunk: nn.Module
        ) -> tuple[torch.Tensor, Callable[..., object]]:
            layout = next(iterator)
            with nullcontext() if self.routes is None else self.routes.of(chunk, layout):
                output = run_chunk(chunk, layout.tokens, layout.rows)
            return output, partial(on_last_stage, layout)

        if self.routes is not None:
            self.routes.forget()
        # Each chunk of an interleaved schedule draws all micro-batches from an iterator of its own.
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
                forward_only=forward_only,
                # Otherwise it expects a loss, and divides it by the number of micro-batches.
                collect_non_loss_data=forward_only,
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


def run_chunk(chunk: nn.Module, tokens: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """Run a chunk's forward pass; call it inside the runtime's scope.

    Args:
        chunk: From `build_model`; the schedule has set the input of stages after the first.
        tokens: `[own tokens]` int64, the shard of this context-parallel rank.
        rows: The packed-sequence parameters.

    Returns:
        On the last stage hidden states `[own tokens, hidden]` in the model's dtype, replicated
        over tensor-parallel ranks; on others the activations for the next stage.
    """
    config = cast("TransformerConfig", chunk.config)
    # `Float16Module` would otherwise cast the output to float32.
    options = {"fp32_output": False} if config.fp16 or config.bf16 else {}
    output = chunk(
        input_ids=tokens[None],
        # Rotary embeddings take positions from the packed-sequence parameters.
        position_ids=None,
        attention_mask=None,
        packed_seq_params=rows,
        **options,
    )
    return output[0] if unwrapped(chunk).post_process else output


def _broadcast_json(value: T, *, device: torch.device) -> T:
    """Return the last stage's JSON-serialisable value on every stage. Collective."""
    group, last, is_last = _last_stage()
    if group.size() == 1:
        return value
    encoded = json.dumps(value).encode() if is_last else b""
    # The size first: the other stages have to allocate the buffer that they receive into.
    size = torch.tensor([len(encoded)], dtype=torch.int64).to(device, non_blocking=True)
    dist.broadcast(size, src=last, group=group)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if is_last:
        data.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), non_blocking=True)
    dist.broadcast(data, src=last, group=group)
    return value if is_last else json.loads(bytes(data.tolist()))


def _broadcast_scored(found: Sequence[Scored], *, device: torch.device) -> list[Scored]:
    """Return the last stage's results of all micro-batches on every stage. Collective.

    JSON and raw tensors rather than pickled objects: nothing that is received is executed. All
    metrics and shapes travel together, and all tensors of a dtype.
    """
    group, last, is_last = _last_stage()
    if group.size() == 1:
        return list(found)
    own = [
        (index, name, list(t.shape), str(t.dtype).removeprefix("torch."))
        for index, each in enumerate(found)
        for name, t in each.tensors.items()
    ]
    metrics, specs = _broadcast_json((_read_metrics(found), own), device=device)
    results = [Scored(metrics={**each}) for each in metrics]
    for dtype in dict.fromkeys(kind for *_, kind in specs):
        chosen = [(index, name, shape) for index, name, shape, kind in specs if kind == dtype]
        sizes = [math.prod(shape) for *_, shape in chosen]
        if is_last:
            parts = [found[index].tensors[name].to(device).flatten() for index, name, _ in chosen]
            flat = torch.cat(parts)
        else:
            flat = torch.empty(sum(sizes), dtype=getattr(torch, dtype), device=device)
        dist.broadcast(flat, src=last, group=group)
        for (index, name, shape), part in zip(chosen, flat.split(sizes), strict=True):
            results[index].tensors[name] = part.view(shape)
    return results


def _read_metrics(found: Sequence[Scored]) -> list[dict[str, float]]:
    """Return the metrics of all micro-batches as plain numbers, read at once."""
    numbers = iter(read_numbers([value for each in found for value in each.metrics.values()]))
    return [dict(zip(each.metrics, numbers, strict=False)) for each in found]


def _checked_metrics(scored: Scored) -> Scored:
    """Return the result with metrics that `_broadcast_scored` can send.

    Call it where an exception is deferred: the other stages wait for the broadcast.

    Raises:
        TypeError: A metric is not JSON-serialisable; the message names it.
    """
    for name, value in scored.metrics.items():
        if isinstance(value, torch.Tensor):
            continue  # of one element: `_read_metrics` makes a number of it
        try:
            json.dumps(value)
        except TypeError as error:
            raise TypeError(f"the loss's metric {name!r} is {value!r}: {error}") from error
    return scored


def _last_stage() -> tuple[dist.ProcessGroup, int, bool]:
    """Return the group of stages, the global rank of the last, and whether it is this one."""
    group = cast("dist.ProcessGroup", parallel_state.get_pipeline_model_parallel_group())
    last = dist.get_global_rank(group, group.size() - 1)
    return group, last, dist.get_rank() == last
