"""Encoding of texts into the batches of a policy, and decoding of its completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from rl_batched_data import BatchedDataDict
from transformers import PreTrainedTokenizerBase

from rl_policy.data.datasets import Message, Problem, conversation_text

_TEMPLATE = "policy.tokenizer.chat_template"
# Stands for a turn of the policy where a template is asked for what follows one.
_TURN = "sampled-turn"

Batch: TypeAlias = BatchedDataDict
"""Tensors by name, one row per sample."""


class ProblemEncoder:
    """Tokens of prompts, answers and completions under one tokenizer.

    Args:
        tokenizer: With a padding token and an end token.
        use_chat_template: Put each prompt as a user's message through the chat template.
        stop_token_ids: Tokens, besides the end token, that end a completion.
        stop_strings: Texts that end a completion.

    Raises:
        ValueError: The tokenizer lacks one of those.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        use_chat_template: bool = False,
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
    ) -> None:
        if use_chat_template and not getattr(tokenizer, "chat_template", None):
            raise ValueError("data.use_chat_template=True, and the tokenizer has no chat template")
        self.pad_id = _special_id(tokenizer, "pad_token")
        self._end_id = _special_id(tokenizer, "eos_token")
        self._stop_ids = {self._end_id, *stop_token_ids}
        self._stop_strings = tuple(stop_strings)
        self.tokenizer = tokenizer
        self._use_chat_template = use_chat_template
        self.max_prompt_tokens: int | None = None
        """Most tokens of a prompt in `prompt_batch`, which keeps its last ones. None: any."""
        self.max_row_tokens: int | None = None
        """Most tokens of a row in `answer_batch`, which keeps its first ones. None: any."""

    def check_template(self) -> None:
        """Raise `ValueError` unless the chat template, if it is used, renders prompts."""
        if not self._use_chat_template:
            return
        (text,) = self._render([Problem("a question")])
        if "a question" not in text:
            raise ValueError(f"{_TEMPLATE} leaves the prompt out: it renders {text[:80]!r}")

    def prompt_tokens(self, problems: Sequence[Problem]) -> list[list[int]]:
        """Return the tokens of each prompt, after which a completion starts."""
        if not any(map(self._is_rendered, problems)):
            return self._tokens([problem.prompt for problem in problems], special=True)
        rendered = self._render([each for each in problems if self._is_rendered(each)])
        plain = [each.prompt for each in problems if not self._is_rendered(each)]
        in_template = iter(self._tokens(rendered, special=False))
        bare = iter(self._tokens(plain, special=True))
        return [next(in_template if self._is_rendered(each) else bare) for each in problems]

    def check_turns(self, problems: Sequence[Problem], *, role: str) -> None:
        """Raise `ValueError` unless the chat template, if it is used, renders observations.

        Args:
            problems: Of the run, some of which may be conversations.
            role: See `observation_tokens`.
        """
        if not any(map(self._is_rendered, problems)):
            return
        observation = "an observation"
        if observation not in self._after_turn(observation, role=role):
            raise ValueError(
                f"{_TEMPLATE} renders no conversation of several turns: it leaves out the message "
                f"of the role {role!r} that follows a turn of the policy"
            )

    def observation_tokens(
        self,
        observations: Sequence[str | Sequence[Message]],
        *,
        problems: Sequence[Problem],
        last_tokens: Sequence[int],
        role: str,
    ) -> list[list[int]]:
        r"""Return the tokens that are appended to a sampled turn, after which the next one starts.

        In a chat template they are what ends the turn, unless it was sampled, the observation as a
        message, and what starts the next turn; otherwise those of the observation alone.

        Example, in the template of Qwen2, for "higher" after a turn that has sampled its end:
            "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"

        Args:
            observations: Texts, or messages, where the template has rendered the prompt.
            problems: From which their episodes started.
            last_tokens: The last sampled token of each.
            role: Of a text's message.

        Raises:
            ValueError: The chat template does not render an observation, or there are messages and
                it is not used.
        """
        texts = [
            self._observation_text(observation, problem, role=role)
            for observation, problem in zip(observations, problems, strict=True)
        ]
        rows = self._tokens(texts, special=False)
        return [
            row[1:] if last in self._stop_ids and row[:1] == [last] else row
            for row, last in zip(rows, last_tokens, strict=True)
        ]

    def _observation_text(
        self, observation: str | Sequence[Message], problem: Problem, *, role: str
    ) -> str:
        if self._is_rendered(problem):
            return self._after_turn(observation, role=role)
        if not isinstance(observation, str):
            raise ValueError(
                f"an environment answers the prompt {problem.prompt[:40]!r}, which is a text, by "
                "messages: let its reset return messages, or set data.use_chat_template"
            )
        return observation

    def _after_turn(self, observation: str | Sequence[Message], *, role: str) -> str:
        """Return what a chat template puts after a turn of the policy that is answered."""
        is_text = isinstance(observation, str)
        answer = [{"role": role, "content": observation}] if is_text else [*observation]
        messages = [
            {"role": "user", "content": "a question"},
            {"role": "assistant", "content": _TURN},
            *answer,
        ]
        (text,) = self._render([Problem(conversation_text(answer), messages=messages)])
        _, found, rest = text.partition(_TURN)
        if not found:
            raise ValueError(
                f"{_TEMPLATE} renders no conversation of several turns: it leaves out messages of "
                "the role 'assistant'"
            )
        return rest

    def answer_tokens(self, problems: Sequence[Problem]) -> list[list[int]]:
        """Return the tokens of completions that are the answers, with the end token."""
        rows = self._tokens([problem.answer for problem in problems], special=False)
        return [[*row, self._end_id] for row in rows]

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
        """Return prompts with their answers, the tokens of the answers being the targets."""
        prompts, answers = self.prompt_tokens(problems), self.answer_tokens(problems)
        tokens = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        rows = self._pad([row[: self.max_row_tokens] for row in tokens])
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
        masks = target_masks(rows["input_ids"], prompt_lengths, rows["input_lengths"])
        return BatchedDataDict({**rows, **masks})

    def completion_texts(self, generated: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the text of each completion, without the tokens or the text that end it.

        Special tokens within a completion stay visible, so that none can hide in an answer.

        Args:
            generated: `output_ids`, `generation_lengths`, `unpadded_sequence_lengths`.
        """
        return [self._up_to_stop(text) for text in self._decoded(generated)]

    def _up_to_stop(self, text: str) -> str:
        for stop in self._stop_strings:
            # It may end within a token, whose remaining text is dropped.
            text = text.partition(stop)[0]
        return text

    def _decoded(self, generated: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Yield the text of each completion, without the tokens that end it."""
        ends = generated["unpadded_sequence_lengths"].tolist()
        lengths = generated["generation_lengths"].tolist()
        rows = generated["output_ids"].tolist()
        for row, end, length in zip(rows, ends, lengths, strict=True):
            tokens = row[end - length : end]
            if tokens and tokens[-1] in self._stop_ids:
                tokens.pop()
            yield str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; a share of a character's bytes is U+FFFD."""
        return [str(self.tokenizer.decode([each], skip_special_tokens=False)) for each in tokens]

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
        ends = generated["unpadded_sequence_lengths"].tolist()
        lengths = generated["generation_lengths"].tolist()
        rows = generated["output_ids"].tolist()
        truncated = [
            length >= max_new_tokens and not self.has_ended(row[end - length : end])
            for row, end, length in zip(rows, ends, lengths, strict=True)
        ]
        return sum(truncated) / len(truncated)

    def has_ended(self, tokens: list[int]) -> bool:
        """Return whether a stop token or a stop string is at the end of a completion."""
        if tokens and tokens[-1] in self._stop_ids:
            return True
        text = str(self.tokenizer.decode(tokens)) if self._stop_strings else ""
        return any(stop in text for stop in self._stop_strings)

    def _is_rendered(self, problem: Problem) -> bool:
        """Return whether the chat template renders a prompt."""
        return self._use_chat_template or bool(problem.messages)

    def _render(self, problems: Sequence[Problem]) -> list[str]:
        """Put prompts through the chat template, as conversations or as a user's message each."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"the prompt {problems[0].prompt[:40]!r} is a conversation, and the tokenizer has "
                f"no chat template: set {_TEMPLATE}"
            )
        texts: list[str] = []
        for problem in problems:
            messages = [*problem.messages] or [{"role": "user", "content": problem.prompt}]
            try:
                text = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # a template may raise whatever its expressions do
                raise ValueError(
                    f"{_TEMPLATE} cannot render the prompt {problem.prompt[:40]!r}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            texts.append(str(text))
        return texts

    def _tokens(self, texts: list[str], *, special: bool) -> list[list[int]]:
        """Tokenize all texts in one call, which is many times as fast as one call per text."""
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=special, return_attention_mask=False)[
            "input_ids"
        ]

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


def _special_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    token_id = getattr(tokenizer, f"{name}_id")
    if token_id is None:
        raise ValueError(f"policy.tokenizer: the tokenizer has no {name}")
    return int(token_id)
