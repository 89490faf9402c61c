"""What the benchmarks of a single rank share: its environment, a model, a batch and two losses."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from rl_batched_data import BatchedDataDict
from rl_dtensor_worker import DTensorPolicyWorker
from rl_interfaces import LossInput, LossType
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ADAMW = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.01}
NUM_WORDS = 1024
"""Tokens that the tokenizer has a text for."""


class NextTokenLoss:
    """Mean negative log-likelihood, from log-probabilities."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.LOGPROBS

    def __call__(
        self, logprobs: torch.Tensor, data: Any, valid_seqs: torch.Tensor, valid_toks: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return loss and metrics."""
        mask = data["token_mask"] * data["sample_mask"][:, None]
        return -(logprobs * mask).sum() / valid_toks, {"num_valid_samples": data.size}


class FullLogitsLoss(NextTokenLoss):
    """The same from all logits in float32, their log-softmax, and the tokens' entries of it."""

    input_type = LossInput.LOGITS

    def __call__(
        self, logits: torch.Tensor, data: Any, valid_seqs: torch.Tensor, valid_toks: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return loss and metrics."""
        logprobs = torch.zeros(data["input_ids"].shape, device=logits.device)
        logprobs[:, 1:] = chosen_logprobs(logits, data["input_ids"])
        return super().__call__(logprobs, data, valid_seqs, valid_toks)


def chosen_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return `[batch, seq - 1]` log-probabilities of the tokens after the first."""
    logprobs = logits[:, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def write_model(path: str, *, vocab_size: int, hidden_size: int, num_layers: int) -> None:
    """Write a Qwen2 of this size, at random."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


def full_rows(num_rows: int, width: int, vocab_size: int) -> BatchedDataDict[Any]:
    """Return rows without padding, all of whose tokens but the first are targets."""
    generator = torch.Generator().manual_seed(0)
    token_mask = torch.ones(num_rows, width)
    token_mask[:, 0] = 0
    return BatchedDataDict(
        input_ids=torch.randint(1, vocab_size, (num_rows, width), generator=generator),
        input_lengths=torch.full((num_rows,), width),
        token_mask=token_mask,
        sample_mask=torch.ones(num_rows),
    )


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def become_rank(rank: int, *, world_size: int, port: int) -> None:
    """Set the environment by which a worker finds its place in a job."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def start_worker(
    model: str, *, num_rows: int, micro_batch_size: int, **overrides: Any
) -> DTensorPolicyWorker:
    """Return a worker that is the only rank of its job; `overrides` are keys of its config."""
    become_rank(0, world_size=1, port=free_port())
    return make_worker(model, num_rows=num_rows, micro_batch_size=micro_batch_size, **overrides)


def make_worker(
    model: str, *, num_rows: int, micro_batch_size: int, **overrides: Any
) -> DTensorPolicyWorker:
    """Return the worker of this rank; `overrides` are keys of its config."""
    config: dict[str, Any] = {
        "model_name": model,
        "precision": "bfloat16" if torch.cuda.is_available() else "float32",
        "dtensor_cfg": {"enabled": True},
        "train_global_batch_size": num_rows,
        "train_micro_batch_size": micro_batch_size,
        "logprob_batch_size": micro_batch_size,
        "max_grad_norm": 1.0,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": ADAMW},
    }
    words = {"<pad>": 0} | {f"w{index}": index for index in range(1, NUM_WORDS)}
    vocabulary = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>")
    return DTensorPolicyWorker(config | overrides, tokenizer, init_reference_model=False)
