"""Rules on the state of a backend: sleep between calls, and weights received from a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.testing.generation import ReceivesWeights
from rl_interfaces.testing.generation.oracle import (
    NUM_NEW,
    batch_of,
    complete,
    error_of,
    largest_error,
    prompts,
)

if TYPE_CHECKING:
    from rl_interfaces.testing.generation import GenerationCase

WRONG = 1e-2
"""Smallest error that wrong weights cause; far above rounding."""


def who_sleeps_does_not_generate(case: GenerationCase) -> None:
    """The error names the call that wakes it; it goes on when it has woken."""
    backend = case.backend(max_new_tokens=NUM_NEW)
    case.sleep(backend)
    error = error_of(lambda: backend.generate(batch_of(case, prompts(case))))
    case.wake(backend)
    assert case.state_error is not None
    assert isinstance(error, case.state_error), f"a sleeping backend ended with {error!r}"
    assert "prepare_for_" in str(error), f"the error does not name the call that wakes: {error}"


def who_has_woken_generates_as_before(case: GenerationCase) -> None:
    """The same tokens, greedily; waking twice does no harm."""
    rows = prompts(case)
    before = complete(case, rows, greedy=True)
    backend = case.backend(max_new_tokens=NUM_NEW)
    case.sleep(backend)
    case.wake(backend)
    case.wake(backend)
    after = complete(case, rows, greedy=True)
    same = before["output_ids"].tolist() == after["output_ids"].tolist()
    assert same, "after a sleep other tokens are the most likely"


def samples_carry_the_committed_version(case: GenerationCase) -> None:
    """`weight_version` `[batch]` int64, a row each."""
    version = _version(case) + 1
    _refit(case, version)
    output = complete(case, prompts(case))
    column = output["weight_version"]
    assert column.dtype == torch.int64, f"'weight_version' is {column.dtype}"
    due = [version] * len(prompts(case))
    assert column.tolist() == due, f"'weight_version' is {column.tolist()}, not {due}"


def a_refit_changes_what_is_generated(case: GenerationCase) -> None:
    """Before it the old weights generate, after it the new ones, twice."""
    for _ in range(2):
        _of(case).change_weights()
        before = largest_error(case, complete(case, prompts(case)))
        assert before > WRONG, "the change of weights is too small: nothing is shown"
        _refit(case, _version(case) + 1)
        _require_right_weights(case)


def nothing_is_generated_before_the_commit(case: GenerationCase) -> None:
    """Nor is a version committed of which nothing has arrived; a new beginning is possible."""
    backend: Any = case.backend(max_new_tokens=NUM_NEW)
    version = _version(case)
    backend.begin_update(version + 1)
    batch = batch_of(case, prompts(case))
    early = error_of(lambda: backend.generate(batch))
    empty = error_of(lambda: backend.commit_update(version + 1))
    _refit(case, version + 2)
    assert case.state_error is not None
    assert isinstance(early, case.state_error), f"before the commit generate ended with {early!r}"
    assert isinstance(empty, case.state_error), f"a commit of nothing ended with {empty!r}"
    _require_right_weights(case)


def a_failed_refit_is_healed_by_a_full_one_alone(case: GenerationCase) -> None:
    """Until then nothing is generated, and nothing is committed."""
    backend: Any = case.backend(max_new_tokens=NUM_NEW)
    version = _version(case) + 1
    _of(case).change_weights()
    _of(case).fail_refit(backend, version)
    batch = batch_of(case, prompts(case))
    sample = error_of(lambda: backend.generate(batch))
    commit = error_of(lambda: backend.commit_update(version))
    _refit(case, version)
    assert case.state_error is not None
    assert isinstance(sample, case.state_error), f"after a failed refit: {sample!r}"
    assert isinstance(commit, case.state_error), f"the commit of a failed refit: {commit!r}"
    _require_right_weights(case)
    assert _version(case) == version


def a_stale_version_changes_nothing(case: GenerationCase) -> None:
    """It is refused by a ValueError with its number, and the backend goes on."""
    backend: Any = case.backend(max_new_tokens=NUM_NEW)
    version = _version(case) + 1
    _refit(case, version)
    for stale in (version, version - 1):
        error = error_of(lambda stale=stale: backend.begin_update(stale))
        if not isinstance(error, ValueError):
            _refit(case, version + 1)  # what was begun must not outlast this rule
        assert isinstance(error, ValueError), f"version {stale} after {version}: {error!r}"
        assert str(stale) in str(error), f"the error does not name {stale}: {error}"
    assert _version(case) == version


def _of(case: GenerationCase) -> ReceivesWeights:
    assert isinstance(case, ReceivesWeights)
    return case


def _refit(case: GenerationCase, version: int) -> None:
    _of(case).refit(case.backend(max_new_tokens=NUM_NEW), version)


def _version(case: GenerationCase) -> int:
    return int(complete(case, prompts(case)[:1], max_new_tokens=1)["weight_version"][0])


def _require_right_weights(case: GenerationCase) -> None:
    error = largest_error(case, complete(case, prompts(case)))
    assert error <= case.tolerance, f"after the refit log-probabilities are off by {error:.2g}"
