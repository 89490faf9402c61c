"""Overrides of the command line: a text is taken literally, everything else is YAML."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_policy.config import (
    RewardSection,
    load_run_config,
    override_resumed,
    parse_overrides,
)
from rl_policy.recipes.grpo_config import GrpoSection

TEXTS = (
    "#### *(-?[0-9]+)",
    "answer is #([0-9]+)",
    "the last #",
    "[0-9]+",
    "{answer}: (.*)",
    "answer: (.*)",
    "'quoted'",
    '"([A-D])"',
    "yes",
    "010",
    "1e3",
    "2026-11-29",
    " leading and trailing ",
    "${seed}",
    "a=b",
    "- item",
    "NULL",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_taken_as_it_is(text):
    config = load_run_config(
        "grpo",
        overrides=[
            f"reward.answer_pattern={text}",
            f"tracking.name={text}",
            f"data.path={text} ",
            f"data.columns.prompt={text}",
        ],
    )
    assert config.section(RewardSection).answer_pattern == text
    assert config.tracking.name == text
    assert config.data.path == f"{text} "
    assert config.data.columns == {"prompt": text}


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1))
def test_any_text_is_taken_as_it_is(text):
    if not text.strip() or text == "null":
        return
    config = load_run_config("grpo", overrides=[f"tracking.name={text}", "seed=3"])
    assert (config.tracking.name, config.seed) == (text, 3)


def test_texts_of_the_policy_and_of_its_overrides_are_literal(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }} # {{ m.x.y }}: \"{}\"{% endfor %}"
    config = load_run_config(
        "ppo",
        overrides=[
            "policy.model_name=my #1",
            f"policy.tokenizer.chat_template={template}",
            "data.path=x",
            "ppo.value_policy.precision=float32",
            "ppo.value_model=#2",
        ],
    )
    assert config.policy["model_name"] == "my #1"
    assert config.policy["tokenizer"]["chat_template"] == template
    assert config.model_dump()["ppo"]["value_model"] == "#2"


def test_null_is_none_and_lists_stay_lists():
    config = load_run_config(
        "grpo",
        overrides=[
            "tracking.name=null",
            "data.path=[a.jsonl, 'my #2.jsonl']",
            "data.columns={prompt: question, answer: '#a'}",
            "reward.function=[a.py:f, exact_match]",
            "policy.optimizer.kwargs.lr=1e-3",
            "policy.generation.top_k=null",
            "refit.staging=off",
            "seed=010",
        ],
    )
    assert config.tracking.name is None
    assert config.seed == 10
    assert config.data.path == ["a.jsonl", "my #2.jsonl"]
    assert config.data.columns == {"prompt": "question", "answer": "#a"}
    assert config.section(RewardSection).function == ["a.py:f", "exact_match"]
    assert config.policy["optimizer"]["kwargs"]["lr"] == 1e-3
    # Of a key without a known type YAML says whether it is a text.
    assert parse_overrides(["a.b=a #b", "a.c=#3", "a.d='#4'", "a.e=5"]) == {
        "a": {"b": "a #b", "c": "#3", "d": "#4", "e": 5}
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.steps=1:30", r"grpo.steps=1:30 would be 90 in YAML"),
        ("grpo.steps=3 # three", r"grpo.steps=3 # three: '# three' is a comment"),
        ("grpo.steps=#3", r"grpo.steps=#3: '#3' is a comment"),
        ("policy.generation.stop_strings=#", r"policy.generation.stop_strings=#: '#' is a comment"),
        ("policy.generation.stop_strings=[a #b]", "'#b]' is a comment"),
        ("data.columns={prompt: a #b}", "'#b}' is a comment"),
    ],
)
def test_what_yaml_would_change_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        load_run_config("grpo", overrides=[override])


def test_a_resumed_run_and_sections_of_other_recipes_have_types_too():
    config = load_run_config("grpo", overrides=["ppo.value_model=#4", "grpo.steps=2"])
    assert config.model_dump()["ppo"]["value_model"] == "#4"
    assert override_resumed(config, ["grpo.steps=9"]).section(GrpoSection).steps == 9
