"""The input of the worker kit: a worker class, a config and a reference model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from rl_interfaces.testing.worker.oracle import Batch, Columns, MakeOptimizer

Worker: TypeAlias = Any
"""A worker under test. No protocol: it may lack optional calls and take batches of another type."""
Receive = Callable[[int], Mapping[str, torch.Tensor]]
"""Sends a version and returns what this rank's receiver has loaded; empty without a receiver."""


class MakeBatches(Protocol):
    """Shards a batch over the data-parallel ranks."""

    def __call__(self, columns: Columns, *, shards: int, batch_size: int | None) -> Sequence[Batch]:
        """Return one batch per shard, with all columns and the rows in any order.

        Args:
            columns: `input_ids` `[batch, seq]` and further columns, one entry per row.
            shards: The number of data-parallel ranks.
            batch_size: Samples of an optimizer step over all ranks. None: all rows.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerances:
    """The largest accepted errors, in float32 on a model of a few layers."""

    logprob: float = 1e-5
    """Absolute. Attention over another row width sums in another order."""
    loss: float = 5e-6
    """Relative, of losses and gradient norms: sums of thousands of terms in another order, at a
    float32 resolution of 1e-7."""
    parameter: float = 1e-5
    """Absolute. AdamW divides by the root of the second moment, which amplifies rounding; an
    epsilon of 1e-6 bounds it."""
    repeat: float = 0.0
    """Absolute, of a computation that is repeated: exact on a CPU. Kernels with atomic additions
    need more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Another way of forming micro-batches, which must give the same results."""

    settings: Mapping[str, object]
    """Config keys of this way, merged into the case's config."""
    make_batches: MakeBatches
    """Makes the batches, with their micro-batch plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardCase:
    """A reward model."""

    settings: Mapping[str, object]
    """Its config keys, merged into the case's config."""
    score: Callable[[torch.Tensor], torch.Tensor]
    """The reference: maps one row's tokens, `[seq]`, to its score, 0-d."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterCase:
    """Training of low-rank adapters on a frozen model."""

    settings: Mapping[str, object]
    """Its config keys, merged into the case's config. Random initial values must be the same on
    every rank."""
    load: Callable[[str], nn.Module]
    """Returns a model like that of `WorkerCase.load_oracle`, with the adapters that `save_adapters`
    wrote to a path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleCase:
    """A learning-rate schedule."""

    settings: Mapping[str, object]
    """Its config keys, merged into the case's config."""
    learning_rate: Callable[[int], float]
    """The reference: maps the index of a `train` call, from 0, to the rate of its steps."""


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCase:
    """A worker class, a float32 config and the reference model to compare the worker with.

    The config has a model of a few layers, so that the checks take seconds, and neither a schedule
    nor adapters. If ranks are spawned, the case must be picklable.
    """

    worker_class: Callable[..., Worker]
    """A `PolicyWorker` class, or a callable with its constructor's signature and its
    `validate_config`."""
    config: Mapping[str, Any]
    """A `PolicyConfig`. Its `generation` section, if any, sets neither `top_k` nor `top_p`."""
    tokenizer: Any
    """Has a `pad_token_id`, and an `eos_token_id` if the worker generates."""
    make_batches: MakeBatches
    """See `MakeBatches`."""
    load_oracle: Callable[[str], nn.Module]
    """Loads the reference model of a path, `model_name` or an export of `save_hf_checkpoint`. It
    maps tokens `[batch, seq]` to logits `[batch, seq, vocab]`, or to an object with `.logits`."""
    make_optimizer: MakeOptimizer = _adamw
    """Builds the reference optimizer, equal to that of the config."""
    ways: Mapping[str, Way] = field(default_factory=dict[str, Way])
    """Further ways of forming micro-batches: packing, dynamic batching."""
    open_receiver: Callable[[Worker], AbstractContextManager[Receive]] | None = None
    """Called on every rank: opens the worker's sender and this rank's receiver, such as
    `rl_refit.testing.receiver_in_thread`."""
    reward: RewardCase | None = None
    """For a worker with `score`."""
    adapters: AdapterCase | None = None
    """For a worker with `save_adapters`."""
    schedule: ScheduleCase | None = None
    """For a worker with learning-rate schedules."""
    tolerances: Tolerances = field(default_factory=Tolerances)
    """The largest accepted errors."""
    timeout_s: float = 600.0
    """Limit of each collective of the kit, in seconds."""

    @property
    def temperature(self) -> float:
        """Divides the logits."""
        return float((self.config.get("generation") or {}).get("temperature") or 1.0)
