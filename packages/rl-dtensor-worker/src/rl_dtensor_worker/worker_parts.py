"""What the groups of a worker's calls have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_interfaces.backend.steps import Step, steps_of

from rl_dtensor_worker.model.media import check_same_media

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from rl_batched_data import BatchedDataDict
    from rl_interfaces import Residency
    from rl_interfaces.backend.runtime.device import Profiler
    from rl_interfaces.backend.runtime.random import RandomState
    from rl_interfaces.backend.runtime.ranks import RankEnvironment
    from rl_interfaces.backend.transfer import WeightTransfer
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from rl_dtensor_worker.checkpoint.checkpointer import Checkpointer
    from rl_dtensor_worker.config import WorkerConfig
    from rl_dtensor_worker.forward import Forward
    from rl_dtensor_worker.model.lora import AdaptersOff
    from rl_dtensor_worker.parallel.context import ParallelContext
    from rl_dtensor_worker.parallel.mesh import Meshes
    from rl_dtensor_worker.reference import ReferenceModel
    from rl_dtensor_worker.train_step import TrainingParts
    from rl_dtensor_worker.value_forward import ValueForward


class WorkerParts:
    """The parts of a worker, which its constructor puts together."""

    model: nn.Module
    _config: WorkerConfig
    _environment: RankEnvironment
    _device: torch.device
    _meshes: Meshes
    _dp_group: dist.ProcessGroup
    _dp_rank: int
    _tokenizer: PreTrainedTokenizerBase
    _pad_token_id: int | None
    _parallel: ParallelContext
    _forward: Forward | ValueForward
    _reference: ReferenceModel | AdaptersOff | None
    _training: TrainingParts | None
    _residency: Residency
    _transfer: WeightTransfer
    _profiler: Profiler
    _random: RandomState
    _checkpointer: Checkpointer

    def _steps(self, data: BatchedDataDict[Any], **sizes: Any) -> list[Step]:
        steps = steps_of(
            data,
            **sizes,
            planned_by=self._config.planned_by,
            concatenation=self._parallel.concatenation(),
            group=self._dp_group,
            device=self._device,
        )
        check_same_media(steps, group=self._dp_group, device=self._device)
        return steps
