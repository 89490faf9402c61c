"""The built-in task: sums of two numbers, with demonstrations that often forget to carry."""

from __future__ import annotations

import random

from rl_policy.recipes.problems import Problem, ProblemSets

DEMONSTRATIONS_PER_PROBLEM = 4
"""Careful or careless, each by its own draw: no problem is always shown wrong."""


def arithmetic_problems(
    *, max_operand: int, num_heldout: int, num_validation: int, careless_share: float, seed: int
) -> ProblemSets:
    """Return all sums of two numbers up to `max_operand`, divided at random.

    A sum and its mirror (`3+5=` and `5+3=`) always stand in the same set, so that none that is
    measured has been trained on the other way round. What is measured holds one of the two.

    Example:
        Problem("27+35=", "62")

    Args:
        max_operand: Largest number that is added.
        num_heldout: Problems to measure accuracy on.
        num_validation: Problems to stop the supervised part by.
        careless_share: Share of the demonstrations that forget to carry, see `careless_sum`.
        seed: Of the division.

    Raises:
        ValueError: There are too few sums; the message names keys and numbers.
    """
    pairs = [(a, b) for a in range(max_operand + 1) for b in range(a, max_operand + 1)]
    num_measured = num_heldout + num_validation
    if num_measured >= len(pairs):
        raise ValueError(
            f"data.max_operand={max_operand} gives {len(pairs)} pairs of numbers: data.num_heldout="
            f"{num_heldout} and data.num_validation={num_validation} leave none to train on"
        )
    generator = random.Random(f"{seed}/arithmetic")
    generator.shuffle(pairs)
    measured = [_sum(*generator.sample(pair, 2)) for pair in pairs[:num_measured]]
    ordered = [order for a, b in pairs[num_measured:] for order in dict.fromkeys([(a, b), (b, a)])]
    return ProblemSets(
        train=tuple(_sum(a, b) for a, b in ordered),
        heldout=tuple(measured[:num_heldout]),
        validation=tuple(measured[num_heldout:]),
        demonstrations=tuple(
            _demonstration(a, b, is_careless=generator.random() < careless_share)
            for a, b in ordered
            for _ in range(DEMONSTRATIONS_PER_PROBLEM)
        ),
    )


def careless_sum(a: int, b: int) -> int:
    """Return the sum of someone who forgets to carry: 27 + 35 gives 52."""
    total, place = 0, 1
    while a or b:
        total += (a % 10 + b % 10) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total


def _demonstration(a: int, b: int, *, is_careless: bool) -> Problem:
    return Problem(f"{a}+{b}=", str(careless_sum(a, b) if is_careless else a + b))


def _sum(a: int, b: int) -> Problem:
    return Problem(f"{a}+{b}=", str(a + b))
