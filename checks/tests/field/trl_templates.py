"""The chat templates of TRL's wheel, each with a tokenizer that has its special tokens."""

import importlib.resources
import re
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# What templates write where a turn starts or ends, or around what is no text.
_SPECIAL = re.compile(
    r"<[|\uff5c][\w\u2581]+[|\uff5c]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_\w+>|\[/?[A-Z_]+\]|</?s>"
)
# The first of them that a template has ends its turns, as the family's own tokenizer says.
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<|return|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
)
_FILES = importlib.resources.files("trl") / "chat_templates"
NAMES = sorted(
    each.name.removesuffix(".jinja") for each in _FILES.iterdir() if "jinja" in each.name
)


@cache
def template(name):
    return (_FILES / f"{name}.jinja").read_text()


@cache
def tokenizer_of(name):
    """Return a tokenizer of bytes with the special tokens that a template writes."""
    specials = sorted(set(_SPECIAL.findall(template(name))))
    end = next((each for each in _ENDS if each in specials), "<eos>")
    vocab = list(dict.fromkeys(["<pad>", "<bos>", end, *specials]))
    vocab += sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: number for number, token in enumerate(vocab)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<pad>", "<bos>", end, *specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token=end,
        chat_template=template(name),
    )
