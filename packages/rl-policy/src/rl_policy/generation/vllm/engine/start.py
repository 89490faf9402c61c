"""What a rank of the engines' worker group constructs: an engine, or what holds its devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from rl_policy.generation.state import INITIAL_VERSION
from rl_policy.generation.vllm.engine.vllm_engine import VllmEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_policy.generation.vllm.config import EngineConfig


class BundleHolder:
    """Holds a device for the engine of another rank: every call returns None."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Python looks up private names of its own, e.g. to pickle, and must not find them.
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def shutdown(self) -> None:
        """Do nothing."""


def start_on_rank(
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    weight_version: int = INITIAL_VERSION,
) -> VllmEngine | BundleHolder:
    """Return the engine on the first rank of each tensor-parallel group, a holder on the others.

    vLLM starts the worker processes of a group itself, on the GPUs of the other ranks' bundles.

    Args:
        config: How the engine runs.
        tokenizer: See `VllmEngine`.
        weight_version: See `VllmEngine`.
    """
    index, position = divmod(int(os.environ["RANK"]), config.tensor_parallel_size)
    if position:
        return BundleHolder()
    return VllmEngine(config, tokenizer, engine_index=index, weight_version=weight_version)
