"""Messages of conversations as data has them: what a row may hold, and the text that shows them.

A message keeps every key it has, as the chat template may use it: `tool_calls`, `tool_call_id`,
`name`, `reasoning_content` and others. `content` is a text, a list of text parts, or null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rl_policy.data.rows import check_text, require_text

Message: TypeAlias = dict[str, Any]
"""A message of a conversation: `role`, `content`, and further keys for the chat template."""

ASSISTANT = "assistant"
"""The role of the policy's turns."""

# An assistant's message with one of these says something even if its content is empty.
_OTHER_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
# Their content may be empty: a tool may return nothing, and data has empty system prompts.
_MAY_BE_EMPTY = ("system", "developer", "tool", "function")


def read_prompt(prompt: Any, place: str) -> tuple[str, Sequence[Message]]:
    """Return the text of a prompt, and its messages if it is a conversation.

    Args:
        prompt: A text, or a list of messages.
        place: Where it stands, for the errors.

    Raises:
        ValueError: It is neither, or empty.
    """
    if isinstance(prompt, list):
        messages = read_messages(prompt, place=place)
        return conversation_text(messages), tuple(messages)
    check_text(prompt, place=place)
    return prompt, ()


def read_messages(messages: Sequence[Any], *, place: str) -> list[Message]:
    """Return messages with all their keys, without those that are null (except `content`).

    A column of Arrow has every key in every message, null where the message lacks it.

    Args:
        messages: Mappings with a `role`, and a `content` or calls of tools.
        place: Where they stand, for the errors.

    Raises:
        ValueError: There are none, or one lacks its role or content.
    """
    if not messages:
        raise ValueError(f"{place} must be a text or messages, and has none")
    return [_message(message, place=f"{place}[{index}]") for index, message in enumerate(messages)]


def read_tools(tools: Any, *, place: str) -> tuple[dict[str, Any], ...]:
    """Return the schemas of tools: a list of objects, or JSON of one.

    Args:
        tools: As a row has them; None: none.
        place: Where they stand, for the errors.

    Raises:
        ValueError: They are neither.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise ValueError(f"{place} must be a list of objects, or JSON of one") from None
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple) or not all(isinstance(each, Mapping) for each in tools):
        raise ValueError(f"{place} must be a list of objects, or JSON of one")
    return tuple(dict(each) for each in tools)


def usable_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Return the schemas of tools of a prompt that is a text; none if the value is another."""
    try:
        return read_tools(tools, place="tools")
    except ValueError:
        return ()


def conversation_text(messages: Sequence[Message]) -> str:
    """Return the text that stands for a conversation where one is shown or told apart."""
    return "\n".join(map(message_text, messages))


def message_text(message: Message) -> str:
    """Return the text that stands for a message: its content, and its calls of tools as JSON."""
    content = joined_parts(message.get("content"))
    calls = [json.dumps(call, default=str) for call in message.get("tool_calls") or ()]
    return "\n".join([content, *calls] if content or not calls else calls)


def joined_parts(content: Any) -> str:
    """Return the content of a message as one text; "" if it is null."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _message(message: Any, *, place: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} must be an object, got {type(message).__name__}")
    require_text(message, "role", place=place)
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    content: Any = kept.get("content")
    if isinstance(content, list):
        kept["content"] = content = _text_parts(content, place=f"{place}: 'content'")
    may_be_empty = kept["role"] in _MAY_BE_EMPTY or any(map(kept.get, _OTHER_CONTENT))
    if not (content in (None, "", []) and may_be_empty):
        is_list = isinstance(content, list)
        check_text(joined_parts(content) if is_list else content, place=f"{place}: 'content'")
    try:
        json.dumps(kept, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place} has half of a surrogate pair, which is no character") from None
    return kept


def _text_parts(parts: Sequence[Any], *, place: str) -> list[dict[str, Any]]:
    """Return the parts of a content without their null keys."""
    for index, part in enumerate(parts):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"{place}[{index}] is of the type {kind!r}: a model reads texts here")
    return [{key: value for key, value in part.items() if value is not None} for part in parts]
