"""The oracle is the tokenizer: its encoding of a whole text, and `apply_chat_template`."""

import importlib.resources
import importlib.util
import json
import logging
import re

import pytest
from rl_policy.config import load_run_config
from rl_policy.data.batches import ProblemEncoder
from rl_policy.data.datasets import PreferencePair, Problem, read_pairs, read_problems
from rl_policy.data.rows import GivenRows
from rl_policy.run.inputs import prepare_inputs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<end>", "<bos>", "<turn>", "<turn_end>"]
ASK, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
AGAIN, LAST = {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}
CONVERSATION = [ASK, ANSWER, AGAIN, LAST]

TURN = "<turn>{{ m.role }}:{{ m.content }}<turn_end>\n"
TOOLS = (
    "{% if tools %}<turn>tools:{{ tools | tojson }}<turn_end>\n{% endif %}"
    "{% for m in messages %}<turn>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}:"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function | tojson }}{% endfor %}<turn_end>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)


def template(turn, *, before="", prompt="<turn>assistant:"):
    loop = "{% for m in messages %}" + turn + "{% endfor %}"
    return before + loop + "{% if add_generation_prompt %}" + prompt + "{% endif %}"


def of_assistant(turn, other=TURN):
    return "{% if m.role == 'assistant' %}" + turn + "{% else %}" + other + "{% endif %}"


def byte_level(chat_template=None, *, specials=SPECIALS, merges=(), **tokens):
    """Return a tokenizer of bytes, and of pairs of them."""
    vocab = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    ids = {token: number for number, token in enumerate(vocab)}
    core = Tokenizer(models.BPE(ids, merges=[*merges]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([*specials])
    tokens = {"pad_token": "<pad>", "eos_token": "<end>"} | tokens
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **tokens)
    tokenizer.chat_template = chat_template
    return tokenizer


def sentencepiece(scheme="first", *, specials_after=""):
    """Return a tokenizer that puts a space in front of a text, and special tokens around it."""
    vocab = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>"])}
    for token in ["▁", *map(chr, range(33, 127)), "62", "▁62"]:
        vocab.setdefault(token, len(vocab))
    core = Tokenizer(models.BPE(vocab, merges=[("6", "2"), ("▁", "62")], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.post_processor = processors.TemplateProcessing(
        single=f"<s> $A {specials_after}".strip(), special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<unk>",
    )


def example(tokenizer, problem, **options):
    (found,) = ProblemEncoder(tokenizer, **options).examples([problem])
    return found


def trained_text(tokenizer, found):
    pairs = zip(found.tokens, found.targets, strict=True)
    return tokenizer.decode([token for token, is_target in pairs if is_target])


def whole_tokens(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, return_dict=False, **options)


def rows(*objects):
    return GivenRows(objects, key="rows")


def write(path, *objects):
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return str(path)


# Texts


@pytest.mark.parametrize("after", ["", "</s>"])
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_prompt_and_answer_are_the_tokens_of_their_text(scheme, after):
    tokenizer = sentencepiece(scheme, specials_after=after)
    encoder = ProblemEncoder(tokenizer)
    whole = sentencepiece(scheme)("31+31=62")["input_ids"]
    problem = Problem("31+31=", "62")
    assert encoder.examples([problem])[0].tokens == [*whole, tokenizer.eos_token_id]
    assert encoder.prompt_tokens([problem]) == [whole[:-1]]
    assert encoder.answer_tokens([problem]) == [[tokenizer.convert_tokens_to_ids("62"), 2]]


def test_special_tokens_that_a_text_has_already_are_not_added_again():
    tokenizer = sentencepiece("never")
    encoder = ProblemEncoder(tokenizer)
    assert encoder.prompt_tokens([Problem("<s>1=")]) == encoder.prompt_tokens([Problem("1=")])
    (found,) = encoder.examples([Problem("<s>1=", "1</s>")])
    assert found.tokens == [*tokenizer("1=1")["input_ids"], tokenizer.eos_token_id]


def test_a_prompt_keeps_its_tokens_if_the_tokenizer_joins_its_end_with_the_answer(caplog):
    tokenizer = byte_level(merges=[("Ġ", "4"), ("4", "2")])
    prompt, answer = "6*7= ", "42!"
    found = example(tokenizer, Problem(prompt, answer))
    assert found.tokens[: found.prompt_length] == tokenizer(prompt)["input_ids"]
    assert trained_text(tokenizer, found) == "42!<end>"
    assert found.tokens[found.prompt_length] == tokenizer.convert_tokens_to_ids("42")
    assert "joins the end of a prompt, '6*7= ', with its answer, '42!'" in caplog.text


def test_a_text_that_follows_another_has_no_sentencepiece_space():
    tokenizer = sentencepiece()
    encoder = ProblemEncoder(tokenizer)
    (found,) = encoder.observation_tokens(["62"], problems=[Problem("1")], last_tokens=[5], role="")
    assert tokenizer.convert_ids_to_tokens(found) == ["62"]


def test_a_turn_that_ends_with_two_tokens_is_not_ended_again():
    tokenizer = byte_level(template("<turn>{{ m.role }}:{{ m.content }}<turn_end><end>"))
    encoder = ProblemEncoder(tokenizer)
    (found,) = encoder.observation_tokens(
        ["5"], problems=[Problem("x", messages=[ASK])], last_tokens=[1], role="user"
    )
    assert tokenizer.decode(found) == "<turn>user:5<turn_end><end><turn>assistant:"


def test_everything_sampled_but_the_end_token_is_decoded():
    tokenizer = byte_level()
    encoder = ProblemEncoder(tokenizer, stop_token_ids=[4])
    pad, end, five = 0, 1, tokenizer("5")["input_ids"][0]
    cases = {
        (five, pad, pad, end): "5<pad><pad>",
        (five, pad): "5<pad>",
        (five, end, end): "5<end>",
        (five, 4): "5",
        (4, five): "<turn_end>5",
    }
    for tokens, text in cases.items():
        assert encoder._without_end([*tokens]) == text
    tokenizer = byte_level(clean_up_tokenization_spaces=True)
    assert ProblemEncoder(tokenizer).text(tokenizer("a , b .")["input_ids"]) == "a , b ."


# Conversations

TEMPLATES = {
    "a turn's own end": template(TURN),
    "the end token": template("<turn>{{ m.role }}:{{ m.content }}<end>"),
    "an end of text and of turns": template(TURN)
    .replace("{% if add", "{% if not add", 1)
    .replace("<turn>assistant:{% endif %}", "<end>{% else %}<turn>assistant:{% endif %}"),
    "a space": template(of_assistant("<turn>assistant: {{ m.content }}<end>")),
    "a thought": template(
        of_assistant("<turn>assistant:{% if loop.last %}(thought) {% endif %}{{ m.content }}<end>")
    ),
    "bos": template(TURN, before="{{ bos_token }}"),
    "words": template("{{ m.role }}: {{ m.content }}\n", prompt="assistant: "),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_is_what_the_template_renders_after_the_prompt(name, caplog):
    tokenizer = byte_level(TEMPLATES[name], bos_token="<bos>")
    prompt = whole_tokens(tokenizer, CONVERSATION[:-1], add_generation_prompt=True)
    whole = whole_tokens(tokenizer, CONVERSATION)
    found = example(tokenizer, Problem("x", "6", messages=CONVERSATION[:-1]))
    assert found.tokens == whole
    assert found.prompt_length == len(prompt)
    assert found.targets == [0] * len(prompt) + [1] * (len(whole) - len(prompt))
    assert not caplog.text or name == "words"
    batch = ProblemEncoder(tokenizer).answer_batch([Problem("x", "6", messages=CONVERSATION[:-1])])
    assert batch["token_mask"][0].tolist() == found.targets


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a turn's own end", "4<turn_end>\n6<turn_end>\n"),
        ("an end of text and of turns", "4<turn_end>\n6<turn_end>\n<end>"),
        ("a space", " 4<end> 6<end>"),
        ("a thought", "(thought) 6<end>"),
    ],
)
def test_every_turn_of_a_conversation_is_trained_on(name, expected, caplog):
    tokenizer = byte_level(TEMPLATES[name])
    (problem,) = read_problems(rows({"messages": CONVERSATION}), key="rows")
    found = example(tokenizer, problem)
    assert found.tokens == whole_tokens(tokenizer, CONVERSATION)
    assert trained_text(tokenizer, found) == expected
    is_rewritten = "rows[0] is trained on without its messages 1" in caplog.text
    assert is_rewritten == (name == "a thought")


def test_an_answer_in_a_column_of_its_own_is_all_that_is_trained_on():
    tokenizer = byte_level(TEMPLATES["the end token"])
    (problem,) = read_problems(rows({"prompt": CONVERSATION[:-1], "answer": [LAST]}), key="rows")
    assert trained_text(tokenizer, example(tokenizer, problem)) == "6<end>"


def test_marks_of_a_template_are_the_targets():
    marked = template(
        of_assistant("<turn>bot:{% generation %}{{ m.content }}<end>{% endgeneration %}."),
        prompt="<turn>bot:",
    )
    tokenizer = byte_level(marked)
    (problem,) = read_problems(rows({"messages": CONVERSATION}), key="rows")
    found = example(tokenizer, problem)
    whole = tokenizer.apply_chat_template(CONVERSATION, return_assistant_tokens_mask=True)
    assert (found.tokens, found.targets) == (whole["input_ids"], whole["assistant_masks"])
    assert trained_text(tokenizer, found) == "4<end>6<end>"
    only_last = example(tokenizer, Problem("x", "6", messages=CONVERSATION[:-1]))
    assert only_last.tokens == found.tokens
    assert trained_text(tokenizer, only_last) == "6<end>"


def test_a_template_that_rewrites_the_prompt_is_refused_with_both_renderings():
    thinking = template(TURN, prompt="<turn>assistant:<think>\n")
    (problem,) = read_problems(rows({"messages": [ASK, ANSWER]}), key="rows")
    encoder = ProblemEncoder(byte_level(thinking))
    with pytest.raises(ValueError, match=r"^rows\[0\]: the prompt '2\+2\?' is rendered") as caught:
        encoder.examples([problem])
    message = str(caught.value)
    assert "'<turn>user:2+2?<turn_end>\\n<turn>assistant:<think>\\n'" in message
    assert "'<turn>user:2+2?<turn_end>\\n<turn>assistant:4<turn_end>\\n'" in message
    assert "\n" not in message
    # Nothing is trained on its answer.
    assert encoder.prompt_tokens([problem]) == [
        whole_tokens(encoder.tokenizer, [ASK], add_generation_prompt=True)
    ]
    kwargs = {"template_arguments": {"thinks": False}}
    thinking = thinking.replace("<think>\n", "{% if thinks is not false %}<think>\n{% endif %}")
    assert example(byte_level(thinking), problem, **kwargs).targets.count(1)


def test_a_template_without_an_end_is_told_of(caplog):
    open_ended = template("<turn>{{ m.role }}:{{ m.content }}")
    tokenizer = byte_level(open_ended)
    found = example(tokenizer, Problem("x", "4", messages=[ASK]))
    assert found.tokens == whole_tokens(tokenizer, [ASK, ANSWER])
    assert "renders nothing after the answer '4'" in caplog.text
    # Plain text has no end of a turn, as a prompt that is a text.
    tokenizer = byte_level(template("{{ m.role }}:{{ m.content }}", prompt="assistant:"))
    found = example(tokenizer, Problem("x", "4", messages=[ASK]))
    assert found.tokens == [*whole_tokens(tokenizer, [ASK, ANSWER]), tokenizer.eos_token_id]


def test_tokens_joined_across_the_end_of_a_rendered_prompt():
    joined = template(
        of_assistant("<turn>assistant\n\n{{ m.content }}<end>"), prompt="<turn>assistant\n"
    )
    tokenizer = byte_level(joined, merges=[("Ċ", "Ċ")])
    found = example(tokenizer, Problem("x", "6", messages=CONVERSATION[:-1]))
    prompt = whole_tokens(tokenizer, CONVERSATION[:-1], add_generation_prompt=True)
    assert found.tokens[: found.prompt_length] == prompt
    assert trained_text(tokenizer, found) == "\n6<end>"


# Keys of messages


def tool_conversation(content=None):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    return [
        ASK,
        {"role": "assistant", "content": content, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "12", "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": "12 degrees", "reasoning_content": "as f says"},
    ]


def test_the_template_gets_every_key_of_messages_and_tools(caplog):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    tokenizer = byte_level(TOOLS)
    messages = tool_conversation()
    (problem,) = read_problems(rows({"messages": messages, "tools": tools}), key="rows")
    assert [*problem.messages, *problem.completion] == messages
    encoder = ProblemEncoder(tokenizer)
    (found,) = encoder.examples([problem])
    assert found.tokens == whole_tokens(tokenizer, messages, tools=tools)
    assert encoder.prompt_tokens([problem]) == [
        whole_tokens(tokenizer, messages[:-1], tools=tools, add_generation_prompt=True)
    ]
    calls = '(hm)!{"name": "f", "arguments": {"x": 1}}<turn_end>\n'
    assert trained_text(tokenizer, found) == f"{calls}(as f says)12 degrees<turn_end>\n"
    unused = [each for each in caplog.messages if "does not use" in each]
    assert unused == [
        "policy.tokenizer.chat_template does not use tool_call_id of messages of the role 'tool', "
        "which rows[0] has: the model does not read it"
    ]


def test_keys_that_a_template_does_not_use_are_named_once(caplog):
    encoder = ProblemEncoder(byte_level(template(TURN)))
    row = {"messages": tool_conversation("I look."), "tools": [{"name": "f"}]}
    (problem,) = read_problems(rows(row), key="rows")
    for _ in range(2):
        encoder.examples([problem])
        encoder.prompt_tokens([problem])
    (unused,) = [each for each in caplog.messages if "does not use" in each]
    for key in ("tool_calls", "name", "tool_call_id", "reasoning_content", "tools"):
        assert key in unused


def test_a_key_that_is_used_in_some_conversation_is_not_named(caplog):
    # As templates that show the thought of the last turn alone.
    last = template(
        "<turn>{{ m.role }}:{% if loop.last %}{{ m.thinking or '' }}{% endif %}{{ m.content }}<end>"
    )
    thought = {**ANSWER, "thinking": "(two and two)"}
    problems = read_problems(
        rows({"messages": [ASK, thought, AGAIN, LAST]}, {"messages": [AGAIN, thought]}), key="rows"
    )
    ProblemEncoder(byte_level(last)).examples(problems)
    assert "does not use" not in caplog.text


def test_null_and_parts_are_contents(caplog):
    null = template("<turn>{{ m.role }}:{{ m.content }}{{ m.tool_calls or '' }}<end>")
    (problem,) = read_problems(rows({"messages": tool_conversation()}), key="rows")
    text = byte_level(null).decode(example(byte_level(null), problem).tokens)
    assert "None" not in text
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    (problem,) = read_problems(
        rows({"messages": [{"role": "user", "content": parts}, ANSWER]}), key="rows"
    )
    reading_texts = byte_level(template(TURN))
    expected = whole_tokens(reading_texts, [ASK, ANSWER])
    assert example(reading_texts, problem).tokens == expected
    reading_parts = byte_level(
        template("<turn>{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %}<turn_end>\n")
    )
    assert example(reading_parts, problem).tokens == expected
    assert example(reading_parts, Problem("2+2?", "4", messages=[ASK])).tokens == expected
    image = {"role": "user", "content": [{"type": "image", "url": "x"}]}
    with pytest.raises(ValueError, match=r"'messages'\[0\]: 'content'\[0\] is of the type 'image'"):
        read_problems(rows({"messages": [image, ANSWER]}), key="rows")


def test_null_keys_of_arrow_are_left_out():
    message = {**ANSWER, "tool_calls": None, "name": None}
    (problem,) = read_problems(rows({"messages": [ASK, message]}), key="rows")
    assert problem.completion == (ANSWER,)


def test_a_system_prompt_is_the_first_message_of_conversations_without_one():
    tokenizer = byte_level(template(TURN))
    system = {"role": "system", "content": "Be brief."}
    encoder = ProblemEncoder(tokenizer, use_chat_template=True, system_prompt="Be brief.")
    expected = whole_tokens(tokenizer, [system, ASK], add_generation_prompt=True)
    assert encoder.prompt_tokens([Problem("2+2?")]) == [expected]
    assert encoder.prompt_tokens([Problem("x", messages=[ASK])]) == [expected]
    own = {"role": "system", "content": "Be long."}
    assert encoder.prompt_tokens([Problem("x", messages=[own, ASK])]) == [
        whole_tokens(tokenizer, [own, ASK], add_generation_prompt=True)
    ]
    with pytest.raises(
        ValueError, match=r"'2\+2\?' is a text, and data.system_prompt is a message"
    ):
        ProblemEncoder(tokenizer, system_prompt="Be brief.").prompt_tokens([Problem("2+2?")])


def test_variables_of_the_template():
    thinks = template(TURN, prompt="<turn>assistant:{% if thinks %}<think>{% endif %}")
    encoder = ProblemEncoder(
        byte_level(thinks), use_chat_template=True, template_arguments={"thinks": True}
    )
    (tokens,) = encoder.prompt_tokens([Problem("2+2?")])
    assert encoder.text(tokens).endswith("<think>")
    with pytest.raises(ValueError, match=r"data.chat_template_kwargs.tokenize is not a variable"):
        ProblemEncoder(byte_level(thinks), template_arguments={"tokenize": True})


# Preference pairs

WRONG = {"role": "assistant", "content": "7"}


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": CONVERSATION, "rejected": [*CONVERSATION[:-1], WRONG]},
        {"prompt": CONVERSATION[:-1], "chosen": [LAST], "rejected": [WRONG]},
        {"prompt": CONVERSATION[:-1], "chosen": "6", "rejected": [WRONG]},
        {
            "prompt": CONVERSATION[:-1],
            "chosen": CONVERSATION,
            "rejected": [*CONVERSATION[:-1], WRONG],
        },
        {"prompt": "3+3?", "chosen": CONVERSATION, "rejected": [*CONVERSATION[:-1], WRONG]},
    ],
)
def test_pairs_of_conversations_keep_their_whole_context(row):
    (pair,) = read_pairs(rows(row), key="rows")
    assert pair == PreferencePair("2+2?\n4\n3+3?", "6", "7")
    tokenizer = byte_level(template(TURN))
    chosen, rejected = ProblemEncoder(tokenizer).examples(pair.rows)
    assert chosen.tokens == whole_tokens(tokenizer, CONVERSATION)
    assert rejected.tokens == whole_tokens(tokenizer, [*CONVERSATION[:-1], WRONG])
    assert trained_text(tokenizer, chosen) == "6<turn_end>\n"
    assert trained_text(tokenizer, rejected) == "7<turn_end>\n"


def test_pairs_may_differ_in_several_turns():
    other = [ASK, {"role": "assistant", "content": "5"}, AGAIN, WRONG]
    (pair,) = read_pairs(rows({"chosen": CONVERSATION, "rejected": other}), key="rows")
    tokenizer = byte_level(template(TURN))
    chosen, rejected = ProblemEncoder(tokenizer).examples(pair.rows)
    assert trained_text(tokenizer, chosen) == "4<turn_end>\n6<turn_end>\n"
    assert trained_text(tokenizer, rejected) == "5<turn_end>\n7<turn_end>\n"
    assert rejected.tokens == whole_tokens(tokenizer, other)
    (shorter,) = read_pairs(rows({"chosen": CONVERSATION, "rejected": [ASK, ANSWER]}), key="rows")
    assert [row.completion for row in shorter.rows] == [tuple(CONVERSATION[1:]), (ANSWER,)]


def test_a_text_prompt_before_messages_is_a_users():
    (pair,) = read_pairs(
        rows({"prompt": "2+2?", "chosen": [ANSWER], "rejected": [WRONG]}), key="rows"
    )
    assert pair.messages == (ASK,)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Q: 2+2= A: 4", "Q: 2+2= A: 5", "Q: 2+2= A:"),
        ("Q: 2+2=4", "Q: 2+2=5", "Q: 2+2="),
        ("Say hi. Hello", "Say hi. Hey", "Say hi."),
    ],
)
def test_texts_without_a_prompt_begin_with_it(chosen, rejected, prompt, caplog):
    with caplog.at_level(logging.WARNING):
        (pair,) = read_pairs(rows({"chosen": chosen, "rejected": rejected}), key="rows")
    assert (pair.prompt, pair.prompt + pair.chosen, pair.prompt + pair.rejected) == (
        prompt,
        chosen,
        rejected,
    )
    assert "rows[0] has no 'prompt'" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"chosen": [ASK, ANSWER], "rejected": [AGAIN, WRONG]},
            r"rows\[0\]: 'chosen' and 'rejected' differ first in message 0, .* role 'user'",
        ),
        (
            {"prompt": [ASK], "chosen": [AGAIN, ANSWER], "rejected": [WRONG]},
            r"rows\[0\]: chosen begins with a message of the role 'user', and its first 1 messages",
        ),
        (
            {"prompt": [ASK], "chosen": [ANSWER, AGAIN], "rejected": [WRONG]},
            r"rows\[0\]: chosen ends with a message of the role 'user'",
        ),
        (
            {"prompt": [ASK], "chosen": [ASK, AGAIN, ANSWER], "rejected": [WRONG]},
            r"rows\[0\]: the message of chosen after the prompt has the role 'user'",
        ),
        (
            {"prompt": "1+1?", "chosen": [ASK, ANSWER], "rejected": [ASK, WRONG]},
            r"rows\[0\]: the prompt '1\+1\?' is none of the messages",
        ),
        ({"chosen": [ANSWER], "rejected": [WRONG]}, r"rows\[0\]: has no 'prompt'"),
        ({"chosen": CONVERSATION, "rejected": CONVERSATION}, "are the same text"),
        ({"question": "1", "chosen": "a", "rejected": "b"}, r"its keys are question, chosen"),
    ],
)
def test_pairs_without_a_shared_context_are_named(row, message):
    with pytest.raises(ValueError, match=message):
        read_pairs(rows(row), key="rows")


# Before the start

REFUSING = (
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('who is that?') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
REWRITING = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:<think>{% endif %}"
)
CRITIC = {"role": "critic", "content": "no"}


@pytest.mark.parametrize(
    ("recipe", "template", "row", "message"),
    [
        ("grpo", REFUSING, {"messages": [ASK, CRITIC, ASK, ANSWER]}, "TemplateError: who is that?"),
        ("sft", REFUSING, {"messages": [ASK, CRITIC, ASK, ANSWER]}, "TemplateError: who is that?"),
        ("sft", REWRITING, {"messages": [ASK, ANSWER]}, "'u:2+2?;a:<think>', and"),
        (
            "dpo",
            REWRITING,
            {"prompt": [ASK], "chosen": "4", "rejected": "5"},
            "'u:2+2?;a:<think>', and",
        ),
        (
            "rm",
            REWRITING,
            {"chosen": [ASK, ANSWER], "rejected": [ASK, WRONG]},
            "'u:2+2?;a:<think>', and",
        ),
    ],
)
def test_a_row_that_the_template_does_not_render_is_named_before_the_start(
    recipe, template, row, message, tmp_path
):
    fine = [{"prompt": f"{n}=", "answer": "1", "chosen": "1", "rejected": "2"} for n in range(4)]
    overrides = [
        f"data.path={write(tmp_path / 'rows.jsonl', *fine, row)}",
        f"data.heldout_path={write(tmp_path / 'heldout.jsonl', {**fine[0], 'prompt': '?'})}",
        f"policy.tokenizer.chat_template={template}",
        *(["sft.stop_pass_rate=null"] if recipe in ("sft", "grpo") else []),
    ]
    config = load_run_config(recipe, overrides=overrides)
    with pytest.raises(ValueError, match=r"rows\.jsonl:5: the prompt '2\+2\?") as caught:
        prepare_inputs(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_of_the_data_reach_the_template(tmp_path):
    fine = [{"messages": [{"role": "user", "content": f"{n}?"}, ANSWER]} for n in range(4)]
    template = "{% if thinks %}<think>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    config = load_run_config(
        "sft",
        overrides=[
            f"data.path={write(tmp_path / 'rows.jsonl', *fine)}",
            "data.num_heldout=1",
            "sft.stop_pass_rate=null",
            "data.system_prompt=Be brief.",
            "data.chat_template_kwargs={thinks: true}",
            f"policy.tokenizer.chat_template={template}",
        ],
    )
    inputs = prepare_inputs(config)
    (tokens,) = inputs.encoder.prompt_tokens([Problem("x", messages=[ASK])])
    assert inputs.encoder.text(tokens) == "<think>Be brief.2+2?"


# The templates of TRL

_HAS_TRL = importlib.util.find_spec("trl") is not None
TRL = (
    {
        each.name.removesuffix(".jinja"): each.read_text()
        for each in importlib.resources.files("trl").joinpath("chat_templates").iterdir()
        if each.name.endswith(".jinja")
    }
    if _HAS_TRL
    else {}
)
# Their prompt opens a thought that they do not render in front of an answer without one.
OPENS_A_THOUGHT = re.compile(r"deepseek|nemotron")
# They read contents of parts alone, and drop a text: the oracle gets parts.
READS_PARTS = re.compile(r"idefics|smolvlm|llava")


@pytest.mark.parametrize("name", sorted(TRL))
def test_templates_of_trl(name):
    text = TRL[name]
    written = re.findall(r"<[^\s<>'\"{}]+>|\[/?[A-Z_]+\]", text)
    specials = [*dict.fromkeys(["<pad>", "<eos>", *written])]
    tokenizer = byte_level(text, specials=specials, eos_token="<eos>", bos_token="<bos>")
    conversation = CONVERSATION
    if READS_PARTS.match(name):
        conversation = [
            {**each, "content": [{"type": "text", "text": each["content"]}]}
            for each in CONVERSATION
        ]
    prompt = whole_tokens(tokenizer, conversation[:-1], add_generation_prompt=True)
    last = Problem("x", "6", messages=CONVERSATION[:-1])
    encoder = ProblemEncoder(tokenizer)
    assert encoder.prompt_tokens([last]) == [prompt]
    (turns,) = read_problems(rows({"messages": CONVERSATION}), key="rows")
    is_marked = "generation %}" in text or "generation -%}" in text
    if is_marked:
        whole = tokenizer.apply_chat_template(conversation, return_assistant_tokens_mask=True)
        found = example(tokenizer, turns)
        assert (found.tokens, found.targets) == (whole["input_ids"], whole["assistant_masks"])
    if OPENS_A_THOUGHT.match(name):
        with pytest.raises(ValueError, match=r"^the prompt .* is rendered by"):
            encoder.examples([last])
        return
    whole = whole_tokens(tokenizer, conversation)
    found = example(tokenizer, last)
    assert found.tokens == whole
    marks = tokenizer.apply_chat_template(conversation, return_assistant_tokens_mask=True)
    targets = marks["assistant_masks"] if is_marked else [1] * len(whole)
    assert found.targets == [0] * len(prompt) + targets[len(prompt) :]
    if not is_marked:
        of_turns = example(tokenizer, turns)
        assert of_turns.tokens == whole
        assert of_turns.targets[len(prompt) :] == found.targets[len(prompt) :]
        first = whole_tokens(tokenizer, conversation[:1], add_generation_prompt=True)
        then = whole_tokens(tokenizer, conversation[:2])
        if whole[: len(then)] == then:
            assert of_turns.targets[: len(prompt)] == (
                [0] * len(first) + [1] * (len(then) - len(first)) + [0] * (len(prompt) - len(then))
            )
