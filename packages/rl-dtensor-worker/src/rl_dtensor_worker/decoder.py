"""Forwards with a key-value cache, by the training model itself."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from rl_dtensor_worker.model.media import media_of, token_columns_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from rl_dtensor_worker.forward import Forward


class CachedForward:
    """A `rl_interfaces.backend.generation.Decoder` of a model of transformers.

    Args:
        forward: Of a model in eval mode, unsharded except for tensor parallelism.
        rows: The prompts' batch; media are read in the prefill, and then cached.

    Raises:
        ValueError: The model does not take a kind of media in the batch.
    """

    def __init__(self, forward: Forward, rows: Mapping[str, Any]) -> None:
        self._forward = forward
        self._media = media_of(forward.model, rows)
        self._columns = token_columns_of(forward.model, rows)
        self._cache = DynamicCache(config=forward.model.config)
        self._last_only = {"logits_to_keep": 1} if _keeps_last_logits(forward.model) else {}

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See `Decoder.prefill`."""
        tokens, self._mask, self._positions = left_pad(prompts, lengths)
        if not self._media:
            return self._logits(tokens)
        device = prompts.device
        seen = {name: tensor.to(device) for name, tensor in self._media.items()}
        for name, column in self._columns.items():
            seen[name], _, _ = left_pad(column.to(device), lengths)
        # Tokens of an image may share a position, or have several; the model itself knows.
        prepare: Any = self._forward.model._prepare_position_ids_for_generation
        self._positions = prepare(tokens, {"attention_mask": self._mask, **seen})
        return self._logits(tokens, **seen)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder.step`."""
        self._positions = self._positions[..., -1:] + 1
        self._mask = torch.cat([self._mask, torch.ones_like(tokens[:, None])], dim=1)
        return self._logits(tokens[:, None])

    def _logits(self, tokens: torch.Tensor, **media: torch.Tensor) -> torch.Tensor:
        logits = self._forward.model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            **self._last_only,
            **media,
        ).logits[:, -1]
        return self._forward.parallel.gather_logits(logits)


def left_pad(
    prompts: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Move each right-padded prompt to the right edge, so that all continue in one column.

    Returns:
        The tokens, the attention mask and the position ids, each int64 `[rows, longest prompt]`.
    """
    longest = int(lengths.max())
    column = torch.arange(longest, device=prompts.device)[None, :]
    position = column - (longest - lengths[:, None])
    mask = (position >= 0).long()
    position = position.clamp(min=0)
    return prompts.gather(1, position) * mask, mask, position


def _keeps_last_logits(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
