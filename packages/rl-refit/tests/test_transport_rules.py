"""Every rule of the kit can fail: a pair that breaks it does, and keeps the others of its group."""

import broken_pairs as broken
import pytest
from patience import PATIENCE_S
from rl_refit import digest
from rl_refit.ends import outbound
from rl_refit.testing import check_rule, kills, leftovers, rule_names
from rl_refit.testing import pair as pair_module

pytestmark = pytest.mark.needs("rl-refit[testing]")

CASES = 1
# Those that take longest are checked with the pair that breaks them alone.
LONG = {
    "every_kind_of_tensor_arrives_bit_exact",
    "every_receiver_receives_every_bit",
    "senders_without_receivers_run_beside_others",
    "waits_end_at_their_time_limit",
    "a_wrong_token_is_rejected",
    "a_dropped_bucket_is_detected",
}
# What a pair breaks: one rule, but where the rules have the same thing at their bottom.
BROKEN = {
    "round_trips": [
        (broken.LosesNaNs, {"every_kind_of_tensor_arrives_bit_exact"}),
        (broken.ForgetsTheFourthReceiver, {"every_receiver_receives_every_bit"}),
        (broken.SendsTheOldAgain, {"new_values_arrive_with_every_version"}),
        (broken.TakesNoSmallBuffers, {"any_size_and_number_of_buffers_works"}),
        (broken.SendsTiedTwice, {"tied_tensors_are_sent_once"}),
        (broken.IgnoresInto, {"tensors_of_into_are_copied_in_place"}),
        (broken.NeedsReceivers, {"senders_without_receivers_run_beside_others"}),
        (broken.LeavesFiles, {"no_resource_is_leaked"}),
        (broken.LeavesSharedMemory, {"no_resource_is_leaked"}),
    ],
    "versions": [
        (
            broken.CommitsByItself,
            {"a_version_is_valid_from_its_commit", "only_a_sent_version_is_committed"},
        ),
        (broken.CommitsWhatIsNotThere, {"only_a_sent_version_is_committed"}),
        (broken.GoesBackToOldVersions, {"a_stale_version_changes_nothing"}),
        (broken.ForgetsAnotherVersion, {"a_sender_of_another_version_is_refused"}),
        (broken.LoadsWhatIsNotExpected, {"unexpected_tensors_are_refused"}),
        (broken.CommitsAfterAFailure, {"a_failed_load_poisons_all_until_a_full_resend"}),
        (broken.DoesNotNameTheWait, {"waits_end_at_their_time_limit"}),
        (broken.LetsEverybodyIn, {"a_wrong_token_is_rejected"}),
        (broken.KeepsTheOldReceiver, {"a_new_receiver_replaces_the_one_of_its_rank"}),
    ],
    "faults": [
        (lambda: broken.BlindTo("_Dropped"), {"a_dropped_bucket_is_detected"}),
        (lambda: broken.BlindTo("_Duplicated"), {"a_duplicated_bucket_is_detected"}),
        (lambda: broken.BlindTo("_Reordered"), {"a_reordered_bucket_is_detected"}),
        (
            lambda: broken.BlindTo("_AnnouncedTooShort"),
            {"a_bucket_announced_too_short_is_detected"},
        ),
        (lambda: broken.BlindTo("_Truncated"), {"a_truncated_bucket_is_detected"}),
        (lambda: broken.BlindTo("_Flipped"), {"a_flipped_bit_is_detected"}),
        (lambda: broken.BlindTo("_OtherPlan"), {"a_plan_modified_in_transit_is_detected"}),
        (lambda: broken.BlindTo("_OtherHash"), {"another_plan_hash_is_detected"}),
        (
            broken.Unverified,
            {
                "a_truncated_bucket_is_detected",
                "a_flipped_bit_is_detected",
                "swapped_rows_are_detected",
            },
        ),
    ],
    "staging": [
        # Every rule looks at an engine that has received and not committed.
        (broken.OverwritesWhatIsServed, set(rule_names(["staging"]))),
        (broken.RefusesWhileItStages, set(rule_names(["staging"]))),
        (broken.SwapsAtEveryCommit, {"a_staged_version_is_swapped_once_at_its_commit"}),
        (broken.PoisonsTheOldVersion, {"a_failed_staged_refit_leaves_the_old_version_ready"}),
        (broken.CommitsWhatFailedToSwap, {"a_failed_swap_poisons_until_a_full_resend"}),
    ],
    "deltas": [
        (
            broken.SendsEverything,
            {"changes_alone_arrive_bit_exact", "a_changed_patch_is_detected"},
        ),
        (lambda: broken.BlindTo("_SpoiledPatch"), {"a_changed_patch_is_detected"}),
    ],
    "losses": [
        (
            broken.WaitsForAll,
            {
                "a_silent_receiver_is_dropped_after_its_limit",
                "a_missing_receiver_is_dropped_until_it_connects",
            },
        ),
        (
            broken.CommitsWhatFailed,
            {"a_silent_receiver_is_dropped_after_its_limit", "too_few_receivers_commit_nothing"},
        ),
        (broken.CommitsForOne, {"too_few_receivers_commit_nothing"}),
        (
            broken.LosesWeightsWithTheConnection,
            {"an_engine_that_joins_gets_the_present_version_alone"},
        ),
    ],
}
PAIRS = [
    pytest.param(group, make, rules, id=min(rules))
    for group, entries in BROKEN.items()
    for make, rules in entries
]


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    # For pairs that leave something, or that wait until the limit.
    monkeypatch.setattr(leftovers, "GONE_WITHIN_S", 0.5)
    monkeypatch.setattr(pair_module, "LIMIT_S", 5.0)


def broken_rules(names, pair):
    found = set()
    for name in names:
        try:
            check_rule(name, pair, num_cases=CASES)
        except Exception:
            found.add(name)
    return found


@pytest.mark.parametrize(("group", "make", "rules"), PAIRS)
def test_a_pair_breaks_what_it_is_made_to_break(group, make, rules):
    assert broken_rules(sorted(rules), make()) == rules


@pytest.mark.slow
@pytest.mark.parametrize(("group", "make", "rules"), PAIRS)
def test_a_pair_keeps_the_other_rules_of_its_group(group, make, rules, monkeypatch):
    monkeypatch.setattr(leftovers, "GONE_WITHIN_S", PATIENCE_S)
    others = [name for name in rule_names([group]) if name not in rules | LONG]
    assert broken_rules(others, make()) == set()


@pytest.mark.slow
def test_a_digest_without_positions_does_not_find_swapped_rows(monkeypatch):
    def sum_of_bytes(data, *, position):
        return int(data.sum()) + position

    monkeypatch.setitem(digest.DIGESTS, "xxh3", sum_of_bytes)
    monkeypatch.setattr(outbound, "RunningDigest", lambda *_, **__: None)
    found = broken_rules(rule_names(["faults"]), broken.Broken())
    assert found == {"swapped_rows_are_detected"}


@pytest.mark.parametrize("rule", rule_names(["kills"]))
def test_what_a_killed_process_leaves_is_found(rule):
    with pytest.raises(AssertionError, match="left files"):
        check_rule(rule, broken.LeavesFiles(), num_cases=1)


def test_a_killed_sender_that_takes_the_served_version_with_it_is_found():
    with pytest.raises(AssertionError, match="ready ended with PoisonedError"):
        check_rule(
            "staging_receivers_serve_on_if_the_sender_is_killed",
            broken.PoisonsTheOldVersion(),
            num_cases=10,
        )


def test_a_sender_that_waits_for_a_killed_receiver_is_found():
    with pytest.raises(AssertionError, match="the sender ended with RefitError"):
        check_rule("others_commit_without_a_killed_receiver", broken.WaitsForAll(), num_cases=10)


# Without the one in which no survivor fails.
FAILING = [rule for rule in rule_names(["kills"]) if "commit_without" not in rule]


@pytest.mark.parametrize("rule", FAILING)
@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (broken.CommitsWhatFailed, "is committed without a commit"),
        (broken.HangsWhereOthersFail, "it hangs: no answer within 5 s"),
        (broken.DiesWhereOthersFail, "a survivor ended with None"),
    ],
    ids=["commits", "hangs", "dies"],
)
def test_a_survivor_of_a_kill_neither_commits_nor_hangs_nor_dies(monkeypatch, rule, pair, message):
    survived = kills.Cluster._survived

    def survived_soon(*arguments):
        if pair is not broken.HangsWhereOthersFail:
            return survived(*arguments)
        # After the kill alone, as processes take long to start on a busy machine.
        with monkeypatch.context() as patch:
            patch.setattr(kills, "PATIENCE_S", 5.0)
            return survived(*arguments)

    monkeypatch.setattr(kills.Cluster, "_survived", survived_soon)
    with pytest.raises(AssertionError, match=message):
        # One of so many kills comes in time.
        check_rule(rule, pair(), num_cases=10)


def test_every_rule_has_a_pair_that_breaks_it():
    shown = {rule for entries in BROKEN.values() for _, rules in entries for rule in rules}
    assert shown | set(rule_names(["kills"])) == set(rule_names())
