"""One policy on either training backend: the same numbers, from the same calls."""

import pytest
import torch
from backend_runs import plain_results, run
from tolerances import assert_alike

pytestmark = [pytest.mark.slow, pytest.mark.needs("rl-policy[all]")]


@pytest.fixture(scope="module")
def both(shared_ray, backends_model, megatron_results, tmp_path_factory):
    sizes = {"tensor_parallel_size": 2}
    dtensor = run(*backends_model, "dtensor", sizes, tmp_path_factory.mktemp("dtensor"))
    return {"dtensor": dtensor, "megatron": megatron_results}


@pytest.fixture(scope="module")
def plain(backends_model):
    return plain_results(backends_model[0])


@pytest.mark.parametrize("key", ["before", "reference", "after", "losses", "grad_norms"])
def test_numbers_agree(both, plain, key):
    assert_alike(both["megatron"][key], both["dtensor"][key], plain[key], key)


def test_training_has_changed_the_model(both):
    assert (both["megatron"]["after"] - both["megatron"]["before"]).abs().max() > 1e-3
    torch.testing.assert_close(
        both["megatron"]["reference"], both["megatron"]["before"], rtol=0, atol=0
    )


def test_greedy_completions_and_names_of_weights_agree(both):
    assert torch.equal(both["megatron"]["output_ids"], both["dtensor"]["output_ids"])
    assert dict(both["megatron"]["names"]) == dict(both["dtensor"]["names"])
