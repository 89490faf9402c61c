"""What a run trains on: problems with verifiable answers, and preference pairs.

Both are read from files (see `rl_policy.data.rows`) or built in (doubling a number), divided by
prompt into what is trained on and what is only measured, and drawn in a seeded order. `ExactMatch`
rewards completions.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import regex

from rl_policy.data.rows import (
    GivenRows,
    Row,
    check_text,
    read_rows,
    rename_columns,
    require_text,
)

ItemT = TypeVar("ItemT")
SourcedT = TypeVar("SourcedT", bound="Problem | PreferencePair")

Message: TypeAlias = dict[str, str]
"""A message of a conversation: `role` and `content`."""

Source: TypeAlias = str | Path | GivenRows
"""Where rows are read from, see `rl_policy.data.rows.read_rows`."""

_LOGGER = logging.getLogger(__name__)

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

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]
    validation: tuple[Problem, ...]
    demonstrations: tuple[Problem, ...]

    def __post_init__(self) -> None:
        """Check that what is measured is not trained on."""
        train, heldout, validation = (
            {problem.prompt for problem in problems}
            for problems in (self.train, self.heldout, self.validation)
        )
        assert not train & heldout
        assert not train & validation
        assert not heldout & validation
        assert {problem.prompt for problem in self.demonstrations} <= train


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

    @property
    def rows(self) -> tuple[Problem, Problem]:
        """The two rows of a batch, chosen first: the order that `DPOLoss` asks for."""
        chosen, rejected = (
            Problem(self.prompt, answer, messages=self.messages)
            for answer in (self.chosen, self.rejected)
        )
        return chosen, rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSets:
    """The pairs of a run. No prompt is in both sets.

    Attributes:
        train: What is trained on.
        heldout: What is measured.
    """

    train: tuple[PreferencePair, ...]
    heldout: tuple[PreferencePair, ...]


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
        self._order: list[int] = []

    def take(self, count: int) -> list[ItemT]:
        """Return the next `count` items, and advance."""
        taken = [self._at(self.position + index) for index in range(count)]
        self.position += count
        return taken

    def _at(self, position: int) -> ItemT:
        epoch, index = divmod(position, len(self._items))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._items)))
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
    groups = [[each for each in items if each.source == number] for number in range(len(weights))]
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
) -> list[Problem]:
    """Return the problems of one or several sources.

    A row has the texts `prompt` and `answer`. In place of the prompt it may have a conversation: a
    list of messages as `prompt`, or as `messages`, whose last one is the answer if its role is
    `assistant`. Further fields become the problem's `columns`.

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
        ValueError: A source cannot be read, is empty, or a row is malformed or repeats a prompt;
            the message names file and line.
    """
    problems: list[Problem] = []
    first_place: dict[str, str] = {}
    for number, row in _sourced_rows(sources, key=key, columns=columns, split=split):
        problem = _problem(row, source=number, needs_answer=needs_answer)
        if problem.prompt in first_place:
            first = first_place[problem.prompt]
            raise ValueError(f"{row.place}: the prompt of {first} again")
        first_place[problem.prompt] = row.place
        problems.append(problem)
    return problems


def read_pairs(
    sources: Source | Sequence[Source],
    *,
    key: str,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
) -> list[PreferencePair]:
    """Return the preference pairs of one or several sources.

    A row has the texts `prompt`, `chosen` and `rejected`. The prompt may be a conversation as for
    `read_problems`; the other two may be lists whose last message is the completion.

    Args:
        sources: As for `read_problems`; a prompt may have several pairs.
        key: The config key that names them, for the errors.
        columns: `{field: the data's name for it}`.
        split: Of datasets that have several.

    Raises:
        ValueError: A source cannot be read, is empty, or a row is malformed or prefers a text to
            itself; the message names file and line.
    """
    pairs: list[PreferencePair] = []
    for number, row in _sourced_rows(sources, key=key, columns=columns, split=split):
        fields = dict(row.fields)
        text, messages = read_prompt(*_take_prompt(fields, place=row.place))
        if messages and messages[-1]["role"] == "assistant":
            raise ValueError(
                f"{row.place}: the prompt ends with an answer, and 'chosen' and 'rejected' are two "
                "others"
            )
        for name in ("chosen", "rejected"):
            if isinstance(fields.get(name), list):
                place = f"{row.place}: {name}"
                fields[name] = read_messages(fields[name], place=place)[-1]["content"]
        chosen, rejected = (
            require_text(fields, name, place=row.place) for name in ("chosen", "rejected")
        )
        if chosen == rejected:
            raise ValueError(f"{row.place}: 'chosen' and 'rejected' are the same text")
        pairs.append(PreferencePair(text, chosen, rejected, messages, number))
    return pairs


def _sourced_rows(
    sources: Source | Sequence[Source],
    *,
    key: str,
    columns: Mapping[str, str] | None,
    split: str,
) -> Iterator[tuple[int, Row]]:
    """Yield the rows of all sources, each with the number of its source."""
    listed = [sources] if isinstance(sources, str | Path | GivenRows) else sources
    for number, source in enumerate(listed):
        for row in read_rows(source, key=key, split=split):
            yield number, rename_columns(row, columns or {})


def _problem(row: Row, *, source: int, needs_answer: bool) -> Problem:
    fields, place = dict(row.fields), row.place
    text, messages = read_prompt(*_take_prompt(fields, place=place))
    if messages and messages[-1]["role"] == "assistant":
        if "answer" in fields:
            raise ValueError(f"{place}: has an 'answer', and its messages end with another one")
        *messages, last = messages
        if not messages:
            raise ValueError(f"{place}: has no message before the answer")
        text, fields["answer"] = conversation_text(messages), last["content"]
    answer = ""
    if needs_answer or fields.get("answer") is not None:
        answer = require_text(fields, "answer", place=place)
    fields.pop("answer", None)
    return Problem(text, answer, fields, tuple(messages), source)


def _take_prompt(fields: dict[str, Any], *, place: str) -> tuple[Any, str]:
    """Remove the prompt from the fields of a row; return it, and its place."""
    has_messages = fields.get("prompt") is None and "messages" in fields
    name = "messages" if has_messages else "prompt"
    return fields.pop(name, None), f"{place}: {name!r}"


def read_prompt(prompt: Any, place: str) -> tuple[str, Sequence[Message]]:
    """Return the text of a prompt, and its messages if it is a conversation.

    Args:
        prompt: A text, or a list of messages.
        place: Where it stands, for the errors.

    Raises:
        ValueError: It is neither, or empty.
    """
    if isinstance(prompt, list):
        messages = read_messages(prompt, place=place)
        return conversation_text(messages), tuple(messages)
    check_text(prompt, place=place)
    return prompt, ()


def read_messages(messages: Sequence[Any], *, place: str) -> list[Message]:
    """Return messages with the texts `role` and `content` alone.

    Args:
        messages: Mappings with these texts.
        place: Where they stand, for the errors.

    Raises:
        ValueError: There are none, or one lacks a text.
    """
    if not messages:
        raise ValueError(f"{place} must be a text or messages, and has none")
    for index, message in enumerate(messages):
        at = f"{place}[{index}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{at} must be an object, got {type(message).__name__}")
        for name in ("role", "content"):
            require_text(message, name, place=at)
    return [{name: each[name] for name in ("role", "content")} for each in messages]


def conversation_text(messages: Sequence[Message]) -> str:
    """Return the text that stands for a conversation where one is shown or told apart."""
    return "\n".join(each["content"] for each in messages)


def divide_problems(
    problems: Sequence[Problem],
    *,
    heldout: Sequence[Problem] | None,
    num_heldout: int,
    num_validation: int,
    seed: int,
) -> ProblemSets:
    """Return the problems of a run, divided at random.

    Args:
        problems: All problems, without repeated prompts.
        heldout: Problems to measure on; None holds out `num_heldout` of `problems`.
        num_heldout: Not read if `heldout` is given.
        num_validation: Problems to stop supervised fine-tuning by.
        seed: Of the division.

    Raises:
        ValueError: Too few problems, or one to train on that is held out; the message names keys
            and numbers.
    """
    shuffled = random.Random(f"{seed}/division").sample(list(problems), len(problems))
    if heldout is None:
        heldout, shuffled = shuffled[:num_heldout], shuffled[num_heldout:]
    if num_validation >= len(shuffled):
        raise ValueError(
            f"data.path holds {len(problems)} problems: data.num_heldout={num_heldout} and "
            f"data.num_validation={num_validation} leave none to train on: set them to a part of "
            f"these, such as data.num_heldout={max(1, len(problems) // 10)}, or name another file "
            "by data.heldout_path"
        )
    _require_disjoint(shuffled, heldout)
    train = tuple(shuffled[num_validation:])
    return ProblemSets(
        train=train,
        heldout=tuple(heldout),
        validation=tuple(shuffled[:num_validation]),
        demonstrations=train,
    )


def divide_pairs(
    pairs: Sequence[PreferencePair],
    *,
    heldout: Sequence[PreferencePair] | None,
    num_heldout: int,
    seed: int,
) -> PairSets:
    """Return the pairs of a run, divided at random by prompt.

    Args:
        pairs: All pairs.
        heldout: Pairs to measure on; None holds out those of `num_heldout` prompts.
        num_heldout: Not read if `heldout` is given.
        seed: Of the division.

    Raises:
        ValueError: Too few prompts, or one to train on that is held out.
    """
    prompts = sorted({pair.prompt for pair in pairs})
    if heldout is None:
        if num_heldout >= len(prompts):
            raise ValueError(
                f"data.path holds pairs of {len(prompts)} prompts: data.num_heldout={num_heldout} "
                "leaves none to train on: set a part of these, such as "
                f"{max(1, len(prompts) // 10)}, or name another file by data.heldout_path"
            )
        measured = set(random.Random(f"{seed}/division").sample(prompts, num_heldout))
        heldout = [pair for pair in pairs if pair.prompt in measured]
        pairs = [pair for pair in pairs if pair.prompt not in measured]
    _require_disjoint(pairs, heldout)
    return PairSets(train=tuple(pairs), heldout=tuple(heldout))


def arithmetic_problems(
    *, max_number: int, num_heldout: int, num_validation: int, careless_share: float, seed: int
) -> ProblemSets:
    """Return the doublings of all numbers up to `max_number`, divided at random.

    Each number is in one set. The right answer follows from a rule that covers all of them: a digit
    of it depends on one digit of the number, and on whether the next one carries.

    Example:
        Problem("2*3478=", "6956")

    Args:
        max_number: Largest number that is doubled.
        num_heldout: Problems to measure accuracy on.
        num_validation: Problems to stop supervised fine-tuning by.
        careless_share: Share of the demonstrations that forget to carry, see `careless_double`.
        seed: Of the division.

    Raises:
        ValueError: There are too few numbers; the message names keys and numbers.
    """
    numbers = list(range(max_number + 1))
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


def arithmetic_pairs(*, max_number: int) -> list[PreferencePair]:
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
    train: Sequence[Problem | PreferencePair], heldout: Sequence[Problem | PreferencePair]
) -> None:
    shared = {item.prompt for item in train} & {item.prompt for item in heldout}
    if shared:
        raise ValueError(
            f"data.path and data.heldout_path share {len(shared)} prompts, one is {min(shared)!r}"
        )
