"""The forward of reward and value models: one number per token, or the one of a row's last."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_interfaces import LossInput
from torch import nn

from rl_dtensor_worker.parallel.context import ParallelContext

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch
    from rl_interfaces.backend.steps import MicroBatch

# What transformers calls the layer that makes the scores.
_LAYERS = ("score", "classifier")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueForward:
    """A reward or value model's forward over micro-batches of any layout.

    The scores are those of the head's layer, token by token: a sequence classifier's own way of
    finding each row's last token knows neither lengths nor packing.
    """

    model: nn.Module
    layer: nn.Linear
    is_reward: bool
    """Whether a row has one score, that of its last token."""
    width_multiple: int
    """Padded rows are completed to a multiple of this, inside."""
    parallel: ParallelContext = field(default_factory=ParallelContext)
    """The ranks that run it together."""

    def values(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the score of each token, `[batch, seq]` float32; padding is 0."""
        layout = self.parallel.lay_out(self.model, micro_batch, self.width_multiple)
        with _output_of_layer(self.model, self.layer):
            values = self.model(input_ids=layout.tokens, use_cache=False, **layout.arguments)
        return layout.to_rows(values.float().squeeze(-1))

    def scores(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return float32 `[batch]` of a reward model, `[batch, seq]` of a value model."""
        values = self.values(micro_batch)
        if not self.is_reward:
            return values
        last = micro_batch.rows["input_lengths"][:, None] - 1
        return values.gather(1, last).squeeze(1)

    def for_loss(self, micro_batch: MicroBatch, loss_fn: Any) -> torch.Tensor:
        """Return the scores, which a loss gets in place of logits.

        Raises:
            ValueError: The loss wants log-probabilities.
        """
        if getattr(loss_fn, "input_type", LossInput.LOGITS) is LossInput.LOGPROBS:
            head = "reward" if self.is_reward else "value"
            raise ValueError(
                f"policy.head={head!r} gives scores, and {type(loss_fn).__name__} wants "
                "log-probabilities: use a loss whose input_type is LossInput.LOGITS"
            )
        return self.scores(micro_batch)


def find_value_layer(model: nn.Module, *, pad_token_id: int | None) -> nn.Linear:
    """Return the layer that makes the scores of a reward or value model.

    Args:
        model: The model. Its config gets a padding token if it has none: transformers' sequence
            classifiers want one, even though their own scores are not read.
        pad_token_id: The tokenizer's.

    Raises:
        ValueError: There is none, or it makes more than one score.
    """
    text_config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    if text_config.pad_token_id is None:
        text_config.pad_token_id = pad_token_id or 0
    layer = model.get_submodule(value_layer_name(model))
    assert isinstance(layer, nn.Linear)
    return layer


def value_layer_name(model: nn.Module) -> str:
    """Return the name of the layer that makes the scores of a reward or value model.

    Raises:
        ValueError: There is none, or it makes more than one score.
    """
    for name in _LAYERS:
        layer = getattr(model, name, None)
        if isinstance(layer, nn.Linear) and layer.weight.shape[0] == 1:
            return name
    raise ValueError(
        f"policy.head: {type(model).__name__} has no linear layer with one output named "
        f"{' or '.join(_LAYERS)}"
    )


@contextmanager
def _output_of_layer(model: nn.Module, layer: nn.Linear) -> Generator[None, None, None]:
    """Let what `layer` returns be the model's output."""
    found: list[torch.Tensor] = []

    def keep(_layer: nn.Module, _arguments: Any, output: torch.Tensor) -> None:
        found.append(output)

    hooks = [
        layer.register_forward_hook(keep),
        # FSDP prepares the backward pass from the output's tensors, which must be no views.
        model.register_forward_hook(lambda *_: found.pop().clone(), prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
