"""Conformance of a generation backend: its samples against a plain model, and what it rejects.

A case says by further base classes what its backend can do beyond `generate`: `DecodesText`,
`ReceivesWeights`, `Streams` and `RefitsMeanwhile`. The rules on what it cannot are skipped.

As pytest tests, with a fixture that may be shared by all of a module's tests:

    from rl_interfaces.testing.generation import GenerationCase, GenerationConformance

    class Mine(GenerationCase):
        ...  # a backend, and the logits of a plain model with the same weights

    @pytest.fixture(scope="module")
    def generation_case():
        return Mine()

    class TestMine(GenerationConformance):
        pass

Or as a plain call, `check_generation(Mine())`, which raises with a list of what failed. torch is
imported when the first rule is checked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest import SkipTest

from rl_interfaces.testing.report import check_each, require_assertions

if TYPE_CHECKING:
    import pytest
    import torch

    from rl_interfaces.streaming import GenerationStream

RULES = {
    "contract": ("the_contracts_version_is_declared",),
    "outputs": (
        "outputs_have_the_documented_keys_shapes_and_dtypes",
        "a_row_is_its_prompt_its_completion_and_padding",
        "logprobs_are_zero_but_for_the_completion",
        "greedy_is_the_argmax_of_the_oracle",
        "greedy_logprobs_are_those_of_the_whole_distribution",
        "rows_come_back_in_the_callers_order",
        "no_row_gets_more_tokens_than_configured",
        "the_batch_is_left_as_it_was",
    ),
    "stops": (
        "a_configured_stop_token_ends_a_row_and_is_part_of_it",
        "a_configured_stop_string_ends_a_row_and_is_part_of_it",
        "a_stop_string_of_a_row_ends_that_row_alone",
    ),
    "sampling": (
        "logprobs_are_those_of_the_tempered_distribution",
        "logprobs_are_those_of_the_truncated_distribution",
        "tokens_follow_the_tempered_distribution",
        "tokens_follow_the_top_k_alone",
        "tokens_follow_the_nucleus_alone",
        "every_call_samples_anew",
    ),
    "errors": (
        "a_batch_without_lengths_is_refused",
        "a_length_beyond_the_width_is_refused",
        "a_prompt_without_room_for_a_token_is_refused",
        "a_batch_without_rows_is_refused",
    ),
    "sleep": (
        "who_sleeps_does_not_generate",
        "who_has_woken_generates_as_before",
    ),
    "refits": (
        "samples_carry_the_committed_version",
        "a_refit_changes_what_is_generated",
        "nothing_is_generated_before_the_commit",
        "a_failed_refit_is_healed_by_a_full_one_alone",
        "a_stale_version_changes_nothing",
    ),
    "streaming": (
        "a_submission_gets_what_generate_returns",
        "every_submission_samples_anew",
        "finish_reasons_say_what_has_ended_a_row",
        "submissions_are_collected_once_each",
        "only_the_named_submissions_are_collected",
        "room_is_what_may_be_submitted",
        "a_refused_submission_costs_no_other",
        "an_unknown_ticket_is_refused_and_changes_nothing",
    ),
    "cancelling": (
        "a_cancelled_submission_is_gone_and_its_room_is_free",
        "what_has_finished_can_be_cancelled",
        "a_cancelled_submission_changes_no_other",
    ),
    "token versions": (
        "every_token_has_the_version_that_sampled_it",
        "tokens_before_a_refit_keep_their_version_and_log_probabilities",
    ),
}
"""The names of the rules by subject."""
_STREAM_GROUPS = ("streaming", "cancelling", "token versions")

Backend: TypeAlias = Any
"""A `GenerationInterface`, and a `WeightReceiver` where the case is a `ReceivesWeights`."""


class GenerationCase(ABC):
    """A backend, and a plain model with the same weights to compare it with.

    Attributes:
        vocab_size: Tokens of the model.
        pad_token_id: Padding token.
        end_token_id: Ends a row; None where no token does.
        max_length: Most tokens of a row, prompt and completion, at least 16.
        state_error: Raised by `generate` while the backend sleeps or a weight update is incomplete.
            None for a backend that never sleeps: these rules are skipped.
        tolerance: The largest error of a log-probability in float32; kernels differ in the order
            of their sums.
        is_chosen_by_name: Whether a config names the backend, which is then registered in the
            entry-point group `rl_policy.generation` and declares its contract version.
        num_samples: Samples per statistical check. The probability that a correct backend fails
            one is `oracle.ERROR_PROBABILITY`, whatever the number.
    """

    vocab_size: int
    pad_token_id: int
    end_token_id: int | None
    max_length: int
    state_error: type[Exception] | None = None
    tolerance: float = 1e-4
    is_chosen_by_name: bool = True
    num_samples: int = 1000

    @abstractmethod
    def backend(self, **sampling: object) -> Backend:
        """Return a backend with these keys of `GenerationConfig`; it may be the same every time.

        The other keys select the full distribution: `temperature` 1, `top_p` 1, `top_k` None, no
        stops; `max_new_tokens` is always given.
        """

    @abstractmethod
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a plain model's logits after each of `tokens`.

        Args:
            tokens: `[seq]` int64.

        Returns:
            `[seq, vocab]`, float32 or better.
        """

    def batch(self, **columns: object) -> Any:
        """Return a batch of columns, a `GenerationDatumSpec`; a dict unless overridden."""
        return columns

    def sleep(self, backend: Backend) -> None:
        """Put the backend to sleep."""
        assert backend.finish_generation() is True, "finish_generation did not return True"

    def wake(self, backend: Backend) -> None:
        """Wake the backend."""
        assert backend.prepare_for_generation() is True, "prepare_for_generation is not True"


class DecodesText(ABC):
    """Implemented by a case whose backend supports stop strings."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""


class ReceivesWeights(ABC):
    """Implemented by a case whose backend is a `WeightReceiver`; needs a `state_error`."""

    @abstractmethod
    def change_weights(self) -> None:
        """Change the plain model as a training step would, by far more than rounding."""

    @abstractmethod
    def refit(self, backend: Backend, version: int) -> None:
        """Begin an update, transfer the plain model's weights, and commit."""

    @abstractmethod
    def fail_refit(self, backend: Backend, version: int) -> None:
        """Begin an update and break the transfer after some weights have arrived; raise nothing."""


class Streams(ABC):
    """Implemented by a case whose backend offers a `GenerationStream`.

    Attributes:
        collect_timeout_s: Most seconds until one of few submissions has finished.
    """

    collect_timeout_s: float = 300.0

    @abstractmethod
    def stream(self, backend: Backend) -> GenerationStream:
        """Return the stream of a backend that `backend` has returned; it may be the backend."""


class RefitsMeanwhile(Streams, ReceivesWeights):
    """Implemented by a case whose backend goes on with its submissions while it gets weights."""

    @abstractmethod
    def refit_meanwhile(self, backend: Backend, version: int) -> None:
        """Do as `refit`, beside submissions; what depends on old weights is computed again."""


def rule_names() -> list[str]:
    """Return the names of the rules."""
    return [name for names in RULES.values() for name in names]


def check_rule(name: str, case: GenerationCase) -> None:
    """Check one rule of `rule_names()`.

    Raises:
        AssertionError: The rule is broken; the message says how.
        SkipTest: The backend lacks what the rule is about; the message names it.
        RuntimeError: Python runs without assertions.
    """
    require_assertions()
    lacking = _lacking(_group_of(name), name, case)
    if lacking:
        raise SkipTest(f"{type(case).__name__} lacks {lacking}")
    rule_of(name)(case)


def rule_of(name: str) -> Callable[[GenerationCase], None]:
    """Return the function that checks one rule of `rule_names()`; its docstring says more."""
    module = "stream_rules" if _group_of(name) in _STREAM_GROUPS else "rules"
    return getattr(import_module(f"{__name__}.{module}"), name)


def check_generation(case: GenerationCase) -> list[str]:
    """Check every rule; return one line per skipped rule.

    Raises:
        AssertionError: Rules are broken; the message has a line for each.
    """
    return check_each(rule_names(), lambda name: check_rule(name, case), subject="the backend")


class GenerationConformance:
    """Tests for pytest, one per rule, of the backend that a fixture `generation_case` returns."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of every rule; called by pytest."""
        metafunc.parametrize("rule", rule_names())

    def test_conforms(
        self,
        rule: str,
        generation_case: GenerationCase,
        record_property: Callable[[str, object], None],
    ) -> None:
        """Check one rule."""
        record_property("conformance", rule)
        check_rule(rule, generation_case)


def _group_of(name: str) -> str:
    (group,) = (group for group, names in RULES.items() if name in names)
    return group


def _lacking(group: str, name: str, case: GenerationCase) -> str:
    if group == "contract" and not case.is_chosen_by_name:
        return "is_chosen_by_name: no config names the backend"
    if "stop_string" in name and not isinstance(case, DecodesText):
        return "DecodesText: the backend knows no stop strings"
    if group in _STREAM_GROUPS and not isinstance(case, Streams):
        return "Streams: the backend samples nothing that is not waited for"
    if group in ("refits", "token versions") and not isinstance(case, ReceivesWeights):
        return "ReceivesWeights: the backend gets no weights from a trainer"
    if "before_a_refit" in name and not isinstance(case, RefitsMeanwhile):
        return "RefitsMeanwhile: the backend gets no weights while it samples"
    if group in ("sleep", "refits") and case.state_error is None:
        return "state_error: the backend never sleeps"
    return ""
