"""A tiny Qwen2 and its byte-level tokenizer, built here: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_policy.config import TinyModelSection

if TYPE_CHECKING:
    from transformers import Qwen2Config

PAD, END = "<|endoftext|>", "<|im_end|>"
"""The special tokens, under the names that the Qwen2 tokenizer expects."""
_SPECIAL_TOKENS = (PAD, END)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte of UTF-8, thus per ASCII character, and two more.

    It is the byte-level tokenizer of Qwen2 without its merges, so that `AutoTokenizer`, which goes
    by the type of the model, loads the same.
    """
    tokens = [*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def tiny_model_config(sizes: TinyModelSection, *, max_sequence_length: int) -> Qwen2Config:
    """Return the shape of the tiny model.

    Args:
        sizes: The user's part of it.
        max_sequence_length: Most tokens of a sequence.
    """
    # Here, as it imports the code of models, for its docstring, which takes a second.
    from transformers import Qwen2Config

    num_heads = sizes.hidden_size // sizes.head_size
    return Qwen2Config(
        vocab_size=len(build_tokenizer()),
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=max_sequence_length,
        initializer_range=sizes.initializer_range,
        tie_word_embeddings=True,
        pad_token_id=_SPECIAL_TOKENS.index(PAD),
        eos_token_id=_SPECIAL_TOKENS.index(END),
        bos_token_id=None,
        dtype=torch.float32,
    )


def build_tiny_model(path: Path, *, config: Qwen2Config, seed: int) -> None:
    """Write a Hugging Face directory: a Qwen2 with random weights in float32, and its tokenizer.

    Args:
        path: The directory, which is created.
        config: The shape.
        seed: Of the weights; the process's random state is left as it is.
    """
    # A run with a model of its own needs the config alone.
    from transformers import Qwen2ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
