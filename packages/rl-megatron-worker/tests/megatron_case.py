"""The worker as a case of the conformance kit; forked ranks import it."""

from functools import partial

import torch
from batches import make_config
from patience import PATIENCE_S
from rl_batched_data import BatchedDataDict
from rl_interfaces.testing import ScheduleCase, Way, WorkerCase
from rl_megatron_worker import MegatronPolicyWorker
from rl_refit.testing import receiver_in_thread
from tiny_models import build_tokenizer
from transformers import AutoModelForCausalLM

RATE, DECAY_CALLS = 1e-3, 8
BUDGET = 24
SECTIONS = {
    "dynamic_batching": "dynamic_batching_args",
    "sequence_packing": "sequence_packing_args",
}


def make_batches(columns, *, shards, batch_size):
    batch = BatchedDataDict(columns)
    return batch.shard_by_batch_size(shards, batch_size=batch_size, allow_uneven_shards=True)


def make_planned_batches(columns, *, shards, batch_size, arguments):
    batch = BatchedDataDict(columns)
    plan = {arguments: {"max_tokens_per_microbatch": BUDGET}}
    planned, _ = batch.shard_by_batch_size(shards, batch_size=batch_size, **plan)
    return planned


def load_oracle(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def falling(call):
    return RATE * (1 - call / DECAY_CALLS)


def open_receiver(worker):
    """Stream to a receiver in a thread of this rank."""
    rank, ranks = worker.get_gpu_info()["rank"], torch.distributed.get_world_size()
    address = worker.open_refit(
        receivers_per_rank=[1] * ranks, transport="shm", bucket_bytes=1 << 14
    )
    return receiver_in_thread(address, rank, send=worker.send_weights, timeout_s=PATIENCE_S)


def planned(section):
    budgets = {"enabled": True, "train_mb_tokens": BUDGET, "logprob_mb_tokens": BUDGET}
    make = partial(make_planned_batches, arguments=SECTIONS[section])
    return Way(settings={section: budgets}, make_batches=make)


def megatron_case(model, **layout):
    decay = {"lr_decay_style": "linear", "lr_decay_iters": DECAY_CALLS, "lr_warmup_iters": 0}
    return WorkerCase(
        worker_class=MegatronPolicyWorker,
        config=make_config(model, **layout),
        tokenizer=build_tokenizer(),
        make_batches=make_batches,
        load_oracle=load_oracle,
        ways={section: planned(section) for section in SECTIONS},
        open_receiver=open_receiver,
        schedule=ScheduleCase(
            settings={"megatron_cfg": {"scheduler": decay}}, learning_rate=falling
        ),
    )
