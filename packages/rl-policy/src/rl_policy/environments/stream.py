"""Episodes that nobody waits for: each goes on when its engine or its environment has answered.

    submit(problem) -> waits for a place -> reset -> turn -> step -> turn -> step ... -> complete
       a ticket        (a process)          each episode of the group by itself

`EpisodeRunner` is the body of the loop, a plain object of one thread; `EpisodeStream` runs it in a
thread of its own, so that episodes go on while the caller trains. Nothing waits for a whole batch:
engines sample the turns of some episodes while the environments of others compute.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces import NOT_SAMPLED, GenerationStream

from rl_policy.data.batches import Batch
from rl_policy.data.datasets import Problem
from rl_policy.environments.exchange import CallExchange, Failure
from rl_policy.environments.host import Reply
from rl_policy.environments.pool import ProcessPool
from rl_policy.environments.rollouts import Episode, EpisodePlayer, describe_failure, take_prompt

_LOGGER = logging.getLogger(__name__)

# Between two looks at engines while environments compute, and the other way round.
_POLL_S = 0.01
_IDLE_S = 1.0
# Of the thread, which ends between two looks.
_END_S = 30.0

TEXTS = "episode_texts"
"""The column in which `with_texts_as_bytes` has the texts of an episode."""
_LISTS = ("prompts", "turns")
_SPACE = ord(" ")

SpanRecorder: TypeAlias = Callable[[Literal["engine", "environment"], int, float, float], None]
"""Takes what was busy, the ticket of the group, and start and end by `time.monotonic`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedEpisodes:
    """A group whose episodes have all ended, or one of which has failed."""

    ticket: int
    """Its ticket."""
    episodes: Batch
    """What `EpisodePlayer.play` returns, of one group."""
    oldest_version: int | None
    """Of the weights that sampled its oldest token; None where none was sampled."""
    failure: str | None
    """Why it has failed, if it has."""


@dataclass(slots=True)
class _Group:
    ticket: int
    place: int
    episodes: list[Episode]
    turns: dict[int, int] = field(default_factory=dict[int, int])
    """Number of the episode, by the ticket of the turn that engines sample."""
    since: dict[int, float] = field(default_factory=dict[int, float])
    """When an episode began to wait, by its number."""

    @property
    def has_ended(self) -> bool:
        return all(each.has_ended for each in self.episodes)


class EpisodeRunner:
    """Plays groups of episodes, each of which goes on by itself.

    Args:
        player: Limits, encoder, and environments in processes.
        exchange: Of calls with these.
        source: Samples turns.
        group_size: Episodes of a group, which fail together.
        record: Takes what was busy and when. None: nothing does.
    """

    def __init__(
        self,
        player: EpisodePlayer,
        exchange: CallExchange,
        source: GenerationStream,
        *,
        group_size: int,
        record: SpanRecorder | None = None,
    ) -> None:
        self._player = player
        self._exchange = exchange
        self._source = source
        self._group_size = group_size
        self._record = record
        self._waiting: deque[tuple[int, Problem]] = deque()
        self._free = deque(range(player.pool.max_groups))
        self._groups: dict[int, _Group] = {}
        self._ready: deque[tuple[_Group, int]] = deque()
        self._sampled: dict[int, tuple[_Group, int]] = {}
        self.num_events = 0
        """Completions of turns and replies so far: what goes on."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to play."""
        return not self._waiting and not self._groups

    def submit(self, ticket: int, problem: Problem) -> None:
        """Play a group of episodes of a problem, once there is a place for it."""
        self._waiting.append((ticket, problem))

    def advance_environments(self, *, timeout_s: float) -> list[FinishedEpisodes]:
        """Make calls, and take the replies that are there; return the groups that have ended.

        Args:
            timeout_s: Most seconds to wait for a reply.
        """
        self._open_places()
        finished: list[FinishedEpisodes] = []
        for place, received in self._exchange.collect(timeout_s=timeout_s):
            self.num_events += 1
            group = self._groups[place]
            failure = (
                received if isinstance(received, Failure) else self._take_replies(group, received)
            )
            if failure is not None:
                finished.append(self._fail(group, failure))
            elif group.has_ended:
                finished.append(self._finish(group))
        return finished

    def advance_engines(self, *, timeout_s: float) -> None:
        """Hand over the turns that may be sampled, and give those that were to environments.

        Args:
            timeout_s: Most seconds to wait for a turn.
        """
        while self._ready and self._source.room > 0:
            group, number = self._ready.popleft()
            prompt = self._player.encoder.token_batch([group.episodes[number].tokens])
            turn = self._source.submit(prompt)
            group.turns[turn] = number
            self._sampled[turn] = (group, number)
        if not self._sampled:
            return
        for each in self._source.collect(self._sampled, timeout_s=timeout_s):
            self.num_events += 1
            group, number = self._sampled.pop(each.ticket)
            del group.turns[each.ticket]
            (text,) = self._player.take_turns([group.episodes[number]], each.output)
            self._note("engine", group, number)
            self._exchange.submit(group.place, number, text)

    def cancel(self) -> None:
        """Stop to sample."""
        self._source.cancel(self._sampled)
        self._sampled.clear()

    def close(self) -> None:
        """End the environments whose replies nobody waits for."""
        self._exchange.close()

    @property
    def waits_for_engines(self) -> bool:
        """Whether engines alone can bring it forward."""
        return bool(self._sampled) and not self._exchange.num_waiting

    def _open_places(self) -> None:
        while self._waiting and self._free:
            ticket, problem = self._waiting.popleft()
            place = self._free.popleft()
            episodes = [Episode(0, problem) for _ in range(self._group_size)]
            group = self._groups[place] = _Group(ticket, place, episodes)
            for number in range(self._group_size):
                group.since[number] = time.monotonic()
                self._exchange.submit(place, number, problem)

    def _take_replies(self, group: _Group, replies: Mapping[int, Reply]) -> Failure | None:
        """Let episodes go on; return the failure of one."""
        for number, reply in replies.items():
            self._note("environment", group, number)
            episode = group.episodes[number]
            if not episode.tokens:
                take_prompt(episode, reply)
                if failures := self._player.begin([episode]):
                    return failures[episode.group]
            elif (observation := self._player.take_reply(episode, reply)) is not None:
                self._player.append_observations([(episode, observation)])
            if not episode.has_ended:
                self._ready.append((group, number))
        return None

    def _fail(self, group: _Group, failure: Failure) -> FinishedEpisodes:
        """Take a group out: what it has in flight, and its process, whose calls nobody wants."""
        self._source.cancel(group.turns)
        for turn in group.turns:
            del self._sampled[turn]
        self._ready = deque(each for each in self._ready if each[0] is not group)
        self._exchange.forget(group.place)
        described = describe_failure(failure, group.episodes)
        self._player.warn(described)
        # Rows of a group that has failed have their prompts too.
        self._player.begin([each for each in group.episodes if not each.tokens])
        return self._finish(group, Failure(described))

    def _finish(self, group: _Group, failure: Failure | None = None) -> FinishedEpisodes:
        del self._groups[group.place]
        self._free.append(group.place)
        episodes = self._player.batch(group.episodes, {} if failure is None else {0: failure})
        versions = episodes["weight_versions"]
        sampled = versions[versions != NOT_SAMPLED]
        return FinishedEpisodes(
            ticket=group.ticket,
            episodes=episodes,
            oldest_version=int(sampled.min()) if len(sampled) else None,
            failure=None if failure is None else failure.reason,
        )

    def _note(self, what: Literal["engine", "environment"], group: _Group, number: int) -> None:
        now = time.monotonic()
        if self._record is not None:
            self._record(what, group.ticket, group.since[number], now)
        group.since[number] = now


class EpisodeStream:
    """Groups of episodes that go on in a thread while the caller does something else.

    Args:
        player: See `EpisodeRunner`. The thread has a copy of its encoder.
        source: Samples turns; nothing else submits to it, or collects from it.
        group_size: See `EpisodeRunner`.
        record: See `EpisodeRunner`.

    Raises:
        ValueError: The environments are not in processes.
    """

    def __init__(
        self,
        player: EpisodePlayer,
        source: GenerationStream,
        *,
        group_size: int,
        record: SpanRecorder | None = None,
    ) -> None:
        pool = player.pool
        assert isinstance(pool, ProcessPool), "the configuration was checked"
        # Others play in the first places meanwhile, such as an evaluation.
        exchange = pool.exchange(first_group=pool.max_groups)
        # A tokenizer is not for two threads.
        own = replace(player, encoder=copy.deepcopy(player.encoder))
        self._runner = EpisodeRunner(own, exchange, source, group_size=group_size, record=record)
        self._changed = threading.Condition()
        self._engines = threading.Lock()
        self._submitted: deque[tuple[int, Problem]] = deque()
        self._finished: dict[int, FinishedEpisodes] = {}
        self._num_tickets = 0
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._thread.start()

    def submit(self, problem: Problem) -> int:
        """Start a group of episodes of a problem; return its ticket."""
        with self._changed:
            ticket, self._num_tickets = self._num_tickets, self._num_tickets + 1
            self._submitted.append((ticket, problem))
            self._changed.notify_all()
        return ticket

    def collect(self, tickets: Iterable[int], *, timeout_s: float) -> list[FinishedEpisodes]:
        """Wait until a group is complete; return all that are, ascending by ticket, each once.

        Args:
            tickets: Of those to wait for.
            timeout_s: Most seconds in which no episode goes on. 0: take what is complete.

        Returns:
            Nothing, if no episode has gone on for that long.

        Raises:
            TicketsLostError: Engines have lost a turn, or have died; or whatever ended the thread.
        """
        wanted = set(tickets)
        with self._changed:
            seen, since = self._runner.num_events, time.monotonic()
            while True:
                if self._error is not None:
                    raise self._error
                ready = sorted(wanted & self._finished.keys())
                if ready or not wanted or time.monotonic() - since >= timeout_s:
                    return [self._finished.pop(ticket) for ticket in ready]
                self._changed.wait(min(_IDLE_S, timeout_s))
                if self._runner.num_events != seen:
                    seen, since = self._runner.num_events, time.monotonic()

    @contextmanager
    def holding_engines(self) -> Iterator[None]:
        """Submit and collect no turn meanwhile, while environments go on."""
        with self._engines:
            yield

    def close(self) -> None:
        """End the thread, and what engines sample for it. May be called again."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            _LOGGER.warning("the thread of episodes has not ended within %.0f s", _END_S)

    def _run(self) -> None:
        try:
            try:
                while self._take_submitted():
                    self._advance()
                with self._engines:
                    self._runner.cancel()
            finally:
                # Also after a failure: a later stream over the same processes would get replies
                # to calls that it has not made.
                self._runner.close()
        except BaseException as error:  # the caller's thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take_submitted(self) -> bool:
        """Wait until there is something to play; return False if it is to end."""
        with self._changed:
            while not self._is_closing and not self._submitted and self._runner.is_idle:
                self._changed.wait(_IDLE_S)
            while self._submitted:
                self._runner.submit(*self._submitted.popleft())
            return not self._is_closing

    def _advance(self) -> None:
        # A group that fails takes back its turns.
        with self._engines:
            finished = self._runner.advance_environments(timeout_s=0.0)
            waits = self._runner.waits_for_engines
            self._runner.advance_engines(timeout_s=_POLL_S if waits else 0.0)
        if not waits and not finished:
            time.sleep(_POLL_S)
        if finished:
            with self._changed:
                for each in finished:
                    self._finished[each.ticket] = each
                self._changed.notify_all()


def with_texts_as_bytes(episodes: Mapping[str, Any]) -> Batch:
    """Return episodes whose lists of texts are a column of bytes, as a checkpoint holds tensors.

    Args:
        episodes: What `EpisodePlayer.play` returns.

    Returns:
        Without `prompts` and `turns`, and with `TEXTS` `[batch, bytes]` uint8: JSON, padded with
        spaces.
    """
    rows = zip(*(episodes[name] for name in _LISTS), strict=True)
    encoded = [json.dumps(row).encode() for row in rows]
    width = max(map(len, encoded), default=0)
    texts = torch.tensor([[*each.ljust(width)] for each in encoded], dtype=torch.uint8)
    others = {name: column for name, column in episodes.items() if name not in _LISTS}
    return BatchedDataDict(others | {TEXTS: texts})


def with_texts(episodes: Mapping[str, Any]) -> Batch:
    """Return the episodes that `with_texts_as_bytes` was given.

    Args:
        episodes: Of one batch or several, padded with `PAD_VALUES`.
    """
    rows: Sequence[tuple[str, list[list[str]]]] = [
        json.loads(bytes(row)) for row in episodes[TEXTS].tolist()
    ]
    columns: dict[str, Any] = {name: each for name, each in episodes.items() if name != TEXTS}
    columns["prompts"] = [prompt for prompt, _ in rows]
    columns["turns"] = [[(role, text) for role, text in turns] for _, turns in rows]
    return BatchedDataDict(columns)


PAD_VALUES: Mapping[str, float] = {"weight_versions": NOT_SAMPLED, TEXTS: _SPACE}
"""For `BatchedDataDict.from_batches` of what `with_texts_as_bytes` has returned."""
