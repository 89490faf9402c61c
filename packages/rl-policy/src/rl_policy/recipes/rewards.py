"""The reward of a completion: whether its answer is the right one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rl_policy.recipes.problems import Problem


class ExactMatch:
    """1.0 where the text of a completion's answer is the right answer, otherwise 0.0.

    White space around either text does not count; everything else does, so that a completion
    that lists several answers, or goes on after the right one, gets nothing.

    Example, with `answer_pattern = "= *(-?[0-9]+)"` and the answer "62":
        "27 + 35 = 62"   -> 1.0
        "62"             -> 0.0, the pattern matches nowhere
        "= 62, or = 63"  -> 0.0, the last match is 63

    Args:
        answer_pattern: A regular expression whose last match is the answer: its first group, or
            all of it where it has none. None: the whole completion is.

    Raises:
        ValueError: The pattern is no regular expression.
    """

    def __init__(self, answer_pattern: str | None = None) -> None:
        try:
            self._pattern = None if answer_pattern is None else re.compile(answer_pattern)
        except re.error as error:
            raise ValueError(f"reward.answer_pattern={answer_pattern!r}: {error}") from error

    def __call__(self, completions: Sequence[str], problems: Sequence[Problem]) -> list[float]:
        """Return the reward of each completion of the problem at the same place."""
        return [
            float(self._answer(completion) == problem.answer.strip())
            for completion, problem in zip(completions, problems, strict=True)
        ]

    def _answer(self, completion: str) -> str | None:
        if self._pattern is None:
            return completion.strip()
        matches = list(self._pattern.finditer(completion))
        if not matches:
            return None
        answer = matches[-1].group(1 if self._pattern.groups else 0)
        return None if answer is None else answer.strip()
