"""Model classes that do what no config says, and what the start of a worker says of them."""

import logging

import torch
from head_models import SIZES, ShiftingLlama
from ranks import my_rows, worker_for
from tiny_model import build_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


class StrangeConfig(LlamaConfig):
    """Of a model type that transformers does not have."""

    model_type = "strange"


class RememberingLlama(LlamaForCausalLM):
    """Adds a mean of all tokens before, whatever the sequence, the padding or the cache."""

    def forward(self, input_ids, **kwargs):
        embeddings = self.get_input_embeddings()(input_ids)
        counts = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)[:, None]
        return super().forward(
            inputs_embeds=embeddings + embeddings.cumsum(1) / counts,
            **kwargs,
        )


class ForeseeingLlama(LlamaForCausalLM):
    """Adds the token after the next."""

    def forward(self, input_ids, **kwargs):
        embeddings = self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=embeddings + embeddings.roll(-2, 1), **kwargs)


class MeasuringLlama(LlamaForCausalLM):
    """Scales its embeddings by the width of the rows."""

    def forward(self, input_ids, **kwargs):
        embeddings = self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=embeddings + 0.1 * input_ids.shape[1], **kwargs)


class TrainedLlama(LlamaForCausalLM):
    """Adds to its embeddings in training mode."""

    def forward(self, input_ids, **kwargs):
        embeddings = self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=embeddings + float(self.training), **kwargs)


class OrderedLlama(LlamaForCausalLM):
    """Wants positions that rise within a row, which those of packed sequences do not."""

    def forward(self, input_ids, position_ids=None, **kwargs):
        if position_ids is not None and (position_ids.diff() < 0).any():
            raise RuntimeError("positions must rise")
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


_ALL = (
    RememberingLlama,
    ForeseeingLlama,
    ShiftingLlama,
    MeasuringLlama,
    TrainedLlama,
    OrderedLlama,
)
CLASSES = {each.__name__: each for each in _ALL}


def build_strange(path):
    """Write random weights that each class loads, and the tokenizer."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path)
    StrangeConfig(**SIZES).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)


def load_as(class_name):
    """Let transformers load models of the strange type as a class, in this process."""
    AutoConfig.register("strange", StrangeConfig, exist_ok=True)
    model_class = type(class_name, (CLASSES[class_name],), {"config_class": StrangeConfig})
    AutoModelForCausalLM.register(StrangeConfig, model_class, exist_ok=True)


def start_and_generate(*, config, class_name, batch):
    """Start a worker on a class and generate; return the warnings."""
    load_as(class_name)
    warnings, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger = logging.getLogger("rl_dtensor_worker")
    logger.addHandler(handler)
    try:
        with worker_for(config, init_reference_model=False) as worker:
            worker.generate(my_rows(batch))
    finally:
        logger.removeHandler(handler)
    return warnings
