"""How far two results may be apart, from the arithmetic that made them: one table for all tests.

A result in float32 is compared with the same computation in float64, by plain transformers or by
hand. What plain float32 loses against float64 is measured on the machine that runs the test, and
ours may lose a multiple of it. No number here depends on a processor.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

STEP = 2.0**-23
"""The relative distance of two neighbours in float32; one operation rounds by half of it."""


class Row(NamedTuple):
    """A row of the table: by how much a result may differ from float64."""

    multiple: float
    """Of the error of plain float32."""
    floor: float
    """In steps of float32 at the largest value, where plain float32 was right by luck."""


# Other kernels, other widths of rows and sums over ranks round as often as plain float32 does, but
# otherwise: the largest of some dozen errors varies by 2, and each of up to two kinds of
# parallelism that a layout combines adds about one error of the same size.
LOGPROBS = Row(4, 4)
# As above. A gradient is a sum over tokens of products of such values; the largest error of a
# model's gradients counts, at the largest gradient.
GRADIENTS = Row(4, 8)
# A mean of log-probabilities is at most as wrong as the worst of them, and that of other kernels
# hardly more; 4 steps are two roundings of the sum and two of the division, at worst.
LOSSES = Row(2, 4)
# By the triangle inequality a norm is at most as wrong as the norm of its vector's error. The
# floor is that of `SUMS`.
NORMS = Row(1, 16)
# The error is that of gradients, amplified by AdamW: see `_slope`. The floor counts for each
# optimizer step, which rounds the weight as it decays and as it moves: by up to half a float32 step
# each, and by twice that where kernels round a product of the two in between.
PARAMETERS = Row(4, 2)

SUMS = 16 * STEP
"""Relative: a sum of up to 2^16 terms in two orders. torch adds by halves: log2(n) roundings."""
ELEMENTWISE = 16 * STEP
"""Relative: a formula of up to sixteen float32 operations on one number, such as a loss by hand;
`exp` and `log` are off by a step each, an operation by half of one."""
FLOAT64 = 2**16 * torch.finfo(torch.float64).eps
"""Absolute, of two computations in float64 of values of about 1: no processor comes near, and what
is computed in float32 on the way is 10^4 times off."""
REPEATED = 32 * STEP
"""Relative to the largest value: two of our own layouts or ways of batching, whose every result is
about two steps off, through two layers and the reductions of `SUMS`."""
KL = 4 * REPEATED
"""Absolute: the estimated divergence of a policy from its reference, the same model in another
layout, of log-probabilities of about 4."""
ENGINE = 30 * REPEATED
"""Absolute: vLLM's kernels in float32, of log-probabilities of up to 30."""


class _Float64(TorchFunctionMode):
    """Computes in float64 what a model's code asks to compute in float32."""

    def __torch_function__(
        self,
        func: Callable,
        types: tuple[type, ...],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        values: list[Any] = [torch.float64 if each is torch.float32 else each for each in args]
        options: dict[str, Any] = {
            name: torch.float64 if each is torch.float32 else each
            for name, each in (kwargs or {}).items()
        }
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if getattr(func, "__name__", "") == "_grouped_mm":  # has no float64
            rows, weights, ends = values[0], values[1], options["offs"].tolist()
            parts = [
                rows[start:end] @ weight
                for start, end, weight in zip([0, *ends], ends, weights, strict=False)
            ]
            unused = rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])
            return torch.cat([*parts, unused])
        return func(*values, **options)


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model with the same weights that computes in float64 throughout."""
    twin = copy.deepcopy(model).double()
    forward = twin.forward

    def forward_in_float64(*args: Any, **kwargs: Any) -> Any:
        with _Float64():
            return forward(*args, **kwargs)

    twin.forward = forward_in_float64
    return twin


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A result in float64, and how far a result in float32 may be from it."""

    exact: torch.Tensor
    error: torch.Tensor | float
    """Of plain float32: of each element, or the largest."""
    row: Row
    scale: float | None = None
    """The largest value that counts for the floor; None: that of `exact`."""
    step: float = STEP
    """The relative distance of neighbours in the dtype of the computation."""

    @property
    def largest(self) -> float:
        """The value that the floor is relative to."""
        return float(self.exact.abs().max()) if self.scale is None else self.scale

    @property
    def bound(self) -> torch.Tensor | float:
        """The largest difference that is accepted: of each element, or of all."""
        return self.row.multiple * self.error + self.row.floor * self.step * self.largest

    def __len__(self) -> int:
        return len(self.exact)

    def __getitem__(self, index: Any) -> "Expected":
        """Return some of the elements."""
        error = self.error[index] if isinstance(self.error, torch.Tensor) else self.error
        return replace(self, exact=self.exact[index], error=error, scale=self.largest)

    def gather(self, indices: torch.Tensor) -> "Expected":
        """Return elements along the last axis; the floor stays that of all."""
        return replace(self, exact=self.exact.gather(-1, indices), scale=self.largest)


def expected_of(
    compute: Callable,
    model: torch.nn.Module,
    row: Row,
    *,
    dtype: torch.dtype = torch.float32,
    twin: torch.nn.Module | None = None,
) -> Expected:
    """Return `compute(model)`, a tensor, in float64, with the error that it has in `dtype`.

    `twin` is the model in float64, if it was trained so; by default it has the model's weights.
    """
    rounded = compute(model if dtype is torch.float32 else copy.deepcopy(model).to(dtype)).detach()
    exact = compute(twin or in_float64(model)).detach()
    assert exact.dtype is torch.float64, "the oracle computes in float64"
    error = float((rounded - exact).abs().max())
    return Expected(exact=exact, error=error, row=row, step=torch.finfo(dtype).eps)


def assert_close(found: Any, expected: Expected, what: object = "", *, times: float = 1.0) -> None:
    """Hold a tensor or a list of numbers against what is expected, at `times` its bound."""
    found = torch.as_tensor(found, dtype=torch.float64, device="cpu").detach()
    assert found.shape == expected.exact.shape, (what, found.shape, expected.exact.shape)
    differences = (found - expected.exact).abs()
    # A tensor of zeros that nothing has trained has a bound of 0, and has to be equal.
    bound = times * torch.as_tensor(expected.bound, dtype=torch.float64)
    shares = torch.where(differences == 0, 0.0, differences / bound)
    worst = int(shares.argmax()) if shares.numel() else None
    assert worst is None or bool((shares <= 1).all()), (
        f"{what} differs by {float(differences.flatten()[worst]):.2e}, "
        f"{float(shares.flatten()[worst]):.2g} times what rounding explains"
    )


def assert_all_close(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, Expected], *, times: float = 1.0
) -> None:
    """Hold tensors by name against what is expected of them."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in found.items():
        assert_close(tensor, expected[name], name, times=times)


def assert_alike(left: Any, right: Any, expected: Expected, what: object = "") -> None:
    """Hold two results of one computation against each other: each within the bound of float64."""
    right = torch.as_tensor(right, dtype=torch.float64)
    assert_close(left, replace(expected, exact=right, scale=expected.largest), what, times=2)


class Trained(NamedTuple):
    """What plain training gives."""

    parameters: dict[str, Expected]
    losses: Expected
    norms: Expected


class _Steps(NamedTuple):
    """Training in one dtype: what each step has, and the parameters after all of them."""

    terms: list[torch.Tensor]
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    slopes: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]


def measured_training(
    model: torch.nn.Module,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    loss_of: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    batches: Sequence[Any],
    *,
    max_norm: float = 1.0,
    twin: torch.nn.Module | None = None,
) -> Trained:
    """Train a model, and a copy in float64; return what float64 gives, with float32's errors.

    Args:
        model: Is trained.
        make_optimizer: Returns AdamW or SGD of parameters.
        loss_of: Returns the loss of a model and a batch, and the terms that it is a mean of.
        batches: One for each step.
        max_norm: Gradients are clipped to this norm.
        twin: The copy, for callers that use it after it is trained.
    """
    twin = twin or in_float64(model)
    with _Float64():
        exact = _steps(twin, make_optimizer, loss_of, batches, max_norm)
    plain = _steps(model, make_optimizer, loss_of, batches, max_norm)
    names = exact.gradients[0].keys()
    of_weights = PARAMETERS._replace(floor=PARAMETERS.floor * len(batches))
    errors = {name: torch.zeros_like(tensor) for name, tensor in exact.parameters.items()}
    norm_errors = []
    for step, gradients in enumerate(exact.gradients):
        wrong = {name: plain.gradients[step][name] - gradients[name] for name in names}
        total = sum(float(each.square().sum()) for each in wrong.values())
        # Gradients are those that were clipped.
        norm_errors.append(total**0.5 * max(1.0, exact.norms[step] / max_norm))
        typical = (total / sum(each.numel() for each in wrong.values())) ** 0.5
        for name, each in wrong.items():
            # An element may be right by luck, its tensor is not.
            floor = max(float(each.square().mean().sqrt()), typical)
            errors[name] += each.abs().clamp(min=floor) * exact.slopes[step][name]
    terms = [
        float((rounded - right).abs().max())
        for rounded, right in zip(plain.terms, exact.terms, strict=True)
    ]
    return Trained(
        parameters={
            name: Expected(exact=tensor, error=errors[name], row=of_weights)
            for name, tensor in exact.parameters.items()
        },
        losses=Expected(
            exact=torch.tensor(exact.losses, dtype=torch.float64),
            error=torch.tensor(terms, dtype=torch.float64),
            row=LOSSES,
        ),
        norms=Expected(
            exact=torch.tensor(exact.norms, dtype=torch.float64),
            error=torch.tensor(norm_errors, dtype=torch.float64),
            row=NORMS,
        ),
    )


def _steps(
    model: torch.nn.Module,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    loss_of: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    batches: Sequence[Any],
    max_norm: float,
) -> _Steps:
    optimizer = make_optimizer(model.parameters())
    steps = _Steps([], [], [], [], [], {})
    for batch in batches:
        loss, terms = loss_of(model, batch)
        loss.backward()
        steps.losses.append(loss.item())
        steps.terms.append(terms.detach().double())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        steps.norms.append(float(norm))
        trained = {n: p for n, p in model.named_parameters() if p.grad is not None}
        gradients = {n: p.grad for n, p in trained.items() if p.grad is not None}
        steps.gradients.append({name: each.double() for name, each in gradients.items()})
        optimizer.step()
        steps.slopes.append({name: _slope(optimizer, each) for name, each in trained.items()})
        optimizer.zero_grad()
    steps.parameters.update({n: p.detach().double() for n, p in model.named_parameters()})
    return steps


def _slope(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """Return by how much a step moves each element for each unit of its gradient, at most.

    AdamW moves a weight by `lr * m / (sqrt(v) + eps)`: it divides the error of a gradient by the
    typical gradient of the same weight. Where that is about 0 the error alone decides, and `eps`
    bounds it: tests take 1e-6, and not the default of 1e-8. SGD repeats a step by its momentum.
    """
    (group,) = (
        group
        for group in optimizer.param_groups
        if any(each is parameter for each in group["params"])
    )
    state = optimizer.state[parameter]
    if "exp_avg_sq" not in state:
        rate = group["lr"] / (1 - group["momentum"])
        return torch.full_like(parameter, rate, dtype=torch.float64)
    second = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
    return (group["lr"] / (second.sqrt() + group["eps"])).double()
