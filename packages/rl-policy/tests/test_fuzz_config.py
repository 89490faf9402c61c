"""Mutated configurations and files: each ends in one line that names a key, or in a run's start.

The cases are drawn from numbers of their own, not at random: one that fails fails everywhere, and
stays in the list that CI runs. `FUZZ_CASES=5000` in the environment asks for more of them.
"""

import copy
import json
import math
import os
import random
import re
import shutil
from itertools import count

import pytest
import rl_policy.cli
import yaml
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st
from rl_interfaces import PolicyConfig
from rl_policy.cli import build_app
from rl_policy.config import load_run_config, parse_run_config
from rl_policy.config.loading import _add_defaults
from rl_policy.data.tiny_model import build_tiny_model, tiny_model_config
from rl_policy.recipes import find_recipe
from started_here import start_run
from typer.testing import CliRunner
from typing_extensions import get_type_hints, is_typeddict

pytestmark = [
    pytest.mark.usefixtures("ray_apart"),
    pytest.mark.needs("rl-policy[dtensor]"),
    pytest.mark.timeout(3000),
]

# Small, so that reading data and building the model take milliseconds.
BASE = {
    "cluster": {"bundle_ct_per_node_list": [1]},
    "data": {"max_number": 99, "num_heldout": 8, "num_validation": 8},
    "policy": {
        "train_global_batch_size": 8,
        "train_micro_batch_size": 4,
        "logprob_batch_size": 8,
        "generation_batch_size": 8,
        "generation": {"max_new_tokens": 6},
    },
    "sft": {"steps": 2, "policy": {}},
    "grpo": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 4},
    "dpo": {"steps": 2},
    "ppo": {"steps": 2, "prompts_per_step": 8},
}
RECIPES = ["grpo", "sft", "dpo", "ppo"]
SECTIONS = (
    "policy|cluster|tiny_model|data|checkpoint|reward|refit|loss|sft|grpo|dpo|seed|recipe|"
    "report|logger|tracking|eval|rm|environment|async|distill|ppo"
)
NAMED = re.compile(rf"\b(?:{SECTIONS})\b")
# What a key decides that the line does not name: the number of ranks.
CONSEQUENCES = ["data-parallel ranks", "world_size="]
VALUES = [
    *(math.nan, math.inf, -math.inf, -1, 0, 1, 2, 3, 7, 8, 0.5, 1e-30, 1e-9, 1e300, -0.0),
    *(10**30, 2**31, 2**32, 2**63, -(10**30), True, False, None),
    *("", " ", "abc", "nope", "auto", "1", "a\0b", "x" * 300, "é\u202e", "${nope}", "/", "."),
    *([], [[]], [None], [0], [-1], [1, 2], ["abc"], [99999], {}, {"a": 1}, {"enabled": True}),
]

# Values that are right for a key, beside its default.
OTHERS = {
    "precision": ["float32", "bfloat16", "float16"],
    "name": [f"torch.optim.{name}" for name in ("AdamW", "SGD", "Adafactor", "LBFGS", "Muon")],
    "kwargs": [{"lr": 0.1}, {"lr": 1e-3, "weight_decay": 0.1}, {}, {"betas": [0.5, 0.9]}],
    "scheduler": [
        {"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs}
        for name, kwargs in [
            ("LinearLR", {"total_iters": 5}),
            ("CosineAnnealingLR", {"T_max": 10}),
            ("StepLR", {"step_size": 0}),
            ("ConstantLR", {}),
        ]
    ],
    "stop_token_ids": [[0], [1, 200], [257], [258]],
    "stop_strings": [["a"], ["\n", "END"], [""]],
    "old_logprobs": ["trainer", "sampler"],
    "too_old": ["drop", "rescore", "wait"],
    "loss_type": ["token_level", "sequence_level"],
    "preset": ["dapo", "dr_grpo", "gspo", "rloo", "reinforce_pp", "gdpo", "icepop"],
    "ratio_level": ["token", "sequence"],
    "importance_mode": ["token_mask", "sequence_truncate", "geometric_mask"],
    "kl_in": ["loss", "reward", "reward_to_go"],
    "kl_estimator": ["k1", "k2"],
    "length_divisor": ["max_new_tokens", 8],
    "whiten": ["tokens", "samples"],
    "answer_pattern": ["[0-9]+", "(a+)+$", "(a|a)*$", "(", "= *(-?[0-9]+)"],
    "sequence_packing": [{"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}],
    "dynamic_batching": [{"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}],
    "lora": [{"enabled": True}, {"enabled": True, "r": 4}],
    "bundle_ct_per_node_list": [[1], [2], [4], [1, 1], [2, 2]],
    "tensor_parallel_size": [1, 2],
    "head": ["language_model", "value"],
}


def leaves(section, path=()):
    """Yield the path of every key, of sections too."""
    for key, value in section.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))


def declared(kind, path):
    """Yield the path of every key of a TypedDict, set or not."""
    for key, hint in get_type_hints(kind).items():
        yield (*path, key)
        for inner in (hint, *getattr(hint, "__args__", ())):
            if is_typeddict(inner):
                yield from declared(inner, (*path, key))


def paths_of(recipe):
    config = load_run_config(recipe, overrides=[]).model_dump()
    return sorted({*leaves(config), *declared(PolicyConfig, ("policy",))})


PATHS = {recipe: paths_of(recipe) for recipe in RECIPES}


def put(config, path, value):
    """Set a key, through whatever stands in the way."""
    for key in path[:-1]:
        if not isinstance(config.get(key), dict):
            config[key] = {}
        config = config[key]
    # A copy, as the next key may be put into it.
    config[path[-1]] = copy.deepcopy(value)


def near(path, value, chance):
    """Return a value beside one that is right, or another that may be."""
    if path[-1] in OTHERS:
        return chance.choice(OTHERS[path[-1]])
    if isinstance(value, bool):
        return not value
    if not isinstance(value, (int, float)):
        # The value that it has, but given by hand.
        return chance.choice([value, value, chance.choice(VALUES)])
    half = value // 2 if isinstance(value, int) else value / 2
    return chance.choice([value + 1, value - 1, value * 2, half, -value, value * 10**9])


def mutate_config(recipe, chance):
    """Return a file with one to three keys that are changed, added or misspelt, and these keys."""
    config, changed = copy.deepcopy(BASE), []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        kind, paths = chance.random(), PATHS[recipe]
        if kind > 0.9:
            paths = [path for path in paths if path[-1] in OTHERS]
        path = chance.choice(paths)
        if kind < 0.1:
            path = (*path[:-1], path[-1] + chance.choice("xs_0"))
        complete = load_run_config(recipe, overrides=[]).model_dump()
        for key in path:
            complete = complete.get(key) if isinstance(complete, dict) else None
        value = near(path, complete, chance) if not 0.6 < kind < 0.9 else chance.choice(VALUES)
        put(config, path, value)
        changed.append(path)
    return yaml.safe_dump(config).encode(), changed


def damage(content, chance):
    """Return a file's bytes truncated, with bytes changed, or with a part repeated."""
    kind, place = chance.randrange(4), chance.randrange(max(1, len(content)))
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + bytes(chance.randrange(256) for _ in range(4)) + content[place:]
    if kind == 2:
        return content[:place] + content[place // 2 : place] + content[place:]
    return content[:place] + chance.choice([b"[" * 5000, b"{", b"\0", b"9" * 5000, b'"', b"&a *a"])


def problem_lines():
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    rows = [{**row, "chosen": row["answer"], "rejected": "no"} for row in rows]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def change_model(directory, chance):
    """Damage, change or remove a file of a model's directory."""
    path = directory / chance.choice(sorted(each.name for each in directory.iterdir()))
    kind = chance.randrange(3)
    if kind == 0:
        path.unlink()
    elif kind == 1 or path.suffix != ".json":
        path.write_bytes(damage(path.read_bytes(), chance))
    else:
        content = json.loads(path.read_text())
        content[chance.choice(sorted(content))] = chance.choice(VALUES)
        path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the directory of a model that a run takes."""
    path = tmp_path_factory.mktemp("model") / "model"
    sizes = load_run_config("grpo").tiny_model
    build_tiny_model(path, config=tiny_model_config(sizes, max_sequence_length=64), seed=0)
    return path


@pytest.fixture
def command(tmp_path, monkeypatch, model):
    """Return a function that runs a case by its number; it returns the line, or None if it starts.

    It fails unless one of both happens.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rl_policy.cli, "_execute", start_run)
    app, numbers = build_app(), count()

    def run(case):
        place = tmp_path / str(next(numbers))
        place.mkdir()
        monkeypatch.chdir(place)
        chance = random.Random(case)
        recipe, kind = chance.choice(RECIPES), chance.random()
        content, arguments = yaml.safe_dump(BASE).encode(), []
        # What the line has to name.
        names = [r"run\.yaml", SECTIONS]
        if kind < 0.75:
            content, changed = mutate_config(recipe, chance)
            names = [re.escape(name) for path in changed for name in path[-2:]]
        elif kind < 0.82:
            content = damage(content, chance)
        elif kind < 0.91:
            (place / "problems.jsonl").write_bytes(damage(problem_lines(), chance))
            arguments, names = ["data.path=problems.jsonl"], [r"data\.path", r"problems\.jsonl"]
        else:
            shutil.copytree(model, place / "model")
            change_model(place / "model", chance)
            arguments = ["policy.model_name=./model"]
            arguments += ["policy.max_total_sequence_length=64"]
            names = [r"policy\.model_name", r"policy\.tokenizer"]
        (place / "run.yaml").write_bytes(content)
        result = CliRunner().invoke(
            app, [recipe, "--config", "run.yaml", "--out", "out", *arguments]
        )
        note = f"case {case}: {recipe} {arguments} {content[:2000]!r}"
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise AssertionError(note) from result.exception
        shutil.rmtree(place)
        if result.exit_code == 0:
            return None
        lines = result.stderr.splitlines()
        assert (result.exit_code, len(lines)) == (2, 1), f"{note}\n{result.stderr}"
        assert lines[0].startswith("error: "), note
        assert re.search("|".join([*names, *CONSEQUENCES]), lines[0]), f"{note}\n{lines[0]}"
        return lines[0]

    return run


CASES, AT_A_TIME = int(os.environ.get("FUZZ_CASES", "300")), 20


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("first", range(0, CASES, AT_A_TIME))
def test_a_mutated_configuration_ends_in_a_line_or_a_start(command, first):
    lines = [command(case) for case in range(first, first + AT_A_TIME)]
    refused = sum(line is not None for line in lines)
    assert 0 < refused < len(lines), "cases that all end alike would prove nothing here"


VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.lists(st.integers() | st.floats() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from(VALUES),
)


@seed(25)
@settings(
    max_examples=200,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(recipe=st.sampled_from(RECIPES), data=st.data())
@example(recipe="grpo", data=None)
def test_a_key_of_any_value_ends_in_a_line_or_a_configuration(recipe, data):
    """Keys, types and ranges alone: what is accepted is the same once it is written and read."""
    config = copy.deepcopy(BASE)
    if data is not None:
        path = data.draw(st.sampled_from(PATHS[recipe]))
        put(config, path, data.draw(VALUE))
    config["recipe"] = recipe
    try:
        accepted = parse_run_config(_add_defaults(config, find_recipe(recipe)))
    except ValueError as error:
        line = str(error)
    else:
        text = yaml.safe_dump(accepted.model_dump())
        again = parse_run_config(yaml.safe_load(text))
        # As text: in a section that is off a number may be NaN, which equals nothing.
        assert yaml.safe_dump(again.model_dump()) == text
        return
    assert NAMED.search(line), line
