"""A calculator as a tool: `environment.function=rl_policy.environments.calculator:Calculator`.

A tiny model cannot multiply. It can write a product, and copy a number that it reads: a turn that
begins with `?` is a call of the calculator, one that begins with `=` is the answer.

    37*48 | ?37*48 | 1776 | =1776      reward 1, with one call
    37*48 | =1426                      reward 0, a guess

`write_data` writes problems, and demonstrations of both ways for a start: most of them guess, and
all guesses are wrong. That a call is worth it is for the policy to find out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

from rl_interfaces import EnvironmentProblem, EnvironmentStep

from rl_policy.data.rows import GivenRows

CALL, ANSWER = "?", "="
_PRODUCT = re.compile(r"([0-9]{1,6})\*([0-9]{1,6})")


class Calculator:
    """Rewards an answer that is exactly right by 1; multiplies on request."""

    def reset(self, problem: EnvironmentProblem) -> None:
        """Take the answer of a problem, whose prompt is the question."""
        self._answer = problem.answer

    def step(self, text: str) -> EnvironmentStep:
        """Compute the product of a call, or reward an answer."""
        if text.startswith(CALL):
            return EnvironmentStep(multiply(text.removeprefix(CALL)) + "\n", 0.0, done=False)
        return EnvironmentStep("", float(text == ANSWER + self._answer), done=True)


def multiply(expression: str) -> str:
    """Return the product, or what a calculator says of something else.

    Example:
        multiply("37*48") -> "1776"
    """
    found = _PRODUCT.fullmatch(expression.strip())
    return str(int(found[1]) * int(found[2])) if found else "error"


def write_data(directory: str | Path, *, guessing_share: float = 0.75, seed: int = 0) -> None:
    """Write `problems.jsonl` for GRPO, and `demonstrations.jsonl` for supervised fine-tuning.

    Args:
        directory: Created, unless it is there.
        guessing_share: Of the demonstrations, those that do not call the calculator.
        seed: Of the division, and of the guesses.
    """
    generator = random.Random(seed)
    factors = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    generator.shuffle(factors)
    products = [(f"{first}*{second}", first * second) for first, second in factors]
    half = len(products) // 2
    demonstrations = list(_demonstrations(products[:half], generator, share=guessing_share))
    problems = [{"prompt": text, "answer": str(value)} for text, value in products[half:]]
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    for name, rows in {"problems": problems, "demonstrations": demonstrations}.items():
        GivenRows(rows, key=name).write(path / f"{name}.jsonl")


def _demonstrations(
    products: list[tuple[str, int]], generator: random.Random, *, share: float
) -> Iterator[dict[str, str]]:
    # Not above: the process that plays episodes has no use for torch.
    from rl_policy.data.tiny_model import END

    for text, value in products:
        call = f"{CALL}{text}"
        if generator.random() < share:
            guess = generator.choice([each for each in range(100, 9802) if each != value])
            yield {"prompt": text, "answer": f"{ANSWER}{guess}"}
        else:
            yield {"prompt": text, "answer": call}
        # As the calculator's answer follows a call in an episode.
        yield {"prompt": f"{text}{call}{END}{value}\n", "answer": f"{ANSWER}{value}"}
