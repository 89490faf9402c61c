"""The conversations that every template is asked to render, and what transformers makes of them."""

import re

import jinja2

ASK = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "four"}
AGAIN = {"role": "user", "content": "3+3?"}
LAST = {"role": "assistant", "content": "six"}
TURNS = [ASK, ANSWER, AGAIN, LAST]
SYSTEM = {"role": "system", "content": "Be brief."}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "adder",
            "description": "adds",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "description": "a number"}},
                "required": ["x"],
            },
        },
    }
]
RESULT = {"role": "tool", "name": "adder", "content": "twelve"}


def call(arguments):
    """Return the message that calls the tool."""
    function = {"name": "adder", "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render(tokenizer, messages, *, is_prompt=False, **options):
    """Return the tokens of a conversation by transformers alone; None if its template raises.

    A template that reads lists of parts, and drops a content that is a text, gets a list.
    """
    if not reads_texts(tokenizer):
        messages = [
            {**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages
        ]
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=is_prompt, return_dict=False, **options
        )
    except (jinja2.TemplateError, TypeError):
        return None


def reads_texts(tokenizer):
    text = tokenizer.apply_chat_template([ASK], tokenize=False)
    return ASK["content"] in text and "'text'" not in text


def marks(tokenizer, messages, **options):
    """Return what the template marks as the assistant's; None if it has no marks."""
    if not re.search(r"{%-?\s*generation\b", tokenizer.chat_template):
        return None
    if not reads_texts(tokenizer):
        messages = [
            {**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages
        ]
    found = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    return found["assistant_masks"]


def starts_with(tokens, start):
    return tokens is not None and start is not None and tokens[: len(start)] == start


def turn_targets(tokenizer, messages, **options):
    """Return which tokens of a conversation follow a prompt of the policy, and which turns do not.

    A turn is what the template adds to the prompt in front of it. It is left out if the template
    renders that prompt, or the turn with its end, differently once other messages follow.
    """
    whole = render(tokenizer, messages, **options)
    targets, left_out = [0] * len(whole), []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:index], is_prompt=True, **options)
        until = render(tokenizer, messages[: index + 1], **options)
        if until and until[-1] == tokenizer.eos_token_id and not starts_with(whole, until):
            # Some templates end a conversation with it, after the end of its last turn.
            until = until[:-1] if has_end(tokenizer, until[:-1], message) else None
        if not (starts_with(whole, prompt) and starts_with(whole, until)):
            left_out.append(index)
        else:
            targets[len(prompt) : len(until)] = [1] * (len(until) - len(prompt))
    return targets, left_out


def has_end(tokenizer, tokens, message):
    content = message["content"]
    return not content or not tokenizer.decode(tokens).rstrip().endswith(content)
