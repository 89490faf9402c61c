"""Gradient norm and clipping: against torch's own, and in how many operators."""

import pytest
import torch
from rl_dtensor_worker.optim import LossScaler, clip_gradients, total_grad_norm
from torch.utils._python_dispatch import TorchDispatchMode

NUM_PARAMETERS = 200


class Operators(TorchDispatchMode):
    """Counts operators; on a GPU each is a kernel, or one for hundreds of tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # `detach` makes a view, and launches nothing.
        self.count += func not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def parameters():
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(NUM_PARAMETERS):
        parameter = torch.nn.Parameter(torch.zeros(index % 7 + 1, 5))
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        made.append(parameter)
    return [*made, torch.nn.Parameter(torch.zeros(3))]  # the last has no gradient


def gradients_of(parameters):
    return [each.grad for each in parameters if each.grad is not None]


def test_norm_and_clipping_are_torchs(parameters):
    wanted = [torch.nn.Parameter(torch.zeros_like(each)) for each in parameters]
    for own, theirs in zip(parameters, wanted, strict=True):
        theirs.grad = None if own.grad is None else own.grad.clone()
    norm = total_grad_norm(gradients_of(parameters))
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(wanted, 1.0))
    clip_gradients(parameters, max_norm=1.0, norm=norm)
    torch.testing.assert_close(gradients_of(parameters), gradients_of(wanted))


def test_the_number_of_operators_does_not_grow_with_the_parameters(parameters):
    scaler = LossScaler(torch.float16)
    with Operators() as operators:
        scaler.unscale(parameters)
        norm = total_grad_norm(gradients_of(parameters))
        clip_gradients(parameters, max_norm=1.0, norm=norm)
    assert operators.count < 15


def test_no_gradients_at_all_have_the_norm_0():
    without = [torch.nn.Parameter(torch.zeros(3))]
    LossScaler(torch.float16).unscale(without)
    norm = total_grad_norm([])
    clip_gradients(without, max_norm=1.0, norm=norm)
    assert norm == 0
