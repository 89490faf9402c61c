"""The built-in task: doubling a number, with demonstrations that often forget to carry."""

from __future__ import annotations

import random

from rl_policy.data.problems import Problem, ProblemSets

DEMONSTRATIONS_PER_PROBLEM = 4
"""Careful or careless, each by its own draw: no problem is always shown wrong."""


def arithmetic_problems(
    *, max_number: int, num_heldout: int, num_validation: int, careless_share: float, seed: int
) -> ProblemSets:
    """Return the doublings of all numbers up to `max_number`, divided at random.

    Each number stands in one set. The right answer takes a rule that covers all of them: a digit of
    it depends on one digit of the number, and on whether the next one carries.

    Example:
        Problem("2*3478=", "6956")

    Args:
        max_number: Largest number that is doubled.
        num_heldout: Problems to measure accuracy on.
        num_validation: Problems to stop the supervised part by.
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
        train=tuple(_problem(number) for number in train),
        heldout=tuple(_problem(number) for number in numbers[:num_heldout]),
        validation=tuple(_problem(number) for number in numbers[num_heldout:num_measured]),
        demonstrations=tuple(
            _problem(number, is_careless=generator.random() < careless_share)
            for number in train
            for _ in range(DEMONSTRATIONS_PER_PROBLEM)
        ),
    )


def careless_double(number: int) -> int:
    """Return the double by someone who forgets to carry: 3478 gives 6846, not 6956."""
    return int("".join(str(2 * int(digit) % 10) for digit in str(number)))


def _problem(number: int, *, is_careless: bool = False) -> Problem:
    return Problem(f"2*{number}=", str(careless_double(number) if is_careless else 2 * number))
