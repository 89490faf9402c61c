"""How asynchronous rollouts sample a group: completions of one call, or episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces import NOT_SAMPLED, GenerationStream

from rl_policy.data.batches import Batch
from rl_policy.data.datasets import Problem
from rl_policy.environments.rollouts import EpisodePlayer
from rl_policy.environments.stream import (
    PAD_VALUES,
    EpisodeStream,
    FinishedEpisodes,
    SpanRecorder,
    with_texts,
    with_texts_as_bytes,
)

# Rows of episodes that may be opened: the plan's bound alone holds, and places are waited for.
_ANY_NUMBER = 1 << 30
# Of a time limit of an environment, until its failure is here.
_MARGIN_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledGroup:
    """A group that is complete."""

    ticket: int
    """What `GroupSampler.submit` has returned."""
    rows: BatchedDataDict[dict[str, torch.Tensor]]
    """Tensors alone, for `GroupSampler.join`."""
    oldest_version: int | None
    """Of the weights that sampled its oldest token; None where none was sampled."""


class GroupSampler(Protocol):
    """Samples groups that nobody waits for."""

    def room(self, source: GenerationStream) -> int:
        """Return how many rows may be submitted now."""
        ...

    def submit(self, source: GenerationStream, problem: Problem) -> int:
        """Start to sample a group; return its ticket."""
        ...

    def collect(
        self, source: GenerationStream, tickets: Iterable[int], *, timeout_s: float
    ) -> list[SampledGroup]:
        """Wait until a group is complete; return all that are, each once.

        Args:
            source: Samples.
            tickets: Of those to wait for.
            timeout_s: Most seconds in which nothing goes on. 0: take what is complete.
        """
        ...

    def join(self, groups: Sequence[Mapping[str, torch.Tensor]]) -> Batch:
        """Return a `GenerationOutputSpec` of the rows of some groups, padded to the longest."""
        ...

    def holding_engines(self) -> AbstractContextManager[None]:
        """Submit nothing meanwhile, and collect nothing."""
        ...

    def close(self) -> None:
        """End what is sampled. May be called again, and others may be submitted after it."""
        ...


class CompletionGroups:
    """Groups of completions of a prompt, each a submission.

    Args:
        encode: Returns the prompts of problems.
        group_size: Completions of a group.
        pad_id: Pads completions.
    """

    def __init__(
        self, encode: Callable[[Sequence[Problem]], Batch], *, group_size: int, pad_id: int
    ) -> None:
        self._encode = encode
        self._group_size = group_size
        self._pad_id = pad_id

    def room(self, source: GenerationStream) -> int:
        """See `GroupSampler`."""
        return source.room

    def submit(self, source: GenerationStream, problem: Problem) -> int:
        """See `GroupSampler`."""
        return source.submit(self._encode([problem]).repeat_interleave(self._group_size))

    def collect(
        self, source: GenerationStream, tickets: Iterable[int], *, timeout_s: float
    ) -> list[SampledGroup]:
        """See `GroupSampler`."""
        return [
            SampledGroup(
                ticket=each.ticket,
                rows=cast("BatchedDataDict[dict[str, torch.Tensor]]", each.output),
                oldest_version=int(each.output["weight_version"].min()),
            )
            for each in source.collect(tickets, timeout_s=timeout_s)
        ]

    def join(self, groups: Sequence[Mapping[str, torch.Tensor]]) -> Batch:
        """See `GroupSampler`."""
        return BatchedDataDict.from_batches(
            groups, {"output_ids": self._pad_id, "weight_versions": NOT_SAMPLED}
        )

    @contextmanager
    def holding_engines(self) -> Iterator[None]:
        """Do nothing: all calls are the caller's."""
        yield

    def close(self) -> None:
        """Do nothing: what is in flight ends with the engines."""


class EpisodeGroups:
    """Groups of episodes, which go on in a thread.

    Args:
        player: Plays them.
        group_size: Episodes of a group.
        limit_s: Most seconds of a call of an environment.
        record: Takes what was busy and when. None: nothing does.
    """

    def __init__(
        self,
        player: EpisodePlayer,
        *,
        group_size: int,
        limit_s: float,
        record: SpanRecorder | None = None,
    ) -> None:
        self._player = player
        self._group_size = group_size
        self._limit_s = limit_s
        self._record = record
        self._stream: EpisodeStream | None = None
        self._last_failure = ""

    def room(self, source: GenerationStream) -> int:
        """See `GroupSampler`: turns are submitted as engines have room for them."""
        return _ANY_NUMBER

    def submit(self, source: GenerationStream, problem: Problem) -> int:
        """See `GroupSampler`; the source is the same in all calls."""
        if self._stream is None:
            self._stream = EpisodeStream(
                self._player, source, group_size=self._group_size, record=self._record
            )
        return self._stream.submit(problem)

    def collect(
        self, source: GenerationStream, tickets: Iterable[int], *, timeout_s: float
    ) -> list[SampledGroup]:
        """See `GroupSampler`."""
        if self._stream is None:
            return []
        limit_s = max(timeout_s, self._limit_s + _MARGIN_S) if timeout_s else 0.0
        return [self._sampled(each) for each in self._stream.collect(tickets, timeout_s=limit_s)]

    def join(self, groups: Sequence[Mapping[str, torch.Tensor]]) -> Batch:
        """See `GroupSampler`.

        Raises:
            EnvironmentFailure: All groups have failed.
        """
        pad_values = {"output_ids": self._player.encoder.pad_id, **PAD_VALUES}
        joined = BatchedDataDict.from_batches(groups, pad_values)
        if not joined["sample_mask"].any():
            raise self._player.failure_of_all(len(groups), [self._last_failure])
        return with_texts(joined)

    @contextmanager
    def holding_engines(self) -> Iterator[None]:
        """See `GroupSampler`."""
        if self._stream is None:
            yield
            return
        with self._stream.holding_engines():
            yield

    def close(self) -> None:
        """See `GroupSampler`."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _sampled(self, finished: FinishedEpisodes) -> SampledGroup:
        self._last_failure = finished.failure or self._last_failure
        return SampledGroup(
            ticket=finished.ticket,
            rows=with_texts_as_bytes(finished.episodes),
            oldest_version=finished.oldest_version,
        )
