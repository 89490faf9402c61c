import json

import pytest
from rl_policy.data.datasets import (
    ExactMatch,
    PreferencePair,
    Problem,
    ProblemSets,
    ShuffledStream,
    arithmetic_pairs,
    arithmetic_problems,
    careless_double,
    divide_pairs,
    divide_problems,
    read_pairs,
    read_problems,
)

pytestmark = pytest.mark.promise

PROBLEMS = [Problem(f"q{number}", str(number)) for number in range(20)]
PAIRS = [PreferencePair(f"q{number // 2}", "yes", f"no {number}") for number in range(20)]
PROBLEM = Problem("27+35=", "62")


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
        ('{"prompt": "a"}', "problems.jsonl:2 has no 'answer'; its keys are prompt. Add it"),
        ('{"prompt": "a", "answer": ""}', "problems.jsonl:2: 'answer' must be a text"),
        ('{"prompt": "a", "answer": null}', "problems.jsonl:2: 'answer' must be a text"),
        ('{"prompt": " ", "answer": "4"}', "problems.jsonl:2: 'prompt' must be a text"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_line(tmp_path, line, message):
    path = write_lines(tmp_path, '{"prompt": "1", "answer": "1"}', line)
    with pytest.raises(ValueError, match=message):
        read_problems(path, key="data.path")


def test_a_file_that_holds_nothing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data.path=.*problems.jsonl is empty"):
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
    message = (
        "holds 20 problems: data.num_heldout=15 and data.num_validation=5 leave none to train on: "
        ".* data.num_heldout=2, or name another file by data.heldout_path"
    )
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


def test_pairs_are_read(tmp_path):
    path = tmp_path / "pairs.jsonl"
    line = '{"prompt": "a", "chosen": "b", "rejected": "%s"}\n'
    path.write_text(line % "c" + "\n" + line % "d")
    assert read_pairs(path, key="data.path") == [
        PreferencePair("a", "b", "c"),
        PreferencePair("a", "b", "d"),
    ]
    path.write_text(line % "c" + line % "b")
    with pytest.raises(ValueError, match=r"pairs.jsonl:2: 'chosen' and 'rejected' are the same"):
        read_pairs(path, key="data.path")
    path.write_text('{"prompt": "a", "chosen": "b"}\n')
    with pytest.raises(ValueError, match=r"pairs.jsonl:1 has no 'rejected'; its keys are prompt"):
        read_pairs(path, key="data.path")
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"data.path=.* is empty"):
        read_pairs(path, key="data.path")


def test_all_pairs_of_a_prompt_are_on_one_side_of_the_division():
    sets = divide_pairs(PAIRS, heldout=None, num_heldout=3, seed=0)
    assert (len(sets.heldout), len(sets.train)) == (6, 14)
    assert not prompts(sets.heldout) & prompts(sets.train)
    assert sets == divide_pairs(PAIRS, heldout=None, num_heldout=3, seed=0)
    assert sets != divide_pairs(PAIRS, heldout=None, num_heldout=3, seed=1)
    with pytest.raises(ValueError, match=r"pairs of 10 prompts: data.num_heldout=10 leaves none"):
        divide_pairs(PAIRS, heldout=None, num_heldout=10, seed=0)
    with pytest.raises(ValueError, match="share 1 prompts, one is 'q0'"):
        divide_pairs(PAIRS, heldout=PAIRS[:1], num_heldout=1, seed=0)


def test_the_built_in_pairs_prefer_the_right_double():
    pairs = arithmetic_pairs(max_number=99)
    assert PreferencePair("2*15=", "30", "20") in pairs
    # A number of digits up to 4 carries nothing: both would say the same.
    assert len(pairs) == 100 - 5 * 5
    assert all(pair.chosen == str(2 * int(pair.prompt[2:-1])) for pair in pairs)
    first, second = pairs[0].rows
    assert (first.prompt, second.prompt) == (pairs[0].prompt, pairs[0].prompt)
    assert (first.answer, second.answer) == (pairs[0].chosen, pairs[0].rejected)


def number_of(problem):
    return int(problem.prompt.removeprefix("2*").removesuffix("="))


def build_doublings(**changes):
    arguments = {
        "max_number": 999,
        "num_heldout": 200,
        "num_validation": 100,
        "careless_share": 0.6,
        "seed": 0,
    }
    return arithmetic_problems(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("number", "careless"), [(3478, 6846), (1234, 2468), (999, 888), (50, 0), (5, 0), (0, 0)]
)
def test_a_careless_double_forgets_every_carry(number, careless):
    assert careless_double(number) == careless


def test_answers_are_right_and_every_number_is_there_once():
    sets = build_doublings()
    problems = [*sets.train, *sets.heldout, *sets.validation]
    assert sorted(number_of(problem) for problem in problems) == list(range(1000))
    assert all(problem.answer == str(2 * number_of(problem)) for problem in problems)


def test_doublings_that_are_measured_are_not_trained_on():
    sets = build_doublings()
    heldout, validation, train, shown = (
        {number_of(problem) for problem in problems}
        for problems in (sets.heldout, sets.validation, sets.train, sets.demonstrations)
    )
    assert (len(heldout), len(validation)) == (200, 100)
    assert not heldout & validation
    assert not heldout & (train | shown)
    assert not validation & (train | shown)


def test_demonstrations_forget_to_carry_as_often_as_asked():
    sets = build_doublings(careless_share=0.6)
    carried = [
        (int(shown.answer), number_of(shown))
        for shown in sets.demonstrations
        if careless_double(number_of(shown)) != 2 * number_of(shown)
    ]
    careless = [number for answer, number in carried if answer == careless_double(number)]
    careful = [number for answer, number in carried if answer == 2 * number]
    assert len(careless) + len(careful) == len(carried)
    assert len(careless) / len(carried) == pytest.approx(0.6, abs=0.03)
    shown = build_doublings(careless_share=0.0).demonstrations
    assert all(int(each.answer) == 2 * number_of(each) for each in shown)


def test_the_seed_decides_the_division_of_doublings():
    assert build_doublings() == build_doublings()
    assert build_doublings().heldout != build_doublings(seed=1).heldout


def test_too_few_numbers_are_named():
    with pytest.raises(ValueError, match=r"data.max_number=99 gives 100 problems.*num_heldout=200"):
        build_doublings(max_number=99)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("62", 1.0),
        (" 62\n", 1.0),
        ("", 0.0),
        ("6", 0.0),
        ("062", 0.0),
        ("62.", 0.0),
        ("62 63 64", 0.0),
        ("52", 0.0),
        ("6<|endoftext|>2", 0.0),
    ],
)
def test_the_whole_completion_is_the_answer(completion, reward):
    assert ExactMatch()([completion], [PROBLEM]) == [reward]


@pytest.mark.parametrize(
    ("pattern", "completion", "reward"),
    [
        (r"= *(-?\d+)", "27 + 35 = 62", 1.0),
        (r"= *(-?\d+)", "62", 0.0),
        (r"= *(-?\d+)", "= 62, or = 63", 0.0),
        (r"= *(-?\d+)", "= 63, no, = 62", 1.0),
        (r"-?\d+", "the answer is 62", 1.0),
        (r"-?\d+", "the answer is 623", 0.0),
        (r"x(\d+)|y", "x62 y", 0.0),
    ],
)
def test_the_last_match_of_the_pattern_is_the_answer(pattern, completion, reward):
    assert ExactMatch(pattern)([completion], [PROBLEM]) == [reward]


def test_each_completion_is_held_against_its_own_problem():
    problems = [PROBLEM, Problem("1+1=", "2"), PROBLEM]
    assert ExactMatch()(["2", "2", "62"], problems) == [0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="longer"):
        ExactMatch()(["62"], problems)


def test_a_broken_pattern_is_named():
    with pytest.raises(ValueError, match=r"reward.answer_pattern='\('"):
        ExactMatch("(")
