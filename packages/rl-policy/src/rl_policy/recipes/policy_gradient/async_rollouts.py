"""Rollouts of a recipe that are sampled while it trains, in groups of one problem each.

    step t    refit if due | submit what may be | collect until enough are complete | train | count
    engines   sample, sample, sample, ... (the weights are exchanged between two of their steps)

A `RolloutBuffer` has the order, the bound of staleness and the account; `trained.jsonl` in the
run's directory is a ledger of the groups that each step has trained on. `groups` beside this module
has how a group is sampled: completions of one call, or episodes with an environment.

Versions: the engines' weights have the number of the recipe's step after which they were sent, and
the buffer counts optimizer steps, of which a step takes `versions_per_step`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from rl_interfaces import GenerationStream
from rl_interfaces.config.schema import MOST

from rl_policy.config import Section
from rl_policy.data.batches import Batch
from rl_policy.data.datasets import Problem, Stream
from rl_policy.recipes.policy_gradient.groups import GroupSampler, SampledGroup
from rl_policy.rollout_buffer import RolloutBuffer, RolloutGroup, TooOld
from rl_policy.run.metrics import keep_steps

_BUFFER = "rollouts.safetensors"


class AsyncSection(Section):
    """Sampling while the trainer trains, by engines that do not share its devices."""

    max_staleness: int = Field(default=0, ge=0, le=MOST)
    """Most optimizer steps between the weights that sampled a completion and those that it is
    trained on with. 0: each step samples and then trains."""
    refit_every: int = Field(default=1, ge=1, le=MOST)
    """Steps between two refits of the engines; a measurement of accuracy needs one as well."""
    too_old: TooOld = "drop"
    """What becomes of completions that have become too old, as others have overtaken them: they are
    sampled anew (`drop`), or are trained on (`rescore`). `wait`: none become too old, as a step
    waits for the oldest that are not complete where later steps could not train on all in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncPlan:
    """The numbers of asynchronous rollouts."""

    num_groups: int
    """Groups of a step."""
    group_size: int
    """Completions of a group."""
    num_steps: int
    """The last step."""
    versions_per_step: int
    """Optimizer steps of a step."""
    max_staleness: int
    """See `AsyncSection`."""
    refit_every: int
    """See `AsyncSection`."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether anything may be sampled while a step trains."""
        return self.max_staleness > 0

    def check(self) -> None:
        """Raise `ValueError` if the staleness allows nothing, or less than the refits take."""
        if self.max_staleness < self.versions_per_step:
            raise ValueError(
                f"async.max_staleness={self.max_staleness} is less than the "
                f"{self.versions_per_step} optimizer steps of a step: nothing may be sampled while "
                f"it trains; set at least {self.versions_per_step}, or 0"
            )
        lag = (self.refit_every - 1) * self.versions_per_step
        if self.max_staleness < lag:
            raise ValueError(
                f"async.refit_every={self.refit_every} lets engines fall {lag} optimizer steps "
                f"behind, more than async.max_staleness={self.max_staleness}"
            )

    def num_to_open(self, *, held: int, step: int, room: int) -> int:
        """Return how many groups may be submitted, apart from the bound of staleness.

        Args:
            held: Groups that are sampled or wait to be trained on.
            step: The step that is taken next: no more are opened than it and the later ones take.
            room: Rows that may be submitted.
        """
        left = self.num_groups * (self.num_steps - step + 1)
        return max(0, min(left - held, room // self.group_size))

    def is_refit_due(self, *, step: int, weights_step: int) -> bool:
        """Return whether the engines receive weights before a step.

        Args:
            step: The step.
            weights_step: That of their weights; negative for such as were never sent.
        """
        return weights_step < 0 or step - 1 - weights_step >= self.refit_every


class TrainedLedger:
    """The ids of the groups that each step has trained on, as JSON lines.

    Args:
        path: The file.
        step: The step that the run continues after: the first line that is written drops those of
            later steps, which are taken again.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self._path = path
        self._step: int | None = step

    def write(self, step: int, ids: Sequence[int]) -> None:
        """Append a step, durably."""
        if self._step is not None and self._path.exists():
            keep_steps(self._path, self._step)
        self._step = None
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "ids": [*ids]}) + "\n")
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenRollouts:
    """The completions that a step trains on."""

    problems: list[Problem]
    """Of each row."""
    generated: Batch
    """A `GenerationOutputSpec` of all groups, padded to the longest row."""
    metrics: dict[str, float]
    """`staleness_max`, `rollouts_*`: what the buffer holds and has seen, and `oldest_wait_s`: the
    seconds in which enough groups were complete, and older ones that had to come first were not."""


class AsyncRollouts:
    """Submits the problems of a run, and takes them in order when they are complete.

    Args:
        plan: The numbers.
        too_old: See `AsyncSection`.
        open_stream: Returns the stream of problems at a position.
        sampler: Samples groups.
        ledger: See `TrainedLedger`.
        timeout_s: Most seconds without a completion while some are sampled.
    """

    def __init__(
        self,
        plan: AsyncPlan,
        *,
        too_old: TooOld,
        open_stream: Callable[[int], Stream[Problem]],
        sampler: GroupSampler,
        ledger: TrainedLedger,
        timeout_s: float,
    ) -> None:
        self.plan = plan
        self._buffer = RolloutBuffer(
            groups_per_take=plan.num_groups,
            max_staleness=plan.max_staleness,
            versions_per_take=plan.versions_per_step,
            too_old=too_old,
        )
        self._open_stream = open_stream
        self._stream = open_stream(0)
        self._sampler = sampler
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._problems: dict[int, Problem] = {}
        self._ids: dict[int, int] = {}
        self._taken: list[int] = []

    @property
    def num_opened(self) -> int:
        """Problems drawn from the stream so far."""
        return self._buffer.counts.opened

    def load(self, checkpoint: Path) -> None:
        """Continue from what `save` wrote into the directory of a checkpoint."""
        self._buffer.load(checkpoint / _BUFFER)
        # A step of such groups alone ends a run, which could then never be continued.
        self._buffer.discard_where(_has_failed)
        self._stream = self._open_stream(self.num_opened)

    def save(self, checkpoint: Path) -> None:
        """Write the buffer into the directory of a checkpoint."""
        self._buffer.save(checkpoint / _BUFFER)

    def holding_engines(self) -> AbstractContextManager[None]:
        """Submit nothing meanwhile, for a refit that engines pause for."""
        return self._sampler.holding_engines()

    def close(self) -> None:
        """End what is sampled. May be called again."""
        self._sampler.close()

    def sample_anew(self) -> None:
        """Open again what is in flight, as the engines that have sampled it have ended."""
        self._sampler.close()
        self._ids.clear()
        self._buffer.reopen(self._buffer.in_flight)

    def take(self, source: GenerationStream, step: int, *, weights_step: int) -> TakenRollouts:
        """Return the oldest complete groups; submit what may be, and wait until enough are.

        Args:
            source: Samples.
            step: The step that trains on them.
            weights_step: The step after which the engines' weights were sent.

        Raises:
            ValueError: The engines have no room for the completions of one group.
            TimeoutError: Nothing was completed in time.
            TicketsLostError: Submissions have failed.
            EngineLostError: An engine has died.
        """
        self._receive(source, timeout_s=0.0)
        self._submit(source, step, weights_step=weights_step)
        oldest_wait_s = 0.0
        while not (groups := self._buffer.take()):
            # What was too old is sampled anew.
            self._submit(source, step, weights_step=weights_step)
            room = self._sampler.room(source)
            if not self._ids and room < self.plan.group_size:
                raise ValueError(
                    f"grpo.samples_per_prompt={self.plan.group_size} is more than the "
                    f"{room} rows that engines take at a time: raise "
                    "policy.generation.vllm_cfg.max_requests_in_flight"
                )
            waits_for_oldest, since = self._buffer.waits_for_oldest, time.monotonic()
            finished = self._receive(source, timeout_s=self._timeout_s)
            oldest_wait_s += (time.monotonic() - since) * waits_for_oldest
            if not finished:
                raise TimeoutError(
                    f"no completion of step {step} has finished within {self._timeout_s:.0f} s: "
                    f"{self._buffer.counts}"
                )
        try:
            generated = self._sampler.join([group.rows for group in groups])
        except Exception:
            # A checkpoint follows, of the step before.
            self._buffer.give_back(groups)
            raise
        self._taken = [group.id for group in groups]
        size = self.plan.group_size
        return TakenRollouts(
            problems=[self._problem(id) for id in self._taken for _ in range(size)],
            generated=generated,
            metrics=self._metrics(groups) | {"oldest_wait_s": oldest_wait_s},
        )

    def finish(self, step: int) -> None:
        """Count what was taken as trained by a step."""
        # First the ledger: a step that it lacks could be trained on and not be counted.
        self._ledger.write(step, self._taken)
        self._buffer.finish(version=step * self.plan.versions_per_step)
        for id in self._taken:
            self._problems.pop(id, None)
        self._taken = []

    def _submit(self, source: GenerationStream, step: int, *, weights_step: int) -> None:
        counts = self._buffer.counts
        limit = self.plan.num_to_open(
            held=counts.in_flight + counts.complete,
            step=step,
            room=self._sampler.room(source),
        )
        version = weights_step * self.plan.versions_per_step
        for id in self._buffer.open(limit, version=version):
            self._ids[self._sampler.submit(source, self._problem(id))] = id

    def _receive(self, source: GenerationStream, *, timeout_s: float) -> list[SampledGroup]:
        finished = self._sampler.collect(source, self._ids, timeout_s=timeout_s)
        for each in finished:
            oldest = each.oldest_version
            self._buffer.put(
                self._ids.pop(each.ticket),
                each.rows,
                # What has failed before a token was sampled is of no weights.
                version=(
                    self._buffer.version if oldest is None else oldest * self.plan.versions_per_step
                ),
            )
        return finished

    def _problem(self, id: int) -> Problem:
        if id not in self._problems:
            is_next = id == self._stream.position
            # Others were drawn before an interruption.
            stream = self._stream if is_next else self._open_stream(id)
            (self._problems[id],) = stream.take(1)
        return self._problems[id]

    def _metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        counts = self._buffer.counts
        return {
            "staleness_max": float(self._buffer.version - min(group.version for group in groups)),
            "rollouts_in_flight": float(counts.in_flight),
            "rollouts_complete": float(counts.complete),
            "rollouts_trained": float(counts.num_trained),
            "rollouts_dropped": float(counts.num_dropped),
            "rollouts_rescored": float(counts.num_rescored),
        }


def _has_failed(group: RolloutGroup) -> bool:
    """Return whether an environment has cost a group, whose rows are masked."""
    return "sample_mask" in group.rows and not bool(group.rows["sample_mask"].any())
