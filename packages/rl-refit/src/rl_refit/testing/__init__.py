"""The conformance kit for transports: every bit arrives, and every fault is detected.

As pytest tests, here for a transport that is registered as `mine`:

    from rl_refit.testing import RefitPair, TransportConformance

    class TestMine(TransportConformance):
        pair = RefitPair("mine")

Or as a plain call, `check_transport(RefitPair("mine"))`, which raises with a list of what failed.
Neither a trainer nor an engine is needed. `RULES` lists the rules by group, `pair` makes the two
ends and injects faults. The tests of a trainer get its other end from `receiver_in_thread`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from unittest import SkipTest

from rl_refit.testing import deltas, faults, kills, losses, rules, staging
from rl_refit.testing.pair import (
    Announcement,
    DrillSender,
    Fault,
    RefitPair,
    receiver_in_thread,
)

if TYPE_CHECKING:
    import pytest

__all__ = [
    "RULES",
    "Announcement",
    "ConformanceError",
    "DrillSender",
    "Fault",
    "RefitPair",
    "TransportConformance",
    "check_rule",
    "check_transport",
    "receiver_in_thread",
    "rule_names",
]

Rule = Callable[[RefitPair, int], None]
"""Takes the transport's two ends and the number of random cases; raises if a rule is broken."""

RULES: dict[str, tuple[Rule, ...]] = {
    "round_trips": (
        rules.every_kind_of_tensor_arrives_bit_exact,
        rules.every_receiver_receives_every_bit,
        rules.new_values_arrive_with_every_version,
        rules.any_size_and_number_of_buffers_works,
        rules.tied_tensors_are_sent_once,
        rules.tensors_of_into_are_copied_in_place,
        rules.senders_without_receivers_run_beside_others,
        rules.no_resource_is_leaked,
    ),
    "versions": (
        rules.a_version_is_valid_from_its_commit,
        rules.only_a_sent_version_is_committed,
        rules.a_stale_version_changes_nothing,
        rules.a_sender_of_another_version_is_refused,
        rules.unexpected_tensors_are_refused,
        rules.a_failed_load_poisons_all_until_a_full_resend,
        rules.waits_end_at_their_time_limit,
        rules.a_wrong_token_is_rejected,
        rules.a_new_receiver_replaces_the_one_of_its_rank,
    ),
    "faults": (
        faults.a_dropped_bucket_is_detected,
        faults.a_duplicated_bucket_is_detected,
        faults.a_reordered_bucket_is_detected,
        faults.a_bucket_announced_too_short_is_detected,
        faults.a_truncated_bucket_is_detected,
        faults.a_flipped_bit_is_detected,
        faults.swapped_rows_are_detected,
        faults.a_plan_modified_in_transit_is_detected,
        faults.another_plan_hash_is_detected,
    ),
    "staging": (
        staging.a_staged_refit_leaves_the_engine_ready,
        staging.a_staged_version_is_swapped_once_at_its_commit,
        staging.a_failed_staged_refit_leaves_the_old_version_ready,
        staging.a_failed_swap_poisons_until_a_full_resend,
    ),
    "deltas": (
        deltas.changes_alone_arrive_bit_exact,
        deltas.a_changed_patch_is_detected,
    ),
    "losses": (
        losses.a_silent_receiver_is_dropped_after_its_limit,
        losses.too_few_receivers_commit_nothing,
        losses.a_missing_receiver_is_dropped_until_it_connects,
        losses.an_engine_that_joins_gets_the_present_version_alone,
    ),
    "kills": (
        kills.receivers_survive_a_killed_sender,
        kills.others_survive_a_killed_receiver,
        kills.others_commit_without_a_killed_receiver,
        kills.staging_receivers_serve_on_if_the_sender_is_killed,
    ),
}
"""The rules by group."""


class ConformanceError(AssertionError):
    """A transport breaks rules; the message has a line for each."""


def rule_names(groups: Iterable[str] = tuple(RULES)) -> list[str]:
    """Return the names of the rules of some groups, all by default."""
    return [rule.__name__ for group in groups for rule in RULES[group]]


def check_rule(name: str, pair: RefitPair, *, num_cases: int = 20) -> None:
    """Check one rule.

    Args:
        name: One of `rule_names()`.
        pair: Makes the transport's two ends.
        num_cases: Random cases of each fault and each kill.

    Raises:
        AssertionError: The rule is broken; the message says how.
        SkipTest: The rule does not apply to the pair; the message says why.
        RuntimeError: Python runs without assertions.
    """
    if not __debug__:
        raise RuntimeError("python -O removes the assertions that the rules consist of")
    ((group, rule),) = (
        (group, rule) for group, rules in RULES.items() for rule in rules if rule.__name__ == name
    )
    if group == "kills" and not pair.is_for_processes:
        raise SkipTest("is_for_processes is false: neither end can be killed alone")
    rule(pair, num_cases)


def check_transport(
    pair: RefitPair, *, num_cases: int = 20, groups: Iterable[str] = tuple(RULES)
) -> list[str]:
    """Check the rules of some groups; return what was skipped, a line for each rule.

    Raises:
        ConformanceError: Rules are broken.
    """
    broken: list[str] = []
    skipped: list[str] = []
    for name in rule_names(groups):
        try:
            check_rule(name, pair, num_cases=num_cases)
        except SkipTest as reason:
            skipped.append(f"{name}: {reason}")
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            broken.append(f"{name}: {type(error).__name__}: {first_line}")
    if broken:
        raise ConformanceError("\n".join(["the transport does not conform:", *broken]))
    return skipped


class TransportConformance:
    """Tests for pytest, one per rule: subclass it as `Test...` and give it a `pair`.

    Attributes:
        pair: Makes the transport's two ends.
        num_cases: Random cases of each fault and each kill.
        groups: The rules to check, keys of `RULES`.
    """

    pair: RefitPair
    num_cases: int = 20
    groups: Sequence[str] = tuple(RULES)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of every rule; called by pytest."""
        metafunc.parametrize("rule", rule_names(self.groups))

    def test_conforms(self, rule: str, record_property: Callable[[str, object], None]) -> None:
        """Check one rule."""
        record_property("conformance", rule)
        check_rule(rule, self.pair, num_cases=self.num_cases)
