"""The optimizer steps of one `train` call."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_interfaces.backend.metrics import LossCounts

from rl_megatron_worker.parallel.stages import broadcast_from_last_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_interfaces.backend.steps import Step

    from rl_megatron_worker.attention.layout import PackedLayout
    from rl_megatron_worker.model.heads import TokenHead
    from rl_megatron_worker.optim import Trainer
    from rl_megatron_worker.parallel.schedule import Schedule

    LossOf = Callable[[PackedLayout, torch.Tensor], tuple[torch.Tensor, "Scored"]]

logger = logging.getLogger(__name__)

Metrics = dict[str, Any]
Scored = tuple[float, Metrics]
"""A micro-batch's part of the loss, and its metrics."""


@dataclass(kw_only=True, slots=True)
class TrainResult:
    """What the steps of one `train` call have given, alike on all ranks that share rows."""

    losses: list[torch.Tensor] = field(default_factory=list)
    """Per step, 0-d float32: the loss over all data-parallel ranks."""
    grad_norms: list[torch.Tensor] = field(default_factory=list)
    """Per step, 0-d float32: before clipping."""
    metrics: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """Per micro-batch of this rank that has a valid sample."""

    def add_metrics(self, found: Sequence[Metrics]) -> None:
        """Take the metrics of some micro-batches."""
        for metrics in found:
            for name, value in metrics.items():
                self.metrics[name].append(value)


def run_steps(
    schedule: Schedule,
    head: TokenHead | None,
    loss_fn: Any,
    *,
    steps: Sequence[Step],
    trainer: Trainer | None,
    group: dist.ProcessGroup,
    empty_memory_level: int,
) -> TrainResult:
    """Take one optimizer step per entry of `steps`; with `trainer=None`, losses alone.

    Args:
        schedule: The model.
        head: What the last stage makes of hidden states; None on the others.
        loss_fn: The loss.
        steps: This rank's rows.
        trainer: The optimizer.
        group: The data-parallel ranks.
        empty_memory_level: `policy.megatron_cfg.empty_unused_memory_level`.
    """
    result = TrainResult()
    device = schedule.runtime.device
    skipped = 0
    for step in steps:
        counts = LossCounts.of(step.rows, group=group, device=device)
        loss = _loss_of(head, loss_fn, counts, trainer)
        layouts = schedule.lay_out(step)
        if trainer is None:
            found = schedule.run(layouts, _without_gradients(loss))
        else:
            count = _num_tokens(layouts, group, device) if trainer.balances_experts else 1
            trainer.begin_step(count)
            found = schedule.run_backward(layouts, loss)
        value, metrics = _tell_all(found, device)
        result.losses.append(_sum_over(value, group))
        result.add_metrics(metrics)
        if empty_memory_level >= 1:
            schedule.runtime.free_cached_memory()
        if trainer is not None:
            norm, stepped = _apply_gradients(trainer, counts)
            result.grad_norms.append(norm)
            skipped += not stepped
            if empty_memory_level >= 2:
                schedule.runtime.free_cached_memory()
    if trainer is not None and dist.get_rank(group) == 0:
        # From one rank alone: the sum over the ranks is then the count.
        result.metrics["skipped_steps"].append(skipped)
    return result


def _num_tokens(
    layouts: Sequence[PackedLayout], group: dist.ProcessGroup, device: torch.device
) -> int:
    """Return the tokens that go through the model in a step, on all ranks.

    Megatron-core's router deals out what is laid before it: with prompts there are the tokens that
    complete a sequence to what `MegatronLayout.token_multiple` asks for, and those of passes for
    which a rank has no rows. They take part in the experts' balance.
    """
    own = sum(layout.packed.total_length for layout in layouts)
    return int(_sum_over(torch.tensor(own, dtype=torch.int64, device=device), group))


def _loss_of(
    head: TokenHead | None, loss_fn: Any, counts: LossCounts, trainer: Trainer | None
) -> LossOf:
    """Return what gives a micro-batch's loss, and its number and metrics for the report."""

    def loss(layout: PackedLayout, hidden: torch.Tensor) -> tuple[torch.Tensor, Scored]:
        assert head is not None, "only the last stage has hidden states to score"
        rows = layout.micro_batch.rows
        inputs = head.for_loss(layout, hidden, loss_fn)
        value, metrics = loss_fn(inputs, rows, *counts.divisors)
        # The schedule scales the loss in place, so that it is read here.
        return value, (float(value.detach()), _reported(metrics, counts, trainer))

    return loss


def _without_gradients(loss: LossOf) -> Callable[[PackedLayout, torch.Tensor], Scored]:
    def scored(layout: PackedLayout, hidden: torch.Tensor) -> Scored:
        return loss(layout, hidden)[1]

    return scored


def _reported(metrics: Metrics, counts: LossCounts, trainer: Trainer | None) -> Metrics:
    if not metrics["num_valid_samples"] > 0:
        return {}
    numbers = {name: _to_number(name, value) for name, value in metrics.items()}
    numbers["global_valid_seqs"] = float(counts.valid_seqs)
    numbers["global_valid_toks"] = float(counts.valid_toks)
    if trainer is not None:
        numbers["lr"] = trainer.learning_rate
    return numbers


def _tell_all(found: Sequence[Scored], device: torch.device) -> tuple[torch.Tensor, list[Metrics]]:
    """Return the loss and metrics of the last stage on every stage. Collective."""
    total, metrics = broadcast_from_last_stage(
        [sum(value for value, _ in found), [each for _, each in found if each]], device=device
    )
    return torch.tensor(total, dtype=torch.float32, device=device), metrics


def _apply_gradients(trainer: Trainer, counts: LossCounts) -> tuple[torch.Tensor, bool]:
    """Step the optimizer; return the norm before clipping, and whether it stepped.

    A step whose gradients are not finite, or whose batch has no valid sample, changes nothing.
    """
    norm, finite = trainer.gradient_norm()
    if finite and not counts.is_empty:
        trainer.step(norm)
        return norm, True
    if not finite:
        logger.warning("The gradient norm is %s: the step is skipped", float(norm))
    else:
        logger.warning(
            "The global batch has %g valid samples and %g valid tokens: the step is skipped",
            float(counts.valid_seqs),
            float(counts.valid_toks),
        )
    return norm, False


def _sum_over(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(value, group=group)
    return value


def _to_number(name: str, value: Any) -> Any:
    """Return a metric as other stages can be told it, see `broadcast_from_last_stage`."""
    value = value.item() if hasattr(value, "item") else value
    try:
        json.dumps(value)
    except TypeError as error:
        raise TypeError(f"the loss's metric {name!r} is {value!r}: {error}") from error
    return value
