import pytest
from rl_policy.data.datasets import PreferencePair, arithmetic_pairs, divide_pairs, read_pairs

PAIRS = [PreferencePair(f"q{number // 2}", "yes", f"no {number}") for number in range(20)]


def prompts(pairs):
    return {pair.prompt for pair in pairs}


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
    with pytest.raises(ValueError, match=r"pairs.jsonl:1: 'rejected' must be a text"):
        read_pairs(path, key="data.path")
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"data.path=.* holds no pair"):
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
