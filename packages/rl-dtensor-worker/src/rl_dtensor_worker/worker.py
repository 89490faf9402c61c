"""The worker: one rank of a policy, behind the calls of `rl_interfaces.PolicyWorker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_interfaces.backend.worker import EngineWorker

from rl_dtensor_worker.engine import DTensorEngine, free_cached_memory, move_buffers
from rl_dtensor_worker.model.lora import write_peft_directory
from rl_dtensor_worker.model.media import check_same_media
from rl_dtensor_worker.parallel import context

if TYPE_CHECKING:
    import torch
    from rl_batched_data import BatchedDataDict
    from rl_interfaces import ScoreOutputSpec
    from rl_interfaces.backend.steps import Step
    from torch import nn


class DTensorPolicyWorker(EngineWorker):
    """One rank of a policy, for any transformers causal language model.

    FSDP2 shards the parameters, replicated as often as the config says; tensor and sequence
    parallelism shard each layer, context parallelism each sequence.

    A plain class: it runs wherever torchrun's environment variables are set, on its GPU with NCCL
    or on the CPU with gloo. Every method is called on every rank. See `EngineWorker` for the
    arguments. With adapters the reference model takes no copy: it is the model without them.
    """

    engine_class = DTensorEngine
    _engine: DTensorEngine

    @property
    def saves_in_background(self) -> bool:
        """Whether `policy.dtensor_cfg.async_checkpoint` is set."""
        return self._engine.config.async_checkpoint

    def score(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ScoreOutputSpec]:
        """Return `scores`: `[batch]` of a reward model, `[batch, seq]` of a value model, float32.

        Raises:
            ValueError: The model is a language model.
        """
        self._require("score")
        return self._score_rows(lambda output: {"scores": output.logits()}, data, micro_batch_size)

    def save_adapters(self, path: str) -> None:
        """Write a directory that `peft.PeftModel.from_pretrained` loads onto the model.

        Raises:
            ValueError: There are no adapters, or no save has written what is at the path.
            RuntimeError: It cannot be written; on every rank.
        """
        if self._engine.config.adapters is None:
            raise ValueError("save_adapters() needs policy.dtensor_cfg.lora.enabled=True")
        with self._checkpointer.replacing(path) as directory:
            write_peft_directory(
                self._engine.model, directory, is_writer=self._environment.rank == 0
            )

    def return_state_dict(self) -> dict[str, Any]:
        """Return the model's state, of which each rank has its shards."""
        return self._engine.model.state_dict()

    def move_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move parameters and buffers of `model`, and return it."""
        return self.move_buffer_to_device(model.to(device), device)

    def move_buffer_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move the buffers of `model`, which FSDP does not manage, and return it."""
        return move_buffers(model, device)

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device, the CPU if there is no GPU, and return it."""
        return self.move_to_device(model, self._engine.info.device)

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        """Move `model` to the CPU and return it."""
        moved = self.move_to_device(model, "cpu")
        free_cached_memory(self._engine.info.device)
        return moved

    create_context_parallel_ctx = staticmethod(context.create_context_parallel_ctx)
    train_context = staticmethod(context.train_context)

    def _steps(self, data: BatchedDataDict[Any], **options: Any) -> list[Step]:
        """Also check media, before the first step changes anything."""
        steps = super()._steps(data, **options)
        info = self._engine.info
        check_same_media(steps, group=info.data_group, device=info.device)
        return steps
