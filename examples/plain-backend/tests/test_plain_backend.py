"""The backend keeps the rules of the conformance kit."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from plain_backend import PairModel, PlainWorker
from rl_batched_data import BatchedDataDict
from rl_interfaces.testing import ScheduleCase, Way, WorkerCase, WorkerConformance
from rl_refit.testing import receiver_in_thread
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

VOCABULARY = ["<pad>", "<eos>", *"abcdefghijklm"]
RATE, DECAY_CALLS, TOKENS, LIMIT_S = 1e-3, 8, 24, 600
PLANS = {
    "dynamic_batching": "dynamic_batching_args",
    "sequence_packing": "sequence_packing_args",
}


def make_batches(columns, *, shards, batch_size, plan=None):
    options = {PLANS[plan]: {"max_tokens_per_microbatch": TOKENS}} if plan else {}
    found = BatchedDataDict(columns).shard_by_batch_size(
        shards, batch_size=batch_size, allow_uneven_shards=plan is None, **options
    )
    return found[0] if plan else found


def planned(section):
    settings = {"enabled": True, "train_mb_tokens": TOKENS, "logprob_mb_tokens": TOKENS}
    return Way(settings={section: settings}, make_batches=partial(make_batches, plan=section))


def open_receiver(worker):
    """Stream to a receiver in a thread of this rank."""
    address = worker.open_refit(
        receivers_per_rank=[1] * dist.get_world_size(), transport="shm", bucket_bytes=1 << 12
    )
    return receiver_in_thread(address, dist.get_rank(), send=worker.send_weights, timeout_s=LIMIT_S)


@pytest.fixture(scope="module")
def worker_case(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    PairModel(len(VOCABULARY)).save(path)
    words = Tokenizer(WordLevel({word: token for token, word in enumerate(VOCABULARY)}, "<pad>"))
    decay = {"start_factor": 1.0, "end_factor": 0.0, "total_iters": DECAY_CALLS}
    return WorkerCase(
        worker_class=PlainWorker,
        config={
            "model_name": str(path),
            "train_global_batch_size": 4,
            "train_micro_batch_size": 2,
            "max_grad_norm": 1.0,
            "optimizer": {
                "name": "torch.optim.AdamW",
                "kwargs": {"lr": RATE, "eps": 1e-6, "weight_decay": 0.0},
            },
            "generation": {"max_new_tokens": 5, "temperature": 1.25},
            "plain_cfg": {"enabled": True},
        },
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        ),
        make_batches=make_batches,
        load_oracle=PairModel.load,
        ways={section: planned(section) for section in PLANS},
        open_receiver=open_receiver,
        schedule=ScheduleCase(
            settings={"scheduler": {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": decay}},
            learning_rate=lambda call: RATE * (1 - call / DECAY_CALLS),
        ),
    )


class TestPlainBackend(WorkerConformance):
    pass
