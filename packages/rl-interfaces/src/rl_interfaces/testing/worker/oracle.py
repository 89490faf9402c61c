"""Batches and losses of the kit, and reference results: a plain model, row by row, unpadded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rl_interfaces.loss import LossInput, LossType
from rl_interfaces.testing.expectations import expect

if TYPE_CHECKING:
    from collections.abc import Sequence

Columns = dict[str, torch.Tensor]
"""`input_ids`, `input_lengths`, `token_mask`, `sample_mask` and `row_id` of all rows."""
Batch = MutableMapping[str, Any]
"""A batch as the worker takes it: a `BatchedDataDict`, or a backend's own type."""
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(kw_only=True, slots=True)
class PlainRun:
    """The results of the reference training loop."""

    losses: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    grad_norms: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    parameters: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


def row_logits(model: nn.Module, tokens: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Return `[seq, vocab]` of one row's `tokens`, `[seq]`."""
    output = model(tokens[None])
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits[0] / temperature


def row_logprobs(model: nn.Module, tokens: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Return the log-probability of each token but the first, `[seq - 1]`."""
    logits = row_logits(model, tokens, temperature=temperature)[:-1]
    return logits.log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1)


@torch.no_grad()
def plain_logprobs(model: nn.Module, columns: Columns, *, temperature: float) -> torch.Tensor:
    """Return the log-probability of each token, `[batch, seq]`; position 0 and padding are 0."""
    out = torch.zeros(columns["input_ids"].shape)
    for row, length in enumerate(columns["input_lengths"].tolist()):
        tokens = columns["input_ids"][row, :length]
        out[row, 1:length] = row_logprobs(model, tokens, temperature=temperature)
    return out


def plain_loss(
    model: nn.Module,
    columns: Columns,
    *,
    temperature: float,
    loss_type: LossType = LossType.TOKEN_LEVEL,
) -> torch.Tensor:
    """Return the negative log-probability of the target tokens, per token or per sequence."""
    masks = columns["token_mask"] * columns["sample_mask"][:, None]
    total = torch.zeros(())
    for row, length in enumerate(columns["input_lengths"].tolist()):
        tokens = columns["input_ids"][row, :length]
        chosen = row_logprobs(model, tokens, temperature=temperature)
        total = total - (chosen * masks[row, 1:length]).sum()
    per_token = loss_type is LossType.TOKEN_LEVEL
    return total / (masks[:, 1:] if per_token else columns["sample_mask"]).sum()


def plain_training(
    model: nn.Module,
    columns: Columns,
    *,
    make_optimizer: MakeOptimizer,
    global_batch_size: int,
    max_grad_norm: float | None,
    num_calls: int,
    temperature: float,
    loss_type: LossType = LossType.TOKEN_LEVEL,
    learning_rate: Callable[[int], float] | None = None,
) -> PlainRun:
    """Train `model` on full global batches; return each step's loss and norm before clipping.

    `learning_rate` maps the index of a `train` call to its rate; None: the optimizer's.
    """
    parameters = list(model.parameters())
    optimizer, run = make_optimizer(parameters), PlainRun()
    for call in range(num_calls):
        if learning_rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(call)
        for start in range(0, len(columns["input_ids"]), global_batch_size):
            rows = {name: each[start : start + global_batch_size] for name, each in columns.items()}
            loss = plain_loss(model, rows, temperature=temperature, loss_type=loss_type)
            optimizer.zero_grad()
            loss.backward()
            limit = float("inf") if max_grad_norm is None else max_grad_norm
            run.grad_norms.append(nn.utils.clip_grad_norm_(parameters, limit))
            optimizer.step()
            run.losses.append(loss.detach())
    run.parameters = parameters_of(model)
    return run


@torch.no_grad()
def plain_greedy(
    model: nn.Module, prompt: torch.Tensor, *, max_new_tokens: int, stop: set[int]
) -> list[int]:
    """Return the most likely tokens after `prompt`, `[seq]`, including the one that ends it."""
    tokens = prompt
    for _ in range(max_new_tokens):
        following = row_logits(model, tokens, temperature=1.0)[-1].argmax()
        tokens = torch.cat([tokens, following[None]])
        if int(following) in stop:
            break
    return tokens[len(prompt) :].tolist()


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every parameter."""
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def is_target(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return which positions have a log-probability, `[batch, seq]` bool."""
    positions = torch.arange(columns["input_ids"].shape[1])
    return (positions >= 1) & (positions < columns["input_lengths"][:, None])


_NUM_PROMPT_TOKENS = 2
"""Leading tokens of each row that are not targets."""


def make_columns(
    lengths: Sequence[int], *, tokens: Sequence[int], pad: int, width: int | None = None, seed: int
) -> Columns:
    """Return right-padded rows of random tokens.

    The first tokens of each row are masked as targets, and every fourth row as a sample.

    Args:
        lengths: Tokens of each row.
        tokens: The ids to draw from.
        pad: The padding token.
        width: Columns; None: the length of the longest row.
        seed: Seed of the random tokens.
    """
    sizes = torch.tensor(lengths)
    positions = torch.arange(width or int(sizes.max()))
    generator = torch.Generator().manual_seed(seed)
    shape = (len(sizes), len(positions))
    drawn = torch.tensor(tokens)[torch.randint(len(tokens), shape, generator=generator)]
    inside = positions < sizes[:, None]
    row_id = torch.arange(len(sizes))
    return {
        "input_ids": torch.where(inside, drawn, torch.tensor(pad)),
        "input_lengths": sizes,
        "token_mask": (inside & (positions >= _NUM_PROMPT_TOKENS)).float(),
        "sample_mask": (row_id % 4 != 1).float(),
        "row_id": row_id,
    }


class LogprobLoss:
    """The mean negative log-probability of the target tokens."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.LOGPROBS

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the micro-batch's share of the loss, see `LossFunction`."""
        per_token = self.loss_type is LossType.TOKEN_LEVEL
        count = global_valid_toks if per_token else global_valid_seqs
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = -(self.logprobs(next_token_logits, data) * mask).sum() / count
        return loss, {"num_valid_samples": int(data["sample_mask"].sum())}

    def logprobs(self, scores: torch.Tensor, data: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-probability of each token but the first, `[batch, seq - 1]`."""
        return scores[:, 1:]


class SupervisedLoss(LogprobLoss):
    """The loss of `LogprobLoss` for tokens that were not sampled."""

    uses_sampling_temperature = False


class SequenceLoss(LogprobLoss):
    """The negative log-probability of the target tokens, summed per sequence; their mean."""

    loss_type = LossType.SEQUENCE_LEVEL


class LogitLoss(LogprobLoss):
    """The loss of `LogprobLoss`, computed from logits."""

    input_type = LossInput.LOGITS

    def logprobs(self, scores: torch.Tensor, data: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `LogprobLoss.logprobs`."""
        logprobs = scores[:, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)


class ShardedLogitLoss(LogitLoss):
    """The loss of `LogprobLoss`, computed from logits that may be sharded along the vocabulary.

    Args:
        num_shards: The tensor-parallel ranks.
    """

    accepts_sharded_logits = True

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards

    def logprobs(self, scores: torch.Tensor, data: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `LogprobLoss.logprobs`."""
        if isinstance(scores, DTensor):
            size, (placement,) = scores.device_mesh.size(), scores.placements
            expect(placement.is_shard(dim=2), f"the logits are a DTensor with {placement}")
            expect(size == self._num_shards, f"the logits are sharded over {size} ranks")
            scores = scores.full_tensor()
        return super().logprobs(scores, data)


class InfiniteLoss(LogprobLoss):
    """A loss with non-finite gradients."""

    def logprobs(self, scores: torch.Tensor, data: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return log-probabilities that are not finite."""
        return super().logprobs(scores, data) * float("inf")
