"""The worker: one rank of a policy, behind the calls of `rl_interfaces.PolicyWorker`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces import LossType, ParallelLayout, Residency
from rl_interfaces.backend.batch_checks import check_scoring_batch, check_training_batch, positive
from rl_interfaces.backend.generation.loop import check_room, generate
from rl_interfaces.backend.information_calls import InformationCalls
from rl_interfaces.backend.runtime.device import Profiler, device_id
from rl_interfaces.backend.runtime.random import RandomState
from rl_interfaces.backend.runtime.ranks import RankEnvironment, init_process_group
from rl_interfaces.backend.transfer import WeightTransfer

from rl_dtensor_worker.attention.check import check_layout, check_rotation
from rl_dtensor_worker.checkpoint.checkpointer import Checkpointer
from rl_dtensor_worker.checkpoint_calls import CheckpointCalls
from rl_dtensor_worker.config import WorkerConfig, load_model_config
from rl_dtensor_worker.decoder import CachedForward
from rl_dtensor_worker.forward import Forward
from rl_dtensor_worker.model.build import build_model
from rl_dtensor_worker.model.heads import find_token_head
from rl_dtensor_worker.model.lora import AdaptersOff
from rl_dtensor_worker.modes import evaluating, training_mode
from rl_dtensor_worker.optim import LossScaler, build_optimizer, build_scheduler
from rl_dtensor_worker.parallel import context as context_parallel
from rl_dtensor_worker.parallel.fsdp import local_tensor, unshard_fsdp2_model
from rl_dtensor_worker.parallel.mesh import (
    Meshes,
    leave_process_group,
)
from rl_dtensor_worker.parallel.sharing import Sharing
from rl_dtensor_worker.parallel.tensor.group import TensorParallel
from rl_dtensor_worker.parallel.tensor.plans import check_sizes, load_custom_plan
from rl_dtensor_worker.reference import ReferenceModel
from rl_dtensor_worker.residency_calls import ResidencyCalls
from rl_dtensor_worker.scoring_calls import ScoringCalls
from rl_dtensor_worker.train_step import TrainingParts, run_steps
from rl_dtensor_worker.value_forward import ValueForward, find_value_layer
from rl_dtensor_worker.weight_calls import ModelWeightCalls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_interfaces import (
        GenerationDatumSpec,
        GenerationOutputSpec,
        LossFunction,
        PolicyConfig,
    )
    from transformers import PreTrainedTokenizerBase


class DTensorPolicyWorker(
    ScoringCalls, CheckpointCalls, ResidencyCalls, ModelWeightCalls, InformationCalls
):
    """One rank of a policy, for any transformers causal language model.

    Parameters are sharded by FSDP2, in whole copies where the config asks for them; ranks may share
    each layer (tensor and sequence parallelism) and each sequence (context parallelism).

    A plain class: it runs wherever torchrun's environment variables are set, on its GPU with NCCL
    or on the CPU with gloo. Every method is called on every rank.

    Args:
        config: A `PolicyConfig`.
        tokenizer: The model's tokenizer.
        weights_path: Weights of `save_checkpoint` to start from, instead of the model's own.
        optimizer_path: The training state that belongs to them.
        init_optimizer: Whether to train; without an optimizer the worker only scores and samples.
        init_reference_model: Whether to keep a frozen copy for reference log-probabilities. It is
            the model as `model_name` gives it, whatever `weights_path` says. With adapters it takes
            no copy: they are left out.

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
        with ExitStack() as leaving:
            if init_process_group(self._environment, timeout_s=self._config.timeout_s):
                leaving.callback(leave_process_group)
            self._device = self._environment.device
            self._meshes = Meshes.of(
                self._config.layout, replicas=self._config.replicas, device_type=self._device.type
            )
            leaving.callback(self._meshes.leave)
            self._build(
                tokenizer, init_optimizer=init_optimizer, keep_reference=init_reference_model
            )
            leaving.callback(self._checkpointer.close)
            leaving.callback(self._transfer.close)
            if weights_path is not None:
                self.load_checkpoint(weights_path, optimizer_path)
            self._forward = self._build_forward()
            self.model.train(init_optimizer)
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
        if parsed.custom_parallel_plan is not None:
            load_custom_plan(parsed.custom_parallel_plan)
        model_config = load_model_config(parsed)
        check_sizes(model_config, tensor_parallel_size=parsed.layout.tensor_parallel)
        check_rotation(model_config, context_parallel_size=parsed.layout.context_parallel)
        return parsed.layout

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
        training = None if eval_mode else self._training
        mode = evaluating(self.model, self._device) if eval_mode else training_mode(self.model)
        with mode:
            result = run_steps(
                self._forward,
                loss_fn,
                steps=steps,
                training=training,
                config=self._config,
                group=self._dp_group,
                device=self._device,
            )
        if training is not None:
            training.scheduler.step()
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
        forward = self._require_language_model("generate")
        sampling = self._config.sampling
        if sampling is None:
            raise ValueError("policy.generation is not set: the policy does not generate")
        check_scoring_batch(data, pad_token_id=self._pad_token_id)
        check_room(data, longest=self._longest_sequence())
        with (
            evaluating(self.model, self._device),
            unshard_fsdp2_model(self.model),
            self._sharing.whole_sequences(),
        ):
            return generate(
                lambda rows: CachedForward(forward, rows),
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
        """Let go of receivers and handles, and leave the process group if the worker joined it.

        Calling it twice is fine.

        Raises:
            RuntimeError: The last save could not be written.
        """
        self._leaving.close()

    create_context_parallel_ctx = staticmethod(context_parallel.create_context_parallel_ctx)
    train_context = staticmethod(context_parallel.train_context)

    # Inside

    def _sample_parameter(self) -> tuple[str, torch.Tensor]:
        name, parameter = next(iter(self.model.named_parameters()))
        return name, local_tensor(parameter)

    def _build(
        self, tokenizer: PreTrainedTokenizerBase, *, init_optimizer: bool, keep_reference: bool
    ) -> None:
        self._dp_group = self._meshes.data["dp"].get_group()
        self._dp_rank = self._meshes.data["dp"].get_local_rank()
        self._sharing = self._share()
        self._tokenizer = tokenizer
        self._pad_token_id: int | None = tokenizer.pad_token_id  # type: ignore[assignment]
        self.model = build_model(
            self._config,
            meshes=self._meshes,
            tensor_parallel=self._sharing.tensor_parallel,
            device=self._device,
        )
        self._reference = self._build_reference() if keep_reference else None
        self._training = self._build_training()
        self._residency = Residency(has_optimizer=init_optimizer)
        self._transfer = WeightTransfer(
            self.weight_source,
            rank=self._environment.rank,
            device=self._device,
            device_id=device_id(self._device),
            timeout_s=self._config.timeout_s,
        )
        self._profiler = Profiler(self._environment, directory=self._config.profile_dir)
        self._random = RandomState(self._config.seed + self._dp_rank, device=self._device)
        self._checkpointer = Checkpointer(
            self.model,
            timeout_s=self._config.timeout_s,
            in_background=self._config.async_checkpoint,
        )

    def _build_forward(self) -> Forward | ValueForward:
        with evaluating(self.model, self._device):
            forward = self._tokens_or_values()
            packed = self._config.planned_by == "sequence_packing"
            if feature := self._sharing.feature(packed=packed):
                check_layout(
                    self.model,
                    forward.logprobs if isinstance(forward, Forward) else forward.values,
                    sharing=self._sharing,
                    feature=feature,
                    compute_dtype=self._config.compute_dtype,
                    device=self._device,
                )
        return forward

    def _tokens_or_values(self) -> Forward | ValueForward:
        if self._config.head == "language_model":
            return Forward(
                model=self.model,
                head=find_token_head(self.model, self._sharing.tensor_parallel),
                temperature=self._config.temperature,
                width_multiple=self._config.width_multiple,
                sharing=self._sharing,
            )
        return ValueForward(
            model=self.model,
            layer=find_value_layer(self.model, pad_token_id=self._pad_token_id),
            is_reward=self._config.head == "reward",
            width_multiple=self._config.width_multiple,
            sharing=self._sharing,
        )

    def _share(self) -> Sharing:
        layout, meshes = self._config.layout, self._meshes
        cuts = self._config.sequence_parallel
        return Sharing(
            tensor_parallel=TensorParallel(meshes.tp, sequence_parallel=cuts)
            if layout.tensor_parallel > 1
            else None,
            context_group=meshes.data["cp"].get_group() if layout.context_parallel > 1 else None,
        )

    def _build_reference(self) -> ReferenceModel | AdaptersOff | None:
        if self._config.adapters is None:
            return ReferenceModel(self.model)
        # Beside a layer of scores that is trained, leaving adapters out is not all there is to it.
        return AdaptersOff() if self._config.head == "language_model" else None

    def _build_training(self) -> TrainingParts | None:
        if self._config.optimizer is None:
            return None
        optimizer = build_optimizer(self.model, self._config.optimizer)
        return TrainingParts(
            optimizer=optimizer,
            scheduler=build_scheduler(optimizer, self._config.scheduler),
            scaler=LossScaler(self._config.compute_dtype),
        )

    def _local_batch_size(self, gbs: int | None) -> int:
        global_size = positive("gbs", gbs) or self._config.train_global_batch_size
        ranks = self._config.layout.data_parallel
        if global_size % ranks:
            raise ValueError(
                f"gbs={global_size} is not divisible by the {ranks} data-parallel ranks"
            )
        return global_size // ranks

    def _longest_sequence(self) -> int:
        text_config: Any = self.model.config.get_text_config()  # type: ignore[union-attr, operator]
        own = getattr(text_config, "max_position_embeddings", None)
        limits = [x for x in (self._config.max_total_sequence_length, own) if x is not None]
        return min(limits, default=2**31)
