"""The batches of a policy from prompts and answers, and the texts of its completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from rl_batched_data import BatchedDataDict
from transformers import PreTrainedTokenizerBase

from rl_policy.data.chat import ChatTokenizer, special_id
from rl_policy.data.datasets import Problem

Batch: TypeAlias = BatchedDataDict
"""Tensors by name, one row per sample."""


class ProblemEncoder(ChatTokenizer):
    """Batches of prompts, answers and completions under one tokenizer.

    Args:
        tokenizer: With a padding token and an end token.
        use_chat_template: Put each prompt as a user's message through the chat template.
        stop_token_ids: Tokens that end a completion, in addition to the end token.
        stop_strings: Texts that end a completion.
        system_prompt: The first message of conversations that have no system message.
        template_arguments: Further variables of the chat template, such as `enable_thinking`.

    Raises:
        ValueError: The tokenizer lacks one of those tokens, or the chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        use_chat_template: bool = False,
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        system_prompt: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            tokenizer,
            use_chat_template=use_chat_template,
            system_prompt=system_prompt,
            template_arguments=template_arguments,
            stop_token_ids=stop_token_ids,
        )
        self.pad_id = special_id(tokenizer, "pad_token")
        self._stop_strings = tuple(stop_strings)
        self.max_prompt_tokens: int | None = None
        """Most tokens of a prompt in `prompt_batch`, which keeps its last ones. None: any."""
        self.max_row_tokens: int | None = None
        """Most tokens of a row in `answer_batch`, which keeps its first ones. None: any."""

    def answer_tokens(self, problems: Sequence[Problem]) -> list[list[int]]:
        """Return the tokens of the answers, which follow those of the prompts."""
        return [each.tokens[each.prompt_length :] for each in self.examples(problems)]

    def prompt_batch(self, problems: Sequence[Problem]) -> Batch:
        """Return `input_ids` `[batch, seq]` and `input_lengths` `[batch]` of the prompts."""
        rows = self.prompt_tokens(problems)
        if self.max_prompt_tokens is not None:
            rows = [row[-self.max_prompt_tokens :] for row in rows]
        return self.token_batch(rows)

    def token_batch(self, rows: Sequence[Sequence[int]]) -> Batch:
        """Return `input_ids` `[batch, seq]` and `input_lengths` `[batch]` of rows of tokens."""
        return BatchedDataDict(self._pad(rows))

    def answer_batch(self, problems: Sequence[Problem]) -> Batch:
        """Return prompts with their answers, whose tokens are the targets."""
        examples = self.examples(problems)
        rows = self._pad([each.tokens[: self.max_row_tokens] for each in examples])
        masks = torch.zeros_like(rows["input_ids"])
        for row, each in enumerate(examples):
            targets = each.targets[: self.max_row_tokens]
            masks[row, : len(targets)] = torch.tensor(targets)
        # The first token of a row follows nothing that could predict it.
        masks[:, 0] = 0
        return BatchedDataDict(
            {**rows, "token_mask": masks, "sample_mask": torch.ones(len(examples))}
        )

    def completion_texts(self, generated: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the text of each completion, without the token or the text that ends it.

        Everything else that was sampled stays visible, special and padding tokens too, so that
        nothing can hide in an answer.

        Args:
            generated: `output_ids`, `generation_lengths`, `unpadded_sequence_lengths`.
        """
        return [self._up_to_stop(self._without_end(each)) for each in _completions(generated)]

    def _up_to_stop(self, text: str) -> str:
        for stop in self._stop_strings:
            # It may end within a token, whose remaining text is dropped.
            text = text.partition(stop)[0]
        return text

    def _without_end(self, tokens: list[int]) -> str:
        return self.text(tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens)

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; a share of a character's bytes is U+FFFD."""
        return [self.text([each]) for each in tokens]

    def truncated_share(
        self, generated: Mapping[str, torch.Tensor], *, max_new_tokens: int
    ) -> float:
        """Return the share of the completions that the limit of tokens has ended.

        Args:
            generated: `output_ids`, `generation_lengths`, `unpadded_sequence_lengths`; or episodes,
                which have `is_truncated` and `sample_mask`.
            max_new_tokens: The limit.
        """
        if "is_truncated" in generated:
            valid = generated["sample_mask"].bool()
            return float(generated["is_truncated"][valid].double().mean())
        truncated = [
            len(tokens) >= max_new_tokens and not self.has_ended(tokens)
            for tokens in _completions(generated)
        ]
        return sum(truncated) / len(truncated)

    def has_ended(self, tokens: list[int]) -> bool:
        """Return whether a stop token or a stop string is at the end of a completion."""
        if tokens and tokens[-1] in self._stop_ids:
            return True
        text = self.text(tokens) if self._stop_strings else ""
        return any(stop in text for stop in self._stop_strings)

    def _pad(self, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        lengths = torch.tensor([len(row) for row in rows])
        input_ids = torch.full((len(rows), int(lengths.max())), self.pad_id)
        for index, row in enumerate(rows):
            input_ids[index, : len(row)] = torch.tensor(row)
        return {"input_ids": input_ids, "input_lengths": lengths}


def completion_batch(
    generated: Mapping[str, torch.Tensor], *, advantages: torch.Tensor | None = None
) -> Batch:
    """Return sampled completions as a batch to train on, their tokens being the targets.

    Args:
        generated: What `Policy.generate` returned, `[batch, seq]`; or episodes, which have their
            own `token_mask` and `sample_mask`.
        advantages: `[batch]`, any float; every token of a completion gets that of its completion.
            None: the batch has none yet.
    """
    ends = generated["unpadded_sequence_lengths"]
    if "token_mask" in generated:
        masks = {name: generated[name] for name in ("token_mask", "sample_mask")}
    else:
        masks = target_masks(generated["output_ids"], ends - generated["generation_lengths"], ends)
    columns = {
        "input_ids": generated["output_ids"],
        "input_lengths": ends,
        "generation_logprobs": generated["logprobs"],
    }
    if "routed_experts" in generated:
        columns["routed_experts"] = generated["routed_experts"]
    if advantages is not None:
        tokens = advantages.float()[:, None].expand(columns["input_ids"].shape)
        columns["advantages"] = tokens.contiguous()
    return BatchedDataDict({**columns, **masks})


def target_masks(
    input_ids: torch.Tensor, prompt_lengths: torch.Tensor, lengths: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return `token_mask`, 1 from the end of each prompt to that of its row, and `sample_mask`."""
    positions = torch.arange(input_ids.shape[1])
    is_target = (positions >= prompt_lengths[:, None]) & (positions < lengths[:, None])
    return {"token_mask": is_target.long(), "sample_mask": torch.ones(len(lengths))}


def _completions(generated: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """Return the sampled tokens of each row."""
    ends = generated["unpadded_sequence_lengths"].tolist()
    lengths = generated["generation_lengths"].tolist()
    rows = generated["output_ids"].tolist()
    return [row[end - length : end] for row, end, length in zip(rows, ends, lengths, strict=True)]
