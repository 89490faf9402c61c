import pytest
import torch
import torch.distributed as dist
from rl_batched_data import token_logprobs

# Two float32 sums of a few hundred terms in different orders.
FLOAT32 = 1e-5


def dense(logits, tokens, temperature):
    scores = torch.log_softmax(logits.double() / temperature, dim=-1)
    chosen = scores[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    return torch.cat([torch.zeros(len(tokens), 1, dtype=torch.float64), chosen], dim=1)


def example(vocab=40, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, vocab, generator=generator).mul(4).to(dtype)
    tokens = torch.randint(0, vocab, (3, 7), generator=generator)
    edges = [0, vocab // 4 - 1, vocab // 4, vocab // 2 - 1, vocab // 2, vocab - 1]
    tokens[0, 1:] = torch.tensor(edges)
    weights = torch.randn(3, 7, generator=generator)
    return logits, tokens, weights


def value_and_gradient(function, logits, *arguments, weights, **options):
    logits = logits.detach().requires_grad_()
    scores = function(logits, *arguments, **options)
    (scores * weights).sum().backward()
    return scores.detach(), logits.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_logits", [1, 200, 2**24])
def test_values_and_gradients_equal_dense_float64(temperature, chunk_logits):
    logits, tokens, weights = example()
    scores, gradient = value_and_gradient(
        token_logprobs,
        logits,
        tokens,
        weights=weights,
        temperature=temperature,
        chunk_logits=chunk_logits,
    )
    expected, expected_gradient = value_and_gradient(
        dense, logits.double(), tokens, temperature, weights=weights
    )
    assert scores.dtype == torch.float32
    assert (scores[:, 0] == 0).all()
    assert (scores - expected).abs().max() < FLOAT32
    assert (gradient - expected_gradient).abs().max() < FLOAT32


def test_neither_pass_writes_into_the_logits():
    logits, tokens, weights = example()
    before = logits.clone()
    value_and_gradient(token_logprobs, logits, tokens, weights=weights, temperature=0.7)
    assert torch.equal(logits, before)


def test_bfloat16_logits_are_accumulated_in_float32():
    logits, tokens, _ = example(vocab=4000, dtype=torch.bfloat16)
    scores = token_logprobs(logits, tokens)
    assert scores.dtype == torch.float32
    assert (scores - dense(logits, tokens, 1.0)).abs().max() < FLOAT32


def equals_dense_over_ranks(world_size, rank):
    logits, tokens, weights = example()
    expected, expected_gradient = value_and_gradient(
        dense, logits.double(), tokens, 0.7, weights=weights
    )
    scores, gradient = value_and_gradient(
        token_logprobs,
        logits.chunk(world_size, dim=-1)[rank],
        tokens,
        weights=weights,
        temperature=0.7,
        tp_group=dist.group.WORLD,
    )
    assert (scores - expected).abs().max() < FLOAT32
    own = expected_gradient.chunk(world_size, dim=-1)[rank]
    assert (gradient - own).abs().max() < FLOAT32


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_vocabulary_sharded_values_and_gradients_equal_dense_float64(on_gloo_ranks, world_size):
    on_gloo_ranks(world_size, equals_dense_over_ranks, world_size)


def test_wrong_arguments_are_named_with_their_numbers():
    logits, tokens, _ = example()
    with pytest.raises(ValueError, match=r"temperature=0.0 must be greater than 0"):
        token_logprobs(logits, tokens, temperature=0.0)
    with pytest.raises(ValueError, match=r"logits \[3, 7, 40\] and tokens \[3, 6\]"):
        token_logprobs(logits, tokens[:, 1:])
