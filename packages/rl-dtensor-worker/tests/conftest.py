"""Fixtures: a tiny model on disk, and pools of ranks that outlive one test."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks inherit it, and import the same

from rank_pool import RankPool, rank_context
from tiny_model import build_tiny_model

rank_context()  # a server imports beside the collection


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A two-layer Qwen2 with tied embeddings and its tokenizer, on disk."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def pools():
    """`pools(n)` gives `n` processes that run the cases of `*_ranks.py` as the ranks of a job."""
    started: dict[int, RankPool] = {}

    def pool_of(num_ranks: int) -> RankPool:
        if num_ranks not in started:
            started[num_ranks] = RankPool(num_ranks)
        return started[num_ranks]

    yield pool_of
    for pool in started.values():
        pool.close()
