"""What a backend's author gives, for the kit to check the backend's worker with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from rl_interfaces.testing.worker.oracle import Columns, MakeOptimizer

Batch = MutableMapping[str, Any]
"""What the worker takes as a batch: a `BatchedDataDict`, or a backend's own."""


Receive = Callable[[int], Mapping[str, torch.Tensor]]


class MakeBatches(Protocol):
    """Gives each data-parallel rank its share of a batch."""

    def __call__(self, columns: Columns, *, shards: int, batch_size: int | None) -> Sequence[Batch]:
        """Return one batch per shard, with every column and the rows in any order.

        Args:
            columns: `input_ids` `[batch, seq]` and what else there is, one entry per row.
            shards: Data-parallel ranks.
            batch_size: Samples of an optimizer step over all ranks. None: the batch is one.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerances:
    """How far a backend may be from the oracle, both in float32 on a model of a few layers."""

    logprob: float = 1e-5
    """Absolute. Attention over rows of unlike width sums in another order."""
    loss: float = 5e-6
    """Relative, of losses and gradient norms: sums of thousands of terms, taken in another order;
    float32 has steps of 1e-7."""
    parameter: float = 1e-5
    """Absolute. AdamW divides by the root of a square, which amplifies the order of sums; an
    epsilon of 1e-6 bounds it."""
    repeat: float = 0.0
    """Absolute, of what is done twice with the same numbers: nothing may differ on a CPU. Kernels
    with atomic additions need more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Another way to put micro-batches together, which must give the same numbers."""

    settings: Mapping[str, Any]
    """What the config says in this way; sections are merged into the case's."""
    make_batches: MakeBatches
    """The batches of this way, with their plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardCase:
    """A model that gives each row a score."""

    settings: Mapping[str, Any]
    """What the config says for it; sections are merged into the case's."""
    score: Callable[[torch.Tensor], torch.Tensor]
    """The oracle: the score, 0-d, of one row's tokens, `[seq]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterCase:
    """Training of low-rank adapters beside a model that stays as it is."""

    settings: Mapping[str, Any]
    """What the config says for it; sections are merged into the case's. What is drawn by chance is
    drawn alike on every rank."""
    load: Callable[[str], nn.Module]
    """Gives the plain model with the adapters that `save_adapters` wrote to a path, of the kind
    that `WorkerCase.load_oracle` gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleCase:
    """Training under a learning rate that changes from one call of `train` to the next."""

    settings: Mapping[str, Any]
    """What the config says for it; sections are merged into the case's."""
    learning_rate: Callable[[int], float]
    """The oracle: the rate of every step of a call, which are counted from 0."""


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCase:
    """A worker class, a config in float32 and the plain model that it is held against.

    The config itself has no schedule of learning rates and no adapters, and one model of a few
    layers, so that the checks take seconds. Where several ranks are spawned, they need a case that
    can be pickled.
    """

    worker_class: Callable[..., Any]
    """A `PolicyWorker`'s class, or what is called as one and has its `validate_config`."""
    config: Mapping[str, Any]
    """A `PolicyConfig`; its `generation` section, where there is one, truncates nothing."""
    tokenizer: Any
    """With a `pad_token_id`, and an `eos_token_id` where the worker generates."""
    make_batches: MakeBatches
    """See `MakeBatches`."""
    load_oracle: Callable[[str], nn.Module]
    """Gives the plain model that lies at a path, `model_name` or what `save_hf_checkpoint` wrote:
    it takes `[batch, seq]` tokens and gives `[batch, seq, vocab]` logits, or has them as
    `.logits`."""
    make_optimizer: MakeOptimizer = _adamw
    """The oracle's optimizer: what the config asks of the worker's."""
    ways: Mapping[str, Way] = field(default_factory=dict[str, Way])
    """Ways of batching besides the case's own: packing, dynamic batching."""
    open_receiver: Callable[[Any], AbstractContextManager[Receive]] | None = None
    """Called on every rank with the worker: opens its sender and this rank's receiver, and gives
    the function that sends a version and returns what the receiver has got, empty where this rank
    has no receiver."""
    reward: RewardCase | None = None
    """For a worker that has `score`."""
    adapters: AdapterCase | None = None
    """For a worker that has `save_adapters`."""
    schedule: ScheduleCase | None = None
    """For a worker whose config knows schedules of learning rates."""
    tolerances: Tolerances = field(default_factory=Tolerances)
    """How near is near enough."""
    timeout_s: float = 120.0
    """Most seconds that one collective of the kit's own waits for another rank."""

    @property
    def temperature(self) -> float:
        """What divides the logits."""
        return float((self.config.get("generation") or {}).get("temperature") or 1.0)
