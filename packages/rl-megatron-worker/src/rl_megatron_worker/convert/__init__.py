"""Conversion between Hugging Face and Megatron-core models, by `model_type`."""

from rl_megatron_worker.convert.mappings import GateUp, HeldSlice, Mapping, Piece, Qkv, Vocabulary
from rl_megatron_worker.convert.registry import (
    Converter,
    converter_for,
    known_converters,
    register_converter,
)

__all__ = [
    "Converter",
    "GateUp",
    "HeldSlice",
    "Mapping",
    "Piece",
    "Qkv",
    "Vocabulary",
    "converter_for",
    "known_converters",
    "register_converter",
]
