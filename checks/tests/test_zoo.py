"""What the zoo makes of what its ranks say, and the page that it writes."""

import os
import time
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S

from checks.zoo import __main__ as run
from checks.zoo import columns, page, types
from checks.zoo.ranks import Ranks

ROOT = Path(__file__).parents[2]


def outcome_of(body):
    found = {}
    with columns.reporting(found, "a", "b"):
        body()
    assert found["a"] == found["b"]
    return found["a"]


def refuse(text):
    with columns.refusing("at the start: "):
        raise ValueError(text)


def test_only_an_error_that_names_a_key_is_a_refusal():
    assert outcome_of(lambda: None) == "equal"
    refused = outcome_of(lambda: refuse("policy.model_name: no"))
    assert refused == "refused: at the start: policy.model_name: no"
    unpacked = outcome_of(lambda: refuse("not enough values to unpack"))
    assert unpacked.startswith("crash: ValueError: not enough values to unpack (test_zoo.py, line")


@pytest.mark.parametrize("found", [1e-3, float("nan")])
def test_other_numbers_are_wrong(found):
    expected = torch.zeros(3)
    columns.require_close(expected + 1e-6, expected, "scores")
    other = torch.tensor([0.0, found, 0.0])
    said = outcome_of(lambda: columns.require_close(other, expected, "scores"))
    assert said.startswith("wrong: scores are off by")


def test_weights_are_held_by_name_and_bit():
    weights = {"a": torch.ones(2)}
    columns.hold_weights(weights, {"a": torch.ones(2)})
    for other in ({"b": torch.ones(2)}, {"a": torch.ones(2) + 1e-7}):
        assert outcome_of(lambda o=other: columns.hold_weights(o, weights)).startswith("wrong")


def test_the_worst_rank_counts():
    said = [{"x": "equal"}, {"x": "refused: policy"}, {"x": "wrong: 1"}]
    assert run.worst(said) == {"x": "wrong: 1"}
    assert run.worst([*said, {"x": "crash: X"}]) == {"x": "crash: X"}


def test_a_page_hides_nothing():
    equal = dict.fromkeys(page.COLUMNS, "equal")
    refusal = "refused: at the start: policy.head: AForCausalLM differs by 0.{} of the largest"
    text = page.write(
        {
            "one": equal | {"tp2": refusal.format(1), "generate": "equal, without a cache"},
            "two": equal | {"tp2": refusal.format(2), "cp2": "wrong: by 3", "train": "crash: X"},
            "three": {"train": "equal"},
            "none": {"model": "not built: ValueError: large"},
        }
    )
    cells = {
        line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| `")
    }
    assert "| slow |" in cells["`one`"]
    assert "| 1 |" in cells["`one`"]
    assert all(each in cells["`two`"] for each in ("| 1 |", "| wrong: by 3 |", "| crash: X |"))
    assert cells["`three`"].count("not tried") == len(page.COLUMNS) - 1
    assert "1. at the start: policy.head: it differs by ... of the largest\n" in text
    assert "- `none`: ValueError: large" in text
    assert "| of 3 types |" in text


def test_a_page_is_read_as_it_was_written():
    refusal = "refused: at the start: policy.head: a | b < c"
    results = {
        "one (alibi)": dict.fromkeys(page.COLUMNS, "equal")
        | {"tp2": refusal, "generate": "equal, without a cache", "train": "crash: a | b < c"},
        "three": {"train": "equal"},
        "none": {"model": "not built: ValueError: a | b < c"},
    }
    text = page.write(results, since="2020-01-02")
    assert "\nFrom 2020-01-02 to " in text
    assert page.read(text) == (results, "2020-01-02")
    assert page.write(page.read(text).results, since="2020-01-02") == text


def test_columns_that_are_tried_anew_replace_those_of_a_page():
    before = {"a": {"train": "equal", "tp2": "crash: X"}, "b": {"model": "not built: X"}}
    anew = {"a": {"tp2": "equal"}, "b": {"train": "equal"}, "c": {"model": "not built: Y"}}
    assert run.merge(before, anew) == {
        "a": {"train": "equal", "tp2": "equal"},
        "b": {"train": "equal"},
        "c": {"model": "not built: Y"},
    }


def test_what_is_equal_on_the_page_and_refused_now_is_a_fault():
    before = {
        "a": {"train": "equal", "tp2": "equal", "cp2": "refused: policy.x", "LoRA": "equal"},
        "b": {"generate": "equal, without a cache"},
        "c": {"model": "not built: X"},
    }
    same = {"a": {"train": "equal", "cp2": "refused: policy.x"}, "b": {"generate": "equal"}}
    assert run.lost(before, same) == []
    other = {
        "a": {"train": "equal", "tp2": "refused: policy.y", "cp2": "equal"},
        "b": {"model": "not built: Y"},
        "c": {"model": "not built: X"},
        "d": {"train": "refused: policy.z"},
    }
    assert run.lost(before, other) == [
        "a, tp2: equal on the page, now refused: policy.y",
        "b, generate: equal on the page, now not built: Y",
    ]


def test_the_committed_page_is_read_as_it_was_written():
    text = (ROOT / "docs/pages/models.md").read_text()
    found = page.read(text)
    assert len(found.results) > 170
    assert page.read(page.write(found.results, since=found.since)) == found


def test_every_variant_is_of_a_type_that_transformers_has():
    known = set(types.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    parts = {"gemma4_unified_text", "cohere_compass_text"}
    assert {name.partition(" ")[0] for name in types.all_types()} <= known | parts


def end(_directory):
    os._exit(1)


def wait(_directory):
    time.sleep(3600)


def fail(_directory):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("function", "said"), [(end, "a rank has ended"), (wait, "in time"), (fail, "KeyError: 'x'")]
)
def test_ranks_that_fail_are_replaced(monkeypatch, function, said):
    monkeypatch.setattr("checks.zoo.ranks._LIMIT_S", 2 if function is wait else PATIENCE_S)
    ranks = Ranks(2)
    try:
        with pytest.raises(ChildProcessError, match=said):
            ranks.run(function, "")
        monkeypatch.setattr("checks.zoo.ranks._LIMIT_S", PATIENCE_S)
        assert ranks.run(os.path.basename, "/a/b") == ["b", "b"]
    finally:
        ranks.close()
