"""A user's environments where they run: calls of `reset` and `step`, and checks of what they give.

Nothing a user's code raises or returns leaves a host as an exception: it becomes a reply with an
`error`, which says what was wrong.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from rl_interfaces import Environment

from rl_policy.data.datasets import Problem
from rl_policy.data.messages import Message, read_messages
from rl_policy.data.user_code import (
    UnusableError,
    awaited,
    described,
    finite_number,
    require_signature,
)
from rl_policy.environments.agents import Agent, AgentEnvironment

KeyT = TypeVar("KeyT", bound=Hashable)

Reply: TypeAlias = dict[str, Any]
"""Of `reset`: `prompt`. Of `step`: `observation`, `reward` and `done`. Of a failure: `error`. What
is said is a text or a list of messages."""


class Call(NamedTuple, Generic[KeyT]):
    """A call of one episode."""

    key: KeyT
    """Which episode."""
    argument: Problem | str
    """A problem: an episode starts by `reset`. A text: a turn, for `step`."""


def require_environment(factory: Any, *, name: str) -> Callable[[], Environment]:
    """Return what makes environments: a class, a function without arguments, or one for an agent.

    Args:
        factory: Of the user's. A function of a problem and an endpoint is an agent.
        name: Of it, for the errors.

    Raises:
        UnusableError: It is none, as far as that can be known without a call; names it.
    """
    if not callable(factory):
        raise UnusableError(f"{factory!r} is no class or function that makes environments")
    if _is_agent(factory):
        return partial(AgentEnvironment, cast("Agent", factory))
    try:
        made = require_signature(
            factory, name=name, takes="no arguments, or, as an agent, a problem and an endpoint"
        )
    except TypeError as error:
        raise UnusableError(str(error)) from None
    if inspect.isclass(factory):
        _require_methods(factory, name=name)
    return made


class EpisodeHost(Generic[KeyT]):
    """The environments of some episodes.

    Args:
        factory: Makes an environment.
        limit_s: Most seconds of a call that is awaited. Other calls are for the caller to end.
    """

    def __init__(self, factory: Callable[[], Environment], *, limit_s: float) -> None:
        self._factory = factory
        self._limit_s = limit_s
        self._environments: dict[KeyT, Environment] = {}
        # One loop for all calls, as connections that an environment keeps belong to it.
        self._runner = asyncio.Runner()
        self._awaited: dict[asyncio.Task[Reply], KeyT] = {}
        self.running: KeyT | None = None
        """The episode whose call is running; None while several are awaited together."""

    def answers(self, calls: Iterable[Call[KeyT]]) -> Iterator[tuple[KeyT, Reply]]:
        """Yield the reply to each call as it is there: in their order, those awaited last."""
        waiting: list[tuple[Call[KeyT], Awaitable[Any]]] = []
        for call in calls:
            self.running = call.key
            try:
                returned = self._start(call)
                if inspect.isawaitable(returned):
                    waiting.append((call, returned))
                    continue
                reply = _checked(call, returned)
            except Exception as error:  # the code is the user's: anything may be raised
                reply = {"error": described(error)}
            yield call.key, reply
        self.running = None
        if waiting:
            replies = self._runner.run(self._await_all(waiting))
            yield from zip((call.key for call, _ in waiting), replies, strict=True)

    @property
    def num_awaited(self) -> int:
        """Calls of `begin` whose replies `finished` will return."""
        return len(self._awaited)

    def begin(self, call: Call[KeyT]) -> Reply | None:
        """Make a call; return its reply, or None where it is awaited, see `finished`."""
        try:
            # Outside of the loop, as code that is not asynchronous may run one of its own.
            returned = self._start(call)
            if not inspect.isawaitable(returned):
                return _checked(call, returned)
        except Exception as error:  # the code is the user's: anything may be raised
            return {"error": described(error)}
        task = self._runner.get_loop().create_task(self._finish(call, returned))
        self._awaited[task] = call.key
        return None

    def finished(self, connection: socket.socket) -> list[tuple[KeyT, Reply]]:
        """Wait until an awaited call has finished or something can be read; return what has."""
        loop = self._runner.get_loop()
        readable = loop.create_future()
        loop.add_reader(connection, lambda: readable.done() or readable.set_result(None))
        try:
            events = {*self._awaited, readable}
            loop.run_until_complete(asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED))
        finally:
            loop.remove_reader(connection)
        done = [task for task in self._awaited if task.done()]
        return [(self._awaited.pop(task), task.result()) for task in done]

    def forget(self, keys: Iterable[KeyT]) -> None:
        """Drop the environments of episodes; the next `reset` makes new ones."""
        for key in keys:
            self._environments.pop(key, None)

    def renew_loop(self) -> None:
        """Have a new loop for what is awaited: the last one hangs in a thread that was left."""
        self._runner = asyncio.Runner()

    def _start(self, call: Call[KeyT]) -> Any:
        if isinstance(call.argument, str):
            return self._environments[call.key].step(call.argument)
        if call.key not in self._environments:
            made: Any = self._factory()
            _require_methods(made, name=type(made).__name__)
            self._environments[call.key] = made
        return self._environments[call.key].reset(call.argument)

    async def _await_all(self, waiting: Sequence[tuple[Call[KeyT], Awaitable[Any]]]) -> list[Reply]:
        return await asyncio.gather(*(self._finish(*each) for each in waiting))

    async def _finish(self, call: Call[KeyT], returned: Awaitable[Any]) -> Reply:
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                value = await awaited(returned)
            return _checked(call, value)
        except Exception as error:  # as above
            # A time limit of the user's own is an error like others.
            return {"error": TOO_LONG if limit.expired() else described(error)}


TOO_LONG = "a call took too long"
"""The error of a call that has exceeded the limit; whoever knows the key names it."""


def _is_agent(factory: Any) -> bool:
    """Return whether a user's function needs two arguments, as an agent does."""
    if inspect.isclass(factory):
        return False
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # some that are built in have no signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in parameters if each.kind in kinds and each.default is each.empty]
    return len(needed) == 2


def _require_methods(environment: Any, *, name: str) -> None:
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise UnusableError(
                f"{name} has no method {method!r}: an environment has reset and step"
            )


def _checked(call: Call[Any], returned: Any) -> Reply:
    """Return the reply of what a call returned.

    Raises:
        UnusableError: It is something else than the method has to return.
    """
    if not isinstance(call.argument, str):
        expected = "a text or messages, or None for the problem's own"
        said = None if returned is None else _said(returned, what="reset", expected=expected)
        return {"prompt": said}
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise UnusableError(
            f"step returned {returned!r:.60}, a {type(returned).__name__}: expected "
            "(observation, reward, done)"
        )
    observation, reward, done = returned
    said = _said(observation, what="step", expected="a text or messages as observation")
    # numpy's own type has this name too.
    if type(done).__name__ != "bool":
        raise UnusableError(
            f"step returned done={done!r:.60}, a {type(done).__name__}: expected True or False"
        )
    try:
        number = finite_number(reward)
    except UnusableError as error:
        raise UnusableError(f"the reward of step: {error}") from None
    return {"observation": said, "reward": number, "done": bool(done)}


def _said(value: Any, *, what: str, expected: str) -> str | list[Message]:
    """Return a text, or messages.

    Raises:
        UnusableError: It is neither.
    """
    if isinstance(value, list | tuple):
        try:
            return read_messages(value, place=f"what {what} returned")
        except ValueError as error:
            raise UnusableError(str(error)) from None
    if not isinstance(value, str):
        raise UnusableError(
            f"{what} returned {value!r:.60}, a {type(value).__name__}: expected {expected}"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UnusableError(
            f"{what} returned half of a surrogate pair, which is no character"
        ) from None
    return value
