import pytest
from rl_policy.recipes.arithmetic import arithmetic_problems, careless_sum


def operands(problem):
    left, right = problem.prompt.removesuffix("=").split("+")
    return int(left), int(right)


def build(**changes):
    arguments = {
        "max_operand": 40,
        "num_heldout": 200,
        "num_validation": 100,
        "careless_share": 0.6,
        "seed": 0,
    }
    return arithmetic_problems(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("a", "b", "careless"), [(27, 35, 52), (12, 34, 46), (99, 99, 88), (95, 7, 92), (0, 0, 0)]
)
def test_a_careless_sum_forgets_every_carry(a, b, careless):
    assert careless_sum(a, b) == careless


def test_answers_are_right_and_every_sum_is_there_once():
    sets = build()
    problems = [*sets.train, *sets.heldout, *sets.validation]
    assert all(int(problem.answer) == sum(operands(problem)) for problem in problems)
    assert len({problem.prompt for problem in problems}) == len(problems)
    assert {tuple(sorted(operands(problem))) for problem in problems} == {
        (a, b) for a in range(41) for b in range(a, 41)
    }


def test_what_is_measured_is_not_trained_on_either_way_round():
    sets = build()
    unordered = [
        {tuple(sorted(operands(problem))) for problem in problems}
        for problems in (sets.heldout, sets.validation, (*sets.train, *sets.demonstrations))
    ]
    assert [len(pairs) for pairs in unordered[:2]] == [200, 100]
    assert not unordered[0] & unordered[1]
    assert not unordered[0] & unordered[2]
    assert not unordered[1] & unordered[2]


def test_demonstrations_forget_to_carry_as_often_as_asked():
    sets = build(careless_share=0.6)
    carried = [d for d in sets.demonstrations if careless_sum(*operands(d)) != sum(operands(d))]
    careless = [d for d in carried if int(d.answer) == careless_sum(*operands(d))]
    careful = [d for d in carried if int(d.answer) == sum(operands(d))]
    assert len(careless) + len(careful) == len(carried)
    assert len(careless) / len(carried) == pytest.approx(0.6, abs=0.03)
    assert all(int(d.answer) == sum(operands(d)) for d in build(careless_share=0.0).demonstrations)


def test_the_seed_decides_the_division():
    assert build() == build()
    assert build().heldout != build(seed=1).heldout


def test_too_few_sums_are_named():
    with pytest.raises(ValueError, match=r"data.max_operand=9 gives 55 pairs.*num_heldout=200"):
        build(max_operand=9)
