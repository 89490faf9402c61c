"""Completions without waiting for them: tickets now, results as they finish.

    ticket = stream.submit(prompts)            joins what is sampled already
    finished = stream.collect(timeout_s=30)    whatever has finished, in any order
    stream.cancel([ticket])                    frees what it takes

A submission is a batch that finishes as one, such as the completions of one problem. What was
submitted and not collected is bounded: `submit` refuses more than `room` rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict

    from rl_interfaces.generation import GenerationDatumSpec, GenerationOutputSpec

NOT_SAMPLED = -2
"""In place of a version in `weight_versions`: the token is of the prompt, or padding."""

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
        """Wait until a submission has finished; return those that have, each once.

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
            ValueError: A ticket is unknown; nothing is cancelled.
        """
        ...
