from contextlib import contextmanager

import state_ranks
import torch
from rl_dtensor_worker import DTensorPolicyWorker
from tiny_model import make_batch, make_config


def test_the_documented_moves_return_the_model_with_its_values(pools, tiny_model):
    (outcome,) = pools(1).run(
        state_ranks.documented_moves, config=make_config(tiny_model), batch=make_batch(4)
    )
    assert outcome.is_same_model
    assert outcome.devices == {"cpu"}
    assert outcome.same_shards
    assert outcome.still_trains


def test_train_context_enters_what_it_is_given_and_nothing_else():
    entered = []

    @contextmanager
    def inner():
        entered.append("in")
        yield
        entered.append("out")

    with DTensorPolicyWorker.train_context(inner()):
        assert entered == ["in"]
        assert not torch.backends.cuda.math_sdp_enabled()  # kernels that cannot be sharded are off
    assert entered == ["in", "out"]
    with DTensorPolicyWorker.train_context():
        assert torch.backends.cuda.math_sdp_enabled()
