"""Completions without waiting for them: tickets now, results as they finish.

    ticket = stream.submit(prompts)            enters what is sampled already
    finished = stream.collect(timeout_s=30)    whatever has finished, in any order
    stream.cancel([ticket])                    frees what it takes

A submission is a batch that finishes as one, such as the completions of one problem. What was
submitted and not collected is bounded: `submit` refuses more than `room` rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from rl_batched_data import BatchedDataDict

if TYPE_CHECKING:
    from rl_interfaces import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec

FinishReason: TypeAlias = Literal["stop", "length"]
"""What ended a row: a stop token or string, or a limit of tokens."""


class StreamFullError(RuntimeError):
    """As much is in flight as the stream allows."""


class TicketsLostError(RuntimeError):
    """Submissions have failed; the others go on.

    Attributes:
        tickets: Theirs, ascending. The stream has forgotten them.
    """

    def __init__(self, message: str, *, tickets: Iterable[int]) -> None:
        super().__init__(message)
        self.tickets = sorted(tickets)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedSubmission:
    """A submission whose rows have all finished."""

    ticket: int
    """Its ticket."""
    output: BatchedDataDict[GenerationOutputSpec]
    """A row per prompt, in the order of the submission; what `generate` would have returned."""
    finish_reasons: tuple[FinishReason, ...]
    """Of each row."""


class GenerationStream(Protocol):
    """Samples submissions that nobody waits for."""

    @property
    def room(self) -> int:
        """Rows that may be submitted now."""
        ...

    def submit(self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False) -> int:
        """Start to sample a completion per row; return the submission's ticket.

        Args:
            data: The prompts, see `GenerationDatumSpec`.
            greedy: Take the most likely token every time.

        Raises:
            ValueError: A prompt cannot be continued, or there are more rows than the limit.
            StreamFullError: There are more rows than `room`.
        """
        ...

    def collect(
        self, tickets: Iterable[int] | None = None, *, timeout_s: float
    ) -> list[FinishedSubmission]:
        """Wait until a submission has finished; return all that have, each once.

        Args:
            tickets: Of those to wait for. None: all.
            timeout_s: Most seconds to wait. 0: take what has arrived.

        Returns:
            Ascending by ticket; nothing after `timeout_s`, or where there is nothing to wait for.

        Raises:
            ValueError: A ticket is unknown: it was collected, cancelled or lost, or never given.
            TicketsLostError: Submissions have failed.
        """
        ...

    def cancel(self, tickets: Iterable[int]) -> None:
        """Abort submissions and forget them, also such as have finished.

        Raises:
            ValueError: A ticket is unknown.
        """
        ...


def require_room(num_rows: int, *, num_in_flight: int, limit: int) -> None:
    """Raise unless rows may be submitted.

    Args:
        num_rows: Rows of the submission.
        num_in_flight: Rows that were submitted and not collected.
        limit: Most such rows.

    Raises:
        ValueError: They never may.
        StreamFullError: They may not now.
    """
    if num_rows > limit:
        raise ValueError(f"{num_rows} rows are more than the stream's limit of {limit} in flight")
    if num_in_flight + num_rows > limit:
        raise StreamFullError(
            f"{num_in_flight} rows are in flight, and {num_rows} more would exceed the limit of "
            f"{limit}: collect or cancel some first"
        )


def require_known(tickets: Iterable[int], known: Iterable[int]) -> list[int]:
    """Return the tickets, ascending; raise `ValueError` if some are not among `known`."""
    wanted = set(tickets)
    unknown = sorted(wanted.difference(known))
    if unknown:
        raise ValueError(
            f"tickets {unknown} are unknown: they were collected, cancelled or lost, or never given"
        )
    return sorted(wanted)


class SampledAtCollect:
    """A stream over whatever samples batches alone: it samples a submission when it is collected.

    Args:
        source: Samples.
        max_new_tokens: Its limit of tokens per completion, which decides `finish_reasons`.
        stop_token_ids: The tokens that end a row.
        limit: Most rows that are submitted and not collected.
    """

    def __init__(
        self,
        source: GenerationInterface,
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        limit: int,
    ) -> None:
        self._source = source
        self._max_new_tokens = max_new_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._limit = limit
        self._tickets = count()
        self._submitted: dict[int, tuple[BatchedDataDict[GenerationDatumSpec], bool]] = {}

    @property
    def room(self) -> int:
        """See `GenerationStream`."""
        return self._limit - sum(data.size for data, _ in self._submitted.values())

    def submit(self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False) -> int:
        """See `GenerationStream`; prompts are checked when they are sampled."""
        require_room(data.size, num_in_flight=self._limit - self.room, limit=self._limit)
        ticket = next(self._tickets)
        self._submitted[ticket] = (data, greedy)
        return ticket

    def collect(
        self, tickets: Iterable[int] | None = None, *, timeout_s: float
    ) -> list[FinishedSubmission]:
        """See `GenerationStream`; `timeout_s` is not needed, as nothing else samples."""
        wanted = require_known(self._submitted if tickets is None else tickets, self._submitted)
        return [self._sample(ticket) for ticket in wanted]

    def cancel(self, tickets: Iterable[int]) -> None:
        """See `GenerationStream`."""
        for ticket in require_known(tickets, self._submitted):
            del self._submitted[ticket]

    def _sample(self, ticket: int) -> FinishedSubmission:
        data, greedy = self._submitted.pop(ticket)
        output = self._source.generate(data, greedy=greedy)
        ends = output["unpadded_sequence_lengths"].tolist()
        lengths = output["generation_lengths"].tolist()
        last = [row[end - 1] for row, end in zip(output["output_ids"].tolist(), ends, strict=True)]
        return FinishedSubmission(
            ticket=ticket,
            output=output,
            finish_reasons=tuple(
                self._reason(length, token) for length, token in zip(lengths, last, strict=True)
            ),
        )

    def _reason(self, length: int, last_token: int) -> FinishReason:
        # A stop string ends a row before its limit, or is told from it by nothing.
        if length < self._max_new_tokens or last_token in self._stop_token_ids:
            return "stop"
        return "length"
