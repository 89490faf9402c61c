"""Rules of a generation backend: what ends a row, and that it is part of the row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_interfaces.testing.generation import DecodesText
from rl_interfaces.testing.generation.oracle import complete, completions_of, prompts

if TYPE_CHECKING:
    from rl_interfaces.testing.generation import GenerationCase

_FEWEST = 4


def a_configured_stop_token_ends_a_row_and_is_part_of_it(case: GenerationCase) -> None:
    """In every row that has it."""
    rows = prompts(case)
    free = completions_of(complete(case, rows, greedy=True))
    stop = free[_long_row(free)][2]
    found = completions_of(complete(case, rows, greedy=True, stop_token_ids=[stop]))
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert found == expected, f"with the stop token {stop}: {found}, not {expected}"
    assert found != free, "no row is shorter: nothing is shown"


def a_configured_stop_string_ends_a_row_and_is_part_of_it(case: GenerationCase) -> None:
    """Also where it spans tokens."""
    rows = prompts(case)
    free = completions_of(complete(case, rows, greedy=True))
    stop = _text(case, free[_long_row(free)][1:3])
    found = completions_of(complete(case, rows, greedy=True, stop_strings=[stop]))
    expected = [_until(case, row, stop) for row in free]
    assert found == expected, f"with the stop string {stop!r}: {found}, not {expected}"
    assert found != free, "no row is shorter: nothing is shown"


def a_stop_string_of_a_row_ends_that_row_alone(case: GenerationCase) -> None:
    """A row without any is not stopped by another's."""
    rows = prompts(case)
    long = _long_row(completions_of(complete(case, rows, greedy=True)))
    rows = [rows[long], rows[long]]  # the same prompt, so that both could be stopped
    free = completions_of(complete(case, rows, greedy=True))
    stop = _text(case, free[1][1:3])
    columns = {"stop_strings": [None, [stop]]}
    found = completions_of(complete(case, rows, greedy=True, columns=columns))
    expected = [free[0], _until(case, free[1], stop)]
    assert found == expected, f"with {stop!r} for row 1: {found}, not {expected}"
    assert expected[1] != free[1], "the row is no shorter: nothing is shown"


def _long_row(rows: list[list[int]]) -> int:
    longest = max(range(len(rows)), key=lambda index: len(rows[index]))
    assert len(rows[longest]) >= _FEWEST, f"the model ends every row at once: {rows}"
    return longest


def _text(case: GenerationCase, tokens: list[int]) -> str:
    assert isinstance(case, DecodesText)
    text = case.decode(tokens)
    assert text, f"the tokens {tokens} have no text"
    return text


def _until(case: GenerationCase, tokens: list[int], stop: str) -> list[int]:
    """Return the tokens up to the one with which the text has `stop`."""
    for end in range(1, len(tokens) + 1):
        if stop in _text(case, tokens[:end]):
            return tokens[:end]
    return tokens
