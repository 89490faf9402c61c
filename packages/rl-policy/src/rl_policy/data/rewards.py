"""Rewards by functions of the user's, with a limit of time.

A function that is named runs in a process of its own: one that hangs, dies or holds the
interpreter's lock then costs the run one clear error, and what it imports does not meet what the
run has imported. A function that a Python program gives runs in that program, as it may share state
with it.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from rl_policy.data.datasets import Problem
from rl_policy.data.reward_process import answer, require_reward
from rl_policy.data.user_code import end_process, require_name


class Reward(Protocol):
    """Rewards of completions, as `ProblemInputs.reward` takes them."""

    def __call__(self, completions: Sequence[str], problems: Sequence[Problem]) -> Sequence[float]:
        """Return the reward of each completion of the problem at the same index."""
        ...


def is_solved_share(reward: Reward) -> bool:
    """Return whether the mean of a reward is the share of the problems that are solved.

    A reward says so by its attribute `is_solved_share`: it is 1 for a solved problem and 0 for any
    other. A function of the user's may return any number.
    """
    return getattr(reward, "is_solved_share", False)


class RewardError(RuntimeError):
    """A reward function gave no rewards. The message names it, the sample, and what was wrong.

    Attributes:
        policy_has_changed: Whether the step that it has ended had trained the policy before.
    """

    policy_has_changed: bool = False


class Rewards(list[float]):
    """Rewards that are sums, with their parts.

    Attributes:
        parts: By function, the reward of each sample before its weight.
    """

    def __init__(self, values: Sequence[float], parts: Mapping[str, Sequence[float]]) -> None:
        super().__init__(values)
        self.parts = parts


def mean_parts(rewards: Sequence[float]) -> dict[str, float]:
    """Return the mean of each part of rewards, as columns of the metrics; empty for others."""
    parts = rewards.parts if isinstance(rewards, Rewards) else {}
    return {f"reward/{name}": sum(values) / len(values) for name, values in parts.items()}


class WeightedRewards:
    """The weighted sum of several rewards.

    Args:
        rewards: By name.
        weights: One for each, in their order.
    """

    def __init__(self, rewards: Mapping[str, Reward], weights: Sequence[float]) -> None:
        self._rewards = dict(rewards)
        self._weights = dict(zip(rewards, weights, strict=True))
        (first, *others), (weight, *_) = rewards.values(), weights
        self.is_solved_share = not others and weight == 1 and is_solved_share(first)

    def __call__(self, completions: Sequence[str], problems: Sequence[Problem]) -> Rewards:
        """See `Reward`."""
        parts = {name: reward(completions, problems) for name, reward in self._rewards.items()}
        sums = [0.0] * len(completions)
        for name, values in parts.items():
            weight = self._weights[name]
            sums = [total + weight * value for total, value in zip(sums, values, strict=True)]
        return Rewards(sums, parts)


class RewardFunction:
    """A reward function in a process of its own, which ends with this object or this process.

    Args:
        name: `FILE.py:NAME` or `PACKAGE.MODULE:NAME`: a function of a list of completions and a
            list of `Problem`, async or not, that returns a number for each.
        limit_s: Most seconds of its import, and of a call.

    Raises:
        ValueError: It cannot be loaded in time; the message names key and reason.
    """

    def __init__(self, name: str, *, limit_s: float) -> None:
        self._name, self._limit_s = name, limit_s
        require_name(name, key="reward.function")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rl_policy.data.reward_process", name, str(limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # A terminal's Ctrl-C is for the run, which ends this process in order.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._end = weakref.finalize(self, _end, self._process)
        self._rest = b""
        try:
            reply = self._receive()
        except RewardError as error:
            raise ValueError(f"{error}") from None
        if "error" in reply:
            self.close()
            raise ValueError(f"reward.function={name!r} cannot be loaded: {reply['error']}")

    def __call__(self, completions: Sequence[str], problems: Sequence[Problem]) -> list[float]:
        """Return the reward of each completion of the problem at the same index.

        Raises:
            RewardError: It raised, took too long, or returned something else than a number for
                each completion.
        """
        if not self._end.alive:
            raise RewardError(f"reward.function={self._name!r}: its process has ended")
        rows = [asdict(each) for each in problems]
        self._send(_request(completions, rows))
        return _rewards(self._name, self._receive(), completions, problems)

    def close(self) -> None:
        """End the process. May be called again."""
        self._end()

    def _send(self, data: bytes) -> None:
        view, deadline = memoryview(data), time.monotonic() + self._limit_s
        os.set_blocking(self._requests, False)
        while view:
            self._wait(self._requests, selectors.EVENT_WRITE, deadline)
            try:
                view = view[os.write(self._requests, view) :]
            except BrokenPipeError:
                raise self._died() from None

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._limit_s
        while b"\n" not in self._rest:
            self._wait(self._replies, selectors.EVENT_READ, deadline)
            data = os.read(self._replies, 1 << 20)
            if not data:
                raise self._died()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, event)
            if selector.select(max(0.0, deadline - time.monotonic())):
                return
        self.close()
        raise RewardError(
            f"reward.function={self._name!r} took more than reward.timeout_s={self._limit_s:g}"
        )

    def _died(self) -> RewardError:
        self.close()
        return RewardError(
            f"reward.function={self._name!r}: its process ended with status "
            f"{self._process.returncode}"
        )


class GivenReward:
    """A reward function that a Python program gives, in the place of a name.

    It is called in a thread, which cannot be ended: one that takes too long ends the run, and goes
    on until the program ends.

    Args:
        function: Of a list of completions and a list of `Problem`, async or not, that returns a
            number for each.

    Raises:
        TypeError: It is no function of two arguments.
    """

    def __init__(self, function: Callable[[list[str], list[Problem]], Any]) -> None:
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._function = require_reward(function, name=self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> GivenReward:
        """Return itself: the function may have state, which is the program's."""
        return self

    def __str__(self) -> str:
        """Return what stands for it where a name would, which no file has."""
        return f"<{self.name}>"

    def limited(self, limit_s: float) -> Reward:
        """Return the reward, whose calls may take as long.

        Args:
            limit_s: Most seconds of a call.
        """

        def call(completions: Sequence[str], problems: Sequence[Problem]) -> list[float]:
            replies: list[dict[str, Any]] = []

            def run() -> None:
                replies.append(answer(self._function, completions, problems, limit_s=limit_s))

            thread = threading.Thread(target=run, name=f"reward {self.name}", daemon=True)
            thread.start()
            thread.join(limit_s)
            if thread.is_alive():
                raise RewardError(
                    f"the reward {self.name!r} took more than reward.timeout_s={limit_s:g}"
                )
            if not replies:
                raise RewardError(f"the reward {self.name!r} ended its thread")
            return _rewards(self.name, replies[0], completions, problems)

        return call


def _rewards(
    name: str, reply: Mapping[str, Any], completions: Sequence[str], problems: Sequence[Problem]
) -> list[float]:
    """Return the rewards of a reply, or raise a `RewardError` that names the sample."""
    if "error" not in reply:
        return reply["rewards"]
    place = f"in a call with {len(completions)} samples"
    if (index := reply.get("sample")) is not None:
        place = (
            f"for sample {index} of {len(completions)}, the prompt "
            f"{problems[index].prompt!r:.80} with the completion {completions[index]!r:.80}"
        )
    raise RewardError(f"reward.function={name!r}: {reply['error']}, {place}")


def _request(completions: Sequence[str], rows: list[dict[str, Any]]) -> bytes:
    # Columns of a dataset may be dates and the like, of which a function gets the text.
    return (
        json.dumps({"completions": [*completions], "problems": rows}, default=str).encode() + b"\n"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    end_process(process, grace_s=0.5)
