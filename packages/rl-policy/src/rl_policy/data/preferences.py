"""Preference pairs: reading them, dividing them, and the built-in ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_policy.data.arithmetic import careless_double
from rl_policy.data.problems import Problem, read_texts


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


def read_pairs(path: Path, *, key: str) -> list[PreferencePair]:
    """Return the pairs of a file of JSON lines with the texts `prompt`, `chosen` and `rejected`.

    Args:
        path: The file. Empty lines are skipped; a prompt may have several pairs.
        key: The config key that names it, for the errors.

    Raises:
        ValueError: The file cannot be read, holds nothing, or a line is malformed or prefers a text
            to itself; the message names file and line.
    """
    pairs: list[PreferencePair] = []
    fields = ("prompt", "chosen", "rejected")
    for number, (prompt, chosen, rejected) in read_texts(path, fields=fields, key=key):
        if chosen == rejected:
            raise ValueError(f"{path}:{number}: 'chosen' and 'rejected' are the same text")
        pairs.append(PreferencePair(prompt, chosen, rejected))
    if not pairs:
        raise ValueError(f"{key}={path} holds no pair")
    return pairs


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
        heldout: Pairs to measure; None holds out those of `num_heldout` prompts.
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
    shared = {pair.prompt for pair in pairs} & {pair.prompt for pair in heldout}
    if shared:
        raise ValueError(
            f"data.path and data.heldout_path share {len(shared)} prompts, one is {min(shared)!r}"
        )
    return PairSets(train=tuple(pairs), heldout=tuple(heldout))


def arithmetic_pairs(*, max_number: int) -> list[PreferencePair]:
    """Return a pair for each number up to `max_number` whose double carries a digit.

    The right double is preferred to that of someone who forgets to carry.

    Example:
        PreferencePair("2*3478=", chosen="6956", rejected="6846")
    """
    doubles = ((number, 2 * number, careless_double(number)) for number in range(max_number + 1))
    return [
        PreferencePair(f"2*{number}=", str(right), str(careless))
        for number, right, careless in doubles
        if right != careless
    ]
