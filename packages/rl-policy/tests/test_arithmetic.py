import pytest
from rl_policy.data.datasets import arithmetic_problems, careless_double


def number_of(problem):
    return int(problem.prompt.removeprefix("2*").removesuffix("="))


def build(**changes):
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
    sets = build()
    problems = [*sets.train, *sets.heldout, *sets.validation]
    assert sorted(number_of(problem) for problem in problems) == list(range(1000))
    assert all(problem.answer == str(2 * number_of(problem)) for problem in problems)


def test_what_is_measured_is_not_trained_on():
    sets = build()
    heldout, validation, train, shown = (
        {number_of(problem) for problem in problems}
        for problems in (sets.heldout, sets.validation, sets.train, sets.demonstrations)
    )
    assert (len(heldout), len(validation)) == (200, 100)
    assert not heldout & validation
    assert not heldout & (train | shown)
    assert not validation & (train | shown)


def test_demonstrations_forget_to_carry_as_often_as_asked():
    sets = build(careless_share=0.6)
    carried = [
        (int(shown.answer), number_of(shown))
        for shown in sets.demonstrations
        if careless_double(number_of(shown)) != 2 * number_of(shown)
    ]
    careless = [number for answer, number in carried if answer == careless_double(number)]
    careful = [number for answer, number in carried if answer == 2 * number]
    assert len(careless) + len(careful) == len(carried)
    assert len(careless) / len(carried) == pytest.approx(0.6, abs=0.03)
    shown = build(careless_share=0.0).demonstrations
    assert all(int(each.answer) == 2 * number_of(each) for each in shown)


def test_the_seed_decides_the_division():
    assert build() == build()
    assert build().heldout != build(seed=1).heldout


def test_too_few_numbers_are_named():
    with pytest.raises(ValueError, match=r"data.max_number=99 gives 100 problems.*num_heldout=200"):
        build(max_number=99)
