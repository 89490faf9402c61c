"""The loss of a value model on returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from rl_interfaces import LossInput, LossType

from rl_policy.losses.reduction import (
    masked_difference,
    require_keys,
    share_of,
    target_column,
    target_mask,
    with_samples,
)


@dataclass(kw_only=True, slots=True)
class ValueLoss:
    """The clipped value loss of PPO, as the code of Schulman et al. 2017 (baselines, ppo2) has it.

    With the value `v` of the state in which a target token is sampled, its return `R`, and the
    value `o` before the update, a token costs

        max((v - R) ** 2, (clip(v, o - clip, o + clip) - R) ** 2) / 2

    so that a value has no gradient once it has moved by more than `clip` towards its return.

    The batch holds `token_mask` and `returns` `[batch, seq]`, `sample_mask` `[batch]`, and
    `prev_values` `[batch, seq]` if `clip` is set; column `t` of these is of token `t`. The policy
    has `head: value`, whose values `[batch, seq]` float32 are what the loss is called with: column
    `t` is the value after token `t`, and so of the state in which token `t + 1` is sampled.

    Example, one target token, `clip = 0.2`, R = 1, o = 0:
        v = 0.1: max(0.81, 0.81) / 2 = 0.405, gradient -0.9
        v = 0.5: max(0.25, 0.64) / 2 = 0.32, clipped: no gradient

    Attributes:
        clip: Most that a value moves in an update, above 0, in units of reward. None: any.
    """

    clip: float | None = 0.2
    loss_type: LossType = field(default=LossType.TOKEN_LEVEL, init=False)
    input_type: ClassVar[LossInput] = LossInput.LOGITS
    uses_sampling_temperature: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raise `ValueError`, naming the argument, if a value is out of its range."""
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip={self.clip} must be positive")

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the micro-batch's share of the loss, and its metrics.

        Returns:
            The 0-d loss per token, and 0-d tensors that add up over micro-batches to means over
            tokens: `value_mean`, `value_clip_fraction` (fraction of tokens whose clipped cost is
            the greater), and the count `num_valid_samples`.

        Raises:
            ValueError: The batch lacks a column, or the policy has no values.
        """
        name = type(self).__name__
        reasons = {
            "token_mask": "the target tokens",
            "sample_mask": "the valid samples",
            "returns": "the return of each token",
        }
        if self.clip is not None:
            reasons["prev_values"] = f"read as clip={self.clip}"
        require_keys(data, reasons, loss=name)
        if next_token_logits.shape != data["token_mask"].shape:
            raise ValueError(
                f"{name} needs a value for each token, {tuple(data['token_mask'].shape)}, and got "
                f"{tuple(next_token_logits.shape)}: set policy.head='value'"
            )
        mask = target_mask(data)
        values = torch.where(mask > 0, next_token_logits[:, :-1], 0.0)
        returns = target_column(data, "returns", values)
        # Masked first: beyond the targets a return may be anything, and so would be the gradient.
        cost = masked_difference(values, returns, mask) ** 2
        is_clipped = torch.zeros_like(cost)
        if self.clip is not None:
            before = target_column(data, "prev_values", values)
            bounded = before + (values - before).clamp(-self.clip, self.clip)
            bounded_cost = masked_difference(bounded, returns, mask) ** 2
            is_above = bounded_cost > cost
            # Where both are equal the gradient is that of the free value: see `ClippedPGLoss`.
            cost, is_clipped = torch.where(is_above, bounded_cost, cost), is_above.float()
        measured = {"value_mean": values, "value_clip_fraction": is_clipped}
        shares = {
            key: share_of(each.detach(), mask, global_valid_toks) for key, each in measured.items()
        }
        return share_of(cost / 2, mask, global_valid_toks), with_samples(shares, data)
