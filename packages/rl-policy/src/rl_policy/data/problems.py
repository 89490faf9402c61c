"""Problems with verifiable answers: reading them, dividing them, and drawing them in order."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem and its right answer."""

    prompt: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemSets:
    """The problems of a run. No prompt stands in two of the first three.

    Attributes:
        train: What GRPO draws prompts from.
        heldout: What accuracy is measured on.
        validation: What the supervised part is stopped by; may be empty.
        demonstrations: What the supervised part imitates: problems of `train`, whose answers
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


class ShuffledStream(Generic[ItemT]):
    """Items without end, in an order that seed and position alone decide.

    Each pass over the items has an order of its own, computed from the seed, so that a stream which
    is created anew at a saved position continues as if it had never been interrupted.

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


def read_problems(path: Path, *, key: str) -> list[Problem]:
    """Return the problems of a file of JSON lines, each with the texts `prompt` and `answer`.

    Args:
        path: The file. Empty lines are skipped.
        key: The config key that names it, for the errors.

    Raises:
        ValueError: The file cannot be read, holds nothing, or a line is malformed or repeats a
            prompt; the message names file and line.
    """
    problems: list[Problem] = []
    first_line: dict[str, int] = {}
    for number, (prompt, answer) in read_texts(path, fields=("prompt", "answer"), key=key):
        if prompt in first_line:
            raise ValueError(f"{path}:{number}: the prompt of line {first_line[prompt]} again")
        first_line[prompt] = number
        problems.append(Problem(prompt, answer))
    if not problems:
        raise ValueError(f"{key}={path} holds no problem")
    return problems


def read_texts(
    path: Path, *, fields: Sequence[str], key: str
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the number of each line of a file of JSON lines, and its texts in order of `fields`.

    Args:
        path: The file. Empty lines are skipped, and further fields ignored.
        fields: Texts that every object must have.
        key: The config key that names the file, for the errors.

    Raises:
        ValueError: The file cannot be read, or a line is malformed; the message names both.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{key}={path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, _parse_texts(line, fields=fields, place=f"{path}:{number}")


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
        heldout: Problems to measure on; None takes `num_heldout` out of `problems`.
        num_heldout: Not read where `heldout` is given.
        num_validation: Problems to stop the supervised part by.
        seed: Of the division.

    Raises:
        ValueError: Too few problems, or one to train on that is held out; the message names keys
            and numbers.
    """
    shuffled = random.Random(f"{seed}/division").sample(list(problems), len(problems))
    if heldout is None:
        heldout, shuffled = shuffled[:num_heldout], shuffled[num_heldout:]
    _check_division(
        problems, heldout, num_heldout=num_heldout, num_validation=num_validation, left=shuffled
    )
    train = tuple(shuffled[num_validation:])
    return ProblemSets(
        train=train,
        heldout=tuple(heldout),
        validation=tuple(shuffled[:num_validation]),
        demonstrations=train,
    )


def _check_division(
    problems: Sequence[Problem],
    heldout: Sequence[Problem],
    *,
    num_heldout: int,
    num_validation: int,
    left: Sequence[Problem],
) -> None:
    if num_validation >= len(left):
        raise ValueError(
            f"data.path holds {len(problems)} problems: data.num_heldout={num_heldout} and "
            f"data.num_validation={num_validation} leave none to train on"
        )
    both = {problem.prompt for problem in left} & {problem.prompt for problem in heldout}
    if both:
        raise ValueError(
            f"data.path and data.heldout_path share {len(both)} prompts, one is {min(both)!r}"
        )


def _parse_texts(line: str, *, fields: Sequence[str], place: str) -> tuple[str, ...]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{place}: must be an object, got {type(content).__name__}")
    for key in fields:
        if not isinstance(content.get(key), str) or not content[key].strip():
            raise ValueError(f"{place}: {key!r} must be a text that is not empty")
    return tuple(content[key] for key in fields)
