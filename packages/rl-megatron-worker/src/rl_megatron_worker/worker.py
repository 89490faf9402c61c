"""The worker: one rank of a Megatron-core policy, behind `rl_interfaces.PolicyWorker`'s calls."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rl_batched_data import BatchedDataDict
from rl_interfaces import LossType, ParallelLayout, Residency
from rl_interfaces.backend.batch_checks import check_scoring_batch, check_training_batch, positive
from rl_interfaces.backend.generation.loop import check_room, generate
from rl_interfaces.backend.information_calls import InformationCalls
from rl_interfaces.backend.runtime.device import Profiler, device_id
from rl_interfaces.backend.runtime.random import RandomState
from rl_interfaces.backend.runtime.ranks import RankEnvironment, init_process_group
from rl_interfaces.backend.transfer import WeightTransfer

from rl_megatron_worker.checkpoint.checkpointer import Checkpointer
from rl_megatron_worker.checkpoint_calls import CheckpointCalls
from rl_megatron_worker.config import WorkerConfig, load_generation_config, load_model_config
from rl_megatron_worker.convert import converter_for
from rl_megatron_worker.decoder import ExpertSync, open_decoder
from rl_megatron_worker.model.build import build_model
from rl_megatron_worker.model.config import transformer_config
from rl_megatron_worker.model.heads import TokenHead
from rl_megatron_worker.model.load import load_weights
from rl_megatron_worker.modes import evaluating, training_mode
from rl_megatron_worker.optim import Trainer, ddp_config
from rl_megatron_worker.parallel.groups import (
    check_device,
    check_sizes,
    init_model_parallel,
    leave_model_parallel,
)
from rl_megatron_worker.parallel.schedule import Schedule
from rl_megatron_worker.reference import ReferenceModel
from rl_megatron_worker.residency_calls import ResidencyCalls
from rl_megatron_worker.runtime import Runtime, may_have_gpus
from rl_megatron_worker.scoring_calls import ScoringCalls
from rl_megatron_worker.train_step import run_steps
from rl_megatron_worker.weight_calls import ModelWeightCalls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_interfaces import (
        GenerationDatumSpec,
        GenerationOutputSpec,
        LossFunction,
        PolicyConfig,
    )
    from rl_interfaces.backend.generation.loop import Decoder
    from transformers import PreTrainedTokenizerBase


class MegatronPolicyWorker(
    ScoringCalls, CheckpointCalls, ResidencyCalls, ModelWeightCalls, InformationCalls
):
    """One rank of a policy on Megatron-core, for the models that `convert` knows.

    A plain class: it runs wherever torchrun's environment variables are set, on its GPU with NCCL
    or on the CPU with gloo. Every method is called on every rank.

    Args:
        config: A `PolicyConfig`.
        tokenizer: The model's tokenizer.
        weights_path: Weights of `save_checkpoint` to start from, instead of the model's own.
        optimizer_path: The training state that belongs to them.
        init_optimizer: Whether to train; without an optimizer the worker only scores and samples.
        init_reference_model: Whether to keep a frozen copy for reference log-probabilities. It is
            the model as `model_name` gives it, whatever `weights_path` says.

    Raises:
        ValueError: The config asks for what cannot be done.
    """

    contract_version = (1, 0)

    def __init__(
        self,
        config: PolicyConfig,
        tokenizer: PreTrainedTokenizerBase,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
    ) -> None:
        self._environment = RankEnvironment.from_environment()
        self._config = WorkerConfig.from_policy_config(
            config, world_size=self._environment.world_size, init_optimizer=init_optimizer
        )
        self._tokenizer = tokenizer
        self._pad_token_id: int | None = tokenizer.pad_token_id  # type: ignore[assignment]
        self._runtime = Runtime(self._environment)
        self._device = self._runtime.device
        with ExitStack() as leaving:
            if init_process_group(self._environment, timeout_s=self._config.timeout_s):
                leaving.callback(_leave_process_group)
            leaving.callback(leave_model_parallel)
            init_model_parallel(
                self._config.layout, self._runtime, timeout_s=self._config.timeout_s
            )
            self._build(keep_reference=init_reference_model)
            leaving.callback(self._checkpointer.close)
            leaving.callback(self._transfer.close)
            if weights_path is not None:
                self.load_checkpoint(weights_path, optimizer_path)
            self._set_mode(training=init_optimizer)
            self._leaving = leaving.pop_all()

    def __repr__(self) -> str:
        return f"{type(self).__name__}[rank={self._environment.rank}]"

    @staticmethod
    def validate_config(
        config: Mapping[str, Any], *, world_size: int, init_optimizer: bool = True
    ) -> ParallelLayout:
        """Return the layout of `world_size` ranks, before any of them starts.

        Raises:
            ValueError: The config asks for what cannot be done; the message names key and numbers.
        """
        parsed = WorkerConfig.from_policy_config(
            config, world_size=world_size, init_optimizer=init_optimizer
        )
        hf_config = load_model_config(parsed)
        converter = converter_for(hf_config, parsed.converter_type)
        check_device(parsed.layout, on_cuda=may_have_gpus())
        check_sizes(
            converter.architecture(hf_config),
            parsed.layout,
            recomputed_unit=parsed.model.recomputed_unit,
        )
        return parsed.layout.for_driver

    # Training and generation

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Take an optimizer step per global batch, of which `data` is this rank's share.

        See `rl_interfaces.PolicyWorker.train`.

        Raises:
            ValueError: The batch lacks a key, or sizes do not divide.
            ResidencyError: The worker is not in a state to train.
        """
        self._residency.require("train(eval_mode=True)" if eval_mode else "train")
        check_training_batch(
            data,
            pad_token_id=self._pad_token_id,
            needs_token_mask=loss_fn.loss_type is LossType.TOKEN_LEVEL,
        )
        steps = self._steps(
            data,
            local_batch_size=self._local_batch_size(gbs),
            given=positive("mbs", mbs),
            default=self._config.train_micro_batch_size,
            rows_per_group=getattr(loss_fn, "rows_per_group", 1),
        )
        trainer = None if eval_mode else self._trainer
        mode = evaluating(self.model, self._runtime) if eval_mode else training_mode(self.model)
        with mode:
            result = run_steps(
                self._schedule,
                self._head,
                loss_fn,
                steps=steps,
                trainer=trainer,
                group=self._dp_group,
                empty_memory_level=self._config.empty_unused_memory_level,
            )
        if trainer is not None:
            trainer.step_scheduler()
        return {
            "global_loss": torch.stack(result.losses).cpu(),
            "grad_norm": torch.stack(result.grad_norms).cpu() if result.grad_norms else None,
            "rank": self._environment.rank,
            "all_mb_metrics": dict(result.metrics),
        }

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a completion for each row, see `GenerationOutputSpec`.

        Raises:
            ValueError: There is no `policy.generation`, or a prompt leaves no room for a token.
        """
        self._residency.require("generate")
        sampling = self._config.sampling
        if sampling is None:
            raise ValueError("policy.generation is not set: the policy does not generate")
        check_scoring_batch(data, pad_token_id=self._pad_token_id)
        check_room(data, longest=self._longest_sequence())

        def new_decoder() -> Decoder:
            return open_decoder(self._schedule, self._head, self._concatenation)

        sync = ExpertSync(
            self._dp_group, self._device, enabled=self._config.layout.experts_span_data_ranks
        )
        with evaluating(self.model, self._runtime), sync.joining(new_decoder):
            return generate(
                lambda _: sync.synchronised(new_decoder()),
                data,
                sampling=sampling,
                greedy=greedy,
                tokenizer=self._tokenizer,  # type: ignore[arg-type]
                generator=self._random.sampling,
                max_total_length=self._longest_sequence(),
                device=self._device,
            )

    # The end

    def shutdown(self) -> None:
        """Let go of receivers and handles, and leave the process groups.

        Calling it twice is fine.

        Raises:
            RuntimeError: The last save could not be written.
        """
        self._leaving.close()

    # Inside

    def _build(self, *, keep_reference: bool) -> None:
        config = self._config
        self._hf_config = load_model_config(config)
        self._generation_config = load_generation_config(config)
        self._converter = converter_for(self._hf_config, config.converter_type)
        self._architecture = self._converter.architecture(self._hf_config)
        check_sizes(self._architecture, config.layout, recomputed_unit=config.model.recomputed_unit)
        self._dp_group = cast("dist.ProcessGroup", parallel_state.get_data_parallel_group())
        dp_rank = self._dp_group.rank()
        self._random = RandomState(config.seed + dp_rank, device=self._device)
        self._runtime.seed(config.seed + dp_rank)
        self._build_model()
        self._head = self._build_head()
        self._reference = ReferenceModel(self.model) if keep_reference else None
        self._residency = Residency(has_optimizer=self._trainer is not None)
        self._transfer = WeightTransfer(
            self.weight_source,
            rank=self._environment.rank,
            device=self._device,
            device_id=device_id(self._device),
            timeout_s=config.timeout_s,
        )
        self._profiler = Profiler(self._environment, directory=config.profile_dir)
        self._checkpointer = Checkpointer(
            self.model, self._runtime, timeout_s=config.timeout_s, trainer=self._trainer
        )

    def _build_model(self) -> None:
        config, optimizer = self._config, self._config.optimizer
        megatron_config = transformer_config(
            self._architecture, config.layout, config.model, self._runtime
        )
        self.model = build_model(
            self._architecture,
            megatron_config,
            config.layout,
            self._runtime,
            ddp=None if optimizer is None else ddp_config(config.data_parallel, optimizer),
        )
        load_weights(
            self.model,
            self._converter.mappings(self._architecture),
            self._hf_config,
            model_name=config.model_name,
        )
        self._schedule = Schedule(chunks=self.model, runtime=self._runtime)
        self._trainer = None
        if optimizer is not None:
            self._trainer = Trainer(
                self.model, megatron_config, optimizer, config.scheduler, self._runtime
            )

    def _build_head(self) -> TokenHead | None:
        if not self._schedule.is_last_stage:
            return None
        return TokenHead(
            chunk=self.model[-1],
            vocab_size=self._architecture.vocab_size,
            temperature=self._config.temperature,
        )

    def _local_batch_size(self, gbs: int | None) -> int:
        global_size = positive("gbs", gbs) or self._config.train_global_batch_size
        ranks = self._config.layout.data
        if global_size % ranks:
            raise ValueError(
                f"gbs={global_size} is not divisible by the {ranks} data-parallel ranks"
            )
        return global_size // ranks

    def _longest_sequence(self) -> int:
        own = self._architecture.max_sequence_length
        return min(self._config.max_total_sequence_length or own, own)


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
