"""Rows with more tokens than a sequence may have, found before a run starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from rl_policy.data.items import LazyItems, select
from rl_policy.data.rows import with_progress

ItemT = TypeVar("ItemT")

LongRows: TypeAlias = list[tuple[int, int]]
"""The index and the tokens of each row that is too long, in the order of the rows."""

_LOGGER = logging.getLogger(__name__)

_AT_A_TIME = 1000
# A template renders the role of a message and what separates it from the next one.
_TOKENS_OF_A_MESSAGE = 16


def find_overlong(
    items: Sequence[Any],
    measure: Callable[[Sequence[Any]], list[int]],
    *,
    limit: int,
    overhead: int | None,
    part: Literal["all", "prompt", "answer"] = "all",
) -> LongRows:
    """Return the rows that have more tokens than a limit.

    Of very many rows only those are tokenized whose texts have more bytes than the limit has
    tokens: no token stands for less than a byte.

    Args:
        items: Problems or pairs.
        measure: Returns the tokens of each.
        limit: Most tokens.
        overhead: Tokens that a row has besides those of its texts. None: not known, and all rows
            are tokenized.
        part: Which part of a row is measured.
    """
    candidates = np.arange(len(items))
    if isinstance(items, LazyItems) and overhead is not None:
        # An answer is one text, whatever its prompt is.
        margin = overhead + (0 if part == "answer" else _TOKENS_OF_A_MESSAGE)
        facts = items.facts
        sizes = {
            "all": facts.sizes,
            "prompt": facts.sizes - facts.answer_sizes,
            "answer": facts.answer_sizes,
        }[part]
        candidates = np.flatnonzero(sizes.astype(np.int64) + margin > limit)
    blocks = with_progress(
        range(0, len(candidates), _AT_A_TIME),
        total=len(candidates),
        size=_AT_A_TIME,
        text="Tokenizing the longest rows",
    )
    found: LongRows = []
    for first in blocks:
        index = candidates[first : first + _AT_A_TIME]
        lengths = measure(select(items, index))
        found += [
            (at, length)
            for at, length in zip(index.tolist(), lengths, strict=True)
            if length > limit
        ]
    return found


def refuse_overlong(
    items: Sequence[ItemT], long_rows: LongRows, *, describe: Callable[[ItemT, int], str]
) -> None:
    """Raise `ValueError` if there is a row that is too long; the longest one is named.

    Args:
        items: Problems or pairs.
        long_rows: Those that are too long.
        describe: Returns the reason for a row and its number of tokens.
    """
    if long_rows:
        at, length = max(long_rows, key=lambda pair: pair[1])
        count = f" ({len(long_rows)} of {len(items)} rows)" if len(long_rows) > 1 else ""
        raise ValueError(
            f"{_place(items[at])}{describe(items[at], length)}{count}; data.overlong=drop leaves "
            "such rows out, data.overlong=truncate cuts them"
        )


def report_overlong(
    items: Sequence[ItemT],
    long_rows: LongRows,
    *,
    mode: str,
    describe: Callable[[ItemT, int], str],
) -> None:
    """Log how many rows are too long, and the first of them.

    Args:
        items: Problems or pairs.
        long_rows: Those that are too long.
        mode: What becomes of them.
        describe: Returns the reason for a row and its number of tokens.
    """
    at, length = long_rows[0]
    _LOGGER.warning(
        "data.overlong=%s: %d of %d rows are too long; the first: %s%s",
        mode,
        len(long_rows),
        len(items),
        _place(items[at]),
        describe(items[at], length),
    )


def drop_overlong(
    items: Sequence[ItemT], long_rows: LongRows, *, describe: Callable[[ItemT, int], str]
) -> Sequence[ItemT]:
    """Return the rows that are not too long, and log how many are.

    Args:
        items: Problems or pairs.
        long_rows: Those that are too long.
        describe: Returns the reason for a row and its number of tokens.

    Raises:
        ValueError: None is left.
    """
    if not long_rows:
        return items
    if len(long_rows) == len(items):
        at, length = long_rows[0]
        raise ValueError(
            f"data.overlong=drop leaves none of {len(items)} rows: {_place(items[at])}"
            f"{describe(items[at], length)}"
        )
    report_overlong(items, long_rows, mode="drop", describe=describe)
    dropped = np.array([at for at, _ in long_rows])
    rows: Sequence[Any] = items
    return select(rows, np.setdiff1d(np.arange(len(items)), dropped))


def _place(item: Any) -> str:
    return f"{item.place}: " if item.place else ""
