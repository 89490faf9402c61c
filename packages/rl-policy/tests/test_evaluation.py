import math

import pytest
import torch
from rl_policy.config import load_run_config
from rl_policy.run.evaluation import check_mismatch, sampler_mismatch
from rl_refit import VerificationError


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


def test_a_mismatch_over_the_limit_is_an_error():
    check_mismatch({"mismatch_max_abs": 0.25}, limit=0.25)
    check_mismatch({"mismatch_max_abs": 9.0}, limit=None)
    for worst in (0.26, float("nan")):
        with pytest.raises(VerificationError, match=r"refit\.max_mismatch=0\.25"):
            check_mismatch({"mismatch_max_abs": worst}, limit=0.25)


def test_the_limit_and_its_check_are_asked_for_together():
    load_run_config("grpo", overrides=["refit.verify=logprobs", "refit.max_mismatch=1e-3"])
    for alone in ("refit.verify=logprobs", "refit.max_mismatch=1e-3"):
        with pytest.raises(ValueError, match=r"refit\.max_mismatch"):
            load_run_config("grpo", overrides=[alone])


def test_vllm_is_not_asked_for_weights_that_it_cannot_yield():
    load_run_config("grpo", overrides=["refit.verify=weights"])
    overrides = ["refit.verify=weights", "policy.generation.backend=vllm"]
    with pytest.raises(ValueError, match=r"refit\.verify='weights'.*backend='vllm'"):
        load_run_config("grpo", overrides=overrides)
