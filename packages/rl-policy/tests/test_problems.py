import json

import pytest
from rl_policy.data.datasets import (
    Problem,
    ProblemSets,
    ShuffledStream,
    divide_problems,
    read_problems,
)

PROBLEMS = [Problem(f"q{number}", str(number)) for number in range(20)]


def write_lines(tmp_path, *lines):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_reads_problems_and_skips_empty_lines(tmp_path):
    path = write_lines(
        tmp_path,
        '{"prompt": "2+2=", "answer": "4"}',
        "",
        json.dumps({"prompt": "\u00fc?", "answer": "\u00df", "source": "a book"}),
    )
    assert read_problems(path, key="data.path") == [
        Problem("2+2=", "4"),
        Problem("\u00fc?", "\u00df"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "answer": ', r"problems.jsonl:2: not JSON: .* \(column \d+\)"),
        ("[1, 2]", "problems.jsonl:2: must be an object, got list"),
        ('{"prompt": "a"}', "problems.jsonl:2: 'answer' must be a text"),
        ('{"prompt": "a", "answer": 4}', "problems.jsonl:2: 'answer' must be a text"),
        ('{"prompt": " ", "answer": "4"}', "problems.jsonl:2: 'prompt' must be a text"),
        ('{"prompt": "1", "answer": "4"}', "problems.jsonl:2: the prompt of line 1 again"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_line(tmp_path, line, message):
    path = write_lines(tmp_path, '{"prompt": "1", "answer": "1"}', line)
    with pytest.raises(ValueError, match=message):
        read_problems(path, key="data.path")


def test_a_file_that_holds_nothing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data.path=.*problems.jsonl holds no problem"):
        read_problems(write_lines(tmp_path, "", ""), key="data.path")
    with pytest.raises(ValueError, match=r"data.heldout_path=.*absent.* cannot be read"):
        read_problems(tmp_path / "absent", key="data.heldout_path")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "\xfc", "answer": "1"}')
    with pytest.raises(ValueError, match=r"data.path=.*latin.jsonl cannot be read"):
        read_problems(latin, key="data.path")


def prompts(problems):
    return {problem.prompt for problem in problems}


def test_the_division_is_disjoint_complete_and_seeded():
    sets = divide_problems(PROBLEMS, heldout=None, num_heldout=5, num_validation=3, seed=1)
    assert (len(sets.heldout), len(sets.validation), len(sets.train)) == (5, 3, 12)
    assert prompts(sets.heldout) | prompts(sets.validation) | prompts(sets.train) == prompts(
        PROBLEMS
    )
    assert prompts(sets.demonstrations) == prompts(sets.train)
    again = divide_problems(PROBLEMS, heldout=None, num_heldout=5, num_validation=3, seed=1)
    other = divide_problems(PROBLEMS, heldout=None, num_heldout=5, num_validation=3, seed=2)
    assert sets == again
    assert sets != other


def test_held_out_problems_of_the_user_are_taken_as_they_are():
    sets = divide_problems(
        PROBLEMS[5:], heldout=PROBLEMS[:5], num_heldout=100, num_validation=3, seed=1
    )
    assert sets.heldout == tuple(PROBLEMS[:5])
    assert len(sets.train) == 12


def test_problems_that_are_trained_on_and_measured_are_refused():
    with pytest.raises(ValueError, match=r"share 1 prompts, one is 'q4'"):
        divide_problems(PROBLEMS[4:], heldout=PROBLEMS[:5], num_heldout=5, num_validation=3, seed=1)
    with pytest.raises(AssertionError):
        ProblemSets(train=(PROBLEMS[0],), heldout=(PROBLEMS[0],), validation=(), demonstrations=())


def test_too_few_problems_are_named():
    message = "holds 20 problems: data.num_heldout=15 and data.num_validation=5 leave none"
    with pytest.raises(ValueError, match=message):
        divide_problems(PROBLEMS, heldout=None, num_heldout=15, num_validation=5, seed=0)


def test_a_pass_of_the_stream_holds_every_problem_once_in_an_order_of_its_own():
    stream = ShuffledStream(PROBLEMS, seed=0)
    first, second = stream.take(20), stream.take(20)
    assert prompts(first) == prompts(second) == prompts(PROBLEMS)
    assert first != second
    assert first != PROBLEMS


@pytest.mark.parametrize("position", [0, 7, 20, 33])
def test_a_stream_goes_on_from_a_saved_position(position):
    whole = ShuffledStream(PROBLEMS, seed=5).take(50)
    stream = ShuffledStream(PROBLEMS, seed=5, position=position)
    assert stream.take(10) == whole[position : position + 10]
    assert stream.position == position + 10
