"""Megatron-core's optimizer and parameter scheduler over the chunks of this rank."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from rl_interfaces.backend.components import (
    FIRST_LOSS_SCALE,
    STEPS_BEFORE_GROWTH,
    move_optimizer_state,
)
from rl_interfaces.backend.engine import OptimizerStep
from rl_interfaces.backend.host_memory import OffloadBuffers

from rl_megatron_worker.compat.versions import balancing_loss_factor, gradients_in_norm

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import nn

    from rl_megatron_worker.config import OptimizerSettings, SchedulerSettings
    from rl_megatron_worker.runtime import Runtime

logger = logging.getLogger(__name__)


class Trainer:
    """The optimizer and the scheduler of this rank.

    A step is `begin_step`, the backward passes, and `step`; or backward passes in `accumulating`,
    any number of times, and `step`. Learning rate and weight decay change with `advance_schedule`,
    once per `train` or `optimizer_step` call.

    Args:
        chunks: The model on this rank with loaded weights: 16-bit ones get float32 copies.
        config: Megatron-core's config of the model; its gradient hooks are set here.
        optimizer: Settings of the optimizer.
        scheduler: Settings of the scheduler.
        runtime: Device and scope of this rank.
        frees_memory: Whether to release the allocator's unused memory after each step.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config: TransformerConfig,
        optimizer: OptimizerSettings,
        scheduler: SchedulerSettings,
        runtime: Runtime,
        *,
        frees_memory: bool = False,
    ) -> None:
        self.chunks = cast("list[DistributedDataParallel]", list(chunks))
        self._runtime = runtime
        self._frees_memory = frees_memory
        self._config = config
        self._balancing = cast("float", config.moe_aux_loss_coeff)
        self._num_sharing = balancing_loss_factor(
            config.tensor_model_parallel_size * config.context_parallel_size
        )
        self._max_norm = optimizer.max_grad_norm
        if optimizer.wants_precision_aware and dist.get_rank() == 0:
            logger.warning(
                "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=True: the distributed "
                "optimizer takes the same update, with its own float32 copy of the weights: inside "
                "Transformer Engine's, Megatron-core would not update it when weights are loaded"
            )
        with runtime.scope():
            self.optimizer = cast(
                "ChainedOptimizer",
                # Annotated as Megatron's own modules; chunks are wrapped in its data parallelism.
                get_megatron_optimizer(_optimizer_config(optimizer, config), list(self.chunks)),
            )
            if optimizer.kind == "sgd":
                for part in self._optimizers():
                    part.init_state_fn = _init_momentum
            self.scheduler = _scheduler(self.optimizer, optimizer, scheduler)
        self._is_accumulating = False
        # Of each, for the float32 copies of the weights and for its state.
        self._offload_buffers = [(OffloadBuffers(), OffloadBuffers()) for _ in self._optimizers()]
        self._set_gradient_hooks(config)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.optimizer.param_groups[0]["lr"]

    @property
    def balances_experts(self) -> bool:
        """Whether an MoE load-balancing loss is added, whose weight depends on the token count."""
        return self._balancing != 0

    def begin_step(self, num_tokens: int) -> None:
        """Clear the gradients.

        Args:
            num_tokens: Of all micro-batches on all ranks. Megatron-core multiplies the
                load-balancing loss by the local tokens of each micro-batch and expects a later
                division by the global count, which our losses have had already. Under tensor or
                context parallelism each rank counts its shard of the tokens only, which later
                versions make up for.
        """
        weight = self._balancing * self._num_sharing
        self._config.moe_aux_loss_coeff = weight / max(num_tokens, 1)
        self.clear_gradients()

    @contextmanager
    def accumulating(self) -> Generator[None, None, None]:
        """Add the gradients of the passes inside to those of earlier ones; `step` reduces the sum.

        Megatron-core reduces in place: reduced gradients that took part in another reduction would
        be counted once per rank.
        """
        if not self._is_accumulating:
            # A pass that failed has left the gradient buckets in the middle of an accumulation.
            self.clear_gradients()
            self._is_accumulating = True
        config = self._config
        finalize, no_sync = config.finalize_model_grads_func, config.no_sync_func
        config.finalize_model_grads_func, config.no_sync_func = None, None
        # Until the next `clear_gradients`: no pass starts a reduction.
        _AccumulateOnly(self.chunks).enter()
        try:
            yield
        finally:
            config.finalize_model_grads_func, config.no_sync_func = finalize, no_sync

    def _reduce_accumulated(self) -> None:
        """Reduce the gradients of the passes in `accumulating`. Collective."""
        self._is_accumulating = False
        with self._runtime.scope():
            for chunk in self.chunks:
                if chunk.ddp_config.overlap_grad_reduce:
                    # No backward pass has started it.
                    chunk.start_grad_sync()
            _finalize_gradients(list(self.chunks))

    def clear_gradients(self) -> None:
        """Set all gradients to zero, and reset the state of their reduction."""
        self._is_accumulating = False
        with self._runtime.scope():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()

    def step(self, *, discard: bool = False, divisor: float = 1.0) -> OptimizerStep:
        """Step if the gradients are finite, see `EngineOptimizer.step`. Collective."""
        if self._is_accumulating:
            self._reduce_accumulated()
        if divisor != 1.0:
            for chunk in self.chunks:
                chunk.scale_gradients(1.0 / divisor)
        norm, finite = self.gradient_norm()
        stepped = finite and not discard
        if stepped:
            self.apply_gradients(norm)
        if self._frees_memory:
            self._runtime.free_cached_memory()
        return OptimizerStep(grad_norm=norm, stepped=stepped)

    def gradient_norm(self) -> tuple[torch.Tensor, bool]:
        """Return the global gradient norm, 0-d float32, and whether all gradients are finite.

        Call it once per step, after the backward passes: it unscales the gradients and updates the
        loss scale. Collective.
        """
        with self._runtime.scope():
            overflown = self.optimizer.prepare_grads()
            self._align_loss_scales()
            norm = float("inf") if overflown else float(self._norm_of_gradients())
        total = torch.tensor(norm, dtype=torch.float32)
        return total, bool(total.isfinite())

    @torch.no_grad()
    def _norm_of_gradients(self) -> torch.Tensor:
        """Return the global 2-norm, 0-d on the device. Collective.

        Megatron-core's own function, without Transformer Engine and Apex, reads the norm of every
        parameter on the host.
        """
        gradients: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
        for part in self.optimizer.chained_optimizers:
            group = part.get_grad_stats_parallel_group()
            gradients.setdefault(group, []).extend(gradients_in_norm(part))
        squares: list[torch.Tensor] = []
        for group, those in gradients.items():
            # A rank may have none that count: tensor-parallel duplicates count on one rank only.
            none = torch.zeros((), device=self._runtime.device)
            square = (torch.nn.utils.get_total_norm(those) if those else none).square()
            dist.all_reduce(square, group=group)
            squares.append(square)
        return torch.stack(squares).sum().sqrt()

    def apply_gradients(self, norm: torch.Tensor) -> None:
        """Clip gradients of this norm to `max_grad_norm`, and step. Collective."""
        with self._runtime.scope():
            if self._max_norm:
                self._clip(float(norm))
            self.optimizer.step_with_ready_grads()

    def advance_schedule(self) -> None:
        """Step the scheduler at the end of a `train` or `optimizer_step` call. Collective.

        With `overlap_param_gather` the next forward would gather the updated parameters; they are
        gathered here, as scoring, saving and weight sending may read them first.
        """
        with self._runtime.scope():
            self.scheduler.step(1)
            for chunk in self.chunks:
                if chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)

    def load_schedule(self, state: dict[str, float]) -> None:
        """Restore the position in the schedule from a checkpoint."""
        # Megatron-core adds the saved steps to its own, and computes the weight decay before it
        # restores the bounds: reset, load, and recompute with a step of 0.
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(state)
        self.scheduler.step(0)

    def reload_weights(self) -> None:
        """Refresh the float32 copies from weights that were loaded into the model."""
        with self._runtime.scope():
            self.optimizer.reload_model_params()

    def init_state(self) -> None:
        """Create the state of the first step, so that a checkpoint always has the same tensors."""
        for part in self._optimizers():
            part.init_state_fn(part.optimizer, part.config)

    def move_state(self, device: torch.device) -> None:
        """Move the optimizer's state and the float32 copies of the weights to `device`."""
        models = {
            parameter.untyped_storage().data_ptr()
            for chunk in self.chunks
            for parameter in chunk.parameters()
        }
        for part, (masters, state) in zip(self._optimizers(), self._offload_buffers, strict=True):
            # Without float32 copies these are the model's own parameters, or views of them, which
            # move with the model.
            copies = [
                copy
                for group in part.optimizer.param_groups
                for copy in group["params"]
                if copy.untyped_storage().data_ptr() not in models
            ]
            for copy, moved in zip(copies, masters.moved(copies, device), strict=True):
                copy.data = moved
            move_optimizer_state(part.optimizer, device, state)

    def move_scalars(self, device: torch.device) -> None:
        """Move loss scale and overflow flag, which a forward pass of an MoE model reads too."""
        for part in self._optimizers():
            for holder in (part, getattr(part, "grad_scaler", None)):
                scalars = {} if holder is None else dict(vars(holder))
                for name, value in scalars.items():
                    if isinstance(value, torch.Tensor):
                        setattr(holder, name, value.to(device))

    def release_gradients(self) -> None:
        """Free the memory of the gradient buffers."""
        with self._runtime.scope():
            for chunk in self.chunks:
                chunk.offload_grad_buffers()

    def restore_gradients(self) -> None:
        """Reallocate the gradient buffers, filled with zeros."""
        with self._runtime.scope():
            for chunk in self.chunks:
                chunk.restore_grad_buffers()

    def _optimizers(self) -> Iterator[MixedPrecisionOptimizer]:
        """Yield the optimizers of dense and of expert parameters that this rank has any of."""
        for part in self.optimizer.chained_optimizers:
            if part.optimizer is not None:
                yield cast("MixedPrecisionOptimizer", part)

    def _clip(self, norm: float) -> None:
        assert self._max_norm is not None
        for part in self._optimizers():
            clip_grad_by_total_norm_fp32([*part.get_parameters()], self._max_norm, norm)

    def _align_loss_scales(self) -> None:
        """Use the lowest loss scale for all optimizers.

        Megatron-core updates those of dense and expert parameters separately, and scales the loss
        by the first.
        """
        scalers = [
            cast("DynamicGradScaler", part.grad_scaler)
            for part in self._optimizers()
            # float32 optimizers have none, and those of bfloat16 no need of one.
            if getattr(part, "grad_scaler", None) is not None
        ]
        if len(scalers) > 1:
            states = [scaler.state_dict() for scaler in scalers]
            lowest = min(states, key=lambda state: (float(state["scale"]), state["growth_tracker"]))
            for scaler in scalers:
                scaler.load_state_dict(lowest)

    def _set_gradient_hooks(self, config: TransformerConfig) -> None:
        """Let the schedules scale losses, and reduce gradients once per step."""
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = _finalize_gradients
        if self.chunks[0].ddp_config.overlap_grad_reduce:
            config.no_sync_func = partial(_AccumulateOnly, self.chunks)


def _finalize_gradients(
    model: list[nn.Module], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Reduce the gradients, without a division by the number of tokens.

    Losses are divided by the global count already. Megatron-core would read the count of 0 that
    the schedule passes, once per step, in order to divide by nothing.
    """
    finalize_model_grads(model, None, **options)


class _AccumulateOnly:
    """`no_sync` of all chunks: gradients accumulate inside, and are reduced after it.

    The chunks' own `no_sync` is a generator, and forward-only schedules enter it without leaving.
    If such a pass fails, garbage collection finalises the generator later, possibly during another
    step, whose gradients would be reduced too early. This class has no finaliser; if it stays
    entered, the next `begin_step` resets it.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._groups = [
            group
            for chunk in chunks
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        ]

    def enter(self) -> None:
        """Start to accumulate."""
        self._set_last(False)

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self._set_last(True)

    def _set_last(self, is_last: bool) -> None:
        for group in self._groups:
            group.is_last_microbatch = is_last


def _optimizer_config(optimizer: OptimizerSettings, config: TransformerConfig) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer=optimizer.kind,
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        decoupled_weight_decay=optimizer.decoupled_weight_decay,
        adam_beta1=optimizer.adam_betas[0],
        adam_beta2=optimizer.adam_betas[1],
        adam_eps=optimizer.adam_eps,
        sgd_momentum=optimizer.sgd_momentum,
        fp16=config.fp16,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=optimizer.is_distributed,
        initial_loss_scale=FIRST_LOSS_SCALE,
        loss_scale_window=STEPS_BEFORE_GROWTH,
        hysteresis=1,
        # `Trainer.step` clips: it needs the norm before.
        clip_grad=0.0,
    )


def _init_momentum(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Create SGD's state, which Megatron-core does not: zeros, equivalent to the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else []:
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def _scheduler(
    optimizer: ChainedOptimizer, settings: OptimizerSettings, schedule: SchedulerSettings
) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=schedule.lr_warmup_steps,
        lr_decay_steps=schedule.lr_decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=schedule.start_weight_decay,
        end_wd=schedule.end_weight_decay,
        wd_incr_steps=schedule.lr_decay_steps,
        wd_incr_style=schedule.weight_decay_style,
    )
