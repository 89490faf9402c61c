"""Environments: what a policy talks to over several turns, and what it is rewarded by."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable


class EnvironmentProblem(Protocol):
    """A row of the data, from which an episode starts."""

    @property
    def prompt(self) -> str:
        """Its text; for a conversation the contents of its messages, one a line."""
        ...

    @property
    def answer(self) -> str:
        """The right answer; empty where the data has none."""
        ...

    @property
    def columns(self) -> Mapping[str, Any]:
        """Further fields of the row."""
        ...

    @property
    def messages(self) -> Sequence[Mapping[str, str]]:
        """A conversation that is the prompt: `role` and `content` each; empty if it is a text."""
        ...


class EnvironmentStep(NamedTuple):
    """What an environment returns for a turn; a plain tuple of the three will do.

    Example:
        EnvironmentStep("higher", 0.0, done=False)
    """

    observation: str | Sequence[Mapping[str, str]]
    """What the policy reads before its next turn: a text, or messages, `role` and `content` each,
    where the prompt has some; unused if `done`."""
    reward: float
    """Of this turn, finite. The reward of an episode is the sum over its turns."""
    done: bool
    """Whether the episode ends here."""


@runtime_checkable
class Environment(Protocol):
    """A partner in a conversation, which answers the policy's turns and rewards them.

    One object has one episode at a time, and may have another one after it. Both methods may be
    `async def`: those of the episodes that run in one process are then awaited together.

    Example, two turns on the problem with the answer "6":
        reset(problem)  -> "A number from 1 to 9?"
        step("4")       -> EnvironmentStep("higher", 0.0, done=False)
        step("6")       -> EnvironmentStep("", 1.0, done=True)

        class Guess:
            def reset(self, problem):
                self.secret = int(problem.answer)
                return "A number from 1 to 9?"

            def step(self, text):
                if not text.isdigit():
                    return EnvironmentStep("", -1.0, done=True)
                if int(text) == self.secret:
                    return EnvironmentStep("", 1.0, done=True)
                hint = "higher" if int(text) < self.secret else "lower"
                return EnvironmentStep(hint, 0.0, done=False)
    """

    def reset(
        self, problem: EnvironmentProblem
    ) -> (
        str
        | Sequence[Mapping[str, str]]
        | Awaitable[str | Sequence[Mapping[str, str]] | None]
        | None
    ):
        """Start an episode; return what the policy reads first.

        Args:
            problem: Of the data. Whatever is random is best drawn from a seed that it gives, so
                that all episodes of a problem start alike and a run can be repeated.

        Returns:
            The prompt: a text, or messages, `role` and `content` each, for the chat template. None:
            that of the problem, with its messages if it has some.
        """
        ...

    def step(self, text: str) -> EnvironmentStep | Awaitable[EnvironmentStep]:
        """Answer a turn of the policy.

        Args:
            text: What it wrote, without the token or the text that ended the turn.
        """
        ...
