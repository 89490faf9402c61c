"""A model, a tokenizer, batches and configs that are small enough for any machine."""

import torch
from rl_batched_data import BatchedDataDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCAB_SIZE = 64
PAD, EOS = 0, 1


def build_tiny_model(path, *, tied=True, seed=0, width=64, num_layers=2):
    """Write a randomly initialised Qwen2 and a character-level tokenizer to `path`."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)


def build_tokenizer():
    """Token `i` is the character `chr(62 + i)`; 0 pads and 1 ends."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {chr(62 + i): i for i in range(2, VOCAB_SIZE)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def make_batch(num_rows, *, width=12, seed=1):
    """Return right-padded rows of unlike lengths, every real token but the first a target."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, width + 1, (num_rows,), generator=generator)
    input_ids = torch.randint(2, VOCAB_SIZE, (num_rows, width), generator=generator)
    is_token = torch.arange(width) < lengths[:, None]
    token_mask = is_token.float()
    token_mask[:, 0] = 0.0
    return BatchedDataDict(
        {
            "input_ids": torch.where(is_token, input_ids, PAD),
            "input_lengths": lengths,
            "token_mask": token_mask,
            "sample_mask": torch.ones(num_rows),
        }
    )


def make_config(model_name, **overrides):
    """Return a policy config in float32 whose AdamW does not amplify rounding (eps 1e-6)."""
    config = {
        "model_name": model_name,
        "precision": "float32",
        "dtensor_cfg": {"enabled": True},
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "max_grad_norm": 1.0,
        "optimizer": {
            "name": "torch.optim.AdamW",
            "kwargs": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.01},
        },
        "generation": {"max_new_tokens": 8, "temperature": 1.0},
    }
    return config | overrides


def rows_for_rank(batch, *, rank, num_ranks, global_batch_size):
    """Return the rows that this rank trains on: an even, then a balanced share of each step's."""
    rows = []
    for start in range(0, batch["input_ids"].shape[0], global_batch_size):
        count = min(global_batch_size, batch["input_ids"].shape[0] - start)
        share, extra = divmod(count, num_ranks)
        begin = start + rank * share + min(rank, extra)
        rows += range(begin, begin + share + (rank < extra))
    return take(batch, rows)


def take(batch, rows):
    """Return `rows` of `batch`, in this order."""
    return BatchedDataDict(batch).select_indices(list(rows))
