"""A guessing game over several turns: `environment.function=rl_policy.environments.guessing:Guess`.

The policy has to find a digit, and is told whether it is higher or lower. It cannot know the digit,
and so has to learn a search: where to begin, and what to make of the hints.

    game 17: | 4 | + | 6 | - | 5      reward 1 - 2 * 0.1

`write_data` writes games, and demonstrations for a start, which guess at random. With three guesses
these find the digit in 37 % of the games, for a reward of 0.34; the best search always finds it,
for 0.86.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from rl_interfaces import EnvironmentProblem, EnvironmentStep

from rl_policy.data.rows import GivenRows

DIGITS = range(1, 8)
COST_OF_TURN = 0.1
"""Less reward for each guess after the first."""

_HIGHER, _LOWER = " + ", " - "


class Guess:
    """A digit from 1 to 7 to find, in the problem's column `secret`."""

    def reset(self, problem: EnvironmentProblem) -> None:
        """Start a game, with the problem's own prompt."""
        self._secret = int(problem.columns["secret"])
        self._num_guesses = 0

    def step(self, text: str) -> EnvironmentStep:
        """Compare a guess; what is none ends the game."""
        self._num_guesses += 1
        if text not in map(str, DIGITS):
            return EnvironmentStep("", 0.0, done=True)
        if int(text) == self._secret:
            return EnvironmentStep("", 1.0 - COST_OF_TURN * (self._num_guesses - 1), done=True)
        return EnvironmentStep(hint(int(text), self._secret), 0.0, done=False)


def hint(guess: int, secret: int) -> str:
    """Return what a wrong guess is answered."""
    return _HIGHER if secret > guess else _LOWER


def write_data(directory: str | Path, *, num_games: int = 2000, seed: int = 0) -> None:
    """Write `problems.jsonl` for GRPO, and `demonstrations.jsonl` for supervised fine-tuning.

    Args:
        directory: Created, unless it is there.
        num_games: Games in each.
        seed: Of the digits, and of the guesses.
    """
    generator = random.Random(seed)
    problems = [
        {"prompt": f"game {number}: ", "secret": generator.choice(DIGITS)}
        for number in range(1000, 1000 + num_games)
    ]
    demonstrations = [row for game in problems for row in _demonstrations(game, generator)]
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    for name, rows in {"problems": problems, "demonstrations": demonstrations}.items():
        GivenRows(rows, key=name).write(path / f"{name}.jsonl")


def _demonstrations(
    game: dict[str, str | int], generator: random.Random, *, num_guesses: int = 3
) -> Iterator[dict[str, str]]:
    """Yield the first turns of a game of random guesses, each with what was written before."""
    # Not above: the process that plays has no use for torch.
    from rl_policy.data.tiny_model import END

    text, secret = str(game["prompt"]), int(game["secret"])
    for _ in range(num_guesses):
        guess = generator.choice(DIGITS)
        yield {"prompt": text, "answer": str(guess)}
        if guess == secret:
            return
        text += f"{guess}{END}{hint(guess, secret)}"
