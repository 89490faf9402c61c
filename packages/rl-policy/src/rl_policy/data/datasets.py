"""What a run trains on: problems with verifiable answers, and preference pairs.

Both are read from JSON lines or built in (doubling a number), divided by prompt into what is
trained on and what is only measured, and drawn in a seeded order. `ExactMatch` rewards completions.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import regex

ItemT = TypeVar("ItemT")

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
    """A problem and its right answer."""

    prompt: str
    answer: str
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Further fields of its line in the data."""


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

    @property
    def rows(self) -> tuple[Problem, Problem]:
        """The two rows of a batch, chosen first: the order that `DPOLoss` asks for."""
        return Problem(self.prompt, self.chosen), Problem(self.prompt, self.rejected)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSets:
    """The pairs of a run. No prompt is in both sets.

    Attributes:
        train: What is trained on.
        heldout: What is measured.
    """

    train: tuple[PreferencePair, ...]
    heldout: tuple[PreferencePair, ...]


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


def read_problems(path: Path, *, key: str) -> list[Problem]:
    """Return the problems of a file of JSON lines, each with the texts `prompt` and `answer`.

    Further fields become its `columns`.

    Args:
        path: The file. Empty lines are skipped.
        key: The config key that names it, for the errors.

    Raises:
        ValueError: The file cannot be read, is empty, or a line is malformed or repeats a prompt;
            the message names file and line.
    """
    problems: list[Problem] = []
    first_line: dict[str, int] = {}
    for number, content in _read_objects(path, fields=("prompt", "answer"), key=key):
        prompt, answer = content.pop("prompt"), content.pop("answer")
        if prompt in first_line:
            raise ValueError(f"{path}:{number}: the prompt of line {first_line[prompt]} again")
        first_line[prompt] = number
        problems.append(Problem(prompt, answer, content))
    return problems


def read_pairs(path: Path, *, key: str) -> list[PreferencePair]:
    """Return the pairs of a file of JSON lines with the texts `prompt`, `chosen` and `rejected`.

    Args:
        path: The file, as for `read_problems`; a prompt may have several pairs.
        key: The config key that names it, for the errors.

    Raises:
        ValueError: The file cannot be read, is empty, or a line is malformed or prefers a text to
            itself; the message names file and line.
    """
    pairs: list[PreferencePair] = []
    fields = ("prompt", "chosen", "rejected")
    for number, content in _read_objects(path, fields=fields, key=key):
        prompt, chosen, rejected = (content[name] for name in fields)
        if chosen == rejected:
            raise ValueError(f"{path}:{number}: 'chosen' and 'rejected' are the same text")
        pairs.append(PreferencePair(prompt, chosen, rejected))
    return pairs


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
            f"data.num_validation={num_validation} leave none to train on"
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
                "leaves none to train on"
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


def _read_objects(
    path: Path, *, fields: Sequence[str], key: str
) -> list[tuple[int, dict[str, Any]]]:
    """Return the number and the object of each line of a JSON lines file, with texts `fields`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:  # bytes that are no UTF-8, a null byte in the path
        raise ValueError(f"{key}={path} cannot be read: {error}") from error
    rows = [
        (number, _parse_object(line, fields=fields, place=f"{path}:{number}"))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise ValueError(f"{key}={path} is empty: give a JSON object per line, with {fields}")
    return rows


def _parse_object(line: str, *, fields: Sequence[str], place: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError:
        raise ValueError(f"{place}: not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"{place}: not JSON that can be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{place}: must be an object, got {type(content).__name__}")
    for key in fields:
        if not isinstance(content.get(key), str) or not content[key].strip():
            raise ValueError(f"{place}: {key!r} must be a text that is not empty")
        if not _is_unicode(content[key]):
            raise ValueError(
                f"{place}: {key!r} has half of a surrogate pair, which is no character"
            )
    return content


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
