"""The optimizer steps of one `train` call."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_interfaces.backend.metrics import LossCounts

from rl_dtensor_worker.optim import clip_gradients, total_grad_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_interfaces.backend.steps import MicroBatch, Step
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from rl_dtensor_worker.config import WorkerConfig
    from rl_dtensor_worker.forward import Forward
    from rl_dtensor_worker.optim import LossScaler
    from rl_dtensor_worker.value_forward import ValueForward

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class TrainingParts:
    """What changes while a model is trained."""

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    scaler: LossScaler


@dataclass(kw_only=True, slots=True)
class TrainResult:
    """What the steps of one `train` call have given on this rank."""

    losses: list[torch.Tensor] = field(default_factory=list)
    """Per step, 0-d float32: the loss over all data-parallel ranks."""
    grad_norms: list[torch.Tensor] = field(default_factory=list)
    """Per step, 0-d float32: before clipping."""
    metrics: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """Per micro-batch of this rank that has a valid sample."""


def run_steps(
    forward: Forward | ValueForward,
    loss_fn: Any,
    *,
    steps: Sequence[Step],
    training: TrainingParts | None,
    config: WorkerConfig,
    group: dist.ProcessGroup,
    device: torch.device,
) -> TrainResult:
    """Take one optimizer step per entry of `steps`; with `training=None`, losses alone."""
    result = TrainResult()
    num_skipped = 0
    for step in steps:
        counts = LossCounts.of(step.rows, group=group, device=device)
        loss = torch.zeros((), device=device)
        for batch in step.micro_batches(device):
            loss += run_microbatch(
                forward, batch, loss_fn, counts, training=training, result=result
            )
        dist.all_reduce(loss, group=group)
        result.losses.append(loss)
        if training is not None:
            norm, stepped = apply_gradients(forward.model, training, counts, config=config)
            result.grad_norms.append(norm)
            num_skipped += not stepped
    if training is not None and dist.get_rank() == 0:
        # From one rank alone: the sum over the ranks is then the count.
        result.metrics["skipped_steps"].append(num_skipped)
    return result


def run_microbatch(
    forward: Forward | ValueForward,
    micro_batch: MicroBatch,
    loss_fn: Any,
    counts: LossCounts,
    *,
    training: TrainingParts | None,
    result: TrainResult,
) -> torch.Tensor:
    """Return the micro-batch's share of the loss; add its gradients and metrics."""
    inputs = forward.for_loss(micro_batch, loss_fn)
    loss, metrics = loss_fn(inputs, micro_batch.rows, *counts.divisors)
    if training is not None:
        (loss * training.scaler.scale).backward()
    if metrics["num_valid_samples"] > 0:
        for name, value in metrics.items():
            result.metrics[name].append(_to_number(value))
        result.metrics["global_valid_seqs"].append(float(counts.valid_seqs))
        result.metrics["global_valid_toks"].append(float(counts.valid_toks))
        if training is not None:
            result.metrics["lr"].append(training.optimizer.param_groups[0]["lr"])
    return loss.detach().float()


def apply_gradients(
    model: nn.Module, training: TrainingParts, counts: LossCounts, *, config: WorkerConfig
) -> tuple[torch.Tensor, bool]:
    """Step the optimizer and clear the gradients; return the norm, and whether it stepped.

    A step whose gradients are not finite, or whose batch has no valid sample, changes nothing.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    training.scaler.unscale(parameters)
    norm = total_grad_norm(p.grad for p in parameters if p.grad is not None)
    finite = bool(torch.isfinite(norm))
    if finite and not counts.is_empty:
        clip_gradients(parameters, max_norm=config.max_grad_norm, norm=norm)
        training.optimizer.step()
    elif not finite:
        logger.warning(
            "The gradient norm is %s: the step is skipped (loss scale %s)",
            float(norm),
            training.scaler.scale,
        )
    else:
        logger.warning(
            "The global batch has %g valid samples and %g valid tokens: the step is skipped",
            float(counts.valid_seqs),
            float(counts.valid_toks),
        )
    training.scaler.update(finite=finite)
    training.optimizer.zero_grad(set_to_none=True)
    return norm, finite and not counts.is_empty


def _to_number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
