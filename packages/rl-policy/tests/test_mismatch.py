import math

import pytest
import torch
from rl_policy.recipes.mismatch import sampler_mismatch


def test_measures_of_the_sampled_tokens_alone():
    batch = {
        "generation_logprobs": torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, 0.0]]),
        "token_mask": torch.tensor([[0, 1, 1], [0, 1, 0]]),
    }
    trainer = torch.tensor([[9.0, -1.5, -2.0], [9.0, -2.75, 9.0]])
    differences = (-0.5, 0.0, 0.25)
    measured = sampler_mismatch(batch, trainer)
    assert measured == pytest.approx(
        {
            "mismatch_mean_abs": 0.25,
            "mismatch_max_abs": 0.5,
            "token_mult_prob_error": sum(math.exp(abs(d)) for d in differences) / 3,
            "mismatch_kl": sum(math.exp(d) - 1 - d for d in differences) / 3,
        }
    )


def test_equal_log_probabilities_have_no_mismatch():
    logprobs = -torch.rand(4, 6)
    batch = {"generation_logprobs": logprobs, "token_mask": torch.ones(4, 6)}
    assert sampler_mismatch(batch, logprobs) == {
        "mismatch_mean_abs": 0.0,
        "mismatch_max_abs": 0.0,
        "token_mult_prob_error": 1.0,
        "mismatch_kl": 0.0,
    }


def test_a_batch_without_samples_is_an_error():
    batch = {"generation_logprobs": torch.zeros(1, 2), "token_mask": torch.zeros(1, 2)}
    with pytest.raises(ValueError, match="'token_mask' marks no token"):
        sampler_mismatch(batch, torch.zeros(1, 2))
