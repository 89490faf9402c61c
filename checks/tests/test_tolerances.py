"""The table of tolerances: what rounding explains is accepted, and planted faults are not."""

from functools import partial

import pytest
import torch
from tolerances import (
    LOGPROBS,
    STEP,
    Expected,
    assert_alike,
    assert_all_close,
    assert_close,
    expected_of,
    in_float64,
    measured_training,
)
from torch import nn

ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-6)


class Upcasting(nn.Module):
    """A model whose code asks for float32 in the ways that transformers does."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(16, 24), nn.Linear(24, 16)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden * hidden.float().pow(2).mean(-1, keepdim=True).rsqrt()
        hidden = hidden.to(torch.float32) * torch.ones(24, dtype=torch.float32)
        return self.out(hidden).softmax(-1, dtype=torch.float32).log()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Upcasting()


TOKENS = torch.arange(12).reshape(3, 4)


def test_a_twin_computes_in_float64_throughout(model):
    found = in_float64(model)(TOKENS)
    hidden = model.embed.weight.double()[TOKENS]
    hidden = hidden * hidden.pow(2).mean(-1, keepdim=True).rsqrt()
    logits = hidden @ model.out.weight.double().T + model.out.bias.double()
    torch.testing.assert_close(found, logits.log_softmax(-1), rtol=0, atol=1e-14)
    assert model(TOKENS).dtype is torch.float32


def test_experts_multiplied_together_are_multiplied_in_float64():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, 8, 16))

        def forward(self, rows):
            ends = torch.tensor([3, 3, 5], dtype=torch.int32)
            return torch.nn.functional.grouped_mm(rows.to(self.weights), self.weights, offs=ends)

    torch.manual_seed(0)
    experts, rows = Experts(), torch.randn(5, 8)
    expected = expected_of(lambda each: each(rows), experts, LOGPROBS)
    assert 0 < expected.error < 8 * STEP * expected.largest


def test_rounding_is_accepted_and_another_number_is_not(model):
    expected = expected_of(lambda each: each(TOKENS), model, LOGPROBS)
    right = model(TOKENS)
    assert_close(right, expected)
    assert_close(right[1:], expected[1:])
    assert_alike(right, right + 0.5 * STEP * expected.largest, expected)
    wrong = right.detach().clone()
    wrong[2, 3, 5] += 32 * STEP * expected.largest
    for hold in (assert_close, partial(assert_alike, right)):
        with pytest.raises(AssertionError, match=r"scores differs by .* what rounding explains"):
            hold(wrong, expected, "scores")
    wrong[2, 3, 5] = float("nan")
    with pytest.raises(AssertionError):
        assert_close(wrong, expected)


def mean(model, tokens):
    terms = -model(tokens)[:, :-1].gather(-1, tokens[:, 1:, None])
    return terms.mean(), terms


def train(model, tokens, *, num_steps=3):
    optimizer, losses = ADAMW(model.parameters()), []
    for _ in range(num_steps):
        loss, _ = mean(model, tokens)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return dict(model.named_parameters()), losses


def test_steps_in_another_order_of_sums_are_accepted_and_a_missing_row_is_not(model):
    starts = [Upcasting() for _ in range(2)]
    for each in starts:
        each.load_state_dict(model.state_dict())
    plain = measured_training(model, ADAMW, mean, [TOKENS] * 3)
    right, losses = train(starts[0], TOKENS.flip(0))
    assert_all_close(right, plain.parameters)
    assert_close(losses, plain.losses)
    wrong, losses = train(starts[1], TOKENS[:2])
    with pytest.raises(AssertionError, match="rounding"):
        assert_all_close(wrong, plain.parameters)
    with pytest.raises(AssertionError, match="rounding"):
        assert_close(losses, plain.losses)


def test_expected_values_have_the_shape_of_what_is_found(model):
    expected = Expected(exact=torch.zeros(2, dtype=torch.float64), error=0.0, row=LOGPROBS)
    with pytest.raises(AssertionError):
        assert_close(torch.zeros(3), expected)
