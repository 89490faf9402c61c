"""What the ranks of a worker do with the real model."""

import os
from typing import NamedTuple

import torch
from rl_batched_data import BatchedDataDict
from rl_dtensor_worker import DTensorPolicyWorker
from rl_policy.losses import DPOLoss, NLLLoss
from transformers import AutoTokenizer


class Scored(NamedTuple):
    """What one rank gives: its rows' numbers in the batch, their columns, and its completions."""

    rows: list[int]
    logprobs: torch.Tensor
    completions: list[list[int]]


def worker_of(config, **options):
    if config.get("megatron_cfg", {}).get("enabled"):
        from rl_megatron_worker import MegatronPolicyWorker as Worker
    else:
        Worker = DTensorPolicyWorker
    tokenizer = AutoTokenizer.from_pretrained(config["model_name"])
    return Worker(config, tokenizer, init_reference_model=False, **options)


def share_of(batch, num_shares, share, budget):
    """Return the rows of a data-parallel share, and their numbers; packed if there is a budget."""
    if not budget:
        rows = list(range(share, len(batch["input_ids"]), num_shares))
        return BatchedDataDict(batch).select_indices(rows), rows
    shards, order = BatchedDataDict(batch).shard_by_batch_size(
        num_shares, sequence_packing_args={"max_tokens_per_microbatch": budget}
    )
    size = len(order) // num_shares
    return shards[share], order[share * size : (share + 1) * size]


def score(*, config, batch, prompts, num_shares=1, budget=None, export=None):
    """Score rows, complete prompts greedily, and write the model."""
    worker = worker_of(config, init_optimizer=False)
    try:
        share = int(os.environ["RANK"]) * num_shares // int(os.environ["WORLD_SIZE"])
        rows, order = share_of(batch, num_shares, share, budget)
        logprobs = worker.get_logprobs(rows)["logprobs"]
        completions = completed(worker, prompts)
        if export:
            worker.save_hf_checkpoint(export)
        return Scored(order, logprobs, completions)
    finally:
        worker.shutdown()


def completed(worker, prompts):
    output = worker.generate(BatchedDataDict(prompts), greedy=True)
    ends, lengths = output["unpadded_sequence_lengths"], prompts["input_lengths"]
    return [
        row[start:end].tolist()
        for row, start, end in zip(output["output_ids"], lengths, ends, strict=True)
    ]


def losses(*, config, demonstrations, pairs, beta):
    """Return the losses of demonstrations and of pairs."""
    worker = worker_of(config, init_optimizer=False)
    try:
        found = [
            worker.train(BatchedDataDict(batch), loss, eval_mode=True, gbs=len(batch["input_ids"]))
            for batch, loss in ((demonstrations, NLLLoss()), (pairs, DPOLoss(beta=beta)))
        ]
        return [float(each["global_loss"][0]) for each in found]
    finally:
        worker.shutdown()
