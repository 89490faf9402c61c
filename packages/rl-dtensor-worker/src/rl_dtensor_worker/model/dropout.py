"""The dropout of a model's config, which is off unless it is asked for.

Training with dropout scores tokens otherwise than the sampler and the old log-probabilities did, so
that importance ratios differ from 1 before the first step. Configs of older models (GPT-2, OPT)
have rates above 0 all the same.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rl_dtensor_worker.parallel.structure import class_name

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from torch import nn
    from transformers import PreTrainedConfig

# Rates of dropout, of dropped layers and paths, and of the noise on a router's inputs.
_RATE = re.compile("drop|jitter")
# What has such a name and is none, by model type: a threshold between experts.
_KEPT = {"phimoe": ("router_jitter_noise",)}
# Routers that draw the experts at random in training mode, whatever their config says.
_DRAWING = ("PhimoeTopKRouter",)

Rates = dict[tuple[str, ...], float | None]
"""Rates that are not 0, by the names of nested configs and, last, of the attribute."""


def disable_dropout(config: PreTrainedConfig, *, head: str) -> Rates:
    """Set every rate of a config and of its nested ones to 0, and return what they were.

    Args:
        config: The config.
        head: `policy.head` of the model that is built by it.
    """
    rates: Rates = dict(_rates(config, ()))
    if head == "value" and getattr(config, "classifier_dropout", None) is None:
        # transformers' token classifiers have a rate of 0.1 where their config has none.
        rates["classifier_dropout",] = None
    _set(config, dict.fromkeys(rates, 0.0))
    return rates


def keep_routers_in_eval_mode(model: nn.Module) -> None:
    """Let routers that draw experts in training mode choose as they do in eval mode, for good."""
    for module in model.modules():
        if class_name(module) in _DRAWING:
            module.eval()
            # Not by a subclass: FSDP and adapters look at the class.
            object.__setattr__(module, "train", partial(_stay, module))


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stand for `nn.Module.train`, and change nothing."""
    del mode
    return module


@contextmanager
def dropout_restored(config: PreTrainedConfig, rates: Rates) -> Generator[None, None, None]:
    """Give a config its own rates inside, as for an export."""
    _set(config, rates)
    try:
        yield
    finally:
        _set(config, dict.fromkeys(rates, 0.0))


def _rates(
    config: PreTrainedConfig, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in vars(config).items():
        if name in config.sub_configs and value is not None and not isinstance(value, dict):
            yield from _rates(value, (*path, name))
        elif name in _KEPT.get(config.model_type, ()):
            continue
        elif isinstance(value, float) and value > 0 and _RATE.search(name):
            yield (*path, name), value


def _set(config: PreTrainedConfig, rates: Rates) -> None:
    for (*nested, name), rate in rates.items():
        owner = config
        for each in nested:
            owner = getattr(owner, each)
        setattr(owner, name, rate)
