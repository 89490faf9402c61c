"""Rows of preference pairs: their prompt, and the two completions that follow it.

The formats are those of TRL. The prompt is a column, or the beginning that `chosen` and `rejected`
share; the completions are texts, messages, or whole conversations that begin with the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rl_policy.data.messages import (
    ASSISTANT,
    Message,
    conversation_text,
    joined_parts,
    read_messages,
    read_prompt,
    read_tools,
    usable_tools,
)
from rl_policy.data.rows import Row, require_text

_COMPLETIONS = ("chosen", "rejected")


@dataclass(frozen=True, kw_only=True, slots=True)
class PairFields:
    """Fields of `rl_policy.data.datasets.PreferencePair`, and whether the row names its prompt."""

    prompt: str
    chosen: str
    rejected: str
    messages: Sequence[Message] = ()
    chosen_messages: Sequence[Message] = ()
    rejected_messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()
    has_prompt: bool = True


def read_pair(row: Row) -> PairFields:
    """Return the prompt and the two completions of a row.

    Raises:
        ValueError: The row is malformed, its completions do not share the context, or they are the
            same; names file and line.
    """
    fields, place = row.fields, row.place
    has_messages = any(isinstance(fields.get(name), list) for name in _COMPLETIONS)
    pair = _conversations(row) if has_messages else _texts(row)
    if (pair.chosen, pair.chosen_messages) == (pair.rejected, pair.rejected_messages):
        raise ValueError(f"{place}: 'chosen' and 'rejected' are the same text")
    return pair


def _prompt(row: Row) -> tuple[str, Sequence[Message]] | None:
    """Return text and messages of the column that is the prompt; None if there is none."""
    name = "prompt" if row.fields.get("prompt") is not None else "messages"
    if row.fields.get(name) is None:
        return None
    text, messages = read_prompt(row.fields[name], f"{row.place}: {name!r}")
    if messages and messages[-1]["role"] == ASSISTANT:
        raise ValueError(
            f"{row.place}: the prompt ends with an answer, and 'chosen' and 'rejected' are two "
            "others"
        )
    return text, messages


def _texts(row: Row) -> PairFields:
    chosen, rejected = (require_text(row.fields, name, place=row.place) for name in _COMPLETIONS)
    prompt = _prompt(row)
    if prompt is not None:
        text, messages = prompt
        tools = _tools(row) if messages else usable_tools(row.fields.get("tools"))
        return PairFields(
            prompt=text, chosen=chosen, rejected=rejected, messages=messages, tools=tools
        )
    if chosen == rejected:
        raise ValueError(f"{row.place}: 'chosen' and 'rejected' are the same text")
    text = _shared_text(chosen, rejected)
    if not text.strip():
        raise ValueError(
            f"{row.place}: has no 'prompt', and 'chosen' and 'rejected' share no beginning; its "
            f"keys are {', '.join(row.fields)}: map yours, as by data.columns={{prompt: question}}"
        )
    rest = [each[len(text) :] for each in (chosen, rejected)]
    if not all(rest):
        raise ValueError(f"{row.place}: 'chosen' and 'rejected' differ in where they end alone")
    return PairFields(prompt=text, chosen=rest[0], rejected=rest[1], has_prompt=False)


def _shared_text(first: str, second: str) -> str:
    """Return the beginning that two texts share, without a part of a word or a last space."""
    pairs = enumerate(zip(first, second, strict=False))
    length = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    following = first[length : length + 1] + second[length : length + 1]
    if any(map(str.isalnum, following)):
        while length and first[length - 1].isalnum():
            length -= 1
    return first[:length].removesuffix(" ")


def _conversations(row: Row) -> PairFields:
    chosen, rejected = (_completion(row, name) for name in _COMPLETIONS)
    prompt = _prompt(row)
    if prompt is None:
        context = _shared_context(chosen, rejected, place=row.place)
    else:
        text, messages = prompt
        context = [*messages] or _context_of_text(text, chosen, rejected, place=row.place)
    answers = [
        _without_context(each, context, name=name, place=row.place)
        for each, name in zip((chosen, rejected), _COMPLETIONS, strict=True)
    ]
    return PairFields(
        prompt=conversation_text(context),
        chosen=conversation_text(answers[0]),
        rejected=conversation_text(answers[1]),
        messages=tuple(context),
        chosen_messages=tuple(answers[0]),
        rejected_messages=tuple(answers[1]),
        tools=_tools(row),
    )


def _completion(row: Row, name: str) -> list[Message]:
    """Return the messages of a completion, which end with the policy's turn."""
    value = row.fields.get(name)
    if not isinstance(value, list):
        text = require_text(row.fields, name, place=row.place)
        return [{"role": ASSISTANT, "content": text}]
    messages = read_messages(value, place=f"{row.place}: {name}")
    if messages[-1]["role"] != ASSISTANT:
        raise ValueError(
            f"{row.place}: {name} ends with a message of the role {messages[-1]['role']!r}, which "
            f"must be {ASSISTANT!r}"
        )
    return messages


def _shared_context(
    chosen: Sequence[Message], rejected: Sequence[Message], *, place: str
) -> list[Message]:
    """Return the messages before the first turn of the policy in which two conversations differ."""
    pairs = zip(chosen, rejected, strict=False)
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if length == min(len(chosen), len(rejected)):
        # One goes on after the other has ended: they differ from the last turn of both.
        length -= 1
    for name, messages in zip(_COMPLETIONS, (chosen, rejected), strict=True):
        if (role := messages[length]["role"]) != ASSISTANT:
            raise ValueError(
                f"{place}: 'chosen' and 'rejected' differ first in message {length}, which has the "
                f"role {role!r} in {name}: two completions of one prompt differ in the policy's "
                "turns"
            )
    if not length:
        raise ValueError(f"{place}: has no 'prompt', and chosen has no message before the answer")
    return [*chosen[:length]]


def _context_of_text(
    text: str, chosen: Sequence[Message], rejected: Sequence[Message], *, place: str
) -> list[Message]:
    """Return the conversation of a prompt that is a text, which one of its messages may repeat."""
    if chosen[0]["role"] == rejected[0]["role"] == ASSISTANT:
        return [{"role": "user", "content": text}]
    context = _shared_context(chosen, rejected, place=place)
    contents = [joined_parts(message.get("content")).strip() for message in context]
    if text.strip() not in contents:
        raise ValueError(
            f"{place}: the prompt {text[:40]!r} is none of the messages with which 'chosen' and "
            f"'rejected' begin: leave it out, or give {ASSISTANT!r} messages alone"
        )
    return context


def _without_context(
    messages: Sequence[Message], context: Sequence[Message], *, name: str, place: str
) -> list[Message]:
    """Return the messages of a completion after those of the prompt, which it may repeat."""
    if messages[0]["role"] != ASSISTANT:
        if [*messages[: len(context)]] != [*context]:
            raise ValueError(
                f"{place}: {name} begins with a message of the role {messages[0]['role']!r}, and "
                f"its first {len(context)} messages are not the prompt, {context!r:.80}"
            )
        messages = messages[len(context) :]
    if messages[0]["role"] != ASSISTANT:
        raise ValueError(
            f"{place}: the message of {name} after the prompt has the role "
            f"{messages[0]['role']!r}, which must be {ASSISTANT!r}"
        )
    return [*messages]


def _tools(row: Row) -> tuple[dict[str, Any], ...]:
    return read_tools(row.fields.get("tools"), place=f"{row.place}: 'tools'")
