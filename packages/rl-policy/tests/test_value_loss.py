"""The loss of a value model, against numbers computed by hand."""

import pytest
import torch
from loss_batches import evaluate
from rl_interfaces import LossInput, LossType
from rl_policy.losses import ValueLoss


def one_value(value, *, before, returned):
    """Return values and a batch of one row `[first token, target token]`."""
    # The value after the first token is of the state in which the second one is sampled.
    values = torch.tensor([[value, 77.0]], dtype=torch.float64, requires_grad=True)
    batch = {
        "token_mask": torch.tensor([[0, 1]]),
        "sample_mask": torch.tensor([1.0]),
        "prev_values": torch.tensor([[88.0, before]], dtype=torch.float64),
        "returns": torch.tensor([[99.0, returned]], dtype=torch.float64),
    }
    return values, batch


@pytest.mark.parametrize(
    ("value", "clip", "cost", "gradient", "share"),
    [
        # (0.9 - 1) ** 2 and (0.2 - 1) ** 2: moved towards the return by more than 0.2.
        (0.9, 0.2, 0.32, 0.0, 1.0),
        (0.9, None, 0.005, -0.1, 0.0),
        (0.1, 0.2, 0.405, -0.9, 0.0),
        # Moved away from it: the unclipped cost is the greater one.
        (-0.5, 0.2, 1.125, -1.5, 0.0),
    ],
)
def test_a_value_that_moves_far_towards_its_return_has_no_gradient(
    value, clip, cost, gradient, share
):
    values, batch = one_value(value, before=0.0, returned=1.0)
    loss, metrics = evaluate(ValueLoss(clip=clip), values, batch)
    loss.backward()
    assert loss.item() == pytest.approx(cost)
    torch.testing.assert_close(values.grad, torch.tensor([[gradient, 0.0]]).double())
    assert metrics["value_clip_fraction"].item() == share
    assert metrics["value_mean"].item() == pytest.approx(value)
    assert metrics["num_valid_samples"].item() == 1


def test_micro_batches_add_up_and_masked_rows_count_nothing():
    generator = torch.Generator().manual_seed(2)
    values, prev_values, returns = (torch.randn(6, 5, generator=generator) for _ in range(3))
    batch = {
        "token_mask": (torch.rand(6, 5, generator=generator) < 0.6).long(),
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1]),
        "prev_values": prev_values,
        "returns": returns,
    }
    batch["returns"][2] = float("nan")  # of a row that is masked
    batch["token_mask"][:, 0] = 0
    mask = (batch["token_mask"] * batch["sample_mask"][:, None].long())[:, 1:]
    counts = {"seqs": 5, "toks": int(mask.sum())}
    loss, metrics = evaluate(ValueLoss(), values.requires_grad_(), batch, **counts)
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient.isfinite().all()
    assert not gradient[:, :-1][mask == 0].any()
    parts = [
        evaluate(
            ValueLoss(), values[rows], {key: each[rows] for key, each in batch.items()}, **counts
        )
        for rows in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss)
    for name in ("value_mean", "value_clip_fraction", "num_valid_samples"):
        torch.testing.assert_close(parts[0][1][name] + parts[1][1][name], metrics[name])


def test_it_is_a_loss_of_values_per_token():
    loss = ValueLoss()
    assert (loss.loss_type, loss.input_type) == (LossType.TOKEN_LEVEL, LossInput.LOGITS)
    with pytest.raises(ValueError, match="clip=0 must be positive"):
        ValueLoss(clip=0)


def test_what_it_cannot_be_called_with_is_named():
    values, batch = one_value(0.5, before=0.0, returned=1.0)
    with pytest.raises(ValueError, match=r"got \(1, 2, 3\): set policy\.head='value'"):
        evaluate(ValueLoss(), torch.zeros(1, 2, 3), batch)
    with pytest.raises(ValueError, match=r"got \(1,\): set policy\.head='value'"):
        evaluate(ValueLoss(), torch.zeros(1), batch)
    for key in ("returns", "prev_values"):
        lacking = {name: each for name, each in batch.items() if name != key}
        with pytest.raises(ValueError, match=f"ValueLoss needs the key '{key}'"):
            evaluate(ValueLoss(), values, lacking)
    evaluate(ValueLoss(clip=None), values, lacking)
    narrow = {**batch, "returns": torch.zeros(1, 1)}
    with pytest.raises(ValueError, match=r"returns has shape \(1, 1\), what the loss is called"):
        evaluate(ValueLoss(), values, narrow)
