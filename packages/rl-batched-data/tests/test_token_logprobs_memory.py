import gc

import pytest
import torch
from live_bytes import LiveBytes
from rl_batched_data import token_logprobs
from tolerances import SUMS

TOKENS, VOCAB, HIDDEN = 2048, 128 * 1024, 1024
MEGABYTE = 2**20


def dense(hidden, tokens, matrix):
    scores = torch.log_softmax((hidden @ matrix.T).float(), dim=-1)
    return scores[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)


def ours(hidden, tokens, matrix):
    return token_logprobs(hidden, tokens, output_matrix=matrix)


def example(dtype, device):
    hidden = torch.randn(2, TOKENS // 2, HIDDEN, dtype=dtype, device=device) / HIDDEN**0.5
    matrix = torch.randn(VOCAB, HIDDEN, dtype=dtype, device=device)
    tokens = torch.randint(0, VOCAB, (2, TOKENS // 2), device=device)
    return hidden.requires_grad_(), tokens, matrix.requires_grad_()


def gradient_bytes(leaves):
    return sum(leaf.grad.nbytes for leaf in leaves)


def counted_peak(function, dtype):
    hidden, tokens, matrix = example(dtype, "meta")
    with LiveBytes(hidden, tokens, matrix) as counter:
        function(hidden, tokens, matrix).sum().backward()
    return counter.peak - gradient_bytes((hidden, matrix))


def test_the_counter_counts_what_lives_at_one_time():
    given = torch.zeros(MEGABYTE, dtype=torch.uint8)
    with LiveBytes(given) as counter:
        first = given + 1
        del first
        second = given.to(torch.int16)
        third = second[1:].add_(1)
        assert counter.live == 2 * MEGABYTE
        del second, third
        gc.collect()
        assert counter.live == 0
    assert counter.peak == 2 * MEGABYTE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_hidden_states_the_peak_is_a_tenth_of_the_dense_one(dtype):
    assert counted_peak(dense, dtype) > TOKENS * VOCAB * 4
    assert counted_peak(ours, dtype) <= counted_peak(dense, dtype) / 10


def test_from_logits_no_second_copy_of_them_exists():
    logits = torch.randn(2, TOKENS // 2, VOCAB, dtype=torch.bfloat16, device="meta")
    tokens = torch.randint(0, VOCAB, (2, TOKENS // 2), device="meta")
    logits.requires_grad_()
    with LiveBytes(logits, tokens) as counter:
        token_logprobs(logits, tokens).sum().backward()
    assert counter.peak - logits.grad.nbytes < 0.5 * logits.nbytes


def measured_peak(function, dtype):
    hidden, tokens, matrix = example(dtype, "cuda")
    hidden.grad, matrix.grad = torch.zeros_like(hidden), torch.zeros_like(matrix)
    function(hidden, tokens, matrix).sum().backward()
    hidden.grad, matrix.grad = None, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function(hidden, tokens, matrix).sum().backward()
    return torch.cuda.max_memory_allocated() - before - gradient_bytes((hidden, matrix))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_peak_is_a_tenth_of_the_dense_one(dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert measured_peak(ours, dtype) <= measured_peak(dense, dtype) / 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_values_and_gradients_equal_dense_float64(dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    hidden = torch.randn(2, 300, 256, device="cuda").mul(0.2).to(dtype).requires_grad_()
    matrix = torch.randn(5000, 256, device="cuda").to(dtype).requires_grad_()
    tokens = torch.randint(0, 5000, (2, 300), device="cuda")
    scores = token_logprobs(hidden, tokens, output_matrix=matrix, chunk_logits=2**16)
    scores.square().sum().backward()
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, matrix)]
    expected = torch.log_softmax(wide[0] @ wide[1].T, dim=-1)[:, :-1]
    expected = expected.gather(2, tokens[:, 1:, None]).squeeze(2)
    expected.square().sum().backward()
    # The sum of 256 products and of 5000 exponentials in float32, of magnitudes up to 30.
    assert (scores[:, 1:] - expected).abs().max() < 30 * SUMS
    # Gradients in bfloat16 are rounded to 8 bits, and so is one factor of their products.
    relative = 1e-5 if dtype == torch.float32 else 2**-7
    for leaf, reference in zip((hidden, matrix), wide, strict=True):
        assert leaf.grad.dtype == dtype
        difference = (leaf.grad - reference.grad).abs().max()
        assert difference < relative * reference.grad.abs().max()
