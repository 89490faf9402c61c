"""A stream of completions over whatever samples batches, and what streams check.

`rl_interfaces.GenerationStream` is the protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from rl_interfaces import FinishedSubmission, StreamFullError, TicketsLostError

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict
    from rl_interfaces import (
        FinishReason,
        GenerationDatumSpec,
        GenerationInterface,
    )


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
        """Sample the oldest of `tickets`, see `GenerationStream`.

        `timeout_s` is not needed, as nothing else samples. The others are left for later calls: a
        submission that fails costs no other one.
        """
        wanted = require_known(self._submitted if tickets is None else tickets, self._submitted)
        return [self._sample(ticket) for ticket in wanted[:1]]

    def cancel(self, tickets: Iterable[int]) -> None:
        """See `GenerationStream`."""
        for ticket in require_known(tickets, self._submitted):
            del self._submitted[ticket]

    def _sample(self, ticket: int) -> FinishedSubmission:
        data, greedy = self._submitted.pop(ticket)
        try:
            output = self._source.generate(data, greedy=greedy)
        except ValueError as error:
            raise TicketsLostError(
                f"the submission {ticket} was refused: {error}", tickets=[ticket]
            ) from error
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
