"""Megatron-core as an engine: one rank's model, schedule, optimizer and weights.

`rl_interfaces.backend.worker.EngineWorker` makes a policy worker of it.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rl_interfaces import ResidencyState
from rl_interfaces.backend.checkpoint import hf_files
from rl_interfaces.backend.components import ReferenceCopy
from rl_interfaces.backend.engine import EngineInfo, HfExport, module_mode
from rl_interfaces.backend.host_memory import OffloadBuffers
from rl_interfaces.backend.steps import Concatenation

from rl_megatron_worker.checkpoint import MegatronFormat
from rl_megatron_worker.config import EngineConfig
from rl_megatron_worker.convert import converter_for
from rl_megatron_worker.convert.registry import names_another_class
from rl_megatron_worker.decoder import ExpertSync, open_decoder
from rl_megatron_worker.model.build import build_model, layers_with_experts, release_caches
from rl_megatron_worker.model.config import transformer_config
from rl_megatron_worker.model.heads import PackedOutput, TokenHead
from rl_megatron_worker.model.load import load_weights
from rl_megatron_worker.model.routes import COLUMN, Routes, check_routes
from rl_megatron_worker.optim import Trainer
from rl_megatron_worker.parallel.groups import (
    check_device,
    check_sizes,
    init_model_parallel,
    leave_model_parallel,
)
from rl_megatron_worker.parallel.schedule import Schedule
from rl_megatron_worker.runtime import Runtime, may_have_gpus, place_parameters
from rl_megatron_worker.weights import MegatronWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from rl_interfaces import ParallelLayout
    from rl_interfaces.backend.engine import LossOfOutput, Scored, ScoreFunction
    from rl_interfaces.backend.generation import Decoder
    from rl_interfaces.backend.runtime import RankEnvironment
    from rl_interfaces.backend.steps import Step
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from rl_megatron_worker.layout import PackedLayout
    from rl_megatron_worker.model.config import Architecture

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class MegatronEngine:
    """One rank of a model on Megatron-core: a `rl_interfaces.backend.engine.Engine`.

    Args:
        config: A resolved policy config.
        environment: The rank; the default process group exists.
        tokenizer: Not used: the model's config gives the vocabulary.
        init_optimizer: Whether to build an optimizer.

    Raises:
        ValueError: A setting is invalid; the message names key and numbers.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        environment: RankEnvironment,
        tokenizer: PreTrainedTokenizerBase | None = None,
        init_optimizer: bool = True,
    ) -> None:
        self._config = EngineConfig.from_policy_config(
            config, world_size=environment.world_size, init_optimizer=init_optimizer
        )
        self.runtime = Runtime(environment)
        self._offload_buffers = OffloadBuffers()
        self._routes: Routes | None = None
        self._is_reference = False
        layout = self._config.layout
        with ExitStack() as leaving:
            # First on the stack: groups are left after all that uses them, and on any failure.
            leaving.callback(leave_model_parallel)
            init_model_parallel(layout, self.runtime, timeout_s=self._config.timeout_s)
            self._hf_config = _load_model_config(self._config)
            self._saved_dtype = hf_files.saved_dtype(self._config.model_name, self._hf_config)
            converter = converter_for(self._hf_config, self._config.converter_type)
            self._architecture = converter.architecture(self._hf_config)
            check_sizes(
                self._architecture, layout, recomputed_unit=self._config.model.recomputed_unit
            )
            self._mappings = converter.mappings(self._architecture)
            self.info = self._build_info()
            self.runtime.seed(self._config.seed + dist.get_rank(self.info.data_group))
            self._build_model()
            self._leaving = leaving.pop_all()
        self._state = ResidencyState.TRAINING if self.optimizer else ResidencyState.INFERENCE
        self._set_mode(training=self.optimizer is not None)

    @classmethod
    def plan_layout(
        cls, config: Mapping[str, object], *, world_size: int, init_optimizer: bool = True
    ) -> ParallelLayout:
        """Return the layout of `world_size` ranks, before any of them starts.

        Raises:
            ValueError: A setting is invalid; the message names key and numbers.
        """
        parsed = EngineConfig.from_policy_config(
            config, world_size=world_size, init_optimizer=init_optimizer
        )
        hf_config = _load_model_config(parsed)
        converter = converter_for(hf_config, parsed.converter_type)
        if names_another_class(hf_config, parsed.converter_type):
            logger.warning(
                "policy.megatron_cfg.converter_type=%r is not the class of %s models like "
                "policy.model_name=%r, whose own converter is used",
                parsed.converter_type,
                hf_config.model_type,
                parsed.model_name,
            )
        check_device(parsed.layout, on_cuda=may_have_gpus())
        architecture = converter.architecture(hf_config)
        check_sizes(architecture, parsed.layout, recomputed_unit=parsed.model.recomputed_unit)
        _check_routers(parsed, architecture, model_type=hf_config.model_type)
        return parsed.layout.for_driver

    # Forward and backward passes

    def run(self, step: Step, score: ScoreFunction) -> list[Scored]:
        """See `Engine.run`; every pipeline stage returns the results of the last one."""

        def on_last_stage(layout: PackedLayout, hidden: torch.Tensor) -> Scored:
            return score(layout.micro_batch, self._output(layout, hidden))

        layouts = self._lay_out(step)
        found = self._schedule.run(layouts, on_last_stage)
        # The reference chooses its own experts, which training has no use for.
        records = self._routes is not None and not self._is_reference and COLUMN not in step.rows
        if self._routes is not None and records and "logprobs" in found[0].tensors:
            with self.runtime.scope():
                routes = self._routes.collect(layouts)
            for scored, each in zip(found, routes, strict=True):
                scored.tensors[COLUMN] = each
        self._free_memory(level=1)
        return found

    def run_backward(
        self, step: Step, loss: LossOfOutput, *, accumulate: bool = False
    ) -> list[Scored]:
        """See `Engine.run_backward`; the gradients of an earlier step are cleared first.

        With `accumulate`, only those from before the first such call are. They are cleared here,
        not only after a step: a pass that failed has left the gradient buckets in the middle of an
        accumulation.
        """
        assert self.optimizer is not None, "the engine was built without an optimizer"

        def on_last_stage(
            layout: PackedLayout, hidden: torch.Tensor
        ) -> tuple[torch.Tensor, Scored]:
            return loss(layout.micro_batch, self._output(layout, hidden))

        layouts = self._lay_out(step)
        if accumulate:
            assert not self.optimizer.balances_experts, "EngineInfo.lacks has refused the call"
            with self.optimizer.accumulating():
                found = self._schedule.run_backward(layouts, on_last_stage)
        else:
            num_tokens = self._num_tokens(layouts) if self.optimizer.balances_experts else 1
            self.optimizer.begin_step(num_tokens)
            found = self._schedule.run_backward(layouts, on_last_stage)
        self._free_memory(level=1)
        return found

    @contextmanager
    def mode(self, *, training: bool) -> Generator[None, None, None]:
        """See `Engine.mode`."""
        with module_mode(self.model, training=training):
            try:
                yield
            except BaseException:
                if training and self.optimizer is not None:
                    self.optimizer.clear_gradients()
                raise

    @contextmanager
    def decoders(self) -> Generator[Callable[[Mapping[str, object]], Decoder], None, None]:
        """See `Engine.decoders`; expert-parallel ranks synchronise their forward passes."""

        def new_decoder() -> Decoder:
            return open_decoder(self._schedule, self._head, self.info.packing)

        sync = ExpertSync(
            self.info.data_group,
            self.info.device,
            enabled=self._config.layout.experts_span_data_ranks,
        )
        with sync.joining(new_decoder):
            yield lambda _: sync.synchronised(new_decoder())

    # Residency

    def place(self, state: ResidencyState) -> None:
        """See `Engine.place`."""
        self._state = state
        self._place(
            model=state is not ResidencyState.OFFLOADED,
            training=state is ResidencyState.TRAINING,
        )
        if state is not ResidencyState.REFITTING:
            self._set_mode(training=state is ResidencyState.TRAINING)

    @contextmanager
    def on_device(self) -> Generator[None, None, None]:
        """Have model and optimizer state on the device inside, and then where they were."""
        self._place(model=True, training=True)
        try:
            yield
        finally:
            self._place(
                model=self._state is not ResidencyState.OFFLOADED,
                training=self._state is ResidencyState.TRAINING,
            )

    # Weights

    def local_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name in its chunk and this rank's shard of every parameter.

        Tied embeddings have one key on the first and the last stage, each of which has a copy.
        """
        for chunk in self.model:
            for name, parameter in chunk.named_parameters():
                is_tied = getattr(parameter, "shared_embedding", False)
                yield "embeddings" if is_tied else name, parameter

    def keep_reference(self) -> Callable[[], AbstractContextManager[None]]:
        """See `Engine.keep_reference`."""
        reference = ReferenceCopy(self._local_tensors)

        @contextmanager
        def swapped_in() -> Generator[None, None, None]:
            with reference.swapped_in():
                self._is_reference = True
                try:
                    yield
                finally:
                    self._is_reference = False

        return swapped_in

    def weight_source(self, dtype: torch.dtype) -> MegatronWeights:
        """Return the full weights in `dtype` under Hugging Face names."""
        return self._weights(dtype, scope=nullcontext)

    def export(self) -> HfExport:
        """See `Engine.export`."""
        return HfExport(
            write_config=partial(hf_files.write_config, self._hf_config, dtype=self._saved_dtype),
            # An export is allowed in every residency state, also while the model is offloaded.
            source=self._weights(self._saved_dtype, scope=self.on_device),
        )

    def close(self) -> None:
        """Leave Megatron-core's process groups. Not collective; may be called again."""
        self._leaving.close()

    # Inside

    def _build_info(self) -> EngineInfo:
        multiple = self._config.sequence_multiple
        return EngineInfo(
            device=self.runtime.device,
            data_group=cast("dist.ProcessGroup", parallel_state.get_data_parallel_group()),
            vocab_size=self._architecture.vocab_size,
            wire_dtype=self._config.model.params_dtype,
            max_sequence_length=self._architecture.max_sequence_length,
            # Megatron-core's layers run over packed rows here, whatever the plan of the batch.
            packing=Concatenation(always=True, sequence_multiple=multiple, total_multiple=multiple),
            lacks=self._lacks(),
        )

    def _lacks(self) -> dict[str, str]:
        weight = self._config.model.moe_options["moe_aux_loss_coeff"]
        if not weight:
            return {}
        reason = (
            f"policy.megatron_cfg.moe_aux_loss_coeff={weight} adds a loss that is divided by the "
            "tokens of the whole step, which are not known before optimizer_step; use train, or 0.0"
        )
        return {"forward_backward": reason}

    def _build_model(self) -> None:
        config, optimizer = self._config, self._config.optimizer
        megatron_config = transformer_config(
            self._architecture, config.layout, config.model, self.runtime
        )
        self.model = build_model(
            self._architecture,
            megatron_config,
            config.layout,
            self.runtime,
            ddp=None if optimizer is None else config.data_parallel,
            freezes_routers=config.model.freezes_routers,
        )
        # Before the optimizer, which makes its float32 copies of the weights when it is built.
        load_weights(self.model, self._mappings, self._hf_config, model_name=config.model_name)
        if config.replays_routes:
            self._routes = Routes(self.model, layers_with_experts(megatron_config))
        self._schedule = Schedule(chunks=self.model, runtime=self.runtime, routes=self._routes)
        self._head = None
        if self._schedule.is_last_stage:
            self._head = TokenHead(chunk=self.model[-1])
        self.optimizer = None
        if optimizer is not None:
            self.optimizer = Trainer(
                self.model,
                megatron_config,
                optimizer,
                config.scheduler,
                self.runtime,
                frees_memory=config.empty_unused_memory_level >= 2,
            )
        self.checkpoint = MegatronFormat(
            self.model, self.runtime, trainer=self.optimizer, on_device=self.on_device
        )

    def _lay_out(self, step: Step) -> list[PackedLayout]:
        """Return the micro-batches of a step, with the routes of the batch if it has any.

        Raises:
            ValueError: The routes are not those of this model.
        """
        if COLUMN in step.rows:
            if self._routes is None:
                raise ValueError(
                    f"the batch has {COLUMN}, which needs policy.megatron_cfg."
                    "moe_router_replay=True"
                )
            fields = self._architecture.transformer
            routes = step.rows[COLUMN]
            if isinstance(routes, torch.Tensor):
                routes = self._routes.with_experts(routes)
            check_routes(
                {**step.rows, COLUMN: routes},
                num_layers=self._routes.num_layers,
                num_experts=cast("int", fields["num_moe_experts"]),
                num_chosen=cast("int", fields["moe_router_topk"]),
            )
        layouts = self._schedule.lay_out(step)
        # The reference chooses by itself: routes of the policy are not its own.
        return [replace(each, routes=None) for each in layouts] if self._is_reference else layouts

    def _weights(
        self, dtype: torch.dtype, *, scope: Callable[[], AbstractContextManager[None]]
    ) -> MegatronWeights:
        return MegatronWeights(
            self.model, self._mappings, wire_dtype=dtype, device=self.info.device, scope=scope
        )

    def _output(self, layout: PackedLayout, hidden: torch.Tensor) -> PackedOutput:
        assert self._head is not None, "only the last stage has hidden states to score"
        return PackedOutput(head=self._head, layout=layout, hidden=hidden)

    def _num_tokens(self, layouts: Sequence[PackedLayout]) -> int:
        """Return the number of tokens of a step on all data-parallel ranks. Collective.

        Padding and the passes that complete a schedule count too: the router sees their tokens,
        and they take part in the load-balancing loss.
        """
        own = sum(layout.packed.total_length for layout in layouts)
        total = torch.tensor(own, dtype=torch.int64).to(self.info.device, non_blocking=True)
        dist.all_reduce(total, group=self.info.data_group)
        return int(total)

    def _set_mode(self, *, training: bool) -> None:
        for chunk in self.model:
            chunk.train(training)

    def _free_memory(self, *, level: int) -> None:
        if self._config.empty_unused_memory_level >= level:
            self.runtime.free_cached_memory()

    def _place(self, *, model: bool, training: bool) -> None:
        """Have on the device what is asked for, and the rest on the CPU."""
        # Gradients first, both ways: the peak never holds gradients and moving weights together.
        if self.optimizer is not None and not training:
            self.optimizer.release_gradients()
            self.optimizer.move_state(_CPU)
        place_parameters(
            self.model, self.runtime, on_device=model, host_buffers=self._offload_buffers
        )
        if self.optimizer is not None:
            self.optimizer.move_scalars(self.info.device if model else _CPU)
        if not model:
            release_caches(self.model)
        if self.optimizer is not None and training:
            self.optimizer.move_state(self.info.device)
            self.optimizer.restore_gradients()
        self.runtime.free_cached_memory()

    def _local_tensors(self) -> list[torch.Tensor]:
        """Return every parameter, and every buffer that a checkpoint holds."""
        tensors: list[torch.Tensor] = []
        for chunk in self.model:
            tensors += chunk.parameters()
            persistent = chunk.state_dict(keep_vars=True)
            # `nn.Module.named_buffers`: data parallelism replaces `buffers` by a list of its own.
            tensors += [buffer for name, buffer in chunk.named_buffers() if name in persistent]
        return tensors


def _check_routers(config: EngineConfig, architecture: Architecture, *, model_type: str) -> None:
    """Raise if the routers of a model's experts cannot do what the config asks of them."""
    fields = architecture.transformer
    of_model = f"{model_type} models like policy.model_name={config.model_name!r}"
    # A router that is not there is frozen: examples for any model say `freeze_moe_router`.
    if config.replays_routes and "num_moe_experts" not in fields:
        raise ValueError(f"policy.megatron_cfg.moe_router_replay=True: {of_model} have no experts")
    if config.bias_update_rate and fields.get("moe_router_enable_expert_bias"):
        raise ValueError(
            f"policy.megatron_cfg.moe_router_bias_update_rate={config.bias_update_rate}: the "
            f"biases of the routers of {of_model} stay those of the checkpoint: set it to 0"
        )


def _load_model_config(config: EngineConfig) -> PreTrainedConfig:
    return hf_files.load_model_config(config.model_name, trust_remote_code=config.trust_remote_code)
