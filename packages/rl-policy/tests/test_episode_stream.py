"""Episodes that nobody waits for: real processes of environments, stand-ins for the engines."""

import json
import random
import re
import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S, wait_until
from rl_batched_data import BatchedDataDict
from rl_interfaces import NOT_SAMPLED, FinishedSubmission, TicketsLostError
from rl_policy.data.batches import ProblemEncoder, completion_batch
from rl_policy.data.datasets import Problem, open_stream
from rl_policy.data.tiny_model import build_tokenizer
from rl_policy.environments.exchange import MARGIN_S
from rl_policy.environments.pool import ProcessPool
from rl_policy.environments.rollouts import EnvironmentFailure, EpisodePlayer, episode_metrics
from rl_policy.environments.stream import EpisodeStream
from rl_policy.generation.stream import require_known, require_room
from rl_policy.recipes.policy_gradient.async_rollouts import AsyncPlan, AsyncRollouts, TrainedLedger
from rl_policy.recipes.policy_gradient.groups import EpisodeGroups

pytestmark = pytest.mark.needs("rl-policy[dtensor]")

ENVIRONMENTS = """
import asyncio, os, random, sys, time
from pathlib import Path

PLACE = Path(__file__).parent

class Echo:
    '''One to three turns; an observation has its turn's number and text.'''

    def reset(self, problem):
        self.number, self.turn = int(problem.prompt), 0
        time.sleep(random.random() * 0.002)
        return f"{self.number}?"

    def step(self, text):
        self.turn += 1
        try:
            how = (PLACE / f"fail {self.number}").read_text()
            (PLACE / f"fail {self.number}").unlink()
        except FileNotFoundError:
            time.sleep(random.random() * 0.002)
        else:
            {
                "die": lambda: os._exit(7),
                "hang": lambda: time.sleep(3600),
                "raise": lambda: 1 / 0,
            }[how]()
        return f"<{self.turn}{text}>", 1.0, self.turn == 1 + self.number % 3

class Gated(Echo):
    '''The first episode of a process waits for a file.'''

    made = 0

    def __init__(self):
        self.is_first = not Gated.made
        Gated.made += 1

    async def step(self, text):
        while self.is_first and not (PLACE / "gate").exists():
            await asyncio.sleep(0.01)
        return super().step(text)

class Slow(Echo):
    def reset(self, problem):
        time.sleep(0.5 if problem.prompt == "0" else 0.0)
        return super().reset(problem)

class Long(Echo):
    def reset(self, problem):
        return "9" * 99

class Uneven(Gated):
    '''The first episode of problem 0 cannot start; the others of it take long to.'''

    def reset(self, problem):
        if problem.prompt == "0":
            if self.is_first:
                return "9" * 99
            time.sleep(0.5)
        return super().reset(problem)

    async def step(self, text):
        return Echo.step(self, text)

class Wordy(Echo):
    def step(self, text):
        return "word " * 1_000_000, 1.0, True
"""
PROBLEMS = [Problem(prompt=str(number), answer="", source=0) for number in range(7)]
GROUP = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments")
    (path / "my_environments.py").write_text(ENVIRONMENTS)
    return path


@pytest.fixture(scope="module")
def player(place):
    """Return a function that gives a player with processes of one of the file's."""
    pools = []

    def player_of(name="Echo", *, max_groups=4, limit_s=PATIENCE_S, encoder=None):
        pool = ProcessPool(
            f"{place}/my_environments.py:{name}", limit_s=limit_s, max_groups=max_groups
        )
        pools.append(pool)
        return EpisodePlayer(
            pool=pool,
            encoder=encoder or ProblemEncoder(build_tokenizer(), use_chat_template=False),
            max_turns=5,
            max_length=64,
            max_new_tokens=9,
            role="user",
        )

    yield player_of
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def echo(player):
    return player()


class Engines:
    """Samples in an order of its own; each token is a letter that says which version sampled it."""

    def __init__(self, chance, encoder, *, limit=1000):
        self.version, self.chance, self.limit = 0, chance, limit
        self.running, self.tickets, self.prompts = {}, 0, []
        self.encoder, self.is_stuck = encoder, False

    @property
    def room(self):
        return self.limit - len(self.running)

    def submit(self, data, greedy=False):
        require_room(data.size, num_in_flight=len(self.running), limit=self.limit)
        assert data.size == 1
        self.tickets += 1
        tokens = data["input_ids"][0, : data["input_lengths"][0]].tolist()
        self.prompts.append(self.encoder.tokenizer.decode(tokens))
        self.running[self.tickets] = (tokens, self.version)
        return self.tickets

    def collect(self, tickets, *, timeout_s):
        wanted = require_known(tickets, self.running)
        if self.is_stuck or not wanted:
            return []
        count = self.chance.randint(0, len(wanted))
        return [self.finish(ticket) for ticket in self.chance.sample(wanted, count)]

    def cancel(self, tickets):
        for ticket in require_known(tickets, self.running):
            del self.running[ticket]

    def finish(self, ticket):
        prompt, first = self.running.pop(ticket)
        # A refit may have come after its first token.
        versions = [first] + [self.version] * self.chance.randint(0, 2)
        text = "".join(letter(version) for version in versions)
        turn = self.encoder.tokenizer.encode(text, add_special_tokens=False)
        assert len(turn) == len(versions)
        row = torch.tensor([prompt + turn])
        own = [NOT_SAMPLED] * len(prompt) + versions
        return FinishedSubmission(
            ticket=ticket,
            output=BatchedDataDict(
                output_ids=row,
                unpadded_sequence_lengths=torch.tensor([row.shape[1]]),
                generation_lengths=torch.tensor([len(turn)]),
                logprobs=torch.where(torch.tensor([own]) >= 0, -1.0, 0.0),
                weight_versions=torch.tensor([own]),
            ),
            finish_reasons=("stop",),
        )


def letter(version):
    return chr(ord("a") + version % 26)


def plan_of(**numbers):
    defaults = {
        "num_groups": 2,
        "group_size": GROUP,
        "num_steps": 6,
        "versions_per_step": 1,
        "max_staleness": 2,
        "refit_every": 1,
    }
    return AsyncPlan(**defaults | numbers)


def rollouts_of(plan, directory, player, *, step=0, limit_s=PATIENCE_S, too_old="drop"):
    return AsyncRollouts(
        plan,
        too_old=too_old,
        open_stream=lambda position: open_stream(PROBLEMS, weights=None, seed=0, position=position),
        sampler=EpisodeGroups(player, group_size=GROUP, limit_s=limit_s),
        ledger=TrainedLedger(directory / "trained.jsonl", step=step),
        timeout_s=PATIENCE_S,
    )


def check_age(taken, *, step, plan):
    """Compare the age of what is trained with the bound."""
    versions = taken.generated["weight_versions"]
    oldest = int(versions[versions != NOT_SAMPLED].min())
    staleness = (step - 1 - oldest) * plan.versions_per_step
    assert staleness <= taken.metrics["staleness_max"] <= plan.max_staleness


def check_rows(taken, encoder, *, step, plan):
    """Compare what is trained with what was sampled and answered, token by token."""
    rows = taken.generated
    ends = rows["unpadded_sequence_lengths"].tolist()
    for row, (problem, end) in enumerate(zip(taken.problems, ends, strict=True)):
        tokens = rows["output_ids"][row, :end].tolist()
        texts = [encoder.tokenizer.decode([token]) for token in tokens]
        versions = rows["weight_versions"][row, :end].tolist()
        sampled = rows["is_sampled"][row, :end].tolist()
        for text, version, own in zip(texts, versions, sampled, strict=True):
            assert text == letter(version) if own else version == NOT_SAMPLED
        newest = max(version for version in versions)
        assert (step - 1 - newest) * plan.versions_per_step >= 0
        # A turn goes to its own episode: the observation after it has its text.
        # An episode may not have started when its group has failed.
        mark = "?" if rows["sample_mask"][row] else ""
        assert "".join(texts).startswith(f"{problem.prompt}{mark}")
        turns = [text for role, text in rows["turns"][row] if role == "policy"]
        answers = [text for role, text in rows["turns"][row] if role == "environment"]
        if rows["sample_mask"][row]:
            assert len(turns) == 1 + int(problem.prompt) % 3 == rows["num_turns"][row]
            assert rows["rewards"][row] == len(turns)
            assert answers == [f"<{turn}{text}>" for turn, text in enumerate(turns[:-1], 1)]
            joined = "".join(f"{a}{b}" for a, b in zip(turns, [*answers, ""], strict=True))
            assert "".join(texts) == f"{problem.prompt}?{joined}"


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    max_steps_ahead=st.integers(1, 3),
    versions_per_step=st.integers(1, 2),
    refit_every=st.integers(1, 3),
    limit=st.sampled_from([1, 4, 1000]),
    too_old=st.sampled_from(["drop", "wait"]),
)
def test_every_problem_is_trained_on_once_whenever_the_run_is_killed(
    tmp_path_factory,
    place,
    echo,
    seed,
    max_steps_ahead,
    versions_per_step,
    refit_every,
    limit,
    too_old,
):
    directory, chance = tmp_path_factory.mktemp("run"), random.Random(seed)
    plan = plan_of(
        versions_per_step=versions_per_step,
        max_staleness=max_steps_ahead * versions_per_step,
        refit_every=min(refit_every, max_steps_ahead + 1),
    )
    plan.check()
    engines = Engines(chance, echo.encoder, limit=limit)
    new = partial(rollouts_of, plan, directory, echo, too_old=too_old)
    rollouts = new()
    most_dropped = {"drop": 1000, "wait": 0}[too_old]
    step = saved = 0
    while step < plan.num_steps:
        if chance.random() < 0.2:
            number = chance.randrange(len(PROBLEMS))
            (place / f"fail {number}").write_text(chance.choice(["die", "raise"]))
        if chance.random() < 0.2:
            # The driver is killed: what is not in the checkpoint is lost, but for the ledger.
            rollouts.close()
            step = saved
            engines = Engines(chance, echo.encoder, limit=limit)
            engines.version = step
            rollouts = new(step=step)
            if saved:
                rollouts.load(directory)
        step += 1
        if plan.is_refit_due(step=step, weights_step=engines.version):
            with rollouts.holding_engines():
                engines.version = step - 1
        try:
            taken = rollouts.take(engines, step, weights_step=engines.version)
        except EnvironmentFailure:
            # Both groups of the step have failed, which ends a run.
            step -= 1
            rollouts.close()
            engines = Engines(chance, echo.encoder, limit=limit)
            engines.version = saved
            rollouts = new(step=saved)
            step = saved
            if saved:
                rollouts.load(directory)
            continue
        check_age(taken, step=step, plan=plan)
        assert taken.metrics["rollouts_dropped"] <= most_dropped
        check_rows(taken, echo.encoder, step=step, plan=plan)
        rollouts.finish(step)
        if chance.random() < 0.4:
            rollouts.save(directory)
            saved = step
    rollouts.close()
    for each in place.glob("fail *"):
        each.unlink()
    lines = [json.loads(line) for line in (directory / "trained.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, plan.num_steps + 1))
    ids = [id for line in lines for id in line["ids"]]
    assert sorted(ids) == list(range(plan.num_steps * plan.num_groups))
    assert not engines.running


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("die", "its process ended with status 7"),
        ("raise", "it raised ZeroDivisionError"),
        ("hang", r"a call took more than environment\.timeout_s=2"),
    ],
)
def test_a_failure_costs_its_group_and_nothing_else(place, player, tmp_path, caplog, how, reason):
    own = player(limit_s=2.0 if how == "hang" else PATIENCE_S)
    (place / "fail 2").write_text(how)
    plan = plan_of(num_groups=7, num_steps=2, max_staleness=1)
    rollouts, engines = rollouts_of(plan, tmp_path, own), Engines(random.Random(0), own.encoder)
    lost = {}
    for step in (1, 2):
        engines.version = step - 1
        taken = rollouts.take(engines, step, weights_step=step - 1)
        check_rows(taken, own.encoder, step=step, plan=plan)
        rows = taken.generated
        lost[step] = [
            problem.prompt
            for problem, mask in zip(taken.problems, rows["sample_mask"].tolist(), strict=True)
            if not mask
        ]
        failures = episode_metrics(rows, group_size=GROUP)["environment_failures"]
        assert failures == len(lost[step]) / GROUP
        batch = completion_batch(rows)
        assert not batch["token_mask"][~rows["sample_mask"].bool()].any()
        rollouts.finish(step)
    rollouts.close()
    assert [*lost[1], *lost[2]] == ["2"] * GROUP
    said = f"{reason}.*, for the prompt '2[?]' in turn 1: its group is left out"
    assert re.search(said, caplog.text)


def test_what_has_been_answered_goes_on_while_others_compute(place, player):
    """No episode waits for another one, of its group or of others."""
    own = player("Gated", max_groups=2)
    engines = Engines(random.Random(0), own.encoder)
    stream = EpisodeStream(own, engines, group_size=2)
    try:
        # Three turns each. The first episode of each of both processes waits in its first one.
        waiting = [stream.submit(PROBLEMS[2]), stream.submit(PROBLEMS[5])]
        wait_until(
            lambda: sum("<2" in prompt for prompt in engines.prompts) == 2,
            what="two prompts of the second turn",
        )
        assert stream.collect(waiting, timeout_s=0.0) == []
        assert sum(prompt in ("2?", "5?") for prompt in engines.prompts) == 4
        assert len(engines.prompts) == 4 + 2 * 2
        (place / "gate").touch()
        found = {}
        while len(found) < 2:
            for each in stream.collect(set(waiting) - found.keys(), timeout_s=PATIENCE_S):
                found[each.ticket] = each
    finally:
        stream.close()
    assert all(each.episodes["num_turns"].tolist() == [3, 3] for each in found.values())


def test_more_groups_than_processes_wait_for_a_place(player):
    own = player(max_groups=1)
    engines = Engines(random.Random(0), own.encoder)
    stream = EpisodeStream(own, engines, group_size=2)
    try:
        tickets = {stream.submit(problem) for problem in PROBLEMS}
        left = set(tickets)
        while left:
            left -= {each.ticket for each in stream.collect(left, timeout_s=PATIENCE_S)}
    finally:
        stream.close()
    # One beside the place of an evaluation, which has not been.
    assert len(own.pool._processes) == 1


def test_nothing_is_submitted_while_engines_are_held(echo):
    engines = Engines(random.Random(0), echo.encoder)
    stream = EpisodeStream(echo, engines, group_size=GROUP)
    try:
        with stream.holding_engines():
            ticket = stream.submit(PROBLEMS[1])
            assert stream.collect([ticket], timeout_s=0.3) == []
            assert not engines.tickets
        (finished,) = stream.collect([ticket], timeout_s=PATIENCE_S)
    finally:
        stream.close()
    assert finished.episodes["num_turns"].tolist() == [2] * GROUP


def test_a_caller_that_does_something_else_for_long_costs_no_group(player):
    """As in a refit: a call waits to be sent, and a reply is longer than the socket's room."""
    limit_s = 0.5
    with player("Wordy", limit_s=limit_s).pool.exchange() as exchange:

        def replies():
            found = []
            while exchange.num_waiting:
                found += exchange.collect(timeout_s=PATIENCE_S)
            return [reply for _, reply in found]

        exchange.submit(0, 0, PROBLEMS[2])
        assert replies() == [{0: {"prompt": "2?"}}]
        exchange.submit(0, 0, "a")
        time.sleep(limit_s + MARGIN_S + 0.1)
        assert exchange.collect(timeout_s=0.0) == []
        time.sleep(limit_s + MARGIN_S + 0.1)
        assert replies() == [{0: {"observation": "word " * 1_000_000, "reward": 1.0, "done": True}}]


def test_what_engines_lose_is_raised_where_it_is_waited_for(echo):
    class Lost(Engines):
        def collect(self, tickets, *, timeout_s):
            raise TicketsLostError("on purpose", tickets=tickets)

    stream = EpisodeStream(echo, Lost(random.Random(0), echo.encoder), group_size=GROUP)
    ticket = stream.submit(PROBLEMS[0])
    with pytest.raises(TicketsLostError, match="on purpose"):
        stream.collect([ticket], timeout_s=PATIENCE_S)
    stream.close()
    assert not stream._thread.is_alive()


def test_a_failed_stream_leaves_no_reply_to_the_next_one(player):
    """The processes are the run's: nobody gets the answer to a call in flight at the failure."""
    own = player("Slow")

    class Lost(Engines):
        def collect(self, tickets, *, timeout_s):
            raise TicketsLostError("on purpose", tickets=tickets)

    failing = EpisodeStream(own, Lost(random.Random(0), own.encoder), group_size=GROUP)
    slow, fast = map(failing.submit, PROBLEMS[:2])
    with pytest.raises(TicketsLostError, match="on purpose"):
        failing.collect([slow, fast], timeout_s=PATIENCE_S)
    failing.close()
    stream = EpisodeStream(own, Engines(random.Random(0), own.encoder), group_size=GROUP)
    try:
        ticket = stream.submit(PROBLEMS[2])
        (finished,) = stream.collect([ticket], timeout_s=PATIENCE_S)
    finally:
        stream.close()
    assert finished.episodes["prompts"] == ["2?"] * GROUP
    assert finished.episodes["num_turns"].tolist() == [3] * GROUP


def test_a_group_that_fails_leaves_no_reply_to_the_next_one_in_its_place(player):
    own = player("Uneven", max_groups=1)
    stream = EpisodeStream(own, Engines(random.Random(0), own.encoder), group_size=GROUP)
    try:
        failed, after = map(stream.submit, (PROBLEMS[0], PROBLEMS[2]))
        (first,) = stream.collect([failed], timeout_s=PATIENCE_S)
        (second,) = stream.collect([after], timeout_s=PATIENCE_S)
    finally:
        stream.close()
    assert "a prompt of 99 tokens" in first.failure
    assert second.failure is None
    assert second.episodes["prompts"] == ["2?"] * GROUP
    assert second.episodes["num_turns"].tolist() == [3] * GROUP


def test_engines_that_finish_nothing_end_the_run(echo, tmp_path):
    rollouts = rollouts_of(plan_of(), tmp_path, echo)
    engines = Engines(random.Random(0), echo.encoder)
    engines.is_stuck = True
    rollouts._timeout_s, rollouts._sampler._limit_s = 0.5, -9.5
    with pytest.raises(TimeoutError, match="no completion of step 1 has finished"):
        rollouts.take(engines, 1, weights_step=0)
    rollouts.close()
    assert not engines.running


def test_a_step_without_a_group_left_ends_the_run(player, tmp_path):
    own = player("Long")
    rollouts = rollouts_of(plan_of(), tmp_path, own)
    engines = Engines(random.Random(0), own.encoder)
    with pytest.raises(EnvironmentFailure, match=r"in all 2 groups .*a prompt of 99 tokens"):
        rollouts.take(engines, 1, weights_step=0)
    # The run saves what it has.
    rollouts.save(tmp_path)
    rollouts.close()
    assert not engines.tickets


def test_groups_are_played_again_after_their_engines_have_died(echo, tmp_path):
    class Lost(Engines):
        def collect(self, tickets, *, timeout_s):
            if len(self.prompts) > 10:
                raise TicketsLostError("on purpose", tickets=tickets)
            return super().collect(tickets, timeout_s=timeout_s)

    plan = plan_of(num_steps=3)
    rollouts = rollouts_of(plan, tmp_path, echo, too_old="wait")
    engines = Lost(random.Random(0), echo.encoder)
    with pytest.raises(TicketsLostError, match="on purpose"):
        rollouts.take(engines, 1, weights_step=0)
    rollouts.sample_anew()
    engines = Engines(random.Random(0), echo.encoder)
    for step in (1, 2, 3):
        engines.version = step - 1
        taken = rollouts.take(engines, step, weights_step=step - 1)
        check_rows(taken, echo.encoder, step=step, plan=plan)
        rollouts.finish(step)
    rollouts.close()
    lines = [json.loads(line) for line in (tmp_path / "trained.jsonl").read_text().splitlines()]
    assert sorted(id for line in lines for id in line["ids"]) == list(range(6))


def test_groups_that_had_failed_are_played_again_after_a_resume(echo, tmp_path):
    plan = plan_of(num_groups=2, num_steps=2, max_staleness=1)
    before = rollouts_of(plan, tmp_path, echo)
    for id in before._buffer.open():
        rows = BatchedDataDict(sample_mask=torch.zeros(GROUP))
        before._buffer.put(id, rows, version=0)
    before.save(tmp_path)
    before.close()
    resumed = rollouts_of(plan, tmp_path, echo)
    resumed.load(tmp_path)
    engines = Engines(random.Random(0), echo.encoder)
    for step in (1, 2):
        engines.version = step - 1
        taken = resumed.take(engines, step, weights_step=step - 1)
        assert taken.generated["sample_mask"].all()
        resumed.finish(step)
    resumed.close()
    lines = [json.loads(line) for line in (tmp_path / "trained.jsonl").read_text().splitlines()]
    assert sorted(id for line in lines for id in line["ids"]) == [0, 1, 2, 3]


def test_an_evaluation_plays_beside_the_stream(echo):
    """Both have processes of their own in one pool."""
    engines = Engines(random.Random(0), echo.encoder)
    engines.is_stuck = True
    stream = EpisodeStream(echo, engines, group_size=GROUP)
    try:
        ticket = stream.submit(PROBLEMS[2])
        wait_until(lambda: engines.tickets == GROUP, what="a full group of tickets")
        reply = echo.pool.play({0: {0: PROBLEMS[4]}, 1: {0: PROBLEMS[5]}})
        assert reply == {0: {0: {"prompt": "4?"}}, 1: {0: {"prompt": "5?"}}}
        engines.is_stuck = False
        (finished,) = stream.collect([ticket], timeout_s=PATIENCE_S)
    finally:
        stream.close()
    assert finished.episodes["prompts"] == ["2?"] * GROUP
    assert finished.episodes["num_turns"].tolist() == [3] * GROUP
