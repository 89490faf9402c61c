"""A model directory without weights: its files have names and shapes, and take no room on the disk.

A worker reads it like any other one, so that a trace needs a model's `config.json` alone.
"""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_DTYPE, _BYTES = "BF16", 2
# Files of safetensors begin with the length of their header, which is padded to this.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class TokenIds:
    """What a trace needs of a tokenizer."""

    pad_token_id: int = 0
    eos_token_id: int | None = None


def empty_language_model(config: PreTrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model that a config describes, in bfloat16 and on the meta device."""
    auto_class: Any = AutoModelForCausalLM
    # A model of text and images has another class than its text part alone.
    named: Any = getattr(transformers, (config.architectures or [""])[0], None)
    if named is not None and type(config) not in AutoModelForCausalLM._model_mapping:
        auto_class = named
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if auto_class is AutoModelForCausalLM:
        options["trust_remote_code"] = trust_remote_code
        build = auto_class.from_config
    else:
        build = auto_class._from_config
    with torch.device("meta"):
        return build(config, **options)


def shallow_config(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """Return a copy of a config with its first `num_layers` layers alone.

    Example, four layers and their types, of which two are kept:
        {num_hidden_layers: 4, layer_types: [a, b, a, b]} -> {num_hidden_layers: 2, [a, b]}
    """
    shallow = copy.deepcopy(config)
    text = shallow.get_text_config()
    all_layers = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == all_layers:
            setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers
    return shallow


def write_stand_in(
    config: PreTrainedConfig, directory: Path, *, trust_remote_code: bool = False
) -> None:
    """Write the directory of a model whose weights are holes in a sparse file.

    Args:
        config: The model's config. A quantisation is left out, as training takes the weights
            without it.
        directory: An existing directory.
        trust_remote_code: Whether code that comes with the model may run.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    config.save_pretrained(directory)
    model = empty_language_model(config, trust_remote_code=trust_remote_code)
    header: dict[str, object] = {}
    end = 0
    tied = set(getattr(model, "all_tied_weights_keys", ()))
    for name, tensor in model.state_dict().items():
        if name not in tied:
            start, end = end, end + _BYTES * tensor.numel()
            header[name] = {
                "dtype": _DTYPE,
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
