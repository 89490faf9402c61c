"""Rules of a generation backend that frees its memory between calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_interfaces.testing.generation.errors import error_of
from rl_interfaces.testing.generation.oracle import NUM_NEW, batch_of, complete, prompts

if TYPE_CHECKING:
    from rl_interfaces.testing.generation import GenerationCase


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
