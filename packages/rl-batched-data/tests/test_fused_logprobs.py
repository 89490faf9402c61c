"""Log-probabilities by Liger: against ours, which are the reference."""

from importlib.util import find_spec

import pytest
import torch
from rl_batched_data import token_scores
from tolerances import REPEATED

WITHOUT_LIGER = find_spec("liger_kernel") is None
pytestmark = [
    pytest.mark.slow,  # triton is a gigabyte, so that one session has it
    pytest.mark.needs("rl-batched-data[liger]"),
]
needs_liger = pytest.mark.skipif(
    WITHOUT_LIGER, reason='needs liger-kernel: nox -s "apart(rl-batched-data)"'
)


def scored(hidden, matrix, tokens, weights, **options):
    """Return log-probabilities, entropies, and their gradients in hidden states and matrix."""
    leaves = [each.detach().requires_grad_() for each in (hidden, matrix)]
    scores = token_scores(leaves[0], tokens, entropy=True, output_matrix=leaves[1], **options)
    (scores.logprobs * weights[0] + scores.entropy * weights[1]).sum().backward()
    return [scores.logprobs.detach(), scores.entropy.detach(), *[each.grad for each in leaves]]


def example(device, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    hidden, matrix = torch.randn(3, 7, 16, generator=draw), torch.randn(64, 16, generator=draw)
    tokens = torch.randint(0, 64, (3, 7), generator=draw)
    weights = torch.randn(2, 3, 7, generator=draw)
    return [
        hidden.to(device, dtype),
        matrix.to(device, dtype),
        tokens.to(device),
        weights.to(device),
    ]


@needs_liger
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "logit_scale": 0.6}])
def test_scores_and_gradients_equal_ours(options):
    inputs = example("cpu")
    found = scored(*inputs, **options, fused=True)
    for ours, fused in zip(scored(*inputs, **options), found, strict=True):
        assert fused.dtype == ours.dtype
        torch.testing.assert_close(fused, ours, rtol=0, atol=REPEATED * float(ours.abs().max()))


@needs_liger
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"soft_cap": 5.0}, r"soft_cap=5\.0"),
        ({"logit_scale": -1.0}, r"logit_scale=-1\.0"),
        ({"top_k": 2}, "top_k=2"),
        ({"output_bias": torch.zeros(64)}, "an output_bias"),
        ({"vocab_start": 3}, "not equally large"),
    ],
)
def test_what_liger_does_not_do_is_refused(options, named):
    hidden, matrix, tokens, _ = example("cpu")
    with pytest.raises(ValueError, match=f"fused=True does not support .*{named}"):
        token_scores(hidden, tokens, output_matrix=matrix, **options, fused=True)


@needs_liger
def test_no_tokens_have_no_scores():
    hidden, matrix, tokens, weights = example("cpu")
    found = scored(hidden[:0], matrix, tokens[:0], weights[:, :0], fused=True)
    assert [each.shape for each in found] == [(0, 7), (0, 7), (0, 7, 16), (64, 16)]


@needs_liger
def test_a_token_outside_the_vocabulary_raises():
    hidden, matrix, tokens, _ = example("cpu")
    tokens[1, 3] = 64
    with pytest.raises(ValueError, match="outside"):
        token_scores(hidden, tokens, output_matrix=matrix, fused=True)


@pytest.mark.skipif(not WITHOUT_LIGER, reason="liger-kernel is installed")
def test_without_liger_it_says_what_to_install():
    hidden, matrix, tokens, _ = example("cpu")
    with pytest.raises(ImportError, match=r"rl-batched-data\[liger\]"):
        token_scores(hidden, tokens, output_matrix=matrix, fused=True)


@pytest.mark.gpu
@needs_liger
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_scores_and_gradients_equal_ours(dtype):
    inputs = example("cuda", dtype)
    # bfloat16 has 8 bits.
    bound = REPEATED if dtype == torch.float32 else 2**-6
    for ours, fused in zip(scored(*inputs), scored(*inputs, fused=True), strict=True):
        torch.testing.assert_close(
            fused.float(), ours.float(), rtol=0, atol=bound * float(ours.abs().max())
        )
