"""The counts behind accumulated gradients, in plain numbers."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_interfaces import LossType
from rl_interfaces.backend.accumulation import CountProbe, PendingGradients
from rl_interfaces.backend.steps import LossCounts

pytestmark = pytest.mark.needs("rl-interfaces[backend]")

TOKENS = SimpleNamespace(loss_type=LossType.TOKEN_LEVEL)
SEQUENCES = SimpleNamespace(loss_type=LossType.SEQUENCE_LEVEL)


def counts(seqs, toks):
    return LossCounts(
        valid_seqs=torch.tensor(float(seqs)),
        valid_toks=torch.tensor(float(toks)),
        num_valid_seqs=float(seqs),
        num_valid_toks=float(toks),
    )


CALL = st.tuples(st.integers(0, 9), st.integers(0, 50), st.floats(-10, 10))


@given(calls=st.lists(CALL, min_size=1, max_size=6), loss_fn=st.sampled_from([TOKENS, SEQUENCES]))
def test_weighted_means_divided_are_the_mean_over_all(calls, loss_fn):
    pending, accumulated, total = PendingGradients(), 0.0, 0.0
    is_per_token = loss_fn is TOKENS
    for seqs, toks, value in calls:
        own = toks if is_per_token else seqs
        # Nothing valid has a sum of 0.
        own_sum = value * own
        accumulated += pending.add(counts(seqs, toks), loss_fn) * own_sum / max(own, 1)
        total += own_sum
    valid = sum(toks if is_per_token else seqs for seqs, toks, _ in calls)
    assert accumulated / pending.divisor == pytest.approx(total / max(valid, 1), abs=1e-9)


@given(seqs=st.integers(0, 9), toks=st.integers(0, 50))
def test_one_call_is_left_as_it_is(seqs, toks):
    pending = PendingGradients()
    assert pending.add(counts(seqs, toks), TOKENS) == 1.0
    assert pending.divisor == 1.0
    assert pending.is_empty == (seqs == 0 or toks == 0)


def test_the_example_of_the_class():
    pending = PendingGradients()
    assert pending.add(counts(2, 3), TOKENS) == 1.0
    assert pending.add(counts(1, 1), TOKENS) == pytest.approx(1 / 3)
    assert pending.divisor == pytest.approx(4 / 3)
    assert pending.num_valid == (3, 4)
    pending.clear()
    assert (pending.num_calls, pending.divisor, pending.num_valid) == (0, 1.0, (0, 0))


def test_losses_of_two_types_are_refused_until_the_step():
    pending = PendingGradients()
    pending.check(TOKENS)
    pending.add(counts(2, 3), TOKENS)
    pending.check(TOKENS)
    with pytest.raises(ValueError, match=r"SEQUENCE_LEVEL.* TOKEN_LEVEL losses: call optimizer_st"):
        pending.check(SEQUENCES)
    pending.clear()
    pending.check(SEQUENCES)


def loss_of(value, loss_type):
    def loss(inputs, rows, seqs, toks):
        return torch.as_tensor(value(seqs, toks)), {}

    loss.loss_type = loss_type
    return loss


@pytest.mark.parametrize(
    ("value", "loss_type", "differs"),
    [
        (lambda seqs, toks: 3 / toks, LossType.TOKEN_LEVEL, 0),
        (lambda seqs, toks: 3 / seqs, LossType.SEQUENCE_LEVEL, 0),
        (lambda seqs, toks: 3 / seqs, LossType.TOKEN_LEVEL, 1),
        (lambda seqs, toks: 3 / toks, LossType.SEQUENCE_LEVEL, 1),
        (lambda seqs, toks: 3 / toks + 1 / seqs, LossType.TOKEN_LEVEL, 1),
        (lambda seqs, toks: 3 / toks + 0.1, LossType.TOKEN_LEVEL, 1),
        (lambda seqs, toks: 3 / toks**2, LossType.TOKEN_LEVEL, 1),
        (lambda seqs, toks: torch.tensor(math.nan), LossType.TOKEN_LEVEL, 0),
        (lambda seqs, toks: torch.tensor(-math.inf), LossType.TOKEN_LEVEL, 0),
        (lambda seqs, toks: torch.tensor(0.0), LossType.TOKEN_LEVEL, 0),
    ],
)
def test_the_probe_detects_what_no_count_divides(value, loss_type, differs):
    loss, found = loss_of(value, loss_type), counts(4, 12)
    probe = CountProbe(loss, found)
    half = probe.half(torch.zeros(1), {})
    assert int(probe.differs(half, loss(None, None, *found.divisors)[0])) == differs
    assert probe.half(torch.zeros(1), {}) is None
