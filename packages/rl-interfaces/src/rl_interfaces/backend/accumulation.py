"""Gradients of several `forward_backward` calls, and the count that divides their sum.

A loss is a sum over rows divided by a count of the global batch, which `train` knows before its
first backward pass. `forward_backward` knows the count `n_i` of its own rows alone, so the division
by the total count follows in `optimizer_step`. With `S_i` the sum over the rows of call `i`:

    call i           accumulates the gradient of (n_i / u) * (S_i / n_i) = S_i / u
    optimizer_step   divides by (sum of n_i) / u, which leaves (sum of S_i) / (sum of n_i)

The unit `u` is the count of the first call. Gradients then have the magnitude of those of `train`,
which float16 needs, and a single call with its step is bit for bit a `train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_interfaces.loss import LossType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_interfaces.backend.steps import LossCounts
    from rl_interfaces.loss import LossFunction

_RELATIVE = 1e-3
# Below it the sum of a loss whose terms cancel is rounding error.
_ABSOLUTE = 1e-5


class PendingGradients:
    """The counts behind the gradients since the last optimizer step.

    Example, calls with 3 and 1 valid tokens under a token-level loss:
        add(3 tokens) -> 1.0, add(1 token) -> 1/3, divisor = 4/3
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all calls."""
        self.num_calls = 0
        self._num_valid_seqs = 0.0
        self._num_valid_toks = 0.0
        self._loss_type: LossType | None = None
        self._unit = 1.0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is valid in all calls together."""
        return self._num_valid_seqs == 0 or self._num_valid_toks == 0

    @property
    def num_valid(self) -> tuple[float, float]:
        """Valid samples and tokens of all calls."""
        return self._num_valid_seqs, self._num_valid_toks

    @property
    def divisor(self) -> float:
        """What the accumulated gradients are divided by."""
        is_per_token = self._loss_type is LossType.TOKEN_LEVEL
        count = self._num_valid_toks if is_per_token else self._num_valid_seqs
        return (count or 1.0) / self._unit

    @property
    def sum_divisor(self) -> float:
        """What they are divided by instead, for the gradient of the sums `S_i` themselves."""
        return 1.0 / self._unit

    def check(self, loss_fn: LossFunction) -> None:
        """Raise if a loss cannot be added to those of the pending calls.

        Raises:
            ValueError: It has another `loss_type`: their sum has no count that divides it.
        """
        if self._loss_type not in (None, loss_fn.loss_type):
            raise ValueError(
                f"{type(loss_fn).__name__} has loss_type={loss_fn.loss_type.name}, and the pending "
                f"gradients are of {self._loss_type.name} losses: call optimizer_step() or "
                "zero_grad() first"
            )

    def add(self, counts: LossCounts, loss_fn: LossFunction) -> float:
        """Count a call, and return the weight of its loss.

        Args:
            counts: Of the call's rows on all data-parallel ranks.
            loss_fn: A loss that `check` accepts.
        """
        seqs, toks = counts.num_valid_seqs or 1.0, counts.num_valid_toks or 1.0
        count = toks if loss_fn.loss_type is LossType.TOKEN_LEVEL else seqs
        if not self.num_calls:
            self._loss_type, self._unit = loss_fn.loss_type, count
        self.num_calls += 1
        self._num_valid_seqs += counts.num_valid_seqs
        self._num_valid_toks += counts.num_valid_toks
        return count / self._unit


class CountProbe:
    """Detects a loss that is not a sum divided by the count of its `loss_type`.

    Only such a loss can be divided by the total count later. The loss is called once more, with
    twice the count of its type and three times the other one: its value must be half.

    Args:
        loss_fn: The loss.
        counts: The counts that it is called with.
    """

    def __init__(self, loss_fn: LossFunction, counts: LossCounts) -> None:
        self._loss_fn = loss_fn
        self._is_tried = False
        is_per_token = loss_fn.loss_type is LossType.TOKEN_LEVEL
        seqs, toks = counts.divisors
        self._counts = (3 * seqs, 2 * toks) if is_per_token else (2 * seqs, 3 * toks)

    @torch.no_grad()
    def half(self, inputs: torch.Tensor, rows: Mapping[str, object]) -> torch.Tensor | None:
        """Return the value under the other counts, at the first call only."""
        if self._is_tried:
            return None
        self._is_tried = True
        return self._loss_fn(inputs, rows, *self._counts)[0].detach().float()

    def differs(self, half: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return 1 if `half` is not half of `value`, else 0, as a 0-d float32 tensor.

        A value that is not finite differs from nothing.
        """
        value = value.detach().float()
        limit = _RELATIVE * value.abs() + _ABSOLUTE
        return ((2 * half - value).abs() > limit).float()

    @property
    def refusal(self) -> str:
        """Why the loss is refused."""
        name = type(self._loss_fn).__name__
        kind = self._loss_fn.loss_type
        count = "global_valid_toks" if kind is LossType.TOKEN_LEVEL else "global_valid_seqs"
        return (
            f"{name} has loss_type={kind.name}, and its value is not a sum divided by {count} "
            "alone: forward_backward cannot normalise it, as it does not know the counts of the "
            "calls that follow. Use train, or a loss per kind of count"
        )
