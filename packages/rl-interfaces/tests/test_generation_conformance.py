"""The kit for generation: a right backend passes it, and one that breaks a rule fails that one."""

import subprocess
import sys
from unittest import SkipTest

import broken_generation as broken
import pytest
import torch
from bigram_generation import PlainBigrams, StreamingBigrams, WholeBigrams
from rl_interfaces.testing.generation import (
    RULES,
    GenerationConformance,
    check_generation,
    check_rule,
    rule_names,
    rule_of,
)
from rl_interfaces.testing.generation.oracle import ERROR_PROBABILITY, chance_of

pytestmark = pytest.mark.needs("rl-interfaces[testing]")

STREAM_RULES = {
    name for group in ("streaming", "cancelling", "token versions") for name in RULES[group]
}
# Each breaks the one rule, but where two have the same thing at their bottom.
BROKEN = {
    broken.SaysNoVersion: "the_contracts_version_is_declared",
    broken.ReturnsFloat64: "outputs_have_the_documented_keys_shapes_and_dtypes",
    broken.PadsWithTheEndToken: "a_row_is_its_prompt_its_completion_and_padding",
    broken.ScoresThePadding: "logprobs_are_zero_but_for_the_completion",
    broken.SamplesAtTemperatureZero: "greedy_is_the_argmax_of_the_oracle",
    broken.TempersGreedyLogprobs: "greedy_logprobs_are_those_of_the_whole_distribution",
    broken.SortsRows: "rows_come_back_in_the_callers_order",
    broken.GivesOneTokenMore: "no_row_gets_more_tokens_than_configured",
    broken.WritesIntoTheBatch: "the_batch_is_left_as_it_was",
    broken.IgnoresStopTokens: "a_configured_stop_token_ends_a_row_and_is_part_of_it",
    broken.IgnoresStopStrings: "a_configured_stop_string_ends_a_row_and_is_part_of_it",
    broken.StopsAllRowsAtOnesString: "a_stop_string_of_a_row_ends_that_row_alone",
    broken.ScoresUntempered: "logprobs_are_those_of_the_tempered_distribution",
    broken.ScoresUntruncated: "logprobs_are_those_of_the_truncated_distribution",
    broken.SamplesUntempered: "tokens_follow_the_tempered_distribution",
    broken.SamplesBeyondTheTopK: "tokens_follow_the_top_k_alone",
    broken.StopsShortOfTheNucleus: "tokens_follow_the_nucleus_alone",
    broken.RepeatsItself: "every_call_samples_anew",
    broken.MissesLengths: "a_batch_without_lengths_is_refused",
    broken.CutsLengths: "a_length_beyond_the_width_is_refused",
    broken.TakesFullPrompts: "a_prompt_without_room_for_a_token_is_refused",
    broken.TakesNoRows: "a_batch_without_rows_is_refused",
    broken.GeneratesAsleep: "who_sleeps_does_not_generate",
    broken.WakesInSilence: "who_sleeps_does_not_generate",
    broken.WakesWithOtherWeights: "who_has_woken_generates_as_before",
    broken.ForgetsTheVersion: "samples_carry_the_committed_version",
    broken.KeepsTheOldWeights: "a_refit_changes_what_is_generated",
    broken.GeneratesInARefit: "nothing_is_generated_before_the_commit",
    broken.ForgetsAFailure: "a_failed_refit_is_healed_by_a_full_one_alone",
    broken.TakesStaleVersions: "a_stale_version_changes_nothing",
}
BROKEN_STREAMS = {
    broken.ScoresSubmissionsUntempered: "a_submission_gets_what_generate_returns",
    broken.SubmissionsRepeatThemselves: "every_submission_samples_anew",
    broken.AlwaysSaysLength: "finish_reasons_say_what_has_ended_a_row",
    broken.HandsOutTwice: "submissions_are_collected_once_each",
    broken.HandsOutEverything: "only_the_named_submissions_are_collected",
    broken.KeepsRoomForWhatItRefuses: "room_is_what_may_be_submitted",
    broken.FailsWithARefusedOne: "a_refused_submission_costs_no_other",
    broken.CancelsBesideAnUnknownOne: "an_unknown_ticket_is_refused_and_changes_nothing",
    broken.GivesNoRoomBack: "a_cancelled_submission_is_gone_and_its_room_is_free",
    broken.KeepsWhatHasFinished: "what_has_finished_can_be_cancelled",
    broken.CancelsANeighboursTokens: "a_cancelled_submission_changes_no_other",
    broken.ForgetsTheVersionsOfTokens: "every_token_has_the_version_that_sampled_it",
    broken.SaysTheLastVersion: "tokens_before_a_refit_keep_their_version_and_log_probabilities",
    broken.StartsAgainAfterARefit: "tokens_before_a_refit_keep_their_version_and_log_probabilities",
}
ALSO = {
    # A failed refit is healed by nothing where no weights are taken.
    broken.KeepsTheOldWeights: {"a_failed_refit_is_healed_by_a_full_one_alone"},
    # Nothing can finish and not be collected.
    broken.HandsOutEverything: {"what_has_finished_can_be_cancelled"},
    broken.ForgetsTheVersionsOfTokens: {
        "tokens_before_a_refit_keep_their_version_and_log_probabilities"
    },
}


@pytest.fixture(scope="module")
def generation_case():
    return StreamingBigrams()


@pytest.mark.promise
class TestBigrams(GenerationConformance):
    """A right backend."""


def broken_rules(new_case):
    found = set()
    for name in rule_names():
        # A case each: what a rule left half done would show in the next.
        try:
            check_rule(name, new_case())
        except AssertionError:
            found.add(name)
        except SkipTest:
            assert name in STREAM_RULES
    return found


@pytest.mark.parametrize("backend_class", BROKEN, ids=lambda value: value.__name__)
def test_a_backend_breaks_the_rule_that_it_is_made_to_break_alone(backend_class):
    found = broken_rules(lambda: WholeBigrams(backend_class))
    assert found == {BROKEN[backend_class]} | ALSO.get(backend_class, set())


@pytest.mark.parametrize("backend_class", BROKEN_STREAMS, ids=lambda value: value.__name__)
def test_a_stream_breaks_the_rule_that_it_is_made_to_break_alone(backend_class):
    found = broken_rules(lambda: StreamingBigrams(backend_class))
    assert found == {BROKEN_STREAMS[backend_class]} | ALSO.get(backend_class, set())


def test_every_rule_has_a_backend_that_breaks_it():
    assert {*BROKEN.values(), *BROKEN_STREAMS.values()} == set(rule_names())


def test_a_backend_that_no_config_names_needs_no_version():
    case = WholeBigrams(broken.SaysNoVersion)
    case.is_chosen_by_name = False
    with pytest.raises(SkipTest, match="is_chosen_by_name: no config names the backend"):
        check_rule("the_contracts_version_is_declared", case)


def test_rules_that_python_leaves_out_are_not_said_to_hold():
    code = (
        "from rl_interfaces.testing import generation as kit\n"
        "try: kit.check_rule(kit.rule_names()[0], None)\n"
        "except RuntimeError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-O", "-c", code], check=True, stdout=subprocess.PIPE)
    assert b"python -O strips the assertions" in run.stdout


def test_what_a_backend_lacks_is_skipped_by_name():
    lines = dict(line.split(": ", 1) for line in check_generation(PlainBigrams()))
    assert lines.keys() == {
        "a_configured_stop_string_ends_a_row_and_is_part_of_it",
        "a_stop_string_of_a_row_ends_that_row_alone",
        *RULES["sleep"],
        *RULES["refits"],
        *STREAM_RULES,
    }
    for name, reason in lines.items():
        wanted = "DecodesText" if "stop_string" in name else "state_error"
        wanted = "ReceivesWeights" if name in RULES["refits"] else wanted
        wanted = "Streams" if name in STREAM_RULES else wanted
        assert f"PlainBigrams lacks {wanted}" in reason


def test_the_report_names_every_broken_rule_and_what_was_seen():
    with pytest.raises(AssertionError) as caught:
        check_generation(WholeBigrams(broken.ReturnsFloat64))
    first, line = str(caught.value).splitlines()
    assert first == "the backend does not conform:"
    assert line.startswith("outputs_have_the_documented_keys_shapes_and_dtypes: ")
    assert "'logprobs' is torch.float64, not torch.float32" in line


def test_pearsons_test_is_that_of_the_tables():
    # 0.05 is the chance of 5.991 at two degrees of freedom, and of 11.070 at five.
    for cells, statistic in ((3, 5.991), (6, 11.070)):
        due = torch.full((cells,), 1 / cells, dtype=torch.float64)
        counts = torch.full((cells,), 1000.0, dtype=torch.float64)
        shift = (statistic * 1000 / 2) ** 0.5
        counts[0] += shift
        counts[1] -= shift
        assert chance_of(counts, due) == pytest.approx(0.05, rel=1e-3)
    assert chance_of(torch.tensor([10, 10, 1]), torch.tensor([0.5, 0.5, 0.0])) == 0


def test_a_right_sampler_is_not_refused():
    generator = torch.Generator().manual_seed(0)
    due = torch.rand(24, generator=generator, dtype=torch.float64) ** 4
    due /= due.sum()
    chances = []
    for _ in range(300):
        samples = torch.multinomial(due, 500, replacement=True, generator=generator)
        chances.append(chance_of(torch.bincount(samples, minlength=24), due))
    assert min(chances) > ERROR_PROBABILITY
    # As likely as not to be below any bound.
    assert 0.35 < sum(chance < 0.5 for chance in chances) / len(chances) < 0.65


def test_the_suite_is_imported_without_torch_and_pytest():
    code = (
        "import sys; import rl_interfaces.testing.generation;"
        "assert not {'torch', 'pytest', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_rule_is_a_function_of_its_module_that_says_what_it_means():
    assert all(rule_of(name).__doc__ for name in rule_names())
