"""The plain worker as a case of the kit."""

from contextlib import contextmanager
from functools import partial

import torch
from plain_policy_worker import (
    RATE,
    CapableWorker,
    Tokenizer,
    load_adapted,
    load_model,
    reward_of,
    write_model,
)
from rl_interfaces.testing import AdapterCase, RewardCase, ScheduleCase, Way, WorkerCase


def make_batches(columns, *, shards, batch_size):
    """Each rank's consecutive rows of each step."""
    num_rows = len(columns["input_ids"])
    steps = torch.arange(num_rows).split(batch_size or num_rows)
    shares = [
        torch.cat([step.tensor_split(shards)[shard] for step in steps]) for shard in range(shards)
    ]
    return [{key: value[rows] for key, value in columns.items()} for rows in shares]


def make_reversed_batches(columns, *, shards, batch_size):
    """Another way of batching: the rows of each step the other way round."""
    size = batch_size or len(columns["input_ids"])
    rows = []
    for start in range(0, len(columns["input_ids"]), size):
        rows += reversed(range(len(columns["input_ids"]))[start : start + size])
    return [{key: value[rows] for key, value in columns.items()}]


def halved(call):
    return RATE * 0.5**call


@contextmanager
def open_receiver(worker):
    worker.open_refit(receivers_per_rank=[1], transport="by hand")

    def receive(version):
        worker.send_weights(version)
        return worker.sent[version]

    yield receive


def plain_case(directory, worker_class=CapableWorker, **changes):
    path = write_model(directory / "model.pt")
    config = {
        "model_name": path,
        "precision": "float32",
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "max_grad_norm": 1.0,
        "generation": {"backend": "hf", "max_new_tokens": 5, "temperature": 1.25},
        "plain_cfg": {"enabled": True},
    }
    arguments = {
        "worker_class": worker_class,
        "config": config,
        "tokenizer": Tokenizer(),
        "make_batches": make_batches,
        "load_oracle": load_model,
        "open_receiver": open_receiver,
        "reward": RewardCase(settings={}, score=partial(reward_of, load_model(path))),
        "adapters": AdapterCase(
            settings={"plain_cfg": {"adapters": True}}, load=partial(load_adapted, base=path)
        ),
        "schedule": ScheduleCase(settings={"plain_cfg": {"decay": 0.5}}, learning_rate=halved),
        "ways": {"reversed": Way(settings={}, make_batches=make_reversed_batches)},
    }
    return WorkerCase(**(arguments | changes))
