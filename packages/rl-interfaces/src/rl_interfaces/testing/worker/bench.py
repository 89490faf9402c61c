"""What the rules about a worker work with: one rank's workers, its batches, the oracle."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_interfaces.config.resolve import merge_sections
from rl_interfaces.loss import LossType
from rl_interfaces.testing.expectations import expect, expect_close
from rl_interfaces.testing.report import NotApplicable
from rl_interfaces.testing.worker.oracle import (
    Columns,
    LogprobLoss,
    PlainRun,
    is_target,
    make_columns,
    parameters_of,
    plain_logprobs,
    plain_training,
    row_logits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rl_interfaces.testing.worker.case import Batch, MakeBatches, WorkerCase
    from rl_interfaces.testing.worker.kit import Ranks

NUM_CALLS = 3
"""Calls of `train` in the run that others are compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """What the worker gave in a run that nothing interrupted."""

    results: list[dict[str, Any]]
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """What a run left after its first call of `train`."""

    weights: str
    optimizer: str
    tokenizer: str
    logprobs: torch.Tensor
    """Of this rank's share of `scoring`."""


class WorkerBench:
    """One rank of a case. At most one worker lives at a time.

    Args:
        case: What the author gives.
        ranks: This rank and its group.
        directory: A directory that all ranks see, for what is saved.
    """

    def __init__(self, case: WorkerCase, *, ranks: Ranks, directory: Path) -> None:
        self.case, self.ranks, self._directory = case, ranks, directory
        self.tolerances = case.tolerances
        self.worker_class: Any = case.worker_class
        self.layout = self.worker_class.validate_config(case.config, world_size=ranks.world_size)
        inner = self.layout.context_parallel * self.layout.tensor_parallel
        self.data_rank: int = ranks.rank // inner % self.layout.data_parallel
        # A step of at least four rows, which the data-parallel ranks share evenly.
        self.global_batch_size: int = self.layout.data_parallel * -(-4 // self.layout.data_parallel)
        self._shared: Any = None
        self._fresh_lives = False
        self._num_paths = 0

    # Workers

    @cached_property
    def worker_type(self) -> type:
        """The workers' class, also where the case names what makes them."""
        made_by = self.worker_class
        return made_by if isinstance(made_by, type) else type(self.worker)

    def require(self, capability: type) -> None:
        """Raise `NotApplicable` where the worker lacks methods of an optional capability."""
        wanted = [name for name in dir(capability) if not name.startswith("_")]
        missing = [name for name in wanted if not hasattr(self.worker_type, name)]
        if missing:
            lack = f"{self.worker_type.__name__} lacks {', '.join(missing)}"
            raise NotApplicable(f"{lack} of rl_interfaces.{capability.__name__}")

    @property
    def worker(self) -> Any:
        """A worker with optimizer and reference, for rules that leave it as it is."""
        assert not self._fresh_lives, "one worker at a time"
        if self._shared is None:
            self._shared = self.worker_class(dict(self.case.config), self.case.tokenizer)
        return self._shared

    @contextmanager
    def fresh(self, settings: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Any]:
        """Give a worker that has just been built, alone; `options` are its constructor's."""
        assert not self._fresh_lives, "one worker at a time"
        self.close()
        config = merge_sections(self.case.config, settings or {})
        worker = self.worker_class(config, self.case.tokenizer, **options)
        self._fresh_lives = True
        try:
            yield worker
        finally:
            self._fresh_lives = False
            worker.shutdown()

    def close(self) -> None:
        """End the shared worker, if there is one."""
        worker, self._shared = self._shared, None
        if worker is not None:
            worker.shutdown()

    def path(self, name: str) -> str:
        """Return a path that is free, the same on every rank."""
        self._num_paths += 1
        return str(self._directory / f"{self._num_paths}-{name}")

    # Batches

    def columns(self, lengths: list[int], *, width: int | None = None, seed: int = 1) -> Columns:
        """Return a batch of rows of these lengths, see `make_columns`."""
        return make_columns(lengths, tokens=self.tokens, pad=self.pad, width=width, seed=seed)

    def on_every_rank(self, lengths: list[int]) -> list[int]:
        """Return `lengths`, repeated until each data-parallel rank has a row of a batch of them."""
        count = max(len(lengths), self.layout.data_parallel)
        return (lengths * -(-count // len(lengths)))[:count]

    def share(
        self,
        columns: Columns,
        *,
        batch_size: int | None = None,
        make_batches: MakeBatches | None = None,
    ) -> Batch:
        """Return this rank's rows."""
        make = make_batches or self.case.make_batches
        # The oracle's own stay as they are, whatever a backend writes into.
        copies = {name: column.clone() for name, column in columns.items()}
        shards = make(copies, shards=self.layout.data_parallel, batch_size=batch_size)
        return shards[self.data_rank]

    def train(self, worker: Any, columns: Columns | None = None, **options: Any) -> dict[str, Any]:
        """Call `train` with this rank's share of `columns`, or of `training`."""
        size = options.setdefault("gbs", self.global_batch_size)
        mine = self.share(self.training if columns is None else columns, batch_size=size)
        return worker.train(mine, options.pop("loss_fn", LogprobLoss()), **options)

    @cached_property
    def scoring(self) -> Columns:
        """Ragged rows, a number that two ranks do not share evenly."""
        return self.columns([11, 3, 7, 1, 5])

    @cached_property
    def training(self) -> Columns:
        """Rows of two optimizer steps, the last of which lacks one."""
        lengths = [12, 4, 9, 7, 3, 10, 6, 8]
        count = 2 * self.global_batch_size - 1
        return self.columns((lengths * -(-count // len(lengths)))[:count])

    @property
    def pad(self) -> int:
        """The id beyond a row's end."""
        return self.case.tokenizer.pad_token_id

    @cached_property
    def tokens(self) -> list[int]:
        """The ids that rows are made of."""
        special = {self.pad, getattr(self.case.tokenizer, "eos_token_id", None)}
        with torch.no_grad():
            some = 0 if self.pad else 1
            vocabulary = row_logits(self.oracle, torch.tensor([some]), temperature=1.0).shape[-1]
        return [token for token in range(vocabulary) if token not in special]

    # The oracle

    @cached_property
    def oracle(self) -> nn.Module:
        """The plain model that the worker starts from; rules leave it as it is."""
        return self.load_oracle(self.case.config["model_name"])

    def load_oracle(self, path: str) -> nn.Module:
        """Return the plain model that lies at `path`."""
        return self.case.load_oracle(path).eval()

    def expected_logprobs(self, columns: Columns, model: nn.Module | None = None) -> torch.Tensor:
        """Return what the oracle, or another plain model, gives `columns`."""
        return plain_logprobs(model or self.oracle, columns, temperature=self.case.temperature)

    @cached_property
    def expected_run(self) -> PlainRun:
        """What the plain loop gives in `NUM_CALLS` calls with `training`."""
        return self.plain_run(NUM_CALLS)

    @cached_property
    def expected_call(self) -> PlainRun:
        """What it gives in one call."""
        return self.plain_run(1)

    def plain_run(
        self,
        num_calls: int,
        *,
        loss_type: LossType = LossType.TOKEN_LEVEL,
        learning_rate: Callable[[int], float] | None = None,
    ) -> PlainRun:
        """Return what the plain loop gives in `num_calls` calls with `training`."""
        return plain_training(
            self.load_oracle(self.case.config["model_name"]),
            self.training,
            make_optimizer=self.case.make_optimizer,
            global_batch_size=self.global_batch_size,
            max_grad_norm=self.case.config.get("max_grad_norm"),
            num_calls=num_calls,
            temperature=self.case.temperature,
            loss_type=loss_type,
            learning_rate=learning_rate,
        )

    def expect_logprobs(
        self, found: torch.Tensor, expected: torch.Tensor, mine: Batch, what: str
    ) -> None:
        """Hold this rank's log-probabilities against those of all rows, where there are any."""
        places = is_target(mine)
        theirs = expected[mine["row_id"]][:, : places.shape[1]]
        expect_close(found[places], theirs[places], what, atol=self.tolerances.logprob)

    # What several rules look at

    @cached_property
    def trained(self) -> TrainedRun:
        """What `NUM_CALLS` calls of `train` gave, uninterrupted."""
        with self.fresh(init_reference_model=False) as worker:
            results = [self.train(worker) for _ in range(NUM_CALLS)]
            return TrainedRun(results=results, parameters=self.exported(worker))

    @cached_property
    def saved(self) -> SavedRun:
        """What a worker saved after one call of `train`."""
        paths = {part: self.path(part) for part in ("weights", "optimizer", "tokenizer")}
        with self.fresh(init_reference_model=False) as worker:
            self.train(worker)
            worker.save_checkpoint(paths["weights"], paths["optimizer"], paths["tokenizer"])
            logprobs = worker.get_logprobs(self.share(self.scoring))["logprobs"]
        expect(logprobs.isfinite().all(), "log-probabilities are finite")
        return SavedRun(**paths, logprobs=logprobs.clone())

    def exported(self, worker: Any) -> dict[str, torch.Tensor]:
        """Return the worker's parameters, by way of `save_hf_checkpoint`."""
        path = self.path("exported")
        worker.save_hf_checkpoint(path)
        return parameters_of(self.load_oracle(path))
