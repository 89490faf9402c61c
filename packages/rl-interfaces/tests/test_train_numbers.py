"""The numbers of a `train` call: read at its end, at once, as what they were."""

import pytest
import torch
from rl_interfaces.backend.steps import TrainReport, read_numbers
from rl_interfaces.backend.worker import _metric

pytestmark = [pytest.mark.promise, pytest.mark.needs("rl-interfaces[backend]")]


def test_numbers_stay_what_they_are():
    third = torch.tensor(1.0) / 3
    found = read_numbers([2, third, torch.tensor(7), 0.5, torch.tensor([1.5]), torch.tensor(2**40)])
    assert found == [2, third.item(), 7, 0.5, 1.5, 2**40]
    assert [type(number) for number in found] == [int, float, int, float, float, int]


def test_no_values_give_no_numbers():
    assert read_numbers([]) == []


def test_not_finite_numbers_are_read():
    nan, infinite = read_numbers([torch.tensor(float("nan")), torch.tensor(float("-inf"))])
    assert nan != nan
    assert infinite == float("-inf")


def test_a_report_keeps_the_order_and_leaves_out_what_does_not_count():
    report = TrainReport(
        losses=[torch.tensor(1.5), torch.tensor(2.5)],
        grad_norms=[torch.tensor(3.0), torch.tensor(4.0)],
        metrics=[
            {"num_valid_samples": torch.tensor(2), "nll": torch.tensor(0.25)},
            {"num_valid_samples": 0, "nll": torch.tensor(9.0)},
            {"nll": torch.tensor(0.75), "num_valid_samples": 1, "kl": 0.5},
        ],
    )
    numbers = report.read()
    assert numbers.losses.tolist() == [1.5, 2.5]
    assert numbers.grad_norms.tolist() == [3.0, 4.0]
    assert numbers.losses.dtype is torch.float32
    assert dict(numbers.metrics) == {"num_valid_samples": [2, 1], "nll": [0.25, 0.75], "kl": [0.5]}


def test_a_metric_does_not_change_after_the_loss_has_returned_it():
    value = torch.tensor(1.0, requires_grad=True) * 1
    metric = _metric("nll", value)
    value.data.fill_(2.0)
    assert read_numbers([metric]) == [1.0]
    assert not metric.requires_grad


def test_a_metric_of_several_elements_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'per_token' has 6 elements, shape \[2, 3\]"):
        _metric("per_token", torch.zeros(2, 3))
