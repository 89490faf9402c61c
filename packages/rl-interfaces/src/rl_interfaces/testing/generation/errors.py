"""Rules of a generation backend: what it refuses, by a ValueError that names key and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.testing.generation.oracle import NUM_NEW, batch_of, prompts

if TYPE_CHECKING:
    from rl_interfaces.testing.generation import GenerationCase


def a_batch_without_lengths_is_refused(case: GenerationCase) -> None:
    """The key is named."""
    batch = case.batch(input_ids=torch.tensor(prompts(case, (3, 3))))
    _require_refusal(case, batch, "input_lengths")


def a_length_beyond_the_width_is_refused(case: GenerationCase) -> None:
    """Key and number are named."""
    batch = batch_of(case, prompts(case))
    beyond = batch["input_ids"].shape[1] + 1
    batch["input_lengths"][2] = beyond
    _require_refusal(case, batch, "input_lengths", str(beyond))


def a_prompt_without_room_for_a_token_is_refused(case: GenerationCase) -> None:
    """Key, length and limit are named; a prompt with room for one token gets one."""
    fitting = batch_of(case, prompts(case, (2, case.max_length - 1)), spare=0)
    output: Any = case.backend(max_new_tokens=NUM_NEW).generate(fitting)
    assert int(output["generation_lengths"][1]) == 1, "a prompt with room for one token"
    full = batch_of(case, prompts(case, (2, case.max_length)), spare=0)
    _require_refusal(case, full, "input_lengths", str(case.max_length))


def a_batch_without_rows_is_refused(case: GenerationCase) -> None:
    """By the name of the key."""
    empty = case.batch(
        input_ids=torch.zeros((0, 4), dtype=torch.int64),
        input_lengths=torch.zeros(0, dtype=torch.int64),
    )
    _require_refusal(case, empty, "input_ids")


def _require_refusal(case: GenerationCase, batch: Any, *words: str) -> None:
    backend = case.backend(max_new_tokens=NUM_NEW)
    error = error_of(lambda: backend.generate(batch))
    assert isinstance(error, ValueError), f"the batch ended with {error!r}, not with a ValueError"
    for word in words:
        assert word in str(error), f"the error does not name {word}: {error}"


def error_of(call: Callable[[], object]) -> Exception | None:
    """Return what `call` raises, None if nothing."""
    try:
        call()
    except Exception as error:
        return error
    return None
