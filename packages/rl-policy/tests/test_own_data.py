"""Data as people have it: what is read, what is divided, what is too long, what has changed."""

import hashlib
import json
import random

import pytest
import rl_policy.data.rows as rows_module
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_policy.config import load_run_config
from rl_policy.data.datasets import (
    PreferencePair,
    Problem,
    divide_pairs,
    divide_problems,
    open_stream,
    read_pairs,
    read_problems,
)
from rl_policy.data.items import LazyItems, digest_items
from rl_policy.data.rows import LineFile, read_rows
from rl_policy.data.tiny_model import build_tiny_model, build_tokenizer, tiny_model_config
from rl_policy.run.directory import RunDirectory
from rl_policy.run.inputs import prepare_inputs

pytestmark = pytest.mark.needs("rl-policy[dtensor]")


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path, **options):
    return read_problems(path, key="data.path", **options)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (4, "4"),
        (-3.5, "-3.5"),
        (True, "true"),
        (False, "false"),
        (0, "0"),
        ([1, 2], "[1, 2]"),
        (["a", "ü"], '["a", "ü"]'),
        ("4", "4"),
    ],
)
def test_an_answer_may_be_any_value(tmp_path, answer, text):
    (problem,) = read(write(tmp_path / "p.jsonl", {"prompt": "q", "answer": answer}))
    assert problem.answer == text


@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"prompt": "\xc3\xbc", "answer": "1"}\n{"prompt": "b", "answer": "2"}',
        b'{"prompt": "\xc3\xbc", "answer": "1"}\r\n\r\n  \r\n{"prompt": "b", "answer": "2"}\r\n',
        b'\n\n{"prompt": "\xc3\xbc", "answer": "1"}\n \t \n{"prompt": "b", "answer": "2"}\n\n',
        b'{"prompt": "\xc3\xbc", "answer": "1"}\n\xef\xbb\xbf{"prompt": "b", "answer": "2"}\n',
    ],
    ids=["bom", "crlf", "blank", "joined"],
)
def test_marks_line_ends_and_blank_lines(tmp_path, monkeypatch, content, limit):
    if limit is not None:
        monkeypatch.setattr(rows_module, "_MOST_BYTES_IN_MEMORY", limit)
    (tmp_path / "p.jsonl").write_bytes(content)
    problems = list(read(tmp_path / "p.jsonl"))
    assert problems == [Problem("\u00fc", "1"), Problem("b", "2")]
    numbers = [number for number, line in enumerate(content.split(b"\n"), 1) if b"{" in line]
    assert [each.place for each in problems] == [f"{tmp_path}/p.jsonl:{n}" for n in numbers]


def test_utf_16_and_marked_lists_are_read(tmp_path):
    text = json.dumps([{"prompt": "\u00fc", "answer": "1"}], ensure_ascii=False)
    for name, encoding in (("a.json", "utf-16"), ("b.json", "utf-8-sig")):
        (tmp_path / name).write_bytes(text.encode(encoding))
        assert read(tmp_path / name) == [Problem("\u00fc", "1")]


@pytest.mark.parametrize(
    ("row", "mapping"),
    [
        ({"question": "q", "solution": "s"}, {"prompt": "question", "answer": "solution"}),
        ({"id": 3, "Problem": "q", "answer": "s"}, {"prompt": "Problem"}),
        ({"instruction": "q", "output": "s"}, {"prompt": "instruction", "answer": "output"}),
        ({"frage": "q", "antwort": "s"}, {"prompt": "frage", "answer": "antwort"}),
        ({"the question": "q", "answer": "s"}, {"prompt": "the question"}),
        ({"conversations": [{"role": "user", "content": "q"}], "answer": "s"},
         {"messages": "conversations"}),
    ],
)  # fmt: skip
def test_other_names_are_told_with_the_mapping_that_reads_them(tmp_path, row, mapping):
    path = write(tmp_path / "odd.jsonl", row)
    with pytest.raises(ValueError, match=r"odd.jsonl:1 has no '\w+'; its keys are ") as raised:
        read(path)
    told = str(raised.value)
    assert told.count("\n") == 0
    assert ", ".join(row) in told
    # What it proposes is read, as an override of the command line.
    remedy = told.partition("Map yours: ")[2]
    config = load_run_config("grpo", overrides=[remedy])
    assert config.data.columns == mapping
    (problem,) = read(path, columns=config.data.columns)
    assert (problem.prompt, problem.answer) == ("q", "s")


def test_the_message_of_the_brief(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "odd.jsonl", {"question": "q", "solution": "s"})
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is checked below
        read("odd.jsonl")
    assert str(raised.value) == (
        "odd.jsonl:1 has no 'prompt'; its keys are question, solution. Map yours: "
        "data.columns={prompt: question, answer: solution}"
    )


def test_columns_of_pairs_and_of_files_with_different_names(tmp_path):
    path = write(tmp_path / "pairs.jsonl", {"question": "q", "good": "a", "bad": "b"})
    with pytest.raises(ValueError, match=r"prompt: question, chosen: good, rejected: bad"):
        read_pairs(path, key="data.path")
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    assert read_pairs(path, key="data.path", columns=columns) == [PreferencePair("q", "a", "b")]
    first = write(tmp_path / "a.jsonl", {"question": "1", "answer": 1})
    second = write(tmp_path / "b.jsonl", {"prompt": "2", "answer": 2})
    found = read([first, second], columns={"prompt": "question"})
    assert found == [Problem("1", "1"), Problem("2", "2")]


PROMPTS = st.lists(st.integers(0, 30), min_size=12, max_size=60).filter(lambda x: len({*x}) > 8)


@settings(deadline=None, max_examples=60)
@given(PROMPTS, st.lists(st.integers(31, 60), max_size=20), st.integers(0, 3), st.integers())
def test_no_prompt_that_was_trained_on_is_ever_held_out(numbers, added, seed, order):
    problems = [Problem(f"q{n}", str(at)) for at, n in enumerate(numbers)]
    options = {"heldout": None, "num_heldout": 4, "num_validation": 2, "seed": seed}
    before = divide_problems(problems, **options)
    more = [*problems, *(Problem(f"q{n}", "x") for n in added)]
    random.Random(order).shuffle(more)
    after = divide_problems(more, **options)
    trained = {each.prompt for each in before.train}
    assert not trained & {each.prompt for each in (*after.heldout, *after.validation)}
    # By prompt: all rows of the others are trained on, and each measured prompt counts once.
    measured = {each.prompt for each in (*before.heldout, *before.validation)}
    assert (len(before.heldout), len(before.validation)) == (4, 2)
    assert list(before.train) == [each for each in problems if each.prompt not in measured]


@pytest.mark.parametrize(("rows", "expected"), [(2, 1), (9, 1), (40, 4), (2559, 255), (9000, 256)])
def test_a_tenth_is_held_out_by_default(rows, expected):
    problems = [Problem(f"q{n}", "1") for n in range(rows)]
    sets = divide_problems(problems, heldout=None, num_heldout=None, num_validation=0, seed=0)
    assert (len(sets.heldout), len(sets.train)) == (expected, rows - expected)
    pairs = [PreferencePair(f"q{n}", "a", "b") for n in range(rows)]
    assert len(divide_pairs(pairs, heldout=None, num_heldout=None, seed=0).heldout) == expected


def test_too_few_rows_are_told_in_one_line():
    options = {"heldout": None, "num_validation": 0, "seed": 0}
    with pytest.raises(ValueError, match=r"data.path holds 1 problems: data.num_heldout=1 and"):
        divide_problems([Problem("q", "1")], num_heldout=None, **options)
    problems = [Problem(f"q{n}", "1") for n in range(10)]
    with pytest.raises(ValueError, match=r"data.num_heldout=256 and .*such as data.num_heldout=1"):
        divide_problems(problems, num_heldout=256, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with the tokens of the built-in one, of a directory."""
    path = tmp_path_factory.mktemp("own") / "model"
    build_tiny_model(path, config=tiny_model_config(
        load_run_config("grpo").tiny_model, max_sequence_length=32
    ), seed=0)  # fmt: skip
    return path


OWN = (
    "cluster.bundle_ct_per_node_list=[1]",
    "policy.max_total_sequence_length=16",
    "policy.generation.max_new_tokens=4",
    "data.num_heldout=2",
)


def prepared(recipe, path, *overrides, model):
    own = [f"policy.model_name={model}", f"data.path={path}", *OWN, *overrides]
    latest = {each.partition("=")[0]: each for each in own}
    return prepare_inputs(load_run_config(recipe, overrides=[*latest.values()]))


def long_rows(path, recipe, *, num_long):
    """Write 20 rows, some of which have 20 tokens more."""
    long = "1" * 20
    rows = [
        {"prompt": f"2*{n}=" + (long if recipe == "grpo" and n < num_long else ""),
         "answer": str(2 * n) + (long if recipe == "sft" and n < num_long else ""),
         "chosen": "1" + (long if n < num_long else ""), "rejected": "2"}
        for n in range(20)
    ]  # fmt: skip
    return write(path, *rows)


@pytest.mark.parametrize("recipe", ["grpo", "sft", "dpo"])
def test_long_rows_are_refused_dropped_or_cut(tmp_path, caplog, model, recipe):
    path = long_rows(tmp_path / "p.jsonl", recipe, num_long=3)
    reward = [] if recipe == "dpo" else ["reward.answer_pattern=[0-9]+"]
    # Nothing held out is too long here, which the seed decides: see which rows are trained on.
    run = lambda *more: prepared(recipe, path, *reward, *more, model=model)  # noqa: E731
    with pytest.raises(ValueError, match=r"p.jsonl:\d+: the prompt .* tokens.*data.overlong=drop"):
        run()
    for mode in ("drop", "truncate"):
        caplog.clear()
        inputs = run(f"data.overlong={mode}")
        told = [each for each in caplog.messages if each.startswith(f"data.overlong={mode}")]
        sets = inputs.pairs if recipe == "dpo" else inputs.problems
        # Fine-tuning does not train on answers that are held out, however long they are.
        num_long = 3
        if recipe == "sft":
            num_long -= sum(len(each.answer) > 20 for each in sets.heldout)
        assert sum(int(each.split()[1]) for each in told) == num_long >= 1
        assert f"{path}:" in told[0]
        trained = sets.demonstrations if recipe == "sft" else sets.train
        left = 20 - (num_long if mode == "drop" else 0)
        assert len(trained) + len(sets.heldout) == left
    if recipe == "grpo":
        batch = inputs.encoder.prompt_batch(sets.train)
        assert int(batch["input_lengths"].max()) == 16 - 4
        (cut,) = inputs.encoder.prompt_batch([Problem("2*0=" + "1" * 20)])["input_ids"].tolist()
        assert cut == inputs.encoder.prompt_tokens([Problem("1" * 12)])[0]
    elif recipe == "sft":
        batch = inputs.encoder.answer_batch(sets.train)
        assert int(batch["input_lengths"].max()) == 16


def test_a_row_without_place_for_its_answer_is_dropped_when_rows_are_cut(tmp_path, caplog, model):
    rows = [{"prompt": f"2*{n}=", "answer": str(2 * n)} for n in range(20)]
    rows += [{"prompt": str(n) * 18, "answer": "4"} for n in range(3, 8)]
    path = write(tmp_path / "p.jsonl", *rows)
    pattern = "reward.answer_pattern=[0-9]+"
    inputs = prepared("sft", path, pattern, "data.overlong=truncate", model=model)
    assert all(len(each.prompt) < 18 for each in inputs.problems.demonstrations)
    assert any("data.overlong=drop: " in each for each in caplog.messages)


def test_a_model_without_data_is_refused(tmp_path, model):
    from transformers import PreTrainedTokenizerFast

    # The built-in one, trained further, has its own data.
    assert prepare_inputs(
        load_run_config("sft", overrides=[f"policy.model_name={model}", *OWN, "data.max_number=99"])
    )
    other = tmp_path / "other"
    build_tiny_model(other, config=tiny_model_config(
        load_run_config("grpo").tiny_model, max_sequence_length=32
    ), seed=0)  # fmt: skip
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["new"])
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.save_pretrained(other)
    for recipe in ("sft", "grpo", "ppo", "dpo", "rm"):
        config = load_run_config(recipe, overrides=[f"policy.model_name={other}", *OWN])
        with pytest.raises(ValueError, match=r"policy.model_name='.*other' needs data.path"):
            prepare_inputs(config)


def test_repeated_prompts_are_counted_where_they_are_sampled_from(tmp_path, caplog, model):
    rows = [{"prompt": f"2*{n % 10}=", "answer": str(n)} for n in range(30)]
    path = write(tmp_path / "p.jsonl", *rows)
    inputs = prepared("grpo", path, model=model)
    assert len(inputs.problems.heldout) == 2
    assert len(inputs.problems.train) == 3 * 8
    told = [each for each in caplog.messages if "earlier row" in each]
    assert told == [
        "data.path: 16 of 24 rows have the prompt of an earlier row, and each is sampled from"
    ]
    caplog.clear()
    assert len(prepared("sft", path, model=model).problems.demonstrations) == 24
    assert not [each for each in caplog.messages if "earlier row" in each]


def test_a_run_refuses_rows_that_have_changed(tmp_path, model):
    rows = [{"prompt": f"2*{n}=", "answer": str(2 * n), "note": {"n": n}} for n in range(20)]
    path = write(tmp_path / "p.jsonl", *rows)

    def digests():
        return prepared("grpo", path, model=model).digests()

    directory = RunDirectory(tmp_path)
    directory.keep_data(digests())
    directory.check_data(digests(), path=path)
    # Other white space is no other row.
    path.write_text("".join(json.dumps(row, indent=None) + " \r\n" for row in rows))
    directory.check_data(digests(), path=path)
    for changed in (rows[:-1], rows[::-1], [*rows[:-1], {**rows[-1], "note": {"n": 0}}]):
        write(path, *changed)
        with pytest.raises(ValueError, match=r"p.jsonl: the rows have changed since the run in"):
            directory.check_data(digests(), path=path)
    write(path, *rows)
    directory.check_data(digests(), path=path)


def test_a_digest_is_of_all_that_rows_have_but_not_of_their_place():
    rows = [Problem("a", "1", {"n": 1}), Problem("b", "2", messages=({"role": "user"},))]
    moved = [Problem("a", "1", {"n": 1}, place="x"), rows[1]]
    assert digest_items(rows) == digest_items(moved)
    others = [
        [Problem("a", "1", {"n": 2}), rows[1]],
        [Problem("a", "2", {"n": 1}), rows[1]],
        [rows[1], rows[0]],
        rows[:1],
        [rows[0], Problem("b", "2", messages=({"role": "tool"},))],
    ]
    assert len({digest_items(each) for each in (rows, *others)}) == 6


def test_many_rows_are_read_from_their_files_and_are_the_same(tmp_path, monkeypatch, model):
    rows = [
        {"prompt": f"2*{n % 400}=", "answer": n % 7, **({"note": n} if n % 5 == 0 else {})}
        for n in range(2500)
    ]
    path = write(tmp_path / "p.jsonl", *rows)
    eager = prepared("grpo", path, model=model)
    monkeypatch.setattr(rows_module, "_MOST_BYTES_IN_MEMORY", 1000)
    assert isinstance(read_rows(path, key="data.path"), LineFile)
    lazy = prepared("grpo", path, model=model)
    assert isinstance(lazy.problems.train, LazyItems)
    assert list(lazy.problems.train) == list(eager.problems.train)
    assert list(lazy.problems.heldout) == list(eager.problems.heldout)
    assert lazy.digests() == eager.digests()
    drawn = [
        open_stream(each.problems.train, weights=None, seed=3, position=7).take(20)
        for each in (eager, lazy)
    ]
    assert drawn[0] == drawn[1]
    assert [each.columns for each in drawn[0]] == [each.columns for each in drawn[1]]
    both = [
        open_stream(read([path, path]), weights=[1.0, 3.0], seed=3, position=0).take(20)
        for _ in range(2)
    ]
    assert both[0] == both[1]
    # A row that is wrong is named as ever.
    with path.open("a") as file:
        file.write('{"prompt": "2*3="}\n')
    with pytest.raises(ValueError, match=r"p.jsonl:2501 has no 'answer'"):
        read(path)


def test_of_many_rows_the_long_ones_alone_are_tokenized(tmp_path, monkeypatch, model):
    monkeypatch.setattr(rows_module, "_MOST_BYTES_IN_MEMORY", 1000)
    long = "2*0=" + "1" * 40
    prompts = [*(f"2*{n}=" for n in range(40)), long]
    path = write(tmp_path / "p.jsonl", *({"prompt": each, "answer": "1"} for each in prompts))
    pattern = "reward.answer_pattern=[0-9]+"
    seen = []
    from rl_policy.data.batches import ProblemEncoder

    tokens = ProblemEncoder.prompt_tokens

    def counting(self, problems):
        seen.extend(each.prompt for each in problems)
        return tokens(self, problems)

    monkeypatch.setattr(ProblemEncoder, "prompt_tokens", counting)
    sizes = ["policy.max_total_sequence_length=32", "policy.generation.max_new_tokens=2"]
    with pytest.raises(ValueError, match=r"p.jsonl:41: the prompt '2\*0=1+' has 44 tokens"):
        prepared("grpo", path, pattern, *sizes, model=model)
    assert [each for each in seen if each != "a"] == [long]


def test_the_division_is_that_of_a_plain_loop():
    def splitmix(value):
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    def key(text):
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    problems = [Problem(f"q{n}", "1") for n in range(50)]
    sets = divide_problems(problems, heldout=None, num_heldout=5, num_validation=3, seed=7)
    order = sorted(problems, key=lambda each: splitmix(key(each.prompt) ^ key("7/division")))
    assert list(sets.heldout) == order[:5]
    assert list(sets.validation) == order[5:8]


def test_tools_count_where_rows_are_measured_by_their_bytes():
    """The template renders them, also if the prompt is a text."""
    schema = {"name": "look_up", "description": "x" * 1000}
    assert Problem("2+2?", "4", tools=(schema,)).text_bytes > 1000
