"""Every chat template of TRL: the tokens of prompts, answers, turns, calls and observations.

What is expected comes from `apply_chat_template`, whole conversations at a time.
"""

import json

import pytest
from conversations import (
    AGAIN,
    ANSWER,
    ASK,
    LAST,
    RESULT,
    SYSTEM,
    TOOLS,
    TURNS,
    call,
    encode,
    marks,
    render,
    starts_with,
    turn_targets,
)
from rl_policy.data.batches import ProblemEncoder
from rl_policy.data.datasets import Problem, read_problems
from rl_policy.data.rows import GivenRows
from trl_templates import NAMES, tokenizer_of

NEMOTRON = {f"nemotron_3_{each}" for each in ("5_lightning", "nano", "super", "ultra")}
DEEPSEEK = {"deepseek_r1_distill", "deepseekv3"}


def with_training(names):
    return names | {f"{name}_training" for name in names}


# The prompt opens a thought, and the conversation does not render it: the answer would not follow
# what the policy samples from.
REFUSED = with_training(NEMOTRON | DEEPSEEK)
# An earlier turn loses its thought, its channel or its end once a user answers.
REWRITES_TURNS = {"gptoss", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}


def read(row):
    (problem,) = read_problems(GivenRows([row], key="rows"), key="rows")
    return problem


def example(name, problem, **options):
    (found,) = ProblemEncoder(tokenizer_of(name), **options).examples([problem])
    return found


def refusal(name, problem, **options):
    with pytest.raises(ValueError, match=r"is rendered by|cannot render") as caught:
        example(name, problem, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_prompt(name):
    tokenizer, encoder = tokenizer_of(name), ProblemEncoder(tokenizer_of(name))
    for messages in ([ASK], [SYSTEM, ASK], TURNS[:-1], [SYSTEM, *TURNS[:-1]]):
        expected = render(tokenizer, messages, is_prompt=True)
        problem = Problem("x", messages=messages)
        if expected is None:
            with pytest.raises(ValueError, match="chat_template cannot render the prompt 'x'"):
                encoder.prompt_tokens([problem])
        else:
            assert encoder.prompt_tokens([problem]) == [expected]


@pytest.mark.parametrize("name", NAMES)
def test_answer(name):
    tokenizer, problem = tokenizer_of(name), Problem("x", LAST["content"], messages=TURNS[:-1])
    prompt, whole = render(tokenizer, TURNS[:-1], is_prompt=True), render(tokenizer, TURNS)
    assert starts_with(whole, prompt) == (name not in REFUSED)
    if name in REFUSED:
        assert "which does not begin with it" in refusal(name, problem)
        return
    found = example(name, problem)
    assert (found.tokens, found.prompt_length) == (whole, len(prompt))
    expected = marks(tokenizer, TURNS) or [1] * len(whole)
    assert found.targets == [0] * len(prompt) + expected[len(prompt) :]


@pytest.mark.parametrize("name", NAMES)
def test_turns(name, caplog):
    tokenizer, problem = tokenizer_of(name), read({"messages": TURNS})
    expected = marks(tokenizer, TURNS)
    if expected is None and name in REFUSED:
        assert "which does not begin with it" in refusal(name, problem)
        return
    left_out = []
    if expected is None:
        expected, left_out = turn_targets(tokenizer, TURNS)
    assert left_out == ([1] if name in REWRITES_TURNS else [])
    found = example(name, problem)
    assert (found.tokens, found.targets) == (render(tokenizer, TURNS), expected)
    assert ("is trained on without its messages 1," in caplog.text) == bool(left_out)


def tool_conversation(tokenizer):
    """Return a conversation with a call, whose arguments are JSON if the template wants a text."""
    for arguments in ({"x": 1}, json.dumps({"x": 1})):
        messages = [ASK, call(arguments), RESULT, LAST]
        if render(tokenizer, messages, tools=TOOLS) is not None:
            return messages
    return None


@pytest.mark.parametrize("name", NAMES)
def test_tool_calls(name, caplog):
    tokenizer, encoder = tokenizer_of(name), ProblemEncoder(tokenizer_of(name))
    messages = tool_conversation(tokenizer)
    if messages is None:
        problem = read({"messages": [ASK, call({"x": 1}), RESULT, LAST], "tools": TOOLS})
        assert "chat_template cannot render rows[0]" in refusal(name, problem)
        return
    problem = read({"messages": messages, "tools": TOOLS})
    prompt = render(tokenizer, messages[:-1], is_prompt=True, tools=TOOLS)
    assert encoder.prompt_tokens([problem]) == [prompt]
    # A template that has no case for tools is named.
    is_without = render(tokenizer, messages) == render(tokenizer, messages, tools=TOOLS)
    (unused,) = [each for each in caplog.messages if "does not use" in each] or [""]
    assert ("tools," in unused) == is_without

    whole = render(tokenizer, messages, tools=TOOLS)
    expected = marks(tokenizer, messages, tools=TOOLS)
    if expected is None and not starts_with(whole, prompt):
        assert name in REFUSED
        assert "which does not begin with it" in refusal(name, problem)
        return
    if expected is None:
        expected, _ = turn_targets(tokenizer, messages, tools=TOOLS)
    found = example(name, problem)
    assert (found.tokens, found.targets) == (whole, expected)


@pytest.mark.parametrize("name", NAMES)
def test_call_as_the_answer(name):
    tokenizer = tokenizer_of(name)
    messages = (tool_conversation(tokenizer) or [ASK, call({"x": 1})])[:2]
    whole = render(tokenizer, messages, tools=TOOLS)
    problem = read({"prompt": [ASK], "answer": messages[1:], "tools": TOOLS})
    prompt = render(tokenizer, [ASK], is_prompt=True, tools=TOOLS)
    if not starts_with(whole, prompt):
        assert name in REFUSED
        assert "which does not begin with it" in refusal(name, problem)
        return
    found = example(name, problem)
    assert (found.tokens, found.prompt_length) == (whole, len(prompt))
    expected = marks(tokenizer, messages, tools=TOOLS) or [1] * len(whole)
    assert found.targets == [0] * len(prompt) + expected[len(prompt) :]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("observed", [AGAIN, RESULT], ids=["user", "tool"])
def test_observation(name, observed):
    tokenizer, encoder = tokenizer_of(name), ProblemEncoder(tokenizer_of(name))
    problem = Problem("x", messages=[ASK])
    sampled = encode(tokenizer, ANSWER["content"])

    def observe(last):
        (found,) = encoder.observation_tokens(
            [[observed]], problems=[problem], last_tokens=[last], role="user"
        )
        return found

    whole = render(tokenizer, [ASK, ANSWER, observed], is_prompt=True)
    if whole is None:
        with pytest.raises(ValueError, match="chat_template cannot render"):
            observe(sampled[-1])
        return
    place = next(i for i in range(len(whole)) if whole[i : i + len(sampled)] == sampled)
    after = whole[place + len(sampled) :]
    # A turn that its limit has ended, and one that ended where the template ends it.
    assert observe(sampled[-1]) == after
    length = end_of_turn(tokenizer, after, observed)
    if length:
        assert observe(after[length - 1]) == after[length:]


def end_of_turn(tokenizer, after, observed):
    """Return how many tokens the policy has sampled of those that follow the text of its turn."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    content = encode(tokenizer, observed["content"])
    until = next(
        (i for i in range(len(after)) if after[i : i + len(content)] == content), len(after)
    )
    ends = [i for i in range(until) if after[i] == tokenizer.eos_token_id]
    if ends:
        return ends[0] + 1
    return 1 if until and after[0] in special else 0


# A variable of the template takes the thought out of the prompt, or the message brings its own.
@pytest.mark.parametrize("name", sorted(NEMOTRON))
def test_way_out_of_a_refusal(name):
    tokenizer = tokenizer_of(name)
    options = {"enable_thinking": False}
    prompt = render(tokenizer, TURNS[:-1], is_prompt=True, **options)
    problem = Problem("x", LAST["content"], messages=TURNS[:-1])
    found = example(name, problem, template_arguments=options)
    whole = render(tokenizer, TURNS, **options)
    assert (found.tokens, found.prompt_length) == (whole, len(prompt))
    thought = {**LAST, "reasoning_content": "three twice"}
    found = example(name, read({"prompt": TURNS[:-1], "answer": [thought]}))
    assert found.tokens == render(tokenizer, [*TURNS[:-1], thought])
    assert found.tokens[: found.prompt_length] == render(tokenizer, TURNS[:-1], is_prompt=True)
