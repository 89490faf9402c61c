"""The worker: one rank of a policy, behind the calls of `rl_interfaces.PolicyWorker`.

Methods import the engine and what goes with it themselves: a driver needs the class alone.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from rl_interfaces.backend.worker import EngineWorker
from torch.nn.attention import SDPBackend, sdpa_kernel

from rl_dtensor_worker import preflight

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from rl_batched_data import BatchedDataDict
    from rl_interfaces import AdamOptions, OptimizerStepOutputSpec, ParallelLayout, ScoreOutputSpec
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from rl_dtensor_worker.engine import DTensorEngine
    from rl_dtensor_worker.model.adapter_sets import AdapterSets


class DTensorPolicyWorker(EngineWorker):
    """One rank of a policy, for any transformers causal language model.

    FSDP2 shards the parameters, replicated as often as the config says; tensor and sequence
    parallelism shard each layer, context parallelism each sequence.

    A plain class: it runs wherever torchrun's environment variables are set, on its GPU with NCCL
    or on the CPU with gloo. Every method is called on every rank. See `EngineWorker` for the
    arguments. With new adapters the reference model takes no copy: it is the model without them.
    """

    _engine: DTensorEngine

    @classmethod
    def find_engine(cls) -> type[DTensorEngine]:
        """Return `DTensorEngine`."""
        from rl_dtensor_worker.engine import DTensorEngine

        return DTensorEngine

    @classmethod
    def plan_layout(
        cls, config: Mapping[str, object], *, world_size: int, init_optimizer: bool
    ) -> ParallelLayout:
        """Return the layout of `world_size` ranks, see `preflight.plan_layout`.

        Raises:
            ValueError: Config and model do not fit; the message names key and numbers.
        """
        return preflight.plan_layout(config, world_size=world_size, init_optimizer=init_optimizer)

    @staticmethod
    def repeated_layers(model: nn.Module) -> list[nn.Module]:
        """Return the repeated layers, in order; see `rl_interfaces.backend.memory`."""
        from rl_dtensor_worker.parallel.structure import decoder_layers

        return list(decoder_layers(cast("PreTrainedModel", model)).values())

    @property
    def saves_in_background(self) -> bool:
        """Whether `policy.dtensor_cfg.async_checkpoint` is set."""
        return self._engine.config.async_checkpoint

    def score(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict[ScoreOutputSpec]:
        """Return `scores`: `[batch]` of a reward model, `[batch, seq]` of a value model, float32.

        Raises:
            ValueError: The model is a language model.
        """
        self._require("score")
        return self._score_rows(lambda output: {"scores": output.logits()}, data, micro_batch_size)

    def open_refit(
        self, *, adapters: str = "merged", **options: Any
    ) -> Mapping[str, str | int] | None:
        """Return the address that this rank's receivers connect to, see `WeightTransfer.open`.

        Args:
            adapters: "merged" into the weights that are sent, or "alone", which `send_adapters`
                sends.
            options: See `WeightTransfer.open`.

        Raises:
            ValueError: Adapters cannot be sent alone, or there are none.
        """
        if adapters not in ("merged", "alone"):
            raise ValueError(f"adapters={adapters!r} is neither 'merged' nor 'alone'")
        if adapters == "alone":
            base, factors = self._engine.adapter_sources(self._engine.info.wire_dtype)
            options |= {"source": base, "adapters": factors}
        return super().open_refit(**options)

    def send_adapters(
        self, version: int, *, receivers: Sequence[int] | None = None
    ) -> dict[str, float]:
        """Stream adapters to receivers that hold the weights that these belong to. Collective.

        Args:
            version: Of the weights.
            receivers: The ranks of those that take part. None: all.

        Returns:
            See `send_weights`.

        Raises:
            RefitError: A receiver failed, did not answer in time, or does not hold those weights.
            ResidencyError: The model is offloaded.
        """
        self._require("send_weights")
        return self._transfer.send(version, adapters_only=True, receivers=receivers)

    def save_adapters(self, path: str) -> None:
        """Write a directory that `peft.PeftModel.from_pretrained` loads onto the model.

        Raises:
            ValueError: There are no adapters, or no save has written what is at the path.
            RuntimeError: It cannot be written; on every rank.
        """
        from rl_dtensor_worker.model.lora import write_peft_directory

        if self._engine.config.adapters is None:
            raise ValueError("save_adapters() needs policy.dtensor_cfg.lora.enabled=True")
        with self._checkpointer.replacing(path) as directory:
            write_peft_directory(
                self._engine.model, directory, is_writer=self._environment.rank == 0
            )

    # Several sets of adapters, see `rl_interfaces.MultiAdapterWorker`

    def add_adapters(self, name: str, *, rank: int, seed: int, layers: list[str]) -> None:
        """Add a set of initial adapters: A random, B zero."""
        from rl_dtensor_worker.model.adapter_sets import AdapterSetConfig

        config = AdapterSetConfig(rank=rank, seed=seed, layers=tuple(layers))
        self._adapter_sets.create(name, config)

    def use_adapters(self, name: str | None) -> None:
        """Put a set into the model, with its pending gradients; None: no adapters."""
        self._pending = self._adapter_sets.use(name, self._pending)
        self._residency.has_gradients = self._pending.num_calls > 0

    def copy_adapters(self, name: str) -> None:
        """Add a set with the adapters that are in the model, to sample with."""
        self._adapter_sets.copy(name)

    def remove_adapters(self, name: str) -> None:
        """Drop a set, and its gradients."""
        # The set in the model leaves its gradients' counts behind, which are dropped with it.
        self._pending = self._adapter_sets.remove(name, self._pending)
        self._residency.has_gradients = self._pending.num_calls > 0

    def save_adapter_set(self, path: str, *, with_optimizer: bool) -> None:
        """Write the set in the model into a directory that `peft.PeftModel` loads."""
        with self._checkpointer.replacing(path) as directory:
            self._adapter_sets.save(
                directory, with_optimizer=with_optimizer, is_writer=self._environment.rank == 0
            )

    def load_adapter_set(self, name: str, path: str, *, with_optimizer: bool) -> None:
        """Add the set that `save_adapter_set` has written."""
        self._adapter_sets.load(name, Path(path), with_optimizer=with_optimizer)

    def adam_step(self, options: AdamOptions) -> OptimizerStepOutputSpec:
        """Step with the pending gradients of the sum, not the mean, over all calls' rows."""
        self._residency.require("optimizer_step")
        assert self._engine.optimizer is not None, "gradients are pending"
        with self._engine.optimizer.with_adam(options):
            return self._step_with_pending(self._pending.sum_divisor)

    @cached_property
    def _adapter_sets(self) -> AdapterSets:
        from rl_dtensor_worker.model.adapter_sets import AdapterSets

        config, optimizer = self._engine.config, self._engine.optimizer
        if config.adapters is None or config.head != "language_model":
            raise ValueError(
                "sets of adapters need policy.dtensor_cfg.lora.enabled=True and "
                f"policy.head='language_model', got {config.head!r}"
            )
        if optimizer is None or type(optimizer.state.optimizer) is not torch.optim.AdamW:
            raise ValueError("sets of adapters need policy.optimizer.name=torch.optim.AdamW")
        return AdapterSets(
            self._engine.model,
            optimizer.state.optimizer,
            rank=config.adapters.r,
            alpha=config.adapters.lora_alpha,
        )

    def return_state_dict(self) -> dict[str, object]:
        """Return the model's state, of which each rank has its shards."""
        return self._engine.model.state_dict()

    def move_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move parameters and buffers of `model`, and return it."""
        return self.move_buffer_to_device(model.to(device), device)

    def move_buffer_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move the buffers of `model`, which FSDP does not manage, and return it."""
        from rl_dtensor_worker.engine import move_buffers

        return move_buffers(model, device)

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device, the CPU if there is no GPU, and return it."""
        return self.move_to_device(model, self._engine.info.device)

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        """Move `model` to the CPU and return it."""
        from rl_dtensor_worker.engine import free_cached_memory

        moved = self.move_to_device(model, "cpu")
        free_cached_memory(self._engine.info.device)
        return moved

    @staticmethod
    def create_context_parallel_ctx(
        cp_mesh: DeviceMesh,
        cp_buffers: list[torch.Tensor],
        cp_seq_dims: list[int],
        cp_no_restore_buffers: set[torch.Tensor],
        cp_rotate_method: str | None = None,
    ) -> AbstractContextManager[None]:
        """Return torch's context-parallel context over `cp_buffers`.

        Args:
            cp_mesh: The one-axis mesh of the ranks that shard each sequence.
            cp_buffers: Tensors that are sharded along their sequence dim inside.
            cp_seq_dims: The sequence dim of each buffer.
            cp_no_restore_buffers: The buffers that need not be restored on exit.
            cp_rotate_method: `allgather` or `alltoall`: how keys and values are exchanged.
        """
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        if cp_rotate_method is not None:
            set_rotate_method(cp_rotate_method)
        return context_parallel(
            cp_mesh,
            buffers=cp_buffers,
            buffer_seq_dims=cp_seq_dims,
            no_restore_buffers=cp_no_restore_buffers,
        )

    @staticmethod
    @contextmanager
    def train_context(
        cp_context: AbstractContextManager[None] | None = None,
    ) -> Generator[None, None, None]:
        """Enter `cp_context` with the attention kernels that it supports; do nothing for None."""
        with ExitStack() as stack:
            if cp_context is not None:
                # torch's context parallelism has no rule for the math kernel.
                stack.enter_context(
                    sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
                )
                stack.enter_context(cp_context)
            yield
