"""The chat template of a tokenizer: conversations as it renders them, and what it leaves out."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_policy.data.datasets import Problem
from rl_policy.data.messages import Message, joined_parts

TEMPLATE = "policy.tokenizer.chat_template"
"""The key of the template."""

PROBE = "a question"
"""A user's message that shows what a template does with one."""

_LOGGER = logging.getLogger(__name__)
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Rows in which a key is looked for: it may be used in some turns only.
_MOST_TRIES = 16
# Arguments of `apply_chat_template` that are not variables of a template.
_OPTIONS = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {
    "documents"
}


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: The model's.
        arguments: Further variables of the template, such as `enable_thinking`.

    Raises:
        ValueError: An argument is not the template's.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        if taken := sorted(self._arguments.keys() & _OPTIONS):
            raise ValueError(
                f"data.chat_template_kwargs.{taken[0]} is not a variable of a template"
            )
        self._content_kinds: tuple[bool, bool] | None = None
        # Of keys of messages, by role: whether the template uses them.
        self._is_used: dict[tuple[str, str], bool] = {}

    def render(
        self, problem: Problem, messages: Sequence[Message], *, is_prompt: bool = False
    ) -> str:
        """Return a conversation as the chat template renders it.

        Args:
            problem: Has the tools, and is named in errors.
            messages: The conversation.
            is_prompt: Whether the assistant's turn follows.

        Raises:
            ValueError: The template cannot render it; names file and line.
        """
        return str(self._apply(problem, messages, tokenize=False, add_generation_prompt=is_prompt))

    def has_marks(self, problem: Problem) -> bool:
        """Return whether the template marks what the assistant generates."""
        template = self._tokenizer.get_chat_template(tools=[*map(dict, problem.tools)] or None)
        is_fast = getattr(self._tokenizer, "is_fast", False)
        return is_fast and _MARK.search(template) is not None

    def marked_spans(self, problem: Problem, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Return the characters that the template marks as the assistant's."""
        rendered: Any = self._apply(
            problem,
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        spans: list[tuple[int, int]] = []
        is_open = False
        for is_marked, (start, end) in zip(
            rendered["assistant_masks"], rendered["offset_mapping"], strict=True
        ):
            if is_marked and is_open:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            elif is_marked:
                spans.append((start, end))
            is_open = bool(is_marked)
        return spans

    def note_keys(self, conversations: Sequence[tuple[Problem, Sequence[Message]]]) -> None:
        """Warn once of keys of messages, and of tools, that the template does not use.

        Args:
            conversations: Problems with all of their messages.
        """
        tries: dict[tuple[str, str], int] = {}
        first: dict[tuple[str, str], Problem] = {}
        for problem, messages in conversations:
            keys = {(each["role"], key) for each in messages for key in each} | (
                {("", "tools")} if problem.tools else set()
            )
            for role, key in keys:
                if key in ("role", "content") or (role, key) in self._is_used:
                    continue
                if tries.setdefault((role, key), 0) < _MOST_TRIES:
                    tries[role, key] += 1
                    first.setdefault((role, key), problem)
                    if self._uses(problem, messages, role, key):
                        self._is_used[role, key] = True
        unused = [each for each in tries if each not in self._is_used]
        self._is_used |= dict.fromkeys(unused, False)
        if unused:
            names = [
                f"{key} of messages of the role {role!r}" if role else key for role, key in unused
            ]
            _LOGGER.warning(
                "%s does not use %s, which %s has: the model does not read it",
                *(TEMPLATE, ", ".join(sorted(names)), problem_place(first[unused[0]])),
            )

    def _uses(self, problem: Problem, messages: Sequence[Message], role: str, key: str) -> bool:
        """Return whether the template renders messages differently without a key."""
        whole = self.render(problem, messages)
        without = [
            {name: value for name, value in each.items() if name != key}
            if each["role"] == role
            else each
            for each in messages
        ]
        bare = problem if role else Problem(problem.prompt)
        try:
            return self.render(bare, without) != whole
        except ValueError:
            return True

    def _apply(self, problem: Problem, messages: Sequence[Message], **options: Any) -> Any:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(
                f"{prompt_name(problem)} is a conversation, and the tokenizer has no chat "
                f"template: set {TEMPLATE}"
            )
        options |= self._arguments | {"tools": [*map(dict, problem.tools)] or None}
        try:
            readable = self._readable(messages, options)
            return self._tokenizer.apply_chat_template(readable, **options)
        except Exception as error:  # a template may raise whatever its expressions do
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{TEMPLATE} cannot render {prompt_name(problem)}: {type(error).__name__}: {reason}"
            ) from error

    def _readable(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[Message]:
        """Return messages with contents that the template renders: texts, parts or null."""
        if self._content_kinds is None:
            self._content_kinds = self._reads("text"), self._reads("parts")
        reads_texts, reads_parts = self._content_kinds
        readable: list[Message] = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list) and not reads_parts and reads_texts:
                message = {**message, "content": joined_parts(content)}
            elif isinstance(content, str) and not reads_texts and reads_parts:
                message = {**message, "content": [{"type": "text", "text": content}]}
            readable.append(message)
        if all(message.get("content") is not None for message in readable):
            return readable
        filled = [{**each, "content": each.get("content") or ""} for each in readable]
        options = {**options, "tokenize": False, "return_dict": False}
        options["return_assistant_tokens_mask"] = False
        try:
            text = str(self._tokenizer.apply_chat_template(readable, **options))
        except Exception:  # as of a template that adds null to a text
            return filled
        expected = str(self._tokenizer.apply_chat_template(filled, **options))
        # A template without a case for null writes it as Python does.
        return filled if text.count("None") > expected.count("None") else readable

    def _reads(self, kind: str) -> bool:
        """Return whether the template renders a content of texts, or of a list of parts."""
        content: Any = PROBE if kind == "text" else [{"type": "text", "text": PROBE}]
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}],
                    tokenize=False,
                    add_generation_prompt=True,
                    **self._arguments,
                )
            )
        except Exception:  # as above; some index a text, or add a list to one
            return False
        # Not as Python or JSON writes the list.
        return PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text


def problem_place(problem: Problem) -> str:
    """Return the file and line of a problem, or else the beginning of its prompt."""
    return problem.place or f"the prompt {problem.prompt[:40]!r}"


def prompt_name(problem: Problem) -> str:
    """Return the beginning of a prompt with its file and line, for an error."""
    prompt = f"the prompt {problem.prompt[:40]!r}"
    return f"{problem.place}: {prompt}" if problem.place else prompt
