"""Sizes that a run has to keep, checked before it starts: positions, vocabulary, token budgets.

Each would otherwise end the run in the middle, at the first row that exceeds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_batched_data import round_up
from rl_interfaces.backend.end_tokens import num_token_ids

from rl_policy.config import BUILTIN_MODEL, RunConfig, Settings, naming_section
from rl_policy.data.chat_template import prompt_name
from rl_policy.dispatch import TokenBudget
from rl_policy.losses import ROWS_PER_PAIR
from rl_policy.run.machine import model_config

if TYPE_CHECKING:
    import torch

    from rl_policy.data.batches import ProblemEncoder
    from rl_policy.data.datasets import Problem

_ROWS_AT_ONCE = 256
_BUDGETS = ("train_mb_tokens", "logprob_mb_tokens")


def check_policies(policies: Mapping[str, Settings]) -> None:
    """Raise unless the rows of every policy fit into its model and into its token budgets.

    Args:
        policies: The complete sections, by path.

    Raises:
        ValueError: Names the keys and the numbers.
    """
    for path, policy in policies.items():
        with naming_section(path):
            _check_positions(policy)
            for key in _BUDGETS:
                _check_budget(policy, TokenBudget.from_config(policy, key))


def _check_positions(policy: Settings) -> None:
    longest: int | None = policy.get("max_total_sequence_length")
    if longest is None or policy["model_name"] == BUILTIN_MODEL:
        return
    text: Any = model_config(policy).get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    # Rotary and relative positions go on beyond those of the training.
    if positions is None or getattr(text, "rope_parameters", None) or getattr(text, "alibi", False):
        return
    if longest > positions:
        name = type(text).attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise ValueError(
            f"policy.max_total_sequence_length={longest} is more than the {positions} positions of "
            f"policy.model_name={policy['model_name']!r} ({name}): set it to {positions} at most"
        )


def _check_budget(policy: Settings, budget: TokenBudget | None) -> None:
    longest: int | None = policy.get("max_total_sequence_length")
    if budget is None or longest is None:
        return
    size = round_up(longest, budget.multiple)
    if size > budget.tokens:
        rounded = f", rounded up to {size}" if size > longest else ""
        raise ValueError(
            f"{budget.key}={budget.tokens} is less than a row of "
            f"policy.max_total_sequence_length={longest} tokens{rounded}: raise it, or lower "
            "policy.max_total_sequence_length"
        )


def check_data(config: RunConfig, inputs: Any) -> None:
    """Raise unless the model takes every token, and the budget every pair of rows.

    Args:
        config: The run configuration.
        inputs: The inputs of its recipe, with `problems` or `pairs`.

    Raises:
        ValueError: Names the row and the numbers.
    """
    encoder: ProblemEncoder = inputs.encoder
    if not config.has_builtin_model:
        _check_tokens(config.policy, inputs, encoder)
    budget = TokenBudget.from_config(config.policy, _BUDGETS[0])
    if budget is not None and hasattr(inputs, "pairs"):
        _check_pairs(config.policy, budget, _pair_rows(inputs), encoder)


def _check_tokens(policy: Settings, inputs: Any, encoder: ProblemEncoder) -> None:
    size = getattr(model_config(policy).get_text_config(), "vocab_size", None)
    num_ids = num_token_ids(encoder.tokenizer)
    if size is None or num_ids is None or num_ids <= size:
        return
    for problems, batch in _batches(inputs, encoder):
        rows, lengths = batch["input_ids"], batch["input_lengths"].tolist()
        for problem, row, length in zip(problems, rows.tolist(), lengths, strict=True):
            highest = max(row[:length])
            if highest >= size:
                token = encoder.tokenizer.convert_ids_to_tokens(highest)
                raise ValueError(
                    f"{prompt_name(problem)} has the token {token!r} with the id {highest}, and "
                    f"policy.model_name={policy['model_name']!r} has {size} tokens: save it with "
                    "more, by resize_token_embeddings, or take the tokenizer that belongs to it"
                )


def _check_pairs(
    policy: Settings, budget: TokenBudget, rows: Sequence[Problem], encoder: ProblemEncoder
) -> None:
    longest: int | None = policy.get("max_total_sequence_length")
    if longest is not None and ROWS_PER_PAIR * round_up(longest, budget.multiple) <= budget.tokens:
        return
    for start in range(0, len(rows), ROWS_PER_PAIR):
        pair = rows[start : start + ROWS_PER_PAIR]
        lengths = encoder.answer_batch(pair)["input_lengths"].tolist()
        widths = [round_up(each, budget.multiple) for each in lengths]
        size = sum(widths) if budget.is_packed else ROWS_PER_PAIR * max(widths)
        if size > budget.tokens:
            raise ValueError(
                f"{budget.key}={budget.tokens} is less than the {size} tokens of both completions "
                f"of {prompt_name(pair[0])}, which stay in one micro-batch: raise it"
            )


def _batches(
    inputs: Any, encoder: ProblemEncoder
) -> Iterator[tuple[Sequence[Problem], Mapping[str, torch.Tensor]]]:
    """Yield all rows of a run with their tokens: prompts, and prompts with answers to learn."""
    if hasattr(inputs, "pairs"):
        learned, asked = _pair_rows(inputs), []
    else:
        problems = inputs.problems
        learned = problems.demonstrations
        asked = [*problems.train, *problems.heldout, *problems.validation]
    for rows, encode in ((learned, encoder.answer_batch), (asked, encoder.prompt_batch)):
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            chunk = rows[start : start + _ROWS_AT_ONCE]
            yield chunk, encode(chunk)


def _pair_rows(inputs: Any) -> list[Problem]:
    return [row for pair in (*inputs.pairs.train, *inputs.pairs.heldout) for row in pair.rows]
