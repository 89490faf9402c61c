"""Each rule can fail: a worker that breaks one is told by it, and by it alone."""

import os

import pytest
from broken_workers import (
    BROKEN_IN_PART,
    BROKEN_WORKERS,
    LEFT_OPEN,
    GrowingAPool,
    LeavingAFile,
    LeavingTheGroupOfOthers,
    ScoringIntoItsBatch,
)
from plain_conformance_case import plain_case
from plain_policy_worker import PlainWorker
from rl_interfaces.testing import (
    WORKER_RULES,
    ConformanceError,
    Outcome,
    Report,
    Status,
    check_worker,
    require_conformance,
)
from rl_interfaces.testing.worker.bench import WorkerBench
from rl_interfaces.testing.worker.information import left_padding_is_refused
from rl_interfaces.testing.worker.kit import Ranks
from rl_interfaces.testing.worker.scoring import logprobs_are_zero_where_no_token_is_scored

pytestmark = pytest.mark.needs("rl-interfaces[testing]")


def test_every_rule_has_a_worker_that_breaks_it():
    assert list(BROKEN_WORKERS) == [rule.name for rule in WORKER_RULES]


def test_every_rule_says_in_a_sentence_what_it_holds():
    assert [rule.name for rule in WORKER_RULES if not rule.summary.endswith(".")] == []


@pytest.mark.parametrize("rule", BROKEN_WORKERS)
def test_a_rule_detects_the_worker_that_breaks_it(tmp_path, rule):
    case = plain_case(tmp_path, BROKEN_WORKERS[rule])
    assert check_worker(case, directory=tmp_path, only=[rule]).broken == [rule]


@pytest.mark.slow_beyond(3, every=20)
@pytest.mark.parametrize("rule", BROKEN_WORKERS)
@pytest.mark.promise_first(1)
def test_a_broken_worker_breaks_one_rule(tmp_path, rule):
    report = check_worker(plain_case(tmp_path, BROKEN_WORKERS[rule]), directory=tmp_path)
    assert report.broken == [rule], [report.of(name).text for name in report.broken]
    with pytest.raises(ConformanceError, match=f"rank 0: {rule} is broken: ") as raised:
        require_conformance([report])
    (summary,) = [each.summary for each in WORKER_RULES if each.name == rule]
    assert summary in str(raised.value)


@pytest.mark.parametrize(("rule", "worker_class"), BROKEN_IN_PART)
def test_each_part_of_a_rule_can_fail(tmp_path, rule, worker_class):
    report = check_worker(plain_case(tmp_path, worker_class), directory=tmp_path, only=[rule])
    assert report.broken == [rule]


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize(
    "rule", [left_padding_is_refused, logprobs_are_zero_where_no_token_is_scored]
)
def test_a_rule_holds_on_every_data_parallel_rank(tmp_path, monkeypatch, rule, rank):
    monkeypatch.setenv("RANK", str(rank))
    ranks = Ranks(rank=rank, world_size=8, verdicts=None)
    bench = WorkerBench(plain_case(tmp_path), ranks=ranks, directory=tmp_path)
    rule.check(bench)


@pytest.fixture
def left_open():
    """Close what the workers of a test have left open."""
    yield LEFT_OPEN
    while LEFT_OPEN:
        os.close(LEFT_OPEN.pop())


def test_a_file_that_every_worker_leaves_open_is_told(tmp_path, left_open):
    rule = "a_worker_takes_its_threads_with_it"
    report = check_worker(plain_case(tmp_path, LeavingAFile), directory=tmp_path, only=[rule])
    assert report.broken == [rule]
    assert "each worker left open files behind" in report.of(rule).text
    assert f"new are {', '.join([os.devnull] * 3)}" in report.of(rule).text


def test_a_pool_that_grows_with_the_first_workers_is_no_leak(tmp_path, left_open):
    rule = "a_worker_takes_its_threads_with_it"
    report = check_worker(plain_case(tmp_path, GrowingAPool), directory=tmp_path, only=[rule])
    require_conformance([report])
    assert len(left_open) == 2


def test_what_a_worker_lacks_is_named(tmp_path):
    nothing = dict.fromkeys(["open_receiver", "reward", "adapters", "schedule"])
    bare = plain_case(tmp_path, PlainWorker, ways={}, **nothing)
    report = check_worker(bare, directory=tmp_path)
    require_conformance([report])
    lacks = {
        each.rule: each.text for each in report.outcomes if each.status is Status.NOT_APPLICABLE
    }
    assert lacks["topk_logits_equal_the_oracle"] == (
        "PlainWorker lacks get_topk_logits of rl_interfaces.TopkLogitsWorker"
    )
    assert "lacks score of rl_interfaces.RowScoringWorker" in lacks["scores_equal_the_oracle"]
    assert "open_refit" in lacks["a_receiver_gets_the_weights_of_each_version"]
    assert "WorkerCase.ways" in lacks["every_way_of_batching_gives_the_same_numbers"]
    assert "lacks save_adapters of" in lacks["saved_adapters_are_the_worker"]
    assert "WorkerCase.schedule" in lacks["a_schedule_goes_on_by_calls"]
    assert (
        "lacks forward_backward, optimizer_step, zero_grad of"
        in lacks["split_calls_add_up_to_one_step"]
    )
    assert len(lacks) == 16


def test_a_function_may_make_the_workers(tmp_path):
    """What it makes is held to the optional rules too."""

    def make(*arguments, **options):
        return ScoringIntoItsBatch(*arguments, **options)

    make.validate_config = ScoringIntoItsBatch.validate_config
    report = check_worker(plain_case(tmp_path, make), directory=tmp_path)
    assert report.broken == ["batches_are_not_written_into"]
    assert {each.status for each in report.outcomes} == {Status.HOLDS, Status.BROKEN}


def test_ranks_that_lose_one_another_leave_a_report(tmp_path):
    names = [rule.name for rule in WORKER_RULES]
    case = plain_case(tmp_path, LeavingTheGroupOfOthers)
    first, *_, last = check_worker(case, directory=tmp_path, only=names[-2:]).outcomes
    assert (first.status, last.status) == (Status.BROKEN, Status.NOT_RUN)
    assert f"communication between ranks failed after {first.rule}" in last.text


def test_what_a_case_lacks_is_named(tmp_path):
    report = check_worker(plain_case(tmp_path, open_receiver=None, reward=None), directory=tmp_path)
    lacks = {each.text for each in report.outcomes if each.status is Status.NOT_APPLICABLE}
    assert lacks == {
        "the case names no receiver (`WorkerCase.open_receiver`)",
        "the case names no reward model (`WorkerCase.reward`)",
    }


def test_rules_can_be_chosen(tmp_path):
    name = "weights_load_alone"
    report = check_worker(plain_case(tmp_path), directory=tmp_path, only=[name])
    assert report == Report(rank=0, outcomes=(Outcome(rule=name, status=Status.HOLDS),))
    with pytest.raises(ValueError, match=r"unknown rules \['no_such_rule'\]"):
        check_worker(plain_case(tmp_path), directory=tmp_path, only=["no_such_rule"])
