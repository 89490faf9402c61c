"""Problems and pairs as sequences: which prompt each has, and how a run divides them.

A few are a list. Very many are read from their files whenever one is needed (`LazyItems`); only
numbers of each are in memory. Both are divided by the hash of the prompt, so that a prompt has its
place whatever other rows there are: rows that are added or reordered move none from what is trained
on to what is measured.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import date
from decimal import Decimal
from functools import cache
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from rl_policy.data.rows import Row, with_progress


class Item(Protocol):
    """A problem or a preference pair."""

    @property
    def prompt(self) -> str:
        """The text of its prompt."""
        ...

    @property
    def source(self) -> int:
        """Which of several files it is from."""
        ...

    @property
    def text_bytes(self) -> int:
        """The most bytes of its texts in UTF-8, with all of a conversation that is shown."""
        ...

    @property
    def answer_bytes(self) -> int:
        """The most bytes of its answer in UTF-8."""
        ...


ItemT = TypeVar("ItemT", bound=Item)

_PLAIN = frozenset({str, int, float})
# Templates render some thousand conversations a second.
_MOST_CHECKED = 10_000


class LazyItems(Sequence[ItemT], Generic[ItemT]):
    """Items that are read from their rows whenever they are needed.

    Args:
        tables: The rows of each source.
        read: Returns the item of a row of a source.
        facts: Numbers of the items. None: all rows are read once, which checks them.
        index: The row of each item, all tables one after the other. None: all rows.
    """

    def __init__(
        self,
        tables: Sequence[Sequence[Row]],
        read: Callable[[Row, int], ItemT],
        *,
        facts: ItemFacts | None = None,
        index: np.ndarray | None = None,
    ) -> None:
        self._tables, self._read = tables, read
        self._firsts = [0, *accumulate(map(len, tables))]
        self._index = np.arange(self._firsts[-1]) if index is None else index
        self.facts = ItemFacts.of(self._in_order(), total=len(self)) if facts is None else facts

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._index)

    def __getitem__(self, index: int | slice) -> Any:
        """Return an item, or some of them as a sequence of this kind."""
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        at = int(self._index[index])
        source = bisect_right(self._firsts, at) - 1
        return self._read(self._tables[source][at - self._firsts[source]], source)

    def select(self, index: np.ndarray) -> LazyItems[ItemT]:
        """Return the items at some indices."""
        return LazyItems(
            self._tables, self._read, facts=self.facts.select(index), index=self._index[index]
        )

    def _in_order(self) -> Iterator[ItemT]:
        for source, table in enumerate(self._tables):
            for row in table:
                yield self._read(row, source)


class ItemFacts:
    """Numbers of each item.

    Attributes:
        keys: `[items]` uint64, a hash of the prompt.
        sources: `[items]` int32, which of several files it is from.
        sizes: `[items]` int32, the most bytes of its texts.
        answer_sizes: `[items]` int32, the most bytes of its answer.
        contents: `[items]` uint64, a hash of all that it has.
    """

    def __init__(
        self,
        keys: np.ndarray,
        sources: np.ndarray,
        sizes: np.ndarray,
        answer_sizes: np.ndarray,
        contents: np.ndarray,
    ) -> None:
        self.keys, self.sources = keys, sources
        self.sizes, self.answer_sizes = sizes, answer_sizes
        self.contents = contents

    @classmethod
    def of(cls, items: Iterator[Item], *, total: int) -> ItemFacts:
        """Return the numbers of items.

        Args:
            items: Each is read once.
            total: Their number.
        """
        keys, sources, contents = array("Q"), array("i"), array("Q")
        sizes, answer_sizes = array("i"), array("i")
        for item in with_progress(items, total=total, text="Reading the data"):
            answer_size = item.answer_bytes
            keys.append(prompt_key(item.prompt))
            sources.append(item.source)
            sizes.append(min(item.text_bytes, 2**31 - 1))
            answer_sizes.append(min(answer_size, 2**31 - 1))
            contents.append(content_key(item))
        return cls(*map(np.array, (keys, sources, sizes, answer_sizes, contents)))

    def select(self, index: np.ndarray) -> ItemFacts:
        """Return those at some indices."""
        arrays = (self.keys, self.sources, self.sizes, self.answer_sizes, self.contents)
        return ItemFacts(*(each[index] for each in arrays))


def keys_of(items: Sequence[Item]) -> np.ndarray:
    """Return a hash of the prompt of each item, `[items]` uint64."""
    if isinstance(items, LazyItems):
        return items.facts.keys
    return np.array([prompt_key(each.prompt) for each in items], dtype=np.uint64)


def sources_of(items: Sequence[Item]) -> np.ndarray:
    """Return which of several files each item is from, `[items]`."""
    if isinstance(items, LazyItems):
        return items.facts.sources
    return np.array([each.source for each in items], dtype=np.int32)


def first_items(*sets: Sequence[ItemT]) -> Iterator[ItemT]:
    """Yield the items to check before a run starts: all in memory, the first of those on disk."""
    for items in sets:
        yield from islice(items, _MOST_CHECKED) if isinstance(items, LazyItems) else items


def select(items: Sequence[ItemT], index: np.ndarray) -> Sequence[ItemT]:
    """Return the items at some indices: a tuple, or `LazyItems` of those."""
    if isinstance(items, LazyItems):
        return cast("LazyItems[ItemT]", items).select(index)
    return tuple(items[at] for at in index.tolist())


def frozen(items: Sequence[ItemT]) -> Sequence[ItemT]:
    """Return items as they are if they are read lazily, otherwise a tuple."""
    return cast("LazyItems[ItemT]", items) if isinstance(items, LazyItems) else tuple(items)


def prompt_key(prompt: str) -> int:
    """Return a hash of a prompt, 64 bits."""
    return _hash(prompt.encode("utf-8", "surrogatepass"))


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def content_key(item: Any) -> int:
    """Return a hash of all that an item has, 64 bits; where it was read from is no part of it."""
    values = _values_of(type(item))(item)
    for value in values:
        if value and type(value) not in _PLAIN:
            return _hash(json.dumps(values, sort_keys=True, default=_plain).encode())
    # Texts and numbers alone, as in most rows: JSON would take several times as long.
    return _hash(repr(values).encode())


@cache
def _values_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(each.name for each in fields(kind) if each.name != "place"))


def ordered_prompts(keys: np.ndarray, *, seed: int) -> np.ndarray:
    """Return the distinct keys in an order that the seed alone determines for any two of them.

    Args:
        keys: `[items]` uint64.
        seed: The seed of the order.
    """
    distinct = np.unique(keys)
    salt = np.uint64(prompt_key(f"{seed}/division"))
    # The finalizer of splitmix64 (Steele et al. 2014), a bijection.
    mixed = distinct ^ salt
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return distinct[np.argsort(mixed ^ (mixed >> np.uint64(31)))]


def is_among(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return which keys are among some others, `[keys]` bool.

    `np.isin` sorts all keys, which takes seconds for millions.
    """
    if not len(wanted):
        return np.zeros(len(keys), dtype=bool)
    ordered = np.sort(wanted)
    places = np.searchsorted(ordered, keys).clip(max=len(ordered) - 1)
    return ordered[places] == keys


def first_rows(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the index of the first item of each wanted prompt, in the order of those.

    Args:
        keys: `[items]`, with each of the wanted ones.
        wanted: Distinct keys.
    """
    distinct, firsts = np.unique(keys, return_index=True)
    return firsts[np.searchsorted(distinct, wanted)]


def count_repeated(items: Sequence[Item]) -> int:
    """Return how many items have the prompt of an earlier one."""
    keys = keys_of(items)
    return len(keys) - len(np.unique(keys))


def digest_items(items: Sequence[Item]) -> str:
    """Return a digest of all that items have, and of their order."""
    if isinstance(items, LazyItems):
        contents = items.facts.contents
    else:
        contents = np.array([content_key(each) for each in items], dtype=np.uint64)
    return hashlib.blake2b(contents.astype("<u8").tobytes(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value of a column as JSON has it, the same in every process."""
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, date | Decimal):
        return str(value)
    return list(value) if isinstance(value, Sequence) else type(value).__name__
