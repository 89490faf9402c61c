"""Rows of data: what they are read from without further packages, and their columns."""

import json

import pytest
from rl_policy.config import load_run_config, new_run_config, render_run_config
from rl_policy.data.batches import ProblemEncoder
from rl_policy.data.datasets import (
    PreferencePair,
    Problem,
    WeightedStream,
    open_stream,
    read_pairs,
    read_problems,
)
from rl_policy.data.rows import GivenRows
from rl_policy.data.tiny_model import build_tokenizer
from rl_policy.run.directory import RunDirectory
from rl_policy.run.inputs import check_shares

pytestmark = pytest.mark.needs("rl-policy[dtensor]")

QUESTION = {"role": "user", "content": "2+2="}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "4"}


def given(*rows):
    return GivenRows(rows, key="data.path")


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "prompt", "messages"),
    [
        ({"prompt": "2+2=", "answer": "4"}, "2+2=", ()),
        ({"prompt": [QUESTION], "answer": "4"}, "2+2=", (QUESTION,)),
        ({"messages": [SYSTEM, QUESTION, ANSWER]}, "Be brief.\n2+2=", (SYSTEM, QUESTION)),
        (
            {"messages": [QUESTION, ANSWER, QUESTION], "answer": "4"},
            "2+2=\n4\n2+2=",
            (QUESTION, ANSWER, QUESTION),
        ),
    ],
)
def test_a_prompt_is_a_text_or_a_conversation(row, prompt, messages):
    (problem,) = read_problems(given({**row, "room": 3}), key="data.path")
    assert (problem.prompt, problem.answer, problem.messages) == (prompt, "4", messages)
    assert problem.columns == {"room": 3}


def test_completions_of_pairs_may_be_messages():
    (pair,) = read_pairs(
        given({"prompt": [QUESTION], "chosen": [ANSWER], "rejected": "5"}), key="data.path"
    )
    assert pair == PreferencePair("2+2=", "4", "5")
    assert [row.messages for row in pair.rows] == [(QUESTION,)] * 2


def test_the_prompt_of_a_pair_ends_with_no_answer():
    row = {"prompt": [QUESTION, ANSWER], "chosen": "4", "rejected": "5"}
    with pytest.raises(ValueError, match=r"data.path\[0\]: the prompt ends with an answer"):
        read_pairs(given(row), key="data.path")


def test_columns_have_the_names_of_the_data():
    rows = given({"question": "2+2=", "solution": "4", "answer": "four"})
    columns = {"prompt": "question", "answer": "solution"}
    (problem,) = read_problems(rows, key="data.path", columns=columns)
    assert (problem, problem.columns) == (Problem("2+2=", "4"), {})
    with pytest.raises(ValueError, match=r"data.path\[0\]: has no 'q', which data.columns.prompt"):
        read_problems(rows, key="data.path", columns={"prompt": "q"})


def test_a_json_list_is_read_like_lines(tmp_path):
    path = tmp_path / "problems.json"
    path.write_text(json.dumps([{"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": "2"}]))
    assert read_problems(path, key="data.path") == [Problem("1", "1"), Problem("2", "2")]
    path.write_text(json.dumps([{"prompt": "1", "answer": "1"}, 3]))
    with pytest.raises(ValueError, match=r"problems.json\[1\]: must be an object, got int"):
        read_problems(path, key="data.path")


def test_separators_of_lines_within_a_text_end_no_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a\u2028b\x85c", "answer": "\u2029d"}, {"prompt": "e", "answer": "f"}]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(text, encoding="utf-8")
    found = read_problems(path, key="data.path")
    assert found == [Problem(row["prompt"], row["answer"]) for row in rows]


@pytest.mark.parametrize("name", ["data/absent.jsonl", "absent.json", "a/b.jsonl"])
def test_a_file_that_is_not_there_is_no_dataset_of_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"data.path={name} cannot be read: .*No such file"):
        read_problems(name, key="data.path")


def test_several_files_are_one_set_whose_problems_know_their_file(tmp_path):
    first = write(tmp_path / "a.jsonl", {"prompt": "1", "answer": "1"})
    second = write(tmp_path / "b.jsonl", {"prompt": "2", "answer": "2"})
    problems = read_problems([first, second], key="data.path")
    assert [(each.prompt, each.source) for each in problems] == [("1", 0), ("2", 1)]
    assert problems[1].place == f"{second}:1"
    assert len(read_problems([first, second, first], key="data.path")) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "4"}, r"data.path\[0\] has no 'prompt'; its keys are answer. Add it"),
        ({"prompt": 3, "answer": "4"}, "'prompt' must be a text that is not empty"),
        (
            {"messages": [], "answer": "4"},
            r"'messages' must be a text or messages, and has none",
        ),
        ({"messages": [3]}, r"'messages'\[0\] must be an object, got int"),
        ({"messages": [{"role": "user"}]}, r"'messages'\[0\]: 'content' must be a text"),
        ({"messages": [ANSWER]}, r"data.path\[0\]: has no message before the answer"),
        ({"messages": [QUESTION]}, "'answer' must be a text that is not empty"),
        ({"messages": [QUESTION, ANSWER], "answer": "5"}, "has an 'answer', and its messages end"),
    ],
)
def test_a_malformed_row_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        read_problems(given(row), key="data.path")


def test_an_answer_may_be_missing_where_nothing_reads_it():
    rows = given({"prompt": "1"}, {"prompt": "2", "answer": "2"})
    found = read_problems(rows, key="data.path", needs_answer=False)
    assert [each.answer for each in found] == ["", "2"]


def test_a_conversation_goes_through_the_chat_template():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    problems = [
        Problem("plain"),
        Problem("Be brief.\n2+2=", messages=(SYSTEM, QUESTION)),
        Problem("2+2=", messages=(QUESTION,)),
    ]
    texts = map(tokenizer.decode, ProblemEncoder(tokenizer).prompt_tokens(problems))
    assert list(texts) == [
        "plain",
        "[system]Be brief.[user]2+2=[assistant]",
        "[user]2+2=[assistant]",
    ]
    with pytest.raises(ValueError, match=r"the prompt '2\+2=' is a conversation, and the"):
        ProblemEncoder(build_tokenizer()).prompt_tokens(problems[2:])


def test_a_conversation_that_the_template_refuses_is_named():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    encoder = ProblemEncoder(tokenizer)
    problems = [
        Problem("2+2=", messages=(QUESTION,)),
        Problem("Be brief.\n2+2=", messages=(SYSTEM, QUESTION)),
    ]
    expected = r"chat_template cannot render the prompt 'Be brief.*': TemplateError: no system"
    with pytest.raises(ValueError, match=expected):
        encoder.prompt_tokens(problems)


def test_sources_are_drawn_in_their_shares_and_continue_at_any_position():
    problems = [Problem(f"{source} {n}", source=source) for source in (0, 1) for n in range(5)]
    options = {"weights": [1.0, 3.0], "seed": 1}
    drawn = open_stream(problems, position=0, **options).take(4000)
    assert sum(each.source for each in drawn) / 4000 == pytest.approx(0.75, abs=0.02)
    # Each source is an epoch after an epoch of its own.
    first = [each.prompt for each in drawn if each.source == 0]
    assert sorted(first[:5]) == sorted(first[5:10]) == [f"0 {n}" for n in range(5)]
    for position in (1, 7, 1000):
        continued = open_stream(problems, position=position, **options)
        assert continued.take(50) == drawn[position : position + 50]
        assert continued.position == position + 50
    assert isinstance(continued, WeightedStream)
    with pytest.raises(ValueError, match=r"data.weights\[1\]=3 is the share of a source"):
        check_shares(problems[:5], [1.0, 3.0])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path=[]"], r"data.path=\[\] names nothing"),
        (["data.path=[a,'']"], r"data.path=\['a', ''\]: string should have at least 1"),
        (["data.path=<3 rows>"], "data.path='<3 rows>' was given by a Python program"),
        (["data.path=[a,b]", "data.weights=[1.0]"], "gives 1 weights for the 2 of data.path"),
        (["data.path=a", "data.weights=[1.0,2.0]"], "gives 2 weights for the 1 of data.path=a"),
        (["data.path=[a,b]", "data.weights=[1.0,0.0]"], r"data.weights.1=0.0: input should be gre"),
        (["data.columns={prompts: q}"], "data.columns.prompts"),
    ],
)
def test_a_wrong_key_is_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_run_config("grpo", overrides=overrides)


def test_given_rows_are_kept_in_the_run_s_directory(tmp_path):
    rows, heldout = given({"prompt": "1", "answer": "1"}), given({"prompt": "2", "answer": "2"})
    config = new_run_config("grpo", {"data": {"path": rows, "heldout_path": heldout}})
    assert config.data.path is rows
    assert "path: <1 rows>" in render_run_config(config)
    directory = RunDirectory(tmp_path / "run")
    directory.create(config)
    read = directory.read_config().data
    assert read_problems(read.path, key="data.path") == [Problem("1", "1")]
    assert read_problems(read.heldout_path, key="data.path") == [Problem("2", "2")]
