"""What the groups of a worker's calls have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_interfaces.backend.steps import Concatenation, Step, steps_of

from rl_megatron_worker.weights import MegatronWeights

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
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from rl_megatron_worker.checkpoint.checkpointer import Checkpointer
    from rl_megatron_worker.config import WorkerConfig
    from rl_megatron_worker.convert import Converter
    from rl_megatron_worker.model.config import Architecture
    from rl_megatron_worker.model.heads import TokenHead
    from rl_megatron_worker.optim import Trainer
    from rl_megatron_worker.parallel.schedule import Schedule
    from rl_megatron_worker.reference import ReferenceModel
    from rl_megatron_worker.runtime import Runtime


class WorkerParts:
    """The parts of a worker, which its constructor puts together."""

    model: list[nn.Module]
    """The chunks of this rank, in the order of the layers."""
    _config: WorkerConfig
    _environment: RankEnvironment
    _runtime: Runtime
    _device: torch.device
    _dp_group: dist.ProcessGroup
    _tokenizer: PreTrainedTokenizerBase
    _pad_token_id: int | None
    _converter: Converter
    _architecture: Architecture
    _hf_config: Any
    _generation_config: GenerationConfig | None
    _schedule: Schedule
    _head: TokenHead | None
    """None on stages before the last."""
    _reference: ReferenceModel | None
    _trainer: Trainer | None
    _residency: Residency
    _transfer: WeightTransfer
    _profiler: Profiler
    _random: RandomState
    _checkpointer: Checkpointer

    @property
    def _concatenation(self) -> Concatenation:
        multiple = self._config.sequence_multiple
        return Concatenation(always=True, sequence_multiple=multiple, total_multiple=multiple)

    def _steps(self, data: BatchedDataDict[Any], **sizes: Any) -> list[Step]:
        return steps_of(
            data,
            **sizes,
            planned_by=self._config.planned_by,
            concatenation=self._concatenation,
            group=self._dp_group,
            device=self._device,
        )

    def _weights(self, wire_dtype: torch.dtype) -> MegatronWeights:
        return MegatronWeights(
            self.model,
            self._converter.mappings(self._architecture),
            wire_dtype=wire_dtype,
            device=self._device,
        )
