import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_interfaces.backend.generation import (
    SamplingConfig,
    sample_tokens,
    scoring_temperature,
    truncate_logits,
)

pytestmark = pytest.mark.needs("rl-interfaces[backend]")


def _kept_naively(logits, top_k, top_p):
    """Keep tokens from the likeliest down, over plain Python numbers."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or len(logits)]
    total = sum(math.exp(logits[i]) for i in order)
    kept, reached = set(), 0.0
    for index in order:
        if reached >= top_p:
            break
        kept.add(index)
        reached += math.exp(logits[index]) / total
    return kept


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.sampled_from([None, 1, 3, 7, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
)
def test_truncation_keeps_what_a_plain_loop_keeps(seed, top_k, top_p):
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kept = truncate_logits(logits, top_k=top_k, top_p=top_p)
    for row, original in zip(kept, logits, strict=True):
        finite = {i for i in range(12) if math.isfinite(row[i])}
        assert finite == _kept_naively(original.tolist(), top_k, top_p)
        assert all(row[i] == original[i] for i in finite)


def test_samples_follow_the_tempered_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(40_000, 1)
    generator = torch.Generator().manual_seed(0)
    tokens, logprobs = sample_tokens(
        logits, temperature=0.5, top_k=None, top_p=1.0, generator=generator
    )
    expected = (logits[0] / 0.5).softmax(-1)
    frequency = torch.bincount(tokens, minlength=4) / len(tokens)
    # Five standard deviations of a frequency over 40,000 draws.
    assert (frequency - expected).abs().max() < 5 * math.sqrt(0.25 / 40_000)
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_what_is_truncated_is_never_drawn():
    """At either end of the vocabulary, where sums of probabilities are 0 or all there is."""
    logits = torch.tensor([[-2.0, 1.0, -2.0, 2.0, -2.0]]).repeat(20_000, 1)
    tokens, logprobs = sample_tokens(
        logits, temperature=1.0, top_k=2, top_p=1.0, generator=torch.Generator().manual_seed(0)
    )
    assert tokens.unique().tolist() == [1, 3]
    assert logprobs.isfinite().all()


def test_temperature_zero_is_greedy_with_the_untempered_probability():
    logits = torch.tensor([[0.0, 3.0, 1.0]], dtype=torch.bfloat16)
    tokens, logprobs = sample_tokens(
        logits, temperature=0.0, top_k=1, top_p=0.1, generator=torch.Generator()
    )
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(float(logits.float().log_softmax(-1)[0, 1]))
    assert logprobs.dtype is torch.float32


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, 0.5), (0.0, 1.0)])
def test_samples_are_scored_at_their_temperature_and_greedy_ones_at_one(temperature, expected):
    config = SamplingConfig(
        max_new_tokens=4,
        temperature=temperature,
        top_p=1.0,
        top_k=None,
        stop_token_ids=(),
        stop_strings=(),
        pad_token_id=0,
        batch_size=1,
    )
    assert scoring_temperature(config) == expected
    assert scoring_temperature(None) == 1.0
