"""A guessing game over several turns: `environment.function=rl_policy.environments.guessing:Guess`.

The policy has to find a digit, and is told whether it is higher or lower. It cannot know the digit,
and so has to learn a search: a good first guess, and to believe the hints.

    A digit? | 5 | higher | 8 | lower | 6      reward 1 - 2 * 0.1
"""

from __future__ import annotations

import random

from rl_interfaces import EnvironmentProblem, EnvironmentStep

DIGITS = range(1, 10)
COST_OF_TURN = 0.1
"""Less reward for each further guess; a turn that is no guess ends the game with -1 turn's cost."""


class Guess:
    """A digit from 1 to 9 to find, the same in all episodes of a problem.

    The first character of a turn is the guess.
    """

    def reset(self, problem: EnvironmentProblem) -> str:
        """Draw the digit by the problem's prompt, which the policy does not see."""
        self._secret = random.Random(problem.prompt).choice(DIGITS)
        self._num_guesses = 0
        return "A digit? "

    def step(self, text: str) -> EnvironmentStep:
        """Compare a guess."""
        self._num_guesses += 1
        if not text[:1].isdecimal() or int(text[0]) not in DIGITS:
            return EnvironmentStep("", -COST_OF_TURN, done=True)
        guess = int(text[0])
        if guess == self._secret:
            return EnvironmentStep("", 1.0 - COST_OF_TURN * (self._num_guesses - 1), done=True)
        return EnvironmentStep(" + " if guess < self._secret else " - ", 0.0, done=False)
