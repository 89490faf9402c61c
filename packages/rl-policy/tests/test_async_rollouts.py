"""Asynchronous rollouts: what may be submitted, what is trained on, and a run that is killed."""

import json
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_batched_data import BatchedDataDict
from rl_interfaces import NOT_SAMPLED, FinishedSubmission, TicketsLostError
from rl_policy.data.datasets import Problem, open_stream
from rl_policy.generation.stream import require_known, require_room
from rl_policy.recipes.policy_gradient.async_rollouts import AsyncPlan, AsyncRollouts, TrainedLedger
from rl_policy.recipes.policy_gradient.groups import CompletionGroups

PROBLEMS = [Problem(prompt=str(number), answer="", source=0) for number in range(7)]
PAD = 99


def plan_of(**numbers):
    defaults = {
        "num_groups": 4,
        "group_size": 2,
        "num_steps": 100,
        "versions_per_step": 1,
        "max_staleness": 2,
        "refit_every": 1,
    }
    return AsyncPlan(**defaults | numbers)


def test_what_may_be_submitted_is_bounded_by_the_last_step_and_by_room():
    plan = plan_of()
    assert plan.num_to_open(held=1, step=99, room=99) == 7
    assert plan.num_to_open(held=9, step=99, room=99) == 0
    assert plan.num_to_open(held=0, step=6, room=7) == 3


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"versions_per_step": 3}, "max_staleness=2 is less than the 3 optimizer steps of a step"),
        ({"refit_every": 4}, "refit_every=4 lets engines fall 3 optimizer steps behind"),
    ],
)
def test_numbers_that_cannot_be_are_refused(numbers, message):
    plan_of().check()
    plan_of(refit_every=3).check()
    with pytest.raises(ValueError, match=message):
        plan_of(**numbers).check()


def test_a_refit_is_due_after_so_many_steps():
    plan = plan_of(refit_every=2)
    assert plan.is_refit_due(step=5, weights_step=-1)
    assert not plan.is_refit_due(step=5, weights_step=4)
    assert not plan.is_refit_due(step=5, weights_step=3)
    assert plan.is_refit_due(step=5, weights_step=2)


class Engines:
    """Samples in an order of its own: a row is the problem's number and the engines' version."""

    def __init__(self, chance, limit=1000):
        self.version, self.chance, self.limit = 0, chance, limit
        self.running, self.tickets, self.rows = {}, 0, 0

    @property
    def room(self):
        return self.limit - self.rows

    def submit(self, data, greedy=False):
        require_room(data.size, num_in_flight=self.rows, limit=self.limit)
        self.tickets += 1
        self.rows += data.size
        # The first token is sampled by the weights that are there now.
        self.running[self.tickets] = (data["input_ids"][:, 0], self.version)
        return self.tickets

    def collect(self, tickets, *, timeout_s):
        wanted = require_known(tickets, self.running)
        if not timeout_s or not wanted:
            return []
        count = self.chance.randint(1, len(wanted))
        return [self.finish(ticket) for ticket in self.chance.sample(wanted, count)]

    def finish(self, ticket):
        numbers, version = self.running.pop(ticket)
        self.rows -= len(numbers)
        width = self.chance.randint(1, 3)
        versions = torch.full((len(numbers), width), self.version)
        versions[:, 0] = version
        return FinishedSubmission(
            ticket=ticket,
            output=BatchedDataDict(
                output_ids=numbers[:, None].repeat(1, width),
                weight_version=versions[:, 0],
                weight_versions=versions,
            ),
            finish_reasons=("stop",) * len(numbers),
        )


def rollouts_of(plan, directory, *, step, too_old="drop"):
    return AsyncRollouts(
        plan,
        too_old=too_old,
        open_stream=lambda position: open_stream(PROBLEMS, weights=None, seed=0, position=position),
        sampler=CompletionGroups(
            lambda problems: BatchedDataDict(
                input_ids=torch.tensor([[int(problem.prompt)] for problem in problems]),
                input_lengths=torch.ones(len(problems)).long(),
            ),
            group_size=plan.group_size,
            pad_id=PAD,
        ),
        ledger=TrainedLedger(directory / "trained.jsonl", step=step),
        timeout_s=1.0,
    )


def trained_ids(directory):
    lines = (directory / "trained.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    max_steps_ahead=st.integers(1, 3),
    versions_per_step=st.integers(1, 2),
    refit_every=st.integers(1, 3),
    limit=st.sampled_from([2, 7, 1000]),
    too_old=st.sampled_from(["drop", "wait"]),
)
def test_every_problem_is_trained_on_once_whenever_the_run_is_killed(
    tmp_path_factory, seed, max_steps_ahead, versions_per_step, refit_every, limit, too_old
):
    directory, chance = tmp_path_factory.mktemp("run"), random.Random(seed)
    plan = plan_of(
        num_steps=12,
        versions_per_step=versions_per_step,
        max_staleness=max_steps_ahead * versions_per_step,
        refit_every=min(refit_every, max_steps_ahead + 1),
    )
    plan.check()
    rollouts = rollouts_of(plan, directory, step=0, too_old=too_old)
    engines, step, saved = Engines(chance, limit), 0, 0
    while step < plan.num_steps:
        if chance.random() < 0.1:
            # The driver is killed: what is not in the checkpoint is lost, but for the ledger.
            step = saved
            rollouts = rollouts_of(plan, directory, step=step, too_old=too_old)
            engines = Engines(chance, limit)
            engines.version = step
            if saved:
                rollouts.load(directory)
        step += 1
        if chance.random() < 0.1:
            # Engines are replaced, and receive weights before they sample.
            rollouts.sample_anew()
            engines = Engines(chance, limit)
            engines.version = step - 1
        if plan.is_refit_due(step=step, weights_step=engines.version):
            engines.version = step - 1
        taken = rollouts.take(engines, step, weights_step=engines.version)
        numbers = [int(problem.prompt) for problem in taken.problems]
        assert taken.generated["output_ids"][:, 0].tolist() == numbers
        versions = taken.generated["weight_versions"]
        oldest = versions[versions != NOT_SAMPLED].min()
        staleness = (step - 1 - int(oldest)) * versions_per_step
        assert taken.metrics["staleness_max"] == staleness <= plan.max_staleness
        assert too_old == "drop" or taken.metrics["rollouts_dropped"] == 0
        assert ((taken.generated["output_ids"] == PAD) == (versions == NOT_SAMPLED)).all()
        rollouts.finish(step)
        if chance.random() < 0.3:
            rollouts.save(directory)
            saved = step
    lines = trained_ids(directory)
    assert [line["step"] for line in lines] == list(range(1, plan.num_steps + 1))
    ids = [id for line in lines for id in line["ids"]]
    # Nothing is opened that the last step does not take: no problem is left out.
    assert sorted(ids) == list(range(plan.num_steps * plan.num_groups))
    assert not engines.running


def test_what_is_sampled_while_a_step_trains_is_of_its_weights_and_older(tmp_path):
    plan, engines = plan_of(num_steps=3, max_staleness=1), Engines(random.Random(0))
    rollouts, staleness = rollouts_of(plan, tmp_path, step=0), []
    for step in range(1, 4):
        engines.version = step - 1
        taken = rollouts.take(engines, step, weights_step=step - 1)
        staleness.append(taken.metrics["staleness_max"])
        rollouts.finish(step)
    # The second step's groups were opened with the first's.
    assert staleness == [0, 1, 1]
    assert rollouts.num_opened == 12


def test_less_is_submitted_where_the_engines_are_not_refitted(tmp_path):
    plan, engines = plan_of(refit_every=2), Engines(random.Random(0))
    rollouts, opened = rollouts_of(plan, tmp_path, step=0), []
    for step, weights_step in ((1, 0), (2, 0), (3, 2)):
        engines.version = weights_step
        rollouts.take(engines, step, weights_step=weights_step)
        rollouts.finish(step)
        opened.append(rollouts.num_opened)
    # Three steps' groups at a time, and two while the weights are a step behind: eight are held.
    assert opened == [12, 12, 20]


class Stubborn(Engines):
    """Finishes the group of the first ticket last."""

    hold = True

    def collect(self, tickets, *, timeout_s):
        later = set(require_known(tickets, self.running)) - {1}
        return super().collect(later if self.hold else tickets, timeout_s=timeout_s)


def test_a_group_that_is_too_old_is_dropped_or_trained_on(tmp_path):
    for too_old in ("drop", "rescore"):
        plan = plan_of(num_groups=1, num_steps=6, max_staleness=1)
        engines = Stubborn(random.Random(0))
        rollouts = rollouts_of(plan, tmp_path, step=0, too_old=too_old)
        for step in range(1, 7):
            engines.version, engines.hold = step - 1, step < 5
            taken = rollouts.take(engines, step, weights_step=step - 1)
            assert taken.metrics["staleness_max"] <= 1 or too_old == "rescore"
            rollouts.finish(step)
        counts = taken.metrics
        assert counts["rollouts_dropped"] == (too_old == "drop")
        assert counts["rollouts_rescored"] == (too_old == "rescore")
        lines = trained_ids(tmp_path)[-6:]
        assert sorted(id for line in lines for id in line["ids"]) == list(range(6))


def test_a_step_waits_for_a_group_that_would_be_too_old_after_it(tmp_path):
    class Patient(Stubborn):
        """Finishes the first ticket's group when nothing else has been for some calls."""

        calls_in_vain = 0

        def collect(self, tickets, *, timeout_s):
            finished = super().collect(tickets, timeout_s=timeout_s)
            if finished or not timeout_s:
                return finished
            time.sleep(0.05)
            self.calls_in_vain += 1
            return [self.finish(1)]

    plan = plan_of(num_groups=1, num_steps=6, max_staleness=1)
    engines, ids, waits = Patient(random.Random(0)), [], []
    rollouts = rollouts_of(plan, tmp_path, step=0, too_old="wait")
    for step in range(1, 7):
        engines.version = step - 1
        taken = rollouts.take(engines, step, weights_step=step - 1)
        waits.append(taken.metrics["oldest_wait_s"])
        assert taken.metrics["staleness_max"] <= 1
        rollouts.finish(step)
        ids.append(trained_ids(tmp_path)[-1]["ids"])
    # Group 1 may come first, as one more step can train on group 0.
    assert ids == [[1], [0], [2], [3], [4], [5]]
    assert engines.calls_in_vain == 1
    assert taken.metrics["rollouts_dropped"] == taken.metrics["rollouts_rescored"] == 0
    assert waits[1] >= 0.05
    assert not any(waits[:1] + waits[3:])


def test_what_engines_that_die_were_sampling_is_sampled_again(tmp_path):
    class Dying(Engines):
        """Dies when it has finished two groups."""

        def collect(self, tickets, *, timeout_s):
            wanted = require_known(tickets, self.running)
            if len(wanted) == 10:
                raise TicketsLostError("dead", tickets=wanted)
            return [self.finish(wanted[-1])] if timeout_s else []

    rollouts = rollouts_of(plan_of(), tmp_path, step=0)
    with pytest.raises(TicketsLostError):
        rollouts.take(Dying(random.Random(0)), 1, weights_step=0)
    rollouts.sample_anew()
    engines = Engines(random.Random(0))
    taken = rollouts.take(engines, 1, weights_step=0)
    # What had finished was not sampled again, and all others were.
    assert engines.tickets == 10
    assert taken.metrics["rollouts_in_flight"] + taken.metrics["rollouts_complete"] == 8
    assert rollouts.num_opened == 12


def test_a_group_that_engines_never_have_room_for_is_refused(tmp_path):
    rollouts = rollouts_of(plan_of(group_size=8), tmp_path, step=0)
    with pytest.raises(ValueError, match=r"samples_per_prompt=8 is more than the 7 rows"):
        rollouts.take(Engines(random.Random(0), limit=7), 1, weights_step=0)


def test_engines_that_finish_nothing_end_the_run(tmp_path):
    class Stuck(Engines):
        def collect(self, tickets, *, timeout_s):
            return []

    rollouts = rollouts_of(plan_of(), tmp_path, step=0)
    with pytest.raises(TimeoutError, match=r"no completion of step 1 has finished within 1 s"):
        rollouts.take(Stuck(random.Random(0)), 1, weights_step=0)
