"""The backend keeps the rules of the conformance kit."""

import pytest
import torch
from plain_backend import PairModel, PlainWorker
from rl_batched_data import BatchedDataDict
from rl_interfaces.testing import WorkerCase, WorkerConformance
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

VOCABULARY = ["<pad>", "<eos>", *"abcdefghijklm"]


def make_batches(columns, *, shards, batch_size):
    batch = BatchedDataDict(columns)
    return batch.shard_by_batch_size(shards, batch_size=batch_size, allow_uneven_shards=True)


@pytest.fixture(scope="module")
def worker_case(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    PairModel(len(VOCABULARY)).save(path)
    words = Tokenizer(WordLevel({word: token for token, word in enumerate(VOCABULARY)}, "<pad>"))
    return WorkerCase(
        worker_class=PlainWorker,
        config={
            "model_name": str(path),
            "train_global_batch_size": 4,
            "train_micro_batch_size": 2,
            "max_grad_norm": 1.0,
            "optimizer": {
                "name": "torch.optim.AdamW",
                "kwargs": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0},
            },
            "generation": {"max_new_tokens": 5, "temperature": 1.25},
            "plain_cfg": {"enabled": True},
        },
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        ),
        make_batches=make_batches,
        load_oracle=PairModel.load,
    )


class TestPlainBackend(WorkerConformance):
    pass
