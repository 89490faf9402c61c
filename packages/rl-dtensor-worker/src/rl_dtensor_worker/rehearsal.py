"""What the start would find out of a packed layout, rehearsed before a process starts.

Whether a model keeps packed sequences apart is in its code, and does not depend on its size. So the
check of the start is run on a stand-in: a model of the same config with every kind of layer once,
narrow feed-forward layers, few tokens in its vocabulary and random weights, on the CPU. What such a
stand-in cannot show is left to the start.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_dtensor_worker.config import load_model_config
from rl_dtensor_worker.forward import Forward, forward_of_head
from rl_dtensor_worker.layout import ParallelContext
from rl_dtensor_worker.mixing import MODEL_ERRORS, run_probe
from rl_dtensor_worker.model.build import empty_model, initial_buffers
from rl_dtensor_worker.model.rotary import fix_rotary_length
from rl_dtensor_worker.parallel.structure import decoder_layers
from rl_dtensor_worker.startup import check_causality, check_layout, keep_apart

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable

    from transformers import PreTrainedConfig, PreTrainedModel

    from rl_dtensor_worker.config import EngineConfig

logger = logging.getLogger(__name__)

# Kinds of attention that need neither a GPU nor a package of their own.
_ATTENTION = (None, "eager", "sdpa")
_CPU = torch.device("cpu")
# In transformers' configs: sizes on which no other size depends, and what they are here at most.
_SIZES = {
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_HIDDEN_SIZE = 512
# Attributes by which layers differ that are of one kind.
_NUMBERS = frozenset(["layer_idx", "layer_index", "layer_id", "layer_number"])
# Elements of a stand-in's weights. Above, its forwards would take longer than the start.
_LARGEST = 2_000_000_000
# How many random numbers a weight repeats: a prime, so that no two rows are the same.
_PERIOD = 1_000_003
# In elements, from a matrix to the next and from a weight to the next, which share their numbers.
# Kernels want them aligned.
_MATRIX_STRIDE, _WEIGHT_STRIDE = 16, 4096


def check_packing(config: EngineConfig) -> None:
    """Raise if a stand-in of the model does not keep sequences apart in the layout of a config.

    Args:
        config: One that `lays_out_rows`.

    Raises:
        ValueError: It does not; the message names key, class and difference.
    """
    features = ParallelContext(shares_prefixes=config.share_prefixes).features(
        packed=config.planned_by == "sequence_packing"
    )
    if config.layout.context_parallel > 1:
        features = [f"dtensor_cfg.context_parallel_size={config.layout.context_parallel}"]
    if config.attn_implementation not in _ATTENTION:
        return
    with _quietly(), torch.random.fork_rng(devices=[]), torch.no_grad():
        for is_narrow in (True, False):
            try:
                rehearsal = Rehearsal(config, is_narrow=is_narrow)
            except (*MODEL_ERRORS, ImportError) as error:
                reason = error
            else:
                rehearsal.check(features)
                return
    logger.info("whether %s packs is left to the start: %s", config.model_name, reason)


class Rehearsal:
    """A stand-in of a config's model, which runs.

    Args:
        config: The worker's config.
        is_narrow: See `stand_in`.

    Raises:
        ValueError: It is too large, or its logits are not finite. The model's code may raise others
            where it does not build or run one of that size.
    """

    def __init__(self, config: EngineConfig, *, is_narrow: bool) -> None:
        self._parallel = ParallelContext(shares_prefixes=config.share_prefixes)
        self._model = stand_in(config, is_narrow=is_narrow)
        self._options: Any = {
            "parallel": self._parallel,
            "compute_dtype": torch.float32,
            "device": _CPU,
        }
        if not run_probe(self._model).isfinite().all():
            raise ValueError("its logits are not finite")
        self._forward = forward_of_head(
            self._model, config, parallel=self._parallel, pad_token_id=None
        )

    def check(self, features: list[str]) -> None:
        """Raise unless the model is causal, and some way of running it has every feature."""
        forward = self._forward
        score = forward.logprobs if isinstance(forward, Forward) else forward.values
        if isinstance(forward, Forward):
            check_causality(self._model, score, **self._options)

        def check() -> None:
            for feature in features:
                check_layout(self._model, score, feature=feature, **self._options)

        keep_apart(self._model, check, self._parallel, torch.float32)


def stand_in(config: EngineConfig, *, is_narrow: bool) -> PreTrainedModel:
    """Return a model that runs the code of a config's model in little time, with random weights.

    In float32 and eval mode, on the CPU. Weights share memory: it cannot be trained.

    Args:
        config: The worker's config.
        is_narrow: Whether hidden states are narrower too, and attention has fewer heads of the same
            size, which some models do not allow.

    Raises:
        ValueError: It is too large all the same. The model's code may raise others.
    """
    one_rank = replace(config.layout, data_parallel=1, tensor_parallel=1, context_parallel=1)
    model_config = load_model_config(config)
    _shrink(model_config)
    if is_narrow:
        _narrow(model_config)
    model = empty_model(replace(config, adapters=None, layout=one_rank), model_config)
    _keep_first_of_each_kind(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > _LARGEST:
        raise ValueError(f"its layers are too large for a rehearsal ({size:,} parameters)")
    _fill(model)
    fix_rotary_length(model, config.max_total_sequence_length)
    return model.eval()


def _shrink(model_config: PreTrainedConfig) -> None:
    """Bound the sizes of a config on which no other depends, in place."""
    text = model_config.get_text_config()
    for name, most in _SIZES.items():
        size = getattr(text, name, None)
        if isinstance(size, int) and size > most:
            setattr(text, name, most)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(text, name, None)
        if isinstance(token, int) and token >= text.vocab_size:
            setattr(text, name, 0)


def _narrow(model_config: PreTrainedConfig) -> None:
    """Divide the hidden size and the numbers of heads of a config, in place."""
    text = model_config.get_text_config()
    size, heads = text.hidden_size, text.num_attention_heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    factor = 1
    divided = (size, heads, key_value_heads)
    while size // factor > _HIDDEN_SIZE and not any(each % (2 * factor) for each in divided):
        factor *= 2
    text.hidden_size, text.num_attention_heads = size // factor, heads // factor
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = key_value_heads // factor


def _keep_first_of_each_kind(model: PreTrainedModel) -> None:
    """Cut the list of layers after the one with which each kind of them has occurred, in place.

    Layers before it stay, as configs say by their place what a layer is.
    """
    for full_name in {layer.rpartition(".")[0] for layer in decoder_layers(model)}:
        layers = model.get_submodule(full_name)
        if isinstance(layers, nn.ModuleList):
            kinds = [_kind_of(layer) for layer in layers]
            parent, _, name = full_name.rpartition(".")
            needed = 1 + max(kinds.index(kind) for kind in kinds)
            setattr(model.get_submodule(parent), name, layers[:needed])


def _kind_of(layer: nn.Module) -> Hashable:
    """Return what two layers have in common that compute alike: classes, shapes and settings."""
    return tuple(
        (
            name,
            type(module).__name__,
            tuple((each, tuple(p.shape)) for each, p in module.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, (bool, int, float, str)) and key not in _NUMBERS
            ),
        )
        for name, module in layer.named_modules()
    )


def _fill(model: PreTrainedModel) -> None:
    """Give a model on the meta device its buffers, and random weights in little memory."""
    buffers = initial_buffers(model)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        buffer.data = buffers[name]
    numbers = _SharedNumbers()
    given: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in given:
                is_table = isinstance(module, nn.Embedding)
                fan_in = 1 if is_table else parameter.shape[-1] if parameter.ndim else 1
                values = numbers.take(parameter.shape, fan_in=fan_in, is_bias=name.endswith("bias"))
                given[id(parameter)] = nn.Parameter(values, requires_grad=False)
            module.register_parameter(name, given[id(parameter)])


class _SharedNumbers:
    """Random numbers of about the size that trained weights have, which many weights share."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._base = torch.randn(_PERIOD, generator=self._random)
        self._scaled: dict[int, torch.Tensor] = {}
        self._weights = 0

    def take(self, shape: torch.Size, *, fan_in: int, is_bias: bool) -> torch.Tensor:
        """Return a weight; its memory is that of others, and of matrices of the same weight."""
        *outer, width = shape or [1]
        if not outer:
            drawn = torch.randn(shape, generator=self._random)
            return 0.02 * drawn if is_bias else 1 + 0.1 * drawn
        *matrices, rows = outer
        start = self._weights * _WEIGHT_STRIDE % _PERIOD
        self._weights += 1
        size = start + rows * width + sum(_MATRIX_STRIDE * count for count in matrices)
        found = self._scaled.get(fan_in)
        if found is None or found.numel() < size:
            repeats = -(-size // _PERIOD)
            self._scaled[fan_in] = found = (self._base * fan_in**-0.5).repeat(repeats)
        strides = (*[_MATRIX_STRIDE] * len(matrices), width, 1)
        return found.as_strided(shape, strides, start)


@contextmanager
def _quietly() -> Generator[None, None, None]:
    """Leave warnings inside to the start, which gives them once."""
    loggers = [logging.getLogger(name) for name in (__package__, "transformers")]
    before = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)
