"""The fixture of the worker rules: one rank's workers, batches and reference results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_interfaces.config.resolve import merge_sections
from rl_interfaces.loss import LossFunction, LossType
from rl_interfaces.testing.expectations import expect, expect_close
from rl_interfaces.testing.report import NotApplicable
from rl_interfaces.testing.worker.oracle import (
    Batch,
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
    from collections.abc import Callable, Iterator

    from rl_interfaces.testing.worker.case import MakeBatches, Worker, WorkerCase
    from rl_interfaces.testing.worker.kit import Ranks

TrainResult = Mapping[str, Any]
"""What `train` of a worker returns."""
NUM_CALLS = 3
"""Calls of `train` in the reference run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """The results of an uninterrupted run of the worker."""

    results: list[TrainResult]
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """The paths of a save after the first call of `train`."""

    weights: str
    optimizer: str
    tokenizer: str
    logprobs: torch.Tensor
    """Of this rank's rows of `scoring`."""


class WorkerBench:
    """One rank of a case. At most one worker exists at a time.

    Args:
        case: The worker and its reference model.
        ranks: This rank and its group.
        directory: A directory shared by all ranks, for saves.
    """

    def __init__(self, case: WorkerCase, *, ranks: Ranks, directory: Path) -> None:
        self.case, self.ranks, self._directory = case, ranks, directory
        self.tolerances = case.tolerances
        self.worker_class: Worker = case.worker_class
        self.layout = self.worker_class.validate_config(case.config, world_size=ranks.world_size)
        inner = self.layout.context_parallel * self.layout.tensor_parallel
        self.data_rank: int = ranks.rank // inner % self.layout.data_parallel
        # At least four rows, divisible by the data-parallel ranks.
        self.global_batch_size: int = self.layout.data_parallel * -(-4 // self.layout.data_parallel)
        self._shared: Worker = None
        self._fresh_lives = False
        self._num_paths = 0

    # Workers

    @cached_property
    def worker_type(self) -> type:
        """The workers' class, also if the case has a factory function."""
        made_by = self.worker_class
        return made_by if isinstance(made_by, type) else type(self.worker)

    def require(self, capability: type) -> None:
        """Raise `NotApplicable` if the worker lacks methods of an optional capability."""
        wanted = [name for name in dir(capability) if not name.startswith("_")]
        missing = [name for name in wanted if not hasattr(self.worker_type, name)]
        if missing:
            lack = f"{self.worker_type.__name__} lacks {', '.join(missing)}"
            raise NotApplicable(f"{lack} of rl_interfaces.{capability.__name__}")

    @property
    def worker(self) -> Worker:
        """A shared worker with optimizer and reference, for rules that do not change its state."""
        assert not self._fresh_lives, "one worker at a time"
        if self._shared is None:
            self._shared = self.worker_class(dict(self.case.config), self.case.tokenizer)
        return self._shared

    @contextmanager
    def fresh(
        self, settings: Mapping[str, object] | None = None, **options: Any
    ) -> Iterator[Worker]:
        """Run the body with a new worker; `options` are arguments of its constructor."""
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
        """Shut down the shared worker, if any."""
        worker, self._shared = self._shared, None
        if worker is not None:
            worker.shutdown()

    def path(self, name: str) -> str:
        """Return an unused path, the same on every rank."""
        self._num_paths += 1
        return str(self._directory / f"{self._num_paths}-{name}")

    # Batches

    def columns(self, lengths: list[int], *, width: int | None = None, seed: int = 1) -> Columns:
        """Return rows of these lengths, see `make_columns`."""
        return make_columns(lengths, tokens=self.tokens, pad=self.pad, width=width, seed=seed)

    def on_every_rank(self, lengths: list[int]) -> list[int]:
        """Return `lengths`, repeated to at least one row per data-parallel rank."""
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
        # Copies, as a faulty backend may write into its batch.
        copies = {name: column.clone() for name, column in columns.items()}
        shards = make(copies, shards=self.layout.data_parallel, batch_size=batch_size)
        return shards[self.data_rank]

    def train(
        self,
        worker: Worker,
        columns: Columns | None = None,
        *,
        gbs: int | None = None,
        loss_fn: LossFunction | None = None,
        **options: object,
    ) -> TrainResult:
        """Call `train` with this rank's rows of `columns`, by default of `training`."""
        size = gbs or self.global_batch_size
        mine = self.share(self.training if columns is None else columns, batch_size=size)
        return worker.train(mine, loss_fn or LogprobLoss(), gbs=size, **options)

    @cached_property
    def scoring(self) -> Columns:
        """Ragged rows, an odd number of them."""
        return self.columns([11, 3, 7, 1, 5])

    @cached_property
    def training(self) -> Columns:
        """Rows of two optimizer steps, one less than divides evenly."""
        lengths = [12, 4, 9, 7, 3, 10, 6, 8]
        count = 2 * self.global_batch_size - 1
        return self.columns((lengths * -(-count // len(lengths)))[:count])

    @property
    def pad(self) -> int:
        """The padding token."""
        return self.case.tokenizer.pad_token_id

    @cached_property
    def tokens(self) -> list[int]:
        """The vocabulary without padding and end token."""
        special = {self.pad, getattr(self.case.tokenizer, "eos_token_id", None)}
        with torch.no_grad():
            some = 0 if self.pad else 1
            vocabulary = row_logits(self.oracle, torch.tensor([some]), temperature=1.0).shape[-1]
        return [token for token in range(vocabulary) if token not in special]

    # The oracle

    @cached_property
    def oracle(self) -> nn.Module:
        """The reference model with the worker's initial weights; rules do not change it."""
        return self.load_oracle(self.case.config["model_name"])

    def load_oracle(self, path: str) -> nn.Module:
        """Load the reference model at `path`."""
        return self.case.load_oracle(path).eval()

    def expected_logprobs(self, columns: Columns, model: nn.Module | None = None) -> torch.Tensor:
        """Return the log-probabilities of `columns` under the oracle or another `model`."""
        return plain_logprobs(model or self.oracle, columns, temperature=self.case.temperature)

    @cached_property
    def expected_run(self) -> PlainRun:
        """The reference loop's results of `NUM_CALLS` calls with `training`."""
        return self.plain_run(NUM_CALLS)

    @cached_property
    def expected_call(self) -> PlainRun:
        """The reference loop's results of one call."""
        return self.plain_run(1)

    def plain_run(
        self,
        num_calls: int,
        *,
        loss_type: LossType = LossType.TOKEN_LEVEL,
        learning_rate: Callable[[int], float] | None = None,
        global_batch_size: int | None = None,
    ) -> PlainRun:
        """Return the reference loop's results of `num_calls` calls with `training`."""
        return plain_training(
            self.load_oracle(self.case.config["model_name"]),
            self.training,
            make_optimizer=self.case.make_optimizer,
            global_batch_size=global_batch_size or self.global_batch_size,
            max_grad_norm=self.case.config.get("max_grad_norm"),
            num_calls=num_calls,
            temperature=self.case.temperature,
            loss_type=loss_type,
            learning_rate=learning_rate,
        )

    def expect_logprobs(
        self, found: torch.Tensor, expected: torch.Tensor, mine: Batch, what: str
    ) -> None:
        """Compare this rank's log-probabilities with the expected ones of all rows."""
        places = is_target(mine)
        theirs = expected[mine["row_id"]][:, : places.shape[1]]
        expect_close(found[places], theirs[places], what, atol=self.tolerances.logprob)

    def expect_results(
        self, found: TrainResult, expected: TrainResult, *, what: str = "", **limits: float
    ) -> None:
        """Compare losses and gradient norms of two calls of `train`, within `atol` or `rtol`."""
        for key in ("global_loss", "grad_norm"):
            expect_close(found[key], expected[key], f"{key}{what}", **limits)

    # Shared by several rules

    def scoring_calls(self, worker: Worker) -> dict[str, Callable[[Batch], object]]:
        """Return the calls that score or sample rows, as far as worker and config have them."""
        calls: dict[str, Callable[[Batch], object]] = {
            name: getattr(worker, name)
            for name in ("get_logprobs", "get_reference_policy_logprobs")
        }
        if self.case.config.get("generation") is not None:
            calls["generate"] = worker.generate
        if hasattr(worker, "get_topk_logits"):
            calls["get_topk_logits"] = lambda mine: worker.get_topk_logits(mine, 2)
        return calls

    @cached_property
    def trained(self) -> TrainedRun:
        """The worker's results of `NUM_CALLS` uninterrupted calls of `train`."""
        with self.fresh(init_reference_model=False) as worker:
            results = [self.train(worker) for _ in range(NUM_CALLS)]
            return TrainedRun(results=results, parameters=self.exported(worker))

    @cached_property
    def saved(self) -> SavedRun:
        """A save of a worker after one call of `train`."""
        paths = {part: self.path(part) for part in ("weights", "optimizer", "tokenizer")}
        with self.fresh(init_reference_model=False) as worker:
            self.train(worker)
            worker.save_checkpoint(paths["weights"], paths["optimizer"], paths["tokenizer"])
            logprobs = worker.get_logprobs(self.share(self.scoring))["logprobs"]
        expect(logprobs.isfinite().all(), "log-probabilities are finite")
        return SavedRun(**paths, logprobs=logprobs.clone())

    def exported(self, worker: Worker) -> dict[str, torch.Tensor]:
        """Return the worker's parameters, through `save_hf_checkpoint`."""
        path = self.path("exported")
        worker.save_hf_checkpoint(path)
        return parameters_of(self.load_oracle(path))
