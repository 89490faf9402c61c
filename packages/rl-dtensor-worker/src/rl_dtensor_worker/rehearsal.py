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
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
# Attributes by which layers differ that are of one kind.
_NUMBERS = frozenset(["layer_idx", "layer_index", "layer_id", "layer_number"])
# Elements of a stand-in's weights. Above, its forwards would take longer than the start.
_LARGEST = 2_000_000_000
# From a row of a weight to the next, in the random numbers that they share; coprime.
_STRIDES = (1, 3, 7, 11, 13)


def check_packing(config: EngineConfig) -> None:
    """Raise if a stand-in of the model does not keep sequences apart in the layout of a config.

    Raises:
        ValueError: It does not; the message names key, class and difference.
    """
    features = ParallelContext(shares_prefixes=config.share_prefixes).features(
        packed=config.planned_by == "sequence_packing"
    )
    if config.layout.context_parallel > 1:
        features = [f"dtensor_cfg.context_parallel_size={config.layout.context_parallel}"]
    if not features or config.attn_implementation not in _ATTENTION:
        return
    with _quietly(), torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            rehearsal = Rehearsal(config)
        except (*MODEL_ERRORS, ImportError) as error:
            logger.info("whether %s packs is left to the start: %s", config.model_name, error)
            return
        rehearsal.check(features)


class Rehearsal:
    """A stand-in of a config's model, which gives sane scores of padded rows.

    Raises:
        ValueError: It is too large, or its scores of padded rows are not those of a causal model.
            transformers may raise others where it does not build or run one of that size.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._parallel = ParallelContext(shares_prefixes=config.share_prefixes)
        self._model = stand_in(config)
        self._options: Any = {
            "parallel": self._parallel,
            "compute_dtype": torch.float32,
            "device": _CPU,
        }
        if not run_probe(self._model).isfinite().all():
            raise ValueError("its logits are not finite")
        forward = forward_of_head(self._model, config, parallel=self._parallel, pad_token_id=None)
        self._score = forward.logprobs if isinstance(forward, Forward) else forward.values
        if isinstance(forward, Forward):
            check_causality(self._model, forward.logprobs, **self._options)

    def check(self, features: list[str]) -> None:
        """Raise unless some way of running the model has every feature; see `check_layout`."""

        def check() -> None:
            for feature in features:
                check_layout(self._model, self._score, feature=feature, **self._options)

        keep_apart(self._model, check, self._parallel, torch.float32)


def stand_in(config: EngineConfig) -> PreTrainedModel:
    """Return a model that runs the code of a config's model in little time, with random weights.

    In float32 and eval mode, on the CPU. Rows of a weight overlap in memory: it cannot be trained.

    Raises:
        ValueError: It is too large all the same. The model's code may raise others.
    """
    one_rank = replace(config.layout, data_parallel=1, tensor_parallel=1, context_parallel=1)
    model_config = load_model_config(config)
    _shrink(model_config)
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
    random = torch.Generator().manual_seed(0)
    given: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in given:
                values = _random_values(module, name, parameter.shape, random)
                given[id(parameter)] = nn.Parameter(values, requires_grad=False)
            module.register_parameter(name, given[id(parameter)])


def _random_values(
    module: nn.Module, name: str, shape: torch.Size, random: torch.Generator
) -> torch.Tensor:
    """Return values of about the size that trained ones have, whose rows overlap in memory.

    Element `[i, j]` is number `3 i + j` of a list: neighbouring rows are different all the same.
    """
    if len(shape) < 2:
        drawn = torch.randn(shape, generator=random)
        return 0.02 * drawn if name.endswith("bias") else 1 + 0.1 * drawn
    strides = _STRIDES[: len(shape)][::-1]
    length = 1 + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    scale = 1.0 if isinstance(module, nn.Embedding) else shape[-1] ** -0.5
    return (scale * torch.randn(length, generator=random)).as_strided(shape, strides)


@contextmanager
def _quietly() -> Generator[None, None, None]:
    """Leave warnings inside to the start, which gives them once."""
    package = logging.getLogger(__package__)
    before = package.level
    package.setLevel(logging.ERROR)
    try:
        yield
    finally:
        package.setLevel(before)
