"""The worker as a case of the conformance kit; ranks import it."""

import functools
from functools import partial

import peft
import torch
from patience import PATIENCE_S
from rl_batched_data import BatchedDataDict
from rl_dtensor_worker import DTensorPolicyWorker
from rl_interfaces.testing import AdapterCase, RewardCase, ScheduleCase, Way, WorkerCase
from rl_refit.testing import receiver_in_thread
from tiny_model import build_tokenizer, make_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

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


@functools.cache
def load_reward_model(path):
    return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()


def score_row(tokens, *, path):
    return load_reward_model(path)(tokens[None]).logits[0, 0]


def load_adapted(path, *, base):
    return peft.PeftModel.from_pretrained(load_oracle(base), path)


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


def dtensor_case(model, reward_model, **layout):
    config = make_config(model, dtensor_cfg={"enabled": True, **layout})
    config["optimizer"]["kwargs"] |= {"lr": RATE, "weight_decay": 0.0}
    lora = {"enabled": True, "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    decay = {"start_factor": 1.0, "end_factor": 0.0, "total_iters": DECAY_CALLS}
    return WorkerCase(
        worker_class=DTensorPolicyWorker,
        config=config,
        tokenizer=build_tokenizer(),
        make_batches=make_batches,
        load_oracle=load_oracle,
        ways={section: planned(section) for section in SECTIONS},
        open_receiver=open_receiver,
        reward=RewardCase(
            settings={"model_name": reward_model, "head": "reward", "generation": None},
            score=partial(score_row, path=reward_model),
        ),
        adapters=AdapterCase(
            settings={"dtensor_cfg": {"lora": lora}}, load=partial(load_adapted, base=model)
        ),
        schedule=ScheduleCase(
            settings={"scheduler": {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": decay}},
            learning_rate=falling,
        ),
    )
