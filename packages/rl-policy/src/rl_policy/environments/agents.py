"""Programs that speak OpenAI's protocol as environments: their requests are the turns.

    play(problem, endpoint) ──POST /v1/chat/completions──▶ endpoint ─▶ reset returns the messages
                            ◀──────────the answer───────────────────── step takes the turn
                            ──the next request─────────────────────▶   step returns what is new
                            ──returns its reward───────────────────▶   step is done

The endpoint is in the process of the environment, and samples nothing: an episode's turns come from
the sampler of the run, like those of any environment, with the tokens and versions they have there.
A request continues the conversation of the one before. So the policy reads its own tokens again and
not a text's, and what is new are the messages after its turn.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from rl_interfaces import EnvironmentProblem, EnvironmentStep

from rl_policy.data.messages import Message
from rl_policy.data.user_code import UnusableError, awaited, finite_number
from rl_policy.environments.endpoint import MODEL, RequestError, own_endpoint

_LOGGER = logging.getLogger(__name__)

# Of an answer, which may wait for a step of training: longer than any client does by itself.
_ANSWER_LIMIT_S = 3600.0
_ENDED = "the episode has ended"
_ROLES = ("system", "developer", "user", "tool", "function")


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentEndpoint:
    """What an agent gives to OpenAI's client."""

    base_url: str
    """Of the protocol, on the loopback interface."""
    api_key: str
    """Of this episode: it tells whose requests these are."""
    model: str = MODEL
    """The name of the model."""


Agent: TypeAlias = Callable[[EnvironmentProblem, AgentEndpoint], float | Awaitable[float]]
"""A program that solves a problem by requests to the endpoint, and returns its reward."""


@dataclass(slots=True)
class _Request:
    """What an agent waits for."""

    messages: list[Message]
    """All of the conversation."""
    num_known: int
    """How many of them the policy has read before, or has written."""
    answer: Future[str] = field(default_factory=Future[str])


_Event: TypeAlias = "_Request | float | BaseException"
"""What an agent does next: it asks, returns its reward, or raises."""


class _AgentEpisode:
    """An agent in a thread of its own, and the conversation so far."""

    def __init__(self, agent: Agent, problem: EnvironmentProblem) -> None:
        self._agent = agent
        self._problem = problem
        self._conversation: list[Message] = []
        self._lock = threading.Lock()
        self._pending: _Request | None = None
        self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._key = own_endpoint().add(self)
        threading.Thread(target=self._run, name="agent", daemon=True).start()

    async def next_event(self) -> _Event:
        """Wait for the agent's next request or its end."""
        return await self._events.get()

    def answer(self, text: str) -> None:
        """Give the policy's turn to the agent, which has asked for it."""
        with self._lock:
            pending, self._pending = self._pending, None
            assert pending is not None, "a turn follows a request"
            self._conversation = [*pending.messages, {"role": "assistant", "content": text}]
        pending.answer.set_result(text)

    def end(self) -> None:
        """Refuse what the agent asks for from now on. May be called again."""
        with self._lock:
            self._has_ended = True
            pending, self._pending = self._pending, None
        own_endpoint().remove(self._key)
        if pending is not None:
            pending.answer.set_exception(RequestError(_ENDED))

    def ask(self, messages: list[Message]) -> str:
        """Return the policy's answer to a request; called in a thread of the endpoint.

        Raises:
            RequestError: It does not continue the conversation, or the episode has ended.
        """
        with self._lock:
            if self._has_ended:
                raise RequestError(_ENDED)
            request = self._pending = self._continued(messages)
        self._post(request)
        try:
            return request.answer.result(_ANSWER_LIMIT_S)
        except TimeoutError:
            raise RequestError(f"no answer within {_ANSWER_LIMIT_S:g} s") from None

    def _continued(self, messages: list[Message]) -> _Request:
        if self._pending is not None:
            raise RequestError("an episode is one conversation: wait for the answer before this")
        known = self._conversation
        for index, message in enumerate(known):
            given = messages[index] if index < len(messages) else {}
            # A client may give an answer back with further keys.
            if {key: given.get(key) for key in message} != message:
                raise RequestError(
                    f"messages[{index}] is not that of the request before: an episode is one "
                    "conversation, in which each request adds messages after the last answer"
                )
        new = messages[len(known) :]
        if not new:
            raise RequestError("the request adds no message after the last answer")
        if not all(each["content"].strip() for each in new):
            raise RequestError("a message after the last answer has an empty content")
        # The first request may show turns that nobody has sampled, as examples.
        own = new if known else new[-1:]
        if strange := [each["role"] for each in own if each["role"] not in _ROLES]:
            raise RequestError(
                f"a message of the role {strange[0]!r} after the last answer: the policy's turns "
                f"are sampled, and a request adds messages of {', '.join(_ROLES)}"
            )
        return _Request(messages, len(known))

    def _run(self) -> None:
        endpoint = AgentEndpoint(base_url=own_endpoint().base_url, api_key=self._key)
        try:
            returned = self._agent(self._problem, endpoint)
            if inspect.isawaitable(returned):
                returned = asyncio.run(awaited(returned))
            self._post(finite_number(returned))
        except BaseException as error:  # the code is the user's, in a thread of its own
            self._post(error)

    def _post(self, event: _Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            _LOGGER.debug("an agent went on after the end of its environment")


class AgentEnvironment:
    """An `rl_interfaces.Environment` whose partner is an agent.

    Args:
        agent: Has an episode for each problem.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._episode: _AgentEpisode | None = None
        self._end_episode: Callable[[], object] = lambda: None

    async def reset(self, problem: EnvironmentProblem) -> Sequence[Mapping[str, str]]:
        """Start the agent, and return the messages of its first request.

        Raises:
            UnusableError: It ends without one.
        """
        self._end_episode()
        episode = self._episode = _AgentEpisode(self._agent, problem)
        # Also when this environment is dropped: nobody answers its agent any more.
        self._end_episode = weakref.finalize(self, episode.end)
        event = await episode.next_event()
        if not isinstance(event, _Request):
            self._end_episode()
            if isinstance(event, BaseException):
                raise event
            raise UnusableError(f"it returned {event} without a request: there is no turn to train")
        return event.messages

    async def step(self, text: str) -> EnvironmentStep:
        """Answer the agent's request; return what its next one adds, or the reward it returns."""
        episode = self._episode
        assert episode is not None, "an episode starts by reset"
        episode.answer(text)
        event = await episode.next_event()
        if isinstance(event, _Request):
            return EnvironmentStep(event.messages[event.num_known :], 0.0, done=False)
        self._end_episode()
        if isinstance(event, BaseException):
            raise event
        return EnvironmentStep("", event, done=True)
