"""What the calls of `rl_interfaces.backend.weight_calls` need of this worker's model."""

from __future__ import annotations

import torch
from rl_interfaces.backend.weight_calls import WeightCalls

from rl_dtensor_worker.parallel.fsdp import local_tensor
from rl_dtensor_worker.weights.source import ModelWeights
from rl_dtensor_worker.worker_parts import WorkerParts


class ModelWeightCalls(WorkerParts, WeightCalls):
    """The model's weights on their way out."""

    @property
    def weight_source(self) -> ModelWeights:
        """The weights as they leave this worker: whole, in the dtype of `precision`."""
        return ModelWeights(
            self.model,
            wire_dtype=self._config.compute_dtype,
            group=self._meshes.shards,
            device=self._device,
        )

    @torch.no_grad()
    def _add_noise_to_weights(self) -> None:
        """Add N(0, 0.01^2) to every trainable parameter, so that a transfer can be seen to work.

        Ranks that have the same part of a parameter draw the same numbers.
        """
        place = self._meshes.state["dp_shard_cp"].get_local_rank()
        generator = torch.Generator(self._device).manual_seed(self._config.seed + place)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                local = local_tensor(parameter)
                noise = torch.randn(local.shape, generator=generator, device=self._device)
                local.add_(noise.to(local), alpha=0.01)
