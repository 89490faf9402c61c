"""The worker: one rank of an FSDP2 policy, behind the calls of `rl_interfaces.PolicyWorker`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_batched_data import BatchedDataDict
from rl_batched_data.batch_checks import check_scoring_batch, check_training_batch
from rl_interfaces import LossType, ParallelLayout, Residency

from rl_dtensor_worker import context_parallel, device, residency
from rl_dtensor_worker.agreement import failing_together
from rl_dtensor_worker.checkpoint import Checkpointer, RankRandomState
from rl_dtensor_worker.config import WorkerConfig, load_model_config
from rl_dtensor_worker.forward import score_rows
from rl_dtensor_worker.fsdp import local_tensor, unshard_fsdp2_model
from rl_dtensor_worker.generate import check_room, generate
from rl_dtensor_worker.microbatches import Step, steps_of
from rl_dtensor_worker.model import build_model
from rl_dtensor_worker.modes import evaluating, training_mode
from rl_dtensor_worker.optim import LossScaler, build_optimizer, build_scheduler
from rl_dtensor_worker.packing import check_packing
from rl_dtensor_worker.parallel import RankEnvironment, build_mesh, init_process_group
from rl_dtensor_worker.randomness import RandomState
from rl_dtensor_worker.reference import ReferenceModel
from rl_dtensor_worker.refit import WeightTransfer
from rl_dtensor_worker.train_step import TrainingParts, run_steps
from rl_dtensor_worker.weights import ModelWeights

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from rl_interfaces import (
        GenerationDatumSpec,
        GenerationOutputSpec,
        LogprobOutputSpec,
        LossFunction,
        PolicyConfig,
        ReferenceLogprobOutputSpec,
    )
    from torch import nn
    from transformers import PreTrainedTokenizerBase


class DTensorPolicyWorker:
    """One rank of a policy on FSDP2, for any transformers causal language model.

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
        self._owns_group = init_process_group(self._environment, timeout_s=self._config.timeout_s)
        self._device = self._environment.device
        self._mesh = build_mesh(self._config.layout, device_type=self._device.type)
        self._dp_group = self._mesh["dp"].get_group()
        self._dp_rank = self._mesh["dp"].get_local_rank()
        self._tokenizer = tokenizer
        self._pad_token_id: int | None = tokenizer.pad_token_id  # type: ignore[assignment]
        self.model = build_model(self._config, mesh=self._mesh, device=self._device)
        self._reference = ReferenceModel(self.model) if init_reference_model else None
        self._training = self._build_training()
        self._residency = Residency(has_optimizer=init_optimizer)
        self._transfer = WeightTransfer(
            self.weight_source, self._environment, timeout_s=self._config.timeout_s
        )
        self._profiler = device.Profiler(self._environment, directory=self._config.profile_dir)
        self._random = RandomState(self._config.seed + self._dp_rank, device=self._device)
        self._checkpointer = Checkpointer(
            self.model,
            timeout_s=self._config.timeout_s,
            in_background=self._config.async_checkpoint,
        )
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)
        if self._config.planned_by == "sequence_packing":
            with evaluating(self.model, self._device):
                check_packing(
                    self.model, compute_dtype=self._config.compute_dtype, device=self._device
                )
        self.model.train(init_optimizer)

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
        load_model_config(parsed)
        return parsed.layout

    # Training and scoring

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
            given=_positive("mbs", mbs),
            default=self._config.train_micro_batch_size,
        )
        training = None if eval_mode else self._training
        mode = evaluating(self.model, self._device) if eval_mode else training_mode(self.model)
        with mode:
            result = run_steps(
                self.model,
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
        with evaluating(self.model, self._device), unshard_fsdp2_model(self.model):
            return generate(
                self.model,
                data,
                sampling=sampling,
                greedy=greedy,
                tokenizer=self._tokenizer,
                generator=self._random.sampling,
                max_total_length=self._longest_sequence(),
                device=self._device,
            )

    # Residency

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring model and optimizer state onto the device, in train mode."""
        self._place(on_device=True, training_on_device=True)
        self.model.train()
        self._residency.enter("prepare_for_training")

    def prepare_for_lp_inference(self) -> None:
        """Bring the model onto the device, in eval mode, and the optimizer state off it."""
        self._place(on_device=True, training_on_device=False)
        self.model.eval()
        self._residency.enter("prepare_for_lp_inference")

    def offload_before_refit(self) -> None:
        """Keep the model on the device and move the optimizer state off it."""
        self._place(on_device=True, training_on_device=False)
        self._residency.enter("offload_before_refit")

    def offload_after_refit(self) -> None:
        """Move everything off the device."""
        self._transfer.drop_handles()
        self._place(on_device=False, training_on_device=False)
        self.model.eval()
        self._residency.enter("offload_after_refit")

    def move_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move parameters and buffers of `model`, and return it."""
        return self.move_buffer_to_device(model.to(device), device)

    def move_buffer_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move the buffers of `model`, which FSDP leaves alone, and return it."""
        return residency.move_buffers(model, device)

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device, the CPU where there is no GPU, and return it."""
        moved = self.move_to_device(model, self._device)
        residency.free_cached_memory(self._device)
        return moved

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        """Move `model` to the CPU and return it."""
        moved = self.move_to_device(model, "cpu")
        residency.free_cached_memory(self._device)
        return moved

    # Checkpoints

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        """Write the weights; the training state and the tokenizer where a path is given.

        The directories are written beside their places and renamed together when all are complete.
        The training state holds optimizer, schedule, loss scale and every rank's random state.

        With `policy.dtensor_cfg.async_checkpoint` this copies the state to the CPU and returns; it
        is written while training goes on. The next save, load or `shutdown`, or
        `finish_checkpoint`, waits for it and raises what it failed with.

        Raises:
            ValueError: `optimizer_path` is given and there is no optimizer, or a path is taken by
                something that no save has written.
            RuntimeError: This save, or the one before it, cannot be written; on every rank.
        """
        self._require_optimizer(optimizer_path, to="save")
        self._checkpointer.save(
            weights_path, optimizer_path, self._training, self._random_state_of_rank()
        )
        with failing_together():
            if tokenizer_path is not None and self._environment.rank == 0:
                self._tokenizer.save_pretrained(tokenizer_path)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Read what `save_checkpoint` wrote, in this layout of ranks or another.

        Raises:
            ValueError: A directory is no complete checkpoint of this model, the two are of
                different saves, or there is no optimizer.
        """
        self._require_optimizer(optimizer_path, to="load")
        random_state = self._checkpointer.load(
            weights_path, optimizer_path, self._training, self._random_state_of_rank()
        )
        if random_state is not None:
            self._random.load_state_dict(random_state)

    def finish_checkpoint(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            RuntimeError: It could not be written.
            TimeoutError: It takes longer than `policy.timeout_s`.
        """
        self._checkpointer.finish()

    def save_hf_checkpoint(self, path: str, max_file_bytes: int = 5 * 10**9) -> None:
        """Write a directory that `AutoModelForCausalLM.from_pretrained` loads, in float32.

        Args:
            path: The directory.
            max_file_bytes: A larger model is written as several files of at most this size, of
                which the first rank holds one at a time.

        Raises:
            ValueError: The path is taken by something that no save has written.
            RuntimeError: It cannot be written; on every rank.
        """
        self._checkpointer.export(self._tokenizer, path, max_file_bytes=max_file_bytes)

    def return_state_dict(self) -> dict[str, Any]:
        """Return the model's state, of which each rank holds its shards."""
        return self.model.state_dict()

    # Information

    def is_alive(self) -> bool:
        """Return True."""
        return True

    def reset_peak_memory_stats(self) -> None:
        """Start the peak memory figures anew."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def get_gpu_info(self) -> dict[str, Any]:
        """Return rank, device, memory figures in MiB, and a few values of one parameter."""
        name, parameter = next(iter(self.model.named_parameters()))
        sample = local_tensor(parameter).flatten()[:4].tolist()
        return {**device.describe_device(self._environment), "parameter_sample": {name: sample}}

    def report_device_id(self) -> str:
        """Return the GPU's UUID, or on the CPU an id of the host."""
        return device.device_id(self._device)

    def start_gpu_profiling(self) -> None:
        """Open a profiling range: CUDA's own, or on the CPU a trace of `torch.profiler`."""
        self._profiler.start()

    def stop_gpu_profiling(self) -> None:
        """Close the range; on the CPU the trace is written to `policy.profile_dir`."""
        self._profiler.stop()

    def shutdown(self) -> None:
        """Let go of receivers and handles, and leave the process group if the worker joined it.

        Calling it twice is fine.

        Raises:
            RuntimeError: The last save could not be written.
        """
        self._transfer.close()
        try:
            self._checkpointer.close()
        finally:
            if self._owns_group and dist.is_initialized():
                dist.destroy_process_group()
            self._owns_group = False

    # Weight transfer

    @property
    def weight_source(self) -> ModelWeights:
        """The weights as they leave this worker: whole, in the dtype of `precision`."""
        return ModelWeights(self.model, wire_dtype=self._config.compute_dtype, device=self._device)

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return `{name: (shape, wire dtype)}` of every tensor that is sent, in order."""
        metadata = self.weight_source.metadata()
        return {name: (shape, dtype) for name, dtype, shape in metadata}

    def open_refit(self, **options: Any) -> dict[str, Any] | None:
        """Return the address at which this rank's receivers find it, see `WeightTransfer.open`."""
        return self._transfer.open(**options)

    def send_weights(self, version: int) -> dict[str, float]:
        """Stream the weights to the receivers; return the seconds of each phase, and the bytes.

        Raises:
            RefitError: A receiver failed or did not answer in time.
            ResidencyError: The model is not on the device.
        """
        self._residency.require("send_weights")
        return self._transfer.send(version)

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Return name and bytes of every tensor as it is sent, and the device's free bytes."""
        self._residency.require("send_weights")
        return self._transfer.sizes()

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return `{device id: {name: handle}}`; the handles of the call before expire.

        `rl_refit.handles.rebuild` makes a tensor of a handle, in another process.

        Raises:
            ValueError: There is no tensor of a name.
        """
        self._residency.require("send_weights")
        return self._transfer.export(keys)

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Meet `world_size - 1` inference ranks at an address of rank 0, which alone joins."""
        self._transfer.join(ip, port, world_size)

    def prepare_info_for_collective(self) -> dict[str, Any]:
        """Return what `prepare_refit_info` returns."""
        return self.prepare_refit_info()

    def broadcast_weights_for_collective(self) -> None:
        """Broadcast every tensor to the group of `init_collective`, in order."""
        self._residency.require("send_weights")
        self._transfer.broadcast()

    create_context_parallel_ctx = staticmethod(context_parallel.create_context_parallel_ctx)
    train_context = staticmethod(context_parallel.train_context)

    @torch.no_grad()
    def _add_noise_to_weights(self) -> None:
        """Add N(0, 0.01^2) to every trainable parameter, so that a transfer can be seen to work."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                local = local_tensor(parameter)
                local.add_(torch.randn_like(local), alpha=0.01)

    # Inside

    def _build_training(self) -> TrainingParts | None:
        if self._config.optimizer is None:
            return None
        optimizer = build_optimizer(self.model, self._config.optimizer)
        return TrainingParts(
            optimizer=optimizer,
            scheduler=build_scheduler(optimizer, self._config.scheduler),
            scaler=LossScaler(self._config.compute_dtype),
        )

    def _require_optimizer(self, optimizer_path: str | None, *, to: str) -> None:
        if optimizer_path is not None and self._training is None:
            raise ValueError(f"optimizer_path={optimizer_path!r}: there is no optimizer to {to}")

    def _random_state_of_rank(self) -> RankRandomState:
        ranks_that_share_it = self._environment.world_size // self._config.layout.data_parallel
        return RankRandomState(
            data_parallel_rank=self._dp_rank,
            is_written_here=self._environment.rank % ranks_that_share_it == 0,
            state=self._random.state_dict(),
        )

    def _score(self, data: BatchedDataDict[Any], micro_batch_size: int | None) -> torch.Tensor:
        check_scoring_batch(data, pad_token_id=self._pad_token_id)
        steps = self._steps(
            data,
            local_batch_size=None,
            given=_positive("micro_batch_size", micro_batch_size),
            default=self._config.logprob_batch_size,
        )
        with evaluating(self.model, self._device):
            return score_rows(
                self.model,
                data,
                steps=steps,
                temperature=self._config.temperature,
                width_multiple=self._config.width_multiple,
                device=self._device,
            )

    def _steps(self, data: BatchedDataDict[Any], **sizes: Any) -> list[Step]:
        return steps_of(
            data,
            **sizes,
            planned_by=self._config.planned_by,
            group=self._dp_group,
            device=self._device,
        )

    def _place(self, *, on_device: bool, training_on_device: bool) -> None:
        cpu = torch.device("cpu")
        offload = self._config.cpu_offload
        if not training_on_device:
            residency.drop_gradients(self._training)
        residency.place_training_state(
            self._training, self._device if training_on_device else cpu, cpu_offload=offload
        )
        residency.place_model(self.model, self._device if on_device else cpu, cpu_offload=offload)
        residency.free_cached_memory(self._device)

    def _local_batch_size(self, gbs: int | None) -> int:
        global_size = _positive("gbs", gbs) or self._config.train_global_batch_size
        ranks = self._config.layout.data_parallel
        if global_size % ranks:
            raise ValueError(
                f"gbs={global_size} is not divisible by the {ranks} data-parallel ranks"
            )
        return global_size // ranks

    def _longest_sequence(self) -> int:
        own = getattr(self.model.config, "max_position_embeddings", None)
        limits = [x for x in (self._config.max_total_sequence_length, own) if x is not None]
        return min(limits, default=2**31)


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and value <= 0:
        raise ValueError(f"{name}={value} must be positive")
    return value
