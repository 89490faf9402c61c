"""The losses of the tinker client: sums over the target tokens of each datum, without a mean.

The definitions are those of its documentation (`tinker-docs`, "Loss functions"). With `p` the
model's log-probability of a target, `q` the one that it was sampled with, `A` its advantage and
`r = exp(p - q)`:

    cross_entropy        -weights * p
    importance_sampling  -r * A
    ppo                  -min(r * A, clip(r, low, high) * A)
    cispo                -stop_gradient(clip(r, low, high)) * A * p
    dro                  -(p * A - beta / 2 * (p - q)^2)
    gspo                 as ppo, with r the same for all tokens of a sequence in value (the
                         exponential of the mean of p - q over `sequence_ratio_mask`), and each
                         token's own in its gradient (Zheng et al. 2025, GSPO-token)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces import LossInput, LossType

from rl_policy.tinker.requests import RequestError
from rl_policy.tinker.wire import Datum

TARGETS = "target_tokens"
_RL_INPUTS = ("logprobs", "advantages")
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossKind:
    """What a loss reads."""

    inputs: tuple[str, ...]
    """Keys of `loss_fn_inputs` beside the targets, float32."""
    settings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Keys of `loss_fn_config`, and their defaults."""


KINDS = {
    "cross_entropy": LossKind(inputs=("weights",)),
    "importance_sampling": LossKind(inputs=_RL_INPUTS),
    "ppo": LossKind(inputs=_RL_INPUTS, settings={_LOW: 0.8, _HIGH: 1.2}),
    "cispo": LossKind(inputs=_RL_INPUTS, settings={_LOW: 0.0, _HIGH: 4.0}),
    "dro": LossKind(inputs=_RL_INPUTS, settings={"beta": 0.05}),
    # The clip range of the paper.
    "gspo": LossKind(
        inputs=(*_RL_INPUTS, "sequence_ratio_mask"),
        settings={_LOW: 1 - 3e-4, _HIGH: 1 + 4e-4},
    ),
}
"""The losses, by name."""


@dataclass(kw_only=True, slots=True)
class TinkerLoss:
    """A loss of the table above, over the rows of `make_batch`.

    The value is the sum over rows and tokens, divided by the number of rows as a policy's losses
    are; `AdapterSets.step` multiplies by it again. The rows' `logprobs` `[batch, seq]` and `loss`
    `[batch]` come back, the latter not divided.
    """

    name: str
    settings: Mapping[str, float]
    input_type: LossInput
    """`LOGPROBS` if every target is the next token of its row. `LOGITS` otherwise, which need
    memory for the whole vocabulary."""
    loss_type: LossType = field(default=LossType.SEQUENCE_LEVEL, init=False)
    returns_rows: ClassVar[bool] = True

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the micro-batch's share of the loss, its count, and the rows' own values."""
        logprobs = next_token_logits[:, 1:]
        if self.input_type is LossInput.LOGITS:
            logprobs = next_token_logits[:, :-1].float().log_softmax(dim=-1)
            logprobs = logprobs.gather(-1, data["targets"][:, 1:, None]).squeeze(-1)
        is_target = data["is_target"][:, 1:] > 0
        columns = {key: data[key][:, 1:] for key in KINDS[self.name].inputs}
        costs = torch.where(is_target, self._costs(logprobs, columns), 0.0)
        losses = costs.sum(dim=1) * data["sample_mask"]
        shown = torch.where(is_target, logprobs, 0.0).detach()
        rows = {"logprobs": torch.nn.functional.pad(shown, (1, 0)), "loss": losses.detach()}
        count = {"num_valid_samples": data["sample_mask"].sum().long()}
        return losses.sum() / global_valid_seqs, count, rows

    def _costs(self, logprobs: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.name == "cross_entropy":
            return -logprobs * columns["weights"]
        advantages = columns["advantages"]
        difference = logprobs - columns["logprobs"]
        if self.name == "dro":
            return -(logprobs * advantages - 0.5 * self.settings["beta"] * difference.square())
        # Where nothing is to be learned no ratio may overflow: infinity times 0 is NaN.
        is_learned = advantages != 0
        if self.name == "gspo":
            log_ratio = self._sequence_log_ratio(logprobs, difference, columns)
            return self._clipped(torch.where(is_learned, log_ratio, 0.0), advantages)
        log_ratio = torch.where(is_learned, difference, 0.0)
        if self.name == "importance_sampling":
            return -log_ratio.exp() * advantages
        if self.name == "ppo":
            return self._clipped(log_ratio, advantages)
        weight = self._clip(log_ratio.detach().exp())
        return -weight * advantages * torch.where(is_learned, logprobs, 0.0)

    def _clipped(self, log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        ratio = log_ratio.detach().exp()
        bounded = self._clip(ratio) * advantages
        # A clipped token has no gradient, whatever its ratio is.
        is_clipped = bounded < ratio * advantages
        free = torch.where(is_clipped, 0.0, log_ratio).exp() * advantages
        return -torch.where(is_clipped, bounded, free)

    def _clip(self, ratio: torch.Tensor) -> torch.Tensor:
        return ratio.clamp(self.settings[_LOW], self.settings[_HIGH])

    def _sequence_log_ratio(
        self, logprobs: torch.Tensor, difference: torch.Tensor, columns: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        mask = (columns["sequence_ratio_mask"] != 0).float()
        total = (torch.where(mask > 0, difference.detach(), 0.0)).sum(dim=1, keepdim=True)
        mean = total / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return mean + torch.nan_to_num(logprobs - logprobs.detach())


def make_loss(
    name: str, config: Mapping[str, float | str], data: Sequence[Datum]
) -> tuple[TinkerLoss, BatchedDataDict]:
    """Return a loss and its rows, checked.

    A row is the input and the last target behind it; column `t + 1` is about the target of
    input token `t`, and column 0 about none:

        tokens [5, 6, 7], targets [6, 7, 8]  ->  input_ids [5, 6, 7, 8], targets [0, 6, 7, 8]

    Raises:
        RequestError: Names the loss, the datum, the key and the numbers.
    """
    kind = KINDS.get(name)
    if kind is None:
        raise RequestError(f"loss_fn={name!r} is not supported: this server has {sorted(KINDS)}")
    settings = _settings(name, kind, config)
    for index, datum in enumerate(data):
        _check_datum(datum, kind, loss=name, where=f"data[{index}]")
    width = 1 + max(len(datum.tokens) for datum in data)
    columns = {
        "input_ids": np.zeros((len(data), width), dtype=np.int64),
        "targets": np.zeros((len(data), width), dtype=np.int64),
        "is_target": np.zeros((len(data), width), dtype=np.float32),
        **{key: np.zeros((len(data), width), dtype=np.float32) for key in kind.inputs},
    }
    is_next = True
    for row, datum in enumerate(data):
        length, targets = len(datum.tokens), datum.inputs[TARGETS]
        columns["input_ids"][row, :length] = datum.tokens
        columns["input_ids"][row, length] = targets[-1]
        columns["targets"][row, 1 : length + 1] = targets
        columns["is_target"][row, 1 : length + 1] = 1.0
        for key in kind.inputs:
            columns[key][row, 1 : length + 1] = datum.inputs[key]
        is_next &= bool((datum.tokens[1:] == targets[:-1]).all())
    batch = BatchedDataDict({key: torch.from_numpy(each) for key, each in columns.items()})
    batch["input_lengths"] = torch.tensor([len(datum.tokens) + 1 for datum in data])
    batch["sample_mask"] = torch.ones(len(data))
    input_type = LossInput.LOGPROBS if is_next else LossInput.LOGITS
    return TinkerLoss(name=name, settings=settings, input_type=input_type), batch


def _settings(name: str, kind: LossKind, config: Mapping[str, float | str]) -> dict[str, float]:
    settings = dict(kind.settings)
    for key, value in config.items():
        if key not in settings:
            raise RequestError(
                f"loss_fn_config[{key!r}]={value!r}: {name!r} takes {sorted(settings)}"
            )
        if isinstance(value, str) or not np.isfinite(value) or value < 0:
            raise RequestError(f"loss_fn_config[{key!r}]={value!r} must be a number of at least 0")
        settings[key] = float(value)
    if _LOW in settings and settings[_LOW] > settings[_HIGH]:
        raise RequestError(
            f"loss_fn_config: {_LOW}={settings[_LOW]:g} is above {_HIGH}={settings[_HIGH]:g}"
        )
    return settings


def _check_datum(datum: Datum, kind: LossKind, *, loss: str, where: str) -> None:
    wanted = {TARGETS, *kind.inputs}
    if datum.inputs.keys() != wanted:
        missing, unknown = (
            sorted(wanted - datum.inputs.keys()),
            sorted(datum.inputs.keys() - wanted),
        )
        raise RequestError(
            f"{where}.loss_fn_inputs: {loss!r} takes {sorted(wanted)}; "
            f"missing {missing}, not known {unknown}"
        )
    if datum.inputs[TARGETS].dtype.kind != "i":
        raise RequestError(f"{where}.loss_fn_inputs[{TARGETS!r}] must be of integers")
    for key in kind.inputs:
        values = datum.inputs[key]
        if values.dtype.kind != "f":
            raise RequestError(f"{where}.loss_fn_inputs[{key!r}] must be float32")
        if not np.isfinite(values).all():
            place = int(np.argmin(np.isfinite(values)))
            raise RequestError(
                f"{where}.loss_fn_inputs[{key!r}][{place}]={values[place]} is not finite"
            )
