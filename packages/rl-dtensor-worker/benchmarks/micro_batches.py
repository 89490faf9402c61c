"""Measure one training step and one pass of log-probabilities: padded, dynamic and packed."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from typing import Any

import torch
from report import Row, parse_options, report
from rl_batched_data import BatchedDataDict
from rl_dtensor_worker import DTensorPolicyWorker
from rl_interfaces import LossInput, LossType
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROWS, VOCABULARY, RUNS = 64, 1024, 4
WAYS = ("padded", "dynamic_batching", "sequence_packing")


class NextTokenLoss:
    """Mean negative log-likelihood."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.LOGPROBS

    def __call__(
        self, logprobs: torch.Tensor, data: Any, valid_seqs: torch.Tensor, valid_toks: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return loss and metrics."""
        mask = data["token_mask"] * data["sample_mask"][:, None]
        return -(logprobs * mask).sum() / valid_toks, {"num_valid_samples": data.size}


def make_batch(width: int) -> BatchedDataDict[Any]:
    """Return rows of log-normal lengths, of which the median is a fifth of the width."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(ROWS, generator=generator) * 0.8
    lengths = (spread.exp() * width / 5).long().clamp(4, width)
    is_token = torch.arange(width) < lengths[:, None]
    ids = torch.randint(1, VOCABULARY, (ROWS, width), generator=generator)
    return BatchedDataDict(
        input_ids=torch.where(is_token, ids, 0),
        input_lengths=lengths,
        token_mask=(is_token & (torch.arange(width) > 0)).float(),
        sample_mask=torch.ones(ROWS),
    )


def make_config(model: str, way: str, *, width: int, budget: int) -> dict[str, Any]:
    """Return a policy config whose micro-batches have at most `budget` tokens, padding included."""
    config: dict[str, Any] = {
        "model_name": model,
        "precision": "bfloat16" if torch.cuda.is_available() else "float32",
        "dtensor_cfg": {"enabled": True},
        "train_global_batch_size": ROWS,
        "train_micro_batch_size": budget // width,
        "logprob_batch_size": budget // width,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-4}},
    }
    if way != "padded":
        config[way] = {"enabled": True, "train_mb_tokens": budget, "logprob_mb_tokens": budget}
    return config


def start(model: str, way: str, *, width: int, budget: int) -> tuple[DTensorPolicyWorker, Any]:
    """Return a worker, and the batch with the plan by which it goes through it."""
    batch = make_batch(width)
    config = make_config(model, way, width=width, budget=budget)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0})))
    worker = DTensorPolicyWorker(config, tokenizer, init_reference_model=False)
    if way == "padded":
        return worker, batch
    arguments = {f"{way}_args": {"max_tokens_per_microbatch": budget}}
    (rows,), _ = batch.shard_by_batch_size(1, batch_size=ROWS, **arguments)
    return worker, rows


def measure(model: str, *, width: int, budget: int) -> list[Row]:
    """Return the fastest of some runs of each way, which take turns."""
    started = {way: start(model, way, width=width, budget=budget) for way in WAYS}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(RUNS):
        for way, (worker, rows) in started.items():
            begin = time.perf_counter()
            worker.train(rows, NextTokenLoss())
            trained = time.perf_counter()
            worker.get_logprobs(rows)
            times[way].append((trained - begin, time.perf_counter() - trained))
    # The first worker owns the process group, so it leaves last.
    for worker, _ in reversed(started.values()):
        worker.shutdown()
    real = float(make_batch(width)["input_lengths"].sum())
    fastest = {
        way: [min(column) for column in zip(*own, strict=True)] for way, own in times.items()
    }
    return [
        {
            "width": width,
            "tokens per micro-batch": budget,
            "way": way,
            "real tokens %": 100 * real / (ROWS * width),
            "train s": train_s,
            "logprobs s": logprobs_s,
            "train, padded / this": fastest["padded"][0] / train_s,
            "logprobs, padded / this": fastest["padded"][1] / logprobs_s,
        }
        for way, (train_s, logprobs_s) in fastest.items()
    ]


def main() -> None:
    """Print and write the table."""
    options = parse_options(__doc__)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sizes = [(256, 1024)] if options.quick else [(512, 1024), (512, 4096), (1024, 4096)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as model:
        architecture = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
        )
        Qwen2ForCausalLM(architecture).save_pretrained(model)
        for width, budget in sizes:
            rows += measure(model, width=width, budget=budget)
    report("micro_batches", f"{ROWS} rows of log-normal lengths, one rank", rows, options.out)


if __name__ == "__main__":
    main()
