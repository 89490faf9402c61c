"""Token scores from hidden states, computed inside the model's own forward.

FSDP all-gathers the output matrix only for the duration of the model's forward, so scores must be
computed inside it. For one forward the output layer is replaced by a function that computes scores
from hidden states, and the forward returns those instead of logits, which then exist in tiles only.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from rl_batched_data import ScoringOptions, TokenScores, target_scores
from rl_batched_data.logprobs_kernel import LogitTransform
from torch import nn
from torch.distributed.tensor import DTensor

from rl_dtensor_worker.parallel.tensor import collectives
from rl_dtensor_worker.parallel.tensor.group import SEQUENCE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from transformers import PreTrainedModel

    from rl_dtensor_worker.parallel.tensor.group import TensorParallel

logger = logging.getLogger(__name__)

# Names in transformers' configs of what is applied to logits after the output layer.
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling",)
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")

# A range of logits in which all scales and soft caps in use differ measurably.
_PROBED_LOGITS = (-60.0, 60.0)
# Names of the score layer of transformers' reward and value models.
_SCORE_LAYERS = ("score", "classifier")
# Relative to the largest logit: rounding of a few float32 operations.
_PROBE_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenHead:
    """How token scores are computed from the last hidden states; see `find_token_head`."""

    layer: nn.Linear | None
    """The output layer. None: the model's own forward makes all logits at once."""
    tensor_parallel: TensorParallel | None = None
    """The ranks that shard the vocabulary."""
    logit_scale: float = 1.0
    """The model's factor on the output layer's logits."""
    soft_cap: float | None = None
    """The model's soft cap on its logits."""

    def target_scores(
        self,
        model: PreTrainedModel,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float,
        top_k: int = 0,
        entropy: bool = False,
        **arguments: Any,
    ) -> TokenScores:
        """Run the model's forward; return the scores of `targets`, each at its own position.

        Args:
            model: The model of this head.
            tokens: `[rows, seq]` int64.
            targets: `[rows, seq]` int64: the token to score at each position, usually the next one.
            temperature: Divides the logits, after scale and soft cap.
            top_k: How many of the largest logits to return.
            entropy: Whether to return the entropy.
            arguments: Further arguments of the forward, such as `position_ids`.

        Returns:
            Fields `[rows, seq]`, and `[rows, seq, top_k]`; see `TokenScores`.
        """
        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "entropy": entropy}
        if self.layer is None:
            logits = model(input_ids=tokens, use_cache=False, **arguments).logits
            group = None if self.tensor_parallel is None else self.tensor_parallel.group
            return target_scores(logits, targets, tp_group=group, **options)

        def score(layer: nn.Linear, hidden: torch.Tensor) -> TokenScores:
            full = self._gather_hidden(hidden)
            return target_scores(full, targets, **self._options(layer), **options)

        with _output_layer_replaced(model, self.layer, score):
            return TokenScores(**model(input_ids=tokens, use_cache=False, **arguments))

    def _gather_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of all positions."""
        tp = self.tensor_parallel
        if tp is None or not tp.sequence_parallel:
            return hidden
        # `target_scores` all-reduces the gradient of its hidden states over the vocabulary shards.
        return collectives.gather_for_replicated_use(hidden, tp.group, SEQUENCE_DIM)

    def _options(self, layer: nn.Linear) -> ScoringOptions:
        return ScoringOptions(
            logit_scale=self.logit_scale,
            soft_cap=self.soft_cap,
            tp_group=None if self.tensor_parallel is None else self.tensor_parallel.group,
            output_matrix=_local(layer.weight),
            output_bias=None if layer.bias is None else _local(layer.bias),
        )


@torch.no_grad()
def find_token_head(
    model: PreTrainedModel, tensor_parallel: TensorParallel | None = None
) -> TokenHead:
    """Return the head of `model`, verified against its own forward. Collective.

    The forward runs once with known logits in place of the output layer's. If it changes them
    otherwise than its config says, or if the output layer is not a plain linear one, the head falls
    back to logits from the model's own forward, with a warning.
    """
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        reason = f"its output layer is a {type(layer).__name__}"
        return _own_head(model, tensor_parallel, reason)
    with nullcontext() if tensor_parallel is None else tensor_parallel.unsharded_sequences():
        probed = _probe_logits(model, layer)
    if probed is None:
        reason = "it does not call its output layer once per forward"
        return _own_head(model, tensor_parallel, reason)
    given, logits = probed
    for scale, soft_cap in (_configured(model.config), (1.0, None)):
        transform = LogitTransform(scale=scale, soft_cap=soft_cap, temperature=1.0)
        if _close(logits, transform.apply_(given.clone())):
            return TokenHead(
                layer=layer,
                tensor_parallel=tensor_parallel,
                logit_scale=scale,
                soft_cap=soft_cap,
            )
    reason = "it changes its logits otherwise than its config says"
    return _own_head(model, tensor_parallel, reason)


def _own_head(
    model: PreTrainedModel, tensor_parallel: TensorParallel | None, reason: str
) -> TokenHead:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.warning(
            "%s computes all logits of a micro-batch at once: %s", type(model).__name__, reason
        )
    return TokenHead(layer=None, tensor_parallel=tensor_parallel)


def _probe_logits(
    model: PreTrainedModel, layer: nn.Linear
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return known logits and the forward's output for them; None if it ignores its layer."""
    device = torch.device(layer.weight.device)
    vocab_size = layer.weight.shape[0]
    tokens = torch.arange(8, device=device)[None] % vocab_size
    low, high = _PROBED_LOGITS
    given = torch.linspace(low, high, tokens.numel() * vocab_size, device=device)
    given = given.view(*tokens.shape, vocab_size)
    calls: list[torch.Size] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.shape[:-1])
        return given.clone()

    with _forward_replaced(layer, forward):
        logits = model(input_ids=tokens, use_cache=False).logits
    return (given, logits) if calls == [tokens.shape] else None


def _configured(config: Any) -> tuple[float, float | None]:
    """Return the logit scale and soft cap of a model's config."""
    text = config.get_text_config()

    def named(keys: tuple[str, ...]) -> list[float]:
        return [float(value) for key in keys if (value := getattr(text, key, None))]

    scale = 1.0
    for factor in named(_FACTORS):
        scale *= factor
    for divisor in named(_DIVISORS):
        scale /= divisor
    return scale, next(iter(named(_SOFT_CAPS)), None)


def _close(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    if logits.shape != expected.shape:
        return False
    tolerance = _PROBE_TOLERANCE * float(expected.abs().max())
    return bool(torch.allclose(logits.float(), expected, rtol=0, atol=tolerance))


@contextmanager
def _output_layer_replaced(
    model: PreTrainedModel,
    layer: nn.Linear,
    score: Callable[[nn.Linear, torch.Tensor], TokenScores],
) -> Generator[None, None, None]:
    """Replace `layer` by `score`, and the model's output by the fields of its result."""
    found: list[TokenScores] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        found.append(score(layer, hidden))
        # The rest of the forward expects logits; a vocabulary of one costs nothing.
        return torch.zeros((*found[-1].logprobs.shape, 1), device=hidden.device)

    # Before FSDP's hook, which registers the backward pass on the output's tensors.
    hook = model.register_forward_hook(lambda *_: _tensors_of(found.pop()), prepend=True)
    try:
        with _forward_replaced(layer, forward):
            yield
    finally:
        hook.remove()


def _tensors_of(scores: TokenScores) -> dict[str, torch.Tensor | None]:
    """Return the fields in a container that FSDP traverses, cloned where they need gradients."""
    values = {field.name: getattr(scores, field.name) for field in fields(scores)}
    return {
        name: value.clone() if value is not None and value.requires_grad else value
        for name, value in values.items()
    }


@contextmanager
def _forward_replaced(
    layer: nn.Linear, forward: Callable[[torch.Tensor], torch.Tensor]
) -> Generator[None, None, None]:
    own = layer.forward
    layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        layer.forward = own  # type: ignore[method-assign]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def find_value_layer(model: PreTrainedModel, *, pad_token_id: int | None) -> nn.Linear:
    """Return the score layer of a reward or value model.

    Args:
        model: The model. Its config gets a padding token if it has none: transformers' sequence
            classifiers require one, even though their own pooled scores are not used.
        pad_token_id: The tokenizer's.

    Raises:
        ValueError: There is none, or it has more than one output.
    """
    text_config: Any = model.config.get_text_config()
    if text_config.pad_token_id is None:
        text_config.pad_token_id = pad_token_id or 0
    layer = model.get_submodule(value_layer_name(model))
    assert isinstance(layer, nn.Linear)
    return layer


def value_layer_name(model: PreTrainedModel) -> str:
    """Return the name of the score layer of a reward or value model.

    Raises:
        ValueError: There is none, or it has more than one output.
    """
    for name in _SCORE_LAYERS:
        layer = getattr(model, name, None)
        if isinstance(layer, nn.Linear) and layer.weight.shape[0] == 1:
            return name
    raise ValueError(
        f"policy.head: {type(model).__name__} has no linear layer with one output named "
        f"{' or '.join(_SCORE_LAYERS)}"
    )


@contextmanager
def output_of_layer(model: PreTrainedModel, layer: nn.Linear) -> Generator[None, None, None]:
    """Make the output of `layer` the model's output inside."""
    found: list[torch.Tensor] = []

    def keep(_layer: nn.Module, _arguments: Any, output: torch.Tensor) -> None:
        found.append(output)

    hooks = [
        layer.register_forward_hook(keep),
        # FSDP registers the backward pass on the output's tensors, which must not be views.
        model.register_forward_hook(lambda *_: found.pop().clone(), prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
