"""The gated delta rule in chunks, against a token at a time in float64."""

import pytest
import torch
from rl_megatron_worker.model.linear_attention import DeltaInputs, gated_delta_rule
from tolerances import FLOAT64

# The inputs are float64: what differs is the order of sums.
TOLERANCE = FLOAT64


def draw(width):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, width, size, dtype=torch.float64, generator=generator)
        for size in (4, 4, 5)
    )
    decay, beta = torch.rand(2, 2, 3, width, dtype=torch.float64, generator=generator)
    key = key / key.norm(dim=-1, keepdim=True)
    return [each.requires_grad_() for each in (query, key, value, -decay, beta)]


def token_by_token(query, key, value, log_decay, beta):
    state, outputs = query.new_zeros(2, 3, 4, 5), []
    for token in range(query.shape[2]):
        state = state * log_decay[:, :, token, None, None].exp()
        known = torch.einsum("rhk,rhkv->rhv", key[:, :, token], state)
        new = beta[:, :, token, None] * (value[:, :, token] - known)
        state = state + torch.einsum("rhk,rhv->rhkv", key[:, :, token], new)
        outputs.append(torch.einsum("rhk,rhkv->rhv", query[:, :, token], state))
    return torch.stack(outputs, 2), state


@pytest.mark.parametrize("width", [1, 7, 64, 65, 130])
def test_chunks_give_what_tokens_give_one_by_one(width):
    inputs = draw(width)
    found, expected = gated_delta_rule(DeltaInputs(*inputs)), token_by_token(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    grads, wanted = (
        torch.autograd.grad(output.sum() + state.square().sum(), inputs)
        for output, state in (found, expected)
    )
    torch.testing.assert_close(grads, wanted, rtol=0, atol=TOLERANCE)


def test_it_goes_on_from_a_state():
    inputs = draw(9)
    first = gated_delta_rule(DeltaInputs(*(each[:, :, :5] for each in inputs)))
    last = gated_delta_rule(DeltaInputs(*(each[:, :, 5:] for each in inputs)), first[1])
    output, state = gated_delta_rule(DeltaInputs(*inputs))
    torch.testing.assert_close(torch.cat([first[0], last[0]], 2), output, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(last[1], state, rtol=0, atol=TOLERANCE)
