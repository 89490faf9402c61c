"""The kit on two ranks that do not see the same."""

import pytest
from rl_interfaces.testing import ConformanceError, Status, require_conformance
from twin_ranks import (
    RULES,
    AlwaysTheFirst,
    CountingItsOwnSequences,
    NeverAlive,
    check_on_two_ranks,
)

pytestmark = pytest.mark.needs("rl-interfaces[testing]")


def test_ranks_that_agree_on_a_broken_rule_go_on(tmp_path):
    reports = check_on_two_ranks(tmp_path, NeverAlive)
    assert [report.rank for report in reports] == [0, 1]
    for report in reports:
        statuses = [report.of(rule).status for rule in RULES]
        assert statuses == [Status.BROKEN, Status.HOLDS, Status.HOLDS]


def test_ranks_that_are_at_odds_stop(tmp_path):
    reports = check_on_two_ranks(tmp_path, AlwaysTheFirst)
    statuses = [[report.of(rule).status for rule in RULES] for report in reports]
    assert statuses == [
        [Status.HOLDS, Status.NOT_RUN, Status.NOT_RUN],
        [Status.BROKEN, Status.NOT_RUN, Status.NOT_RUN],
    ]
    with pytest.raises(ConformanceError) as raised:
        require_conformance(reports)
    assert f"rank 1: {RULES[0]} is broken" in str(raised.value)
    assert f"rank 0: {RULES[1]} is not run: an earlier rule failed" in str(raised.value)


def test_ranks_that_count_their_own_sequences_are_told(tmp_path):
    rules = ["a_loss_may_ask_for_logits", "a_loss_may_be_of_sequences"]
    for report in check_on_two_ranks(tmp_path, CountingItsOwnSequences, rules):
        statuses = [report.of(rule).status for rule in rules]
        assert statuses == [Status.HOLDS, Status.BROKEN], report
