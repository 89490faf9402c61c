"""What the calls of `rl_interfaces.backend.weight_calls` need of this worker's model."""

from __future__ import annotations

import zlib

import torch
from rl_interfaces.backend.weight_calls import WeightCalls

from rl_megatron_worker.weights import MegatronWeights
from rl_megatron_worker.worker_parts import WorkerParts


class ModelWeightCalls(WorkerParts, WeightCalls):
    """The model's weights on their way out."""

    @property
    def weight_source(self) -> MegatronWeights:
        """The weights as they leave this worker: whole, under Hugging Face's names."""
        return self._weights(self._config.model.params_dtype)

    def _sample_parameter(self) -> tuple[str, torch.Tensor]:
        name, parameter = next(each for chunk in self.model for each in chunk.named_parameters())
        # A distributed optimizer's parameters have no memory while they are off the device.
        has_memory = parameter.untyped_storage().nbytes() > 0
        return name, parameter if has_memory else torch.empty(0)

    @torch.no_grad()
    def _add_noise_to_weights(self) -> None:
        """Add N(0, 0.01^2) to every parameter, so that a transfer can be seen to work.

        Ranks that have the same part of a parameter draw the same numbers, and so do the first and
        the last stage for tied embeddings, of which each has a copy under another name.
        """
        generator = torch.Generator(self._device)
        for chunk in self.model:
            for name, parameter in chunk.named_parameters():
                key = "embeddings" if getattr(parameter, "shared_embedding", False) else name
                generator.manual_seed(self._config.seed + zlib.crc32(key.encode()))
                noise = torch.randn(parameter.shape, generator=generator, device=self._device)
                parameter.add_(noise.to(parameter), alpha=0.01)
