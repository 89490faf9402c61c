"""Experts multiplied together: against one after the other."""

import pytest
import torch
from rl_megatron_worker.model.experts import _GroupedLinear
from tolerances import REPEATED

NUM_TOKENS = [3, 0, 5]


def one_by_one(tokens, weights):
    parts = tokens.split(NUM_TOKENS)
    return torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_each_expert_alone(dtype):
    draw = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(shape, generator=draw).to(dtype).requires_grad_()
        for shape in [(8, 16), *[(24, 16)] * 3]
    ]
    ends = torch.tensor(NUM_TOKENS).cumsum(0).int()
    output, bias = _GroupedLinear(leaves[1:], ends)(leaves[0])
    expected = one_by_one(leaves[0], leaves[1:])
    assert bias is None
    assert torch.equal(output, expected)
    weights = torch.randn(output.shape, generator=draw).to(dtype)
    for found, wanted in zip(
        torch.autograd.grad((output * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
        strict=True,
    ):
        atol = 16 * torch.finfo(dtype).eps * float(wanted.detach().abs().max())
        torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def test_frozen_weights_get_no_gradient():
    tokens = torch.randn(8, 16, requires_grad=True)
    weights = [torch.randn(24, 16) for _ in NUM_TOKENS]
    ends = torch.tensor(NUM_TOKENS).cumsum(0).int()
    output, _ = _GroupedLinear(weights, ends)(tokens)
    (found,) = torch.autograd.grad(output.sum(), tokens)
    (wanted,) = torch.autograd.grad(one_by_one(tokens, weights).sum(), tokens)
    atol = REPEATED * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)
