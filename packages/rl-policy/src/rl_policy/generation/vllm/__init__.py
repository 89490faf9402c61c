"""vLLM engines over Ray. Importing this imports neither vLLM nor Ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_policy.generation.vllm.generation import VllmGeneration

__all__ = ["VllmGeneration"]


def __getattr__(name: str) -> object:
    # Lazily, as vLLM's own workers import `engine` of this package, and need no Ray.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("rl_policy.generation.vllm.generation"), name)
