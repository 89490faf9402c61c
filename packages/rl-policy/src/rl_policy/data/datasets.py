"""What a run trains on: problems with verifiable answers, and preference pairs.

Both are read from files (see `rl_policy.data.rows`) or built in (doubling a number), divided by
prompt into what is trained on and what is only measured, and drawn in a seeded order. `ExactMatch`
rewards completions.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np
import regex

from rl_policy.data.items import (
    LazyItems,
    digest_items,
    first_rows,
    frozen,
    is_among,
    keys_of,
    ordered_prompts,
    prompt_key,
    select,
    sources_of,
)
from rl_policy.data.messages import (
    ASSISTANT,
    Message,
    conversation_text,
    message_text,
    read_messages,
    read_prompt,
    read_tools,
    usable_tools,
)
from rl_policy.data.preferences import read_pair
from rl_policy.data.rows import (
    GivenRows,
    Row,
    read_rows,
    rename_columns,
    require_columns,
    require_text,
    text_of,
)

ItemT = TypeVar("ItemT")
SourcedT = TypeVar("SourcedT", bound="Problem | PreferencePair")

Source: TypeAlias = str | Path | GivenRows
"""Where rows are read from, see `rl_policy.data.rows.read_rows`."""

_LOGGER = logging.getLogger(__name__)

MOST_HELDOUT = 256
"""The prompts that are held out by default, of 2560 or more."""
# In UTF-8.
_BYTES_OF_A_CHARACTER = 4

# Long enough for any pattern that reads a text once for each of its characters.
_SEARCH_LIMIT_S = 1.0
_PROBE_LIMIT_S = 0.5
# Twice the exponent at which two ways to match each character take a second.
_HARD_LENGTH = 60

DEMONSTRATIONS_PER_PROBLEM = 4
"""Correct or careless, each by its own draw, so that no built-in problem is always shown wrong."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem and its right answer, which is empty where only functions reward completions."""

    prompt: str
    answer: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Further fields of its line in the data."""
    messages: Sequence[Message] = field(default=(), compare=False)
    """A conversation that is the prompt, for the chat template; empty: `prompt` is a text."""
    source: int = field(default=0, compare=False)
    """Which of several files it is from."""
    place: str = field(default="", compare=False)
    """File and line, or the index in what was given."""
    completion: Sequence[Message] = field(default=(), compare=False)
    """The messages of the answer, for the chat template; empty: `answer` is a text."""
    tools: Sequence[Mapping[str, Any]] = field(default=(), compare=False)
    """Schemas of tools, for the chat template."""
    imitates_turns: bool = field(default=False, compare=False)
    """Whether supervised training imitates the assistant's turns in `messages` too."""

    @property
    def text_bytes(self) -> int:
        """The most bytes of its texts in UTF-8, with all of a conversation that is shown."""
        if self.messages or self.completion or self.tools:
            return _BYTES_OF_A_CHARACTER * len(repr(self))
        return len(self.prompt.encode()) + len(self.answer.encode())

    @property
    def answer_bytes(self) -> int:
        """The bytes of its answer in UTF-8."""
        return len(self.answer.encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemSets:
    """The problems of a run. No prompt is in two of the first three.

    Attributes:
        train: What GRPO draws prompts from.
        heldout: What accuracy is measured on.
        validation: What supervised fine-tuning is stopped by; may be empty.
        demonstrations: What supervised fine-tuning imitates: problems of `train`, whose answers
            here may be wrong.
    """

    train: Sequence[Problem]
    heldout: Sequence[Problem]
    validation: Sequence[Problem]
    demonstrations: Sequence[Problem]

    def __post_init__(self) -> None:
        """Check that what is measured is not trained on."""
        train, heldout, validation = (
            keys_of(each) for each in (self.train, self.heldout, self.validation)
        )
        assert not is_among(train, heldout).any()
        assert not is_among(train, validation).any()
        assert not is_among(heldout, validation).any()
        if self.demonstrations is not self.train:
            assert is_among(keys_of(self.demonstrations), train).all()

    def digests(self) -> dict[str, str]:
        """Return a digest of the rows of each set, with their number."""
        sets = {"train": self.train, "held out": self.heldout, "validation": self.validation}
        return {name: f"{len(rows)} rows {digest_items(rows)}" for name, rows in sets.items()}


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two completions of one prompt, of which the first is preferred."""

    prompt: str
    chosen: str
    rejected: str
    messages: Sequence[Message] = field(default=(), compare=False)
    """As those of a `Problem`."""
    source: int = field(default=0, compare=False)
    """Which of several files it is from."""
    place: str = field(default="", compare=False)
    """File and line, or the index in what was given."""
    chosen_messages: Sequence[Message] = field(default=(), compare=False)
    """The preferred completion as messages after `messages`; empty: `chosen` is a text."""
    rejected_messages: Sequence[Message] = field(default=(), compare=False)
    """The other completion as messages."""
    tools: Sequence[Mapping[str, Any]] = field(default=(), compare=False)
    """As those of a `Problem`."""

    @property
    def text_bytes(self) -> int:
        """As that of a `Problem`, of the longer completion."""
        return max(row.text_bytes for row in self.rows)

    @property
    def answer_bytes(self) -> int:
        """The bytes of the longer completion in UTF-8."""
        return max(row.answer_bytes for row in self.rows)

    @property
    def rows(self) -> tuple[Problem, Problem]:
        """The two rows of a batch, chosen first: the order that `DPOLoss` asks for."""
        chosen, rejected = (
            Problem(
                self.prompt,
                answer,
                messages=self.messages,
                completion=completion,
                tools=self.tools,
                place=self.place,
            )
            for answer, completion in (
                (self.chosen, self.chosen_messages),
                (self.rejected, self.rejected_messages),
            )
        )
        return chosen, rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSets:
    """The pairs of a run. No prompt is in both sets.

    Attributes:
        train: What is trained on.
        heldout: What is measured.
    """

    train: Sequence[PreferencePair]
    heldout: Sequence[PreferencePair]

    def digests(self) -> dict[str, str]:
        """Return a digest of the rows of each set, with their number."""
        sets = {"train": self.train, "held out": self.heldout}
        return {name: f"{len(rows)} rows {digest_items(rows)}" for name, rows in sets.items()}


class Stream(Protocol[ItemT]):
    """An endless stream of items that can be continued at a position."""

    position: int

    def take(self, count: int) -> list[ItemT]:
        """Return the next `count` items, and advance."""
        ...


class ShuffledStream(Generic[ItemT]):
    """An endless stream of items, in an order that seed and position alone determine.

    Each epoch has an order of its own, computed from the seed, so that a stream which is created
    anew at a saved position continues as if it had never been interrupted.

    Args:
        items: At least one.
        seed: Of the orders.
        position: Items that were drawn before.
    """

    def __init__(self, items: Sequence[ItemT], *, seed: int, position: int = 0) -> None:
        assert items
        self.position = position
        self._items = items
        self._seed = seed
        self._epoch = -1
        self._order = array("q")

    def take(self, count: int) -> list[ItemT]:
        """Return the next `count` items, and advance."""
        taken = [self._at(self.position + index) for index in range(count)]
        self.position += count
        return taken

    def _at(self, position: int) -> ItemT:
        epoch, index = divmod(position, len(self._items))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, array("q", range(len(self._items)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._items[self._order[index]]


class WeightedStream(Generic[ItemT]):
    """An endless stream that draws from several groups of items in given shares.

    Each group is a `ShuffledStream` of its own; which one is next is drawn at random, by seed and
    position alone.

    Args:
        groups: Each of at least one item.
        weights: The share of each group, up to a common factor.
        seed: Of the draws, and of the orders.
        position: Items that were drawn before.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[ItemT]],
        weights: Sequence[float],
        *,
        seed: int,
        position: int = 0,
    ) -> None:
        self.position = position
        self._weights = weights
        self._seed = seed
        self._numbers = range(len(groups))
        before = Counter(self._group_at(at) for at in range(position))
        self._streams = [
            ShuffledStream(group, seed=seed, position=before[number])
            for number, group in enumerate(groups)
        ]

    def take(self, count: int) -> list[ItemT]:
        """Return the next `count` items, and advance."""
        groups = [self._group_at(self.position + index) for index in range(count)]
        self.position += count
        return [self._streams[group].take(1)[0] for group in groups]

    def _group_at(self, position: int) -> int:
        generator = random.Random(f"{self._seed}/group/{position}")
        return generator.choices(self._numbers, self._weights)[0]


def open_stream(
    items: Sequence[SourcedT], *, weights: Sequence[float] | None, seed: int, position: int
) -> Stream[SourcedT]:
    """Return the stream of items from one or several sources.

    Args:
        items: With the numbers of their sources.
        weights: Of the sources; None: all items alike.
        seed: Of the order.
        position: Items that were drawn before.
    """
    if weights is None:
        return ShuffledStream(items, seed=seed, position=position)
    sources = sources_of(items)
    groups = [select(items, np.flatnonzero(sources == number)) for number in range(len(weights))]
    return WeightedStream(groups, weights, seed=seed, position=position)


class ExactMatch:
    """The reward 1.0 where the text of a completion's answer is the right answer, otherwise 0.0.

    White space around either text is ignored; everything else counts, so that a completion that
    lists several answers, or continues after the right one, gets nothing.

    Example, with `answer_pattern = "= *(-?[0-9]+)"` and the answer "62":
        "27 + 35 = 62"   -> 1.0
        "62"             -> 0.0, the pattern matches nowhere
        "= 62, or = 63"  -> 0.0, the last match is 63

    Args:
        answer_pattern: A regular expression whose last match is the answer: its first group, or
            all of it where it has none. None: the full completion is.

    A search has a limit of time, as some patterns take exponentially long on some texts: a text on
    which it is exceeded has no answer, which is warned of.

    Raises:
        ValueError: The pattern is no regular expression, or takes exponentially long.
    """

    is_solved_share = True

    def __init__(self, answer_pattern: str | None = None) -> None:
        key = f"reward.answer_pattern={answer_pattern!r}"
        try:
            self._pattern = None if answer_pattern is None else regex.compile(answer_pattern)
        except (regex.error, RecursionError) as error:
            raise ValueError(f"{key}: {error or 'it is nested too deeply'}") from error
        for text in _hard_texts(answer_pattern or ""):
            if self._search(text, limit_s=_PROBE_LIMIT_S) is None:
                raise ValueError(
                    f"{key} takes more than {_PROBE_LIMIT_S} s on a text of {len(text)} "
                    "characters: no part of a repetition may match what another part matches"
                )

    def __call__(self, completions: Sequence[str], problems: Sequence[Problem]) -> list[float]:
        """Return the reward of each completion of the problem at the same index."""
        return [
            float(self._answer(completion) == problem.answer.strip())
            for completion, problem in zip(completions, problems, strict=True)
        ]

    def _answer(self, completion: str) -> str | None:
        if self._pattern is None:
            return completion.strip()
        matches = self._search(completion, limit_s=_SEARCH_LIMIT_S)
        if matches is None:
            _LOGGER.warning(
                "reward.answer_pattern took more than %.1f s on a completion, which so has no "
                "answer: %.80r",
                _SEARCH_LIMIT_S,
                completion,
            )
        if not matches:
            return None
        answer = matches[-1].group(1 if self._pattern.groups else 0)
        return None if answer is None else answer.strip()

    def _search(self, text: str, *, limit_s: float) -> list[Any] | None:
        """Return all matches; None if they are not found in time."""
        if self._pattern is None:
            return []
        try:
            return list(self._pattern.finditer(text, timeout=limit_s))
        except TimeoutError:
            return None


def _hard_texts(pattern: str) -> Iterator[str]:
    """Yield texts on which a pattern fails late: a repeated character of it, then another."""
    for character in sorted({each for each in pattern if each.isalnum()} | {"0", "a", " "})[:20]:
        yield character * _HARD_LENGTH + "\n!"


def read_problems(
    sources: Source | Sequence[Source],
    *,
    key: str,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    needs_answer: bool = True,
) -> Sequence[Problem]:
    """Return the problems of one or several sources.

    A row has the text `prompt`, and as `answer` a text, a number, a boolean or a list, of which the
    text in JSON is the answer. Instead of the prompt it may have a conversation: a list of messages
    as `prompt`, or as `messages`, whose last one is the answer if its role is `assistant`; then
    supervised training imitates every turn of the assistant. Messages keep all of their keys, and
    `tools` of a conversation are the schemas of its tools. Further fields become the problem's
    `columns`.

    Example, in JSON lines:
        {"prompt": "27+35=", "answer": "62"}
        {"messages": [{"role": "user", "content": "27+35="},
                      {"role": "assistant", "content": "62"}]}

    Args:
        sources: See `rl_policy.data.rows.read_rows`.
        key: The config key that names them, for the errors.
        columns: `{field: the data's name for it}`.
        split: Of datasets that have several.
        needs_answer: Whether a row has to have an answer; otherwise it may be missing.

    Raises:
        ValueError: A source cannot be read, is empty, or a row is malformed; the message names file
            and line.
    """
    needed = ("prompt", "answer") if needs_answer else ("prompt",)
    prompt_name, answer_name = ((columns or {}).get(name, name) for name in ("prompt", "answer"))

    def read(row: Row, number: int) -> Problem:
        fields = row.fields
        if len(fields) == 2:
            # Most rows are two plain texts, and there may be millions of them.
            prompt, answer = fields.get(prompt_name), fields.get(answer_name)
            if _is_plain(prompt) and _is_plain(answer):
                return Problem(prompt, answer, {}, (), number, row.place)
        prepared = _prepare_row(row, columns=columns, needed=needed)
        return _problem(prepared, source=number, needs_answer=needs_answer)

    return _read_items(sources, read, key=key, split=split)


def read_pairs(
    sources: Source | Sequence[Source],
    *,
    key: str,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
) -> Sequence[PreferencePair]:
    """Return the preference pairs of one or several sources.

    A row has `chosen` and `rejected`: texts, or messages that end with the policy's turn, with or
    without those of the prompt. The prompt is a text or a conversation as for `read_problems`;
    without one it is the beginning that `chosen` and `rejected` share.

    Args:
        sources: As for `read_problems`; a prompt may have several pairs.
        key: The config key that names them, for the errors.
        columns: `{field: the data's name for it}`.
        split: Of datasets that have several.

    Raises:
        ValueError: A source cannot be read, is empty, or a row is malformed, has completions of two
            contexts or prefers one to itself; the message names file and line.
    """
    unnamed: list[str] = []

    def read(row: Row, number: int) -> PreferencePair:
        renamed = rename_columns(row, columns) if columns else row
        needed = ("prompt", "chosen", "rejected")
        if renamed.fields.keys() >= {"chosen", "rejected"} or len(renamed.fields) < len(needed):
            # They may begin with the prompt themselves.
            needed = needed[1:]
        prepared = _prepare_row(renamed, columns=None, needed=needed)
        pair, has_prompt = _pair(prepared, source=number)
        if not has_prompt and not unnamed:
            unnamed.append(row.place)
            _LOGGER.warning(
                "%s has no 'prompt': it is the text with which 'chosen' and 'rejected' begin, %r",
                *(row.place, pair.prompt[-40:]),
            )
        return pair

    return _read_items(sources, read, key=key, split=split)


def _pair(row: Row, *, source: int) -> tuple[PreferencePair, bool]:
    """Return the pair of a row, and whether the row names its prompt."""
    fields = read_pair(row)
    pair = PreferencePair(
        fields.prompt,
        fields.chosen,
        fields.rejected,
        fields.messages,
        source,
        row.place,
        chosen_messages=fields.chosen_messages,
        rejected_messages=fields.rejected_messages,
        tools=fields.tools,
    )
    return pair, fields.has_prompt


def _is_plain(value: Any) -> TypeGuard[str]:
    """Return whether a value is a text that needs no further check."""
    return type(value) is str and value.isascii() and not value.isspace() and value != ""


def _read_items(
    sources: Source | Sequence[Source],
    read: Callable[[Row, int], SourcedT],
    *,
    key: str,
    split: str,
) -> Sequence[SourcedT]:
    """Return the items of all sources: a list, or `LazyItems` if there are very many."""
    listed = [sources] if isinstance(sources, str | Path | GivenRows) else sources
    tables = [read_rows(source, key=key, split=split) for source in listed]
    if all(isinstance(table, list) for table in tables):
        return [read(row, number) for number, table in enumerate(tables) for row in table]
    return LazyItems(tables, read)


def _prepare_row(row: Row, *, columns: Mapping[str, str] | None, needed: Sequence[str]) -> Row:
    """Return a row with our names of its columns, all that are needed, and texts of its values."""
    renamed = rename_columns(row, columns) if columns else row
    require_columns(renamed, needed)
    fields = dict(renamed.fields)
    if "answer" in fields and not _is_conversation(fields["answer"]):
        fields["answer"] = text_of(fields["answer"])
    for name in ("chosen", "rejected"):
        if isinstance(fields.get(name), bool | int | float):
            fields[name] = text_of(fields[name])
    return Row(row.place, fields)


def _problem(row: Row, *, source: int, needs_answer: bool) -> Problem:
    fields, place = dict(row.fields), row.place
    text, messages = read_prompt(*_take_prompt(fields, place=place))
    if messages:
        tools = read_tools(fields.pop("tools", None), place=f"{place}: 'tools'")
    else:
        # A text may be rendered too, or the column be something else.
        tools = usable_tools(fields.get("tools"))
    completion: Sequence[Message] = ()
    # A whole conversation; an answer in a column of its own is all that is imitated.
    imitates_turns = bool(messages) and messages[-1]["role"] == ASSISTANT
    if imitates_turns:
        if fields.get("answer") is not None:
            raise ValueError(f"{place}: has an 'answer', and its messages end with another one")
        messages, completion = messages[:-1], messages[-1:]
        if not messages:
            raise ValueError(f"{place}: has no message before the answer")
        text, fields["answer"] = conversation_text(messages), message_text(completion[0])
    elif _is_conversation(fields.get("answer")):
        completion = tuple(read_messages(fields["answer"], place=f"{place}: 'answer'"))
        if any(completion[at]["role"] != ASSISTANT for at in (0, -1)):
            raise ValueError(
                f"{place}: the messages of 'answer' must begin and end with the role {ASSISTANT!r}"
            )
        fields["answer"] = conversation_text(completion)
    answer = ""
    if needs_answer or fields.get("answer") is not None:
        answer = require_text(fields, "answer", place=place)
    fields.pop("answer", None)
    return Problem(
        text,
        answer,
        fields,
        messages,
        source,
        place,
        completion=completion,
        tools=tools,
        imitates_turns=imitates_turns,
    )


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and any(
        isinstance(each, Mapping) and "role" in each for each in value
    )


def _take_prompt(fields: dict[str, Any], *, place: str) -> tuple[Any, str]:
    """Remove the prompt from the fields of a row; return it, and its place."""
    has_messages = fields.get("prompt") is None and "messages" in fields
    name = "messages" if has_messages else "prompt"
    return fields.pop(name, None), f"{place}: {name!r}"


def divide_problems(
    problems: Sequence[Problem],
    *,
    heldout: Sequence[Problem] | None,
    num_heldout: int | None,
    num_validation: int | None,
    seed: int,
) -> ProblemSets:
    """Return the problems of a run, divided by prompt.

    Which prompts are measured follows from the seed and the prompts' hashes: the smallest ones are.
    Rows that are added or reordered take no prompt from what is trained on. Of a prompt that is
    measured the first row is taken; all rows of the others are trained on.

    Args:
        problems: All problems.
        heldout: Problems to measure on; None holds out `num_heldout` prompts of `problems`.
        num_heldout: Not read if `heldout` is given. None: 256, at most a tenth of the prompts.
        num_validation: Prompts to stop supervised fine-tuning by. None: as for `num_heldout`.
        seed: Of the division.

    Raises:
        ValueError: Too few problems, or one to train on that is held out; the message names keys
            and numbers.
    """
    keys = keys_of(problems)
    prompts = ordered_prompts(keys, seed=seed)
    default = default_heldout(len(prompts))
    num_heldout = default if num_heldout is None else num_heldout
    num_validation = default if num_validation is None else num_validation
    first = 0 if heldout is not None else num_heldout
    if first + num_validation >= len(prompts):
        raise ValueError(
            f"data.path holds {len(prompts)} problems: data.num_heldout={num_heldout} and "
            f"data.num_validation={num_validation} leave none to train on: set them to a part of "
            f"these, such as data.num_heldout={default}, or name another file by data.heldout_path"
        )
    validation = prompts[first : first + num_validation]
    train = select(problems, np.flatnonzero(~is_among(keys, prompts[: first + num_validation])))
    if heldout is None:
        heldout = select(problems, first_rows(keys, prompts[:first]))
    else:
        # Validation problems too: none of them is to be measured.
        _require_disjoint(problems, heldout)
    return ProblemSets(
        train=train,
        heldout=frozen(heldout),
        validation=select(problems, first_rows(keys, validation)),
        demonstrations=train,
    )


def default_heldout(num_prompts: int) -> int:
    """Return the prompts that are held out if the configuration does not say."""
    return max(1, min(MOST_HELDOUT, num_prompts // 10))


def divide_pairs(
    pairs: Sequence[PreferencePair],
    *,
    heldout: Sequence[PreferencePair] | None,
    num_heldout: int | None,
    seed: int,
) -> PairSets:
    """Return the pairs of a run, divided by prompt, see `divide_problems`.

    Args:
        pairs: All pairs.
        heldout: Pairs to measure on; None holds out those of `num_heldout` prompts.
        num_heldout: Not read if `heldout` is given. None: 256, at most a tenth of the prompts.
        seed: Of the division.

    Raises:
        ValueError: Too few prompts, or one to train on that is held out.
    """
    if heldout is not None:
        _require_disjoint(pairs, heldout)
        return PairSets(train=frozen(pairs), heldout=frozen(heldout))
    keys = keys_of(pairs)
    prompts = ordered_prompts(keys, seed=seed)
    default = default_heldout(len(prompts))
    num_heldout = default if num_heldout is None else num_heldout
    if num_heldout >= len(prompts):
        raise ValueError(
            f"data.path holds pairs of {len(prompts)} prompts: data.num_heldout={num_heldout} "
            f"leaves none to train on: set a part of these, such as {default}, or name another "
            "file by data.heldout_path"
        )
    is_measured = is_among(keys, prompts[:num_heldout])
    return PairSets(
        train=select(pairs, np.flatnonzero(~is_measured)),
        heldout=select(pairs, np.flatnonzero(is_measured)),
    )


def arithmetic_problems(
    *,
    max_number: int,
    num_heldout: int | None,
    num_validation: int | None,
    careless_share: float,
    seed: int,
) -> ProblemSets:
    """Return the doublings of all numbers up to `max_number`, divided at random.

    Each number is in one set. The right answer follows from a rule that covers all of them: a digit
    of it depends on one digit of the number, and on whether the next one carries.

    Example:
        Problem("2*3478=", "6956")

    Args:
        max_number: Largest number that is doubled.
        num_heldout: Problems to measure accuracy on. None: 256, at most a tenth.
        num_validation: Problems to stop supervised fine-tuning by. None: the same.
        careless_share: Share of the demonstrations that forget to carry, see `careless_double`.
        seed: Of the division.

    Raises:
        ValueError: There are too few numbers; the message names keys and numbers.
    """
    numbers = list(range(max_number + 1))
    default = default_heldout(len(numbers))
    num_heldout = default if num_heldout is None else num_heldout
    num_validation = default if num_validation is None else num_validation
    num_measured = num_heldout + num_validation
    if num_measured >= len(numbers):
        raise ValueError(
            f"data.max_number={max_number} gives {len(numbers)} problems: data.num_heldout="
            f"{num_heldout} and data.num_validation={num_validation} leave none to train on"
        )
    generator = random.Random(f"{seed}/arithmetic")
    generator.shuffle(numbers)
    train = numbers[num_measured:]
    return ProblemSets(
        train=tuple(map(_doubling, train)),
        heldout=tuple(map(_doubling, numbers[:num_heldout])),
        validation=tuple(map(_doubling, numbers[num_heldout:num_measured])),
        demonstrations=tuple(
            _doubling(number, is_careless=generator.random() < careless_share)
            for number in train
            for _ in range(DEMONSTRATIONS_PER_PROBLEM)
        ),
    )


def arithmetic_pairs(*, max_number: int) -> Sequence[PreferencePair]:
    """Return a pair for each number up to `max_number` whose double carries a digit.

    The right double is preferred to that of someone who forgets to carry.

    Example:
        PreferencePair("2*3478=", chosen="6956", rejected="6846")
    """
    doublings = [
        (_doubling(number), _doubling(number, is_careless=True)) for number in range(max_number + 1)
    ]
    return [
        PreferencePair(right.prompt, right.answer, careless.answer)
        for right, careless in doublings
        if right != careless
    ]


def careless_double(number: int) -> int:
    """Return the double by someone who forgets to carry: 3478 gives 6846, not 6956."""
    return int("".join(str(2 * int(digit) % 10) for digit in str(number)))


def _doubling(number: int, *, is_careless: bool = False) -> Problem:
    return Problem(f"2*{number}=", str(careless_double(number) if is_careless else 2 * number))


def _require_disjoint(
    train: Sequence[Problem] | Sequence[PreferencePair],
    heldout: Sequence[Problem] | Sequence[PreferencePair],
) -> None:
    shared = np.intersect1d(keys_of(train), keys_of(heldout))
    if len(shared):
        one = next(each for each in heldout if prompt_key(each.prompt) in shared)
        raise ValueError(
            f"data.path and data.heldout_path share {len(shared)} prompts, one is {one.prompt!r}: "
            "take them out of one of the two"
        )
