"""Recipes by entry point: what is listed, what is refused, and a stranger's that runs."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
from rl_policy import RecipeTrainer
from rl_policy.cli import build_app
from rl_policy.config import load_run_config, override_resumed
from rl_policy.recipes import describe_recipe, find_recipe, installed_recipes
from rl_policy.run.metrics import read_metrics
from typer.testing import CliRunner

pytestmark = pytest.mark.promise

STRANGER = Path(__file__).parent / "stranger"


@pytest.fixture
def register(tmp_path, monkeypatch):
    """Return a function that installs a package with entry points `name = value`."""
    monkeypatch.syspath_prepend(str(STRANGER))
    monkeypatch.syspath_prepend(str(tmp_path))

    def register(*lines):
        info = tmp_path / "stranger_recipes-1.0.dist-info"
        shutil.rmtree(info, ignore_errors=True)  # as an installer does
        info.mkdir()
        metadata = "Metadata-Version: 2.1\nName: stranger-recipes\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata)
        text = "\n".join(["[rl_policy.recipes]", *lines, ""])
        (info / "entry_points.txt").write_text(text)
        importlib.invalidate_caches()

    yield register
    sys.modules.pop("stranger_recipe", None)


def test_ours_are_registered_like_a_strangers(register):
    register("echo = stranger_recipe:ECHO")
    assert installed_recipes() == ["distill", "dpo", "echo", "eval", "grpo", "ppo", "rm", "sft"]
    for name in ("distill", "dpo", "eval", "grpo", "ppo", "rm", "sft"):
        recipe = find_recipe(name)
        assert recipe.name == name == next(iter(recipe.sections))


def test_the_command_line_lists_what_is_registered_without_importing_it(register):
    register("echo = stranger_recipe:ECHO", "gone = no_such_package.module:X")
    listed = CliRunner().invoke(build_app(), ["--help"], env={"COLUMNS": "200"}).output
    recipes = ("distill", "dpo", "echo", "eval", "grpo", "ppo", "rm", "sft")
    for name in (*recipes, "merge", "plan", "serve ", "serve-tinker"):
        assert name in listed
    assert "Repeat the prompts" in listed
    assert "Cannot be imported" in listed
    assert "stranger_recipe" not in sys.modules


def test_a_strangers_recipe_runs_by_its_module_and_its_section_alone(
    shared_ray, register, tmp_path, monkeypatch
):
    register("echo = stranger_recipe:ECHO")
    monkeypatch.chdir(tmp_path)
    settings = ["echo.rows=4", "cluster.bundle_ct_per_node_list=[1]", "checkpoint.every=1"]
    result = CliRunner().invoke(
        build_app(), ["echo", "--out", "out", *settings], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [list(row) for row in rows] == [["step", "nats"]] * 3
    assert rows[0]["nats"] is None
    assert all(row["nats"] > 0 for row in rows[1:])
    assert "2 steps" in result.output
    assert (tmp_path / "out" / "final" / "model.safetensors").is_file()
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").glob("step_*"))
    assert names == ["step_1", "step_2"]


def test_a_strangers_section_is_checked_shown_and_resumed_like_ours(register):
    register("echo = stranger_recipe:ECHO")
    with pytest.raises(ValueError, match=r"echo\.row is not a known key, did you mean 'rows'"):
        load_run_config("echo", overrides=["echo.row=3"])
    shown = CliRunner().invoke(build_app(), ["echo", "--show-config"]).output
    assert "# Prompts per step.\n  rows: 8" in shown
    config = override_resumed(load_run_config("echo"), ["echo.steps=9"])
    assert config.section(type(config.echo)).steps == 9
    with pytest.raises(
        ValueError,
        match=r"echo\.rows cannot change .* only echo\.steps, cluster\.restarts, cluster\.fork",
    ):
        override_resumed(config, ["echo.rows=9"])


def test_one_file_serves_several_recipes():
    config = load_run_config("sft", overrides=["dpo.steps=3"])
    assert config.dpo.steps == 3
    with pytest.raises(ValueError, match=r"dpo\.stepz is not a known key, did you mean 'steps'"):
        load_run_config("sft", overrides=["dpo.stepz=3"])


def test_a_strangers_recipe_has_a_trainer_too(register):
    register("echo = stranger_recipe:ECHO")

    class EchoTrainer(RecipeTrainer):
        recipe = "echo"

    trainer = EchoTrainer(config={"echo.rows": 4})
    assert trainer.config.section(type(trainer.config.echo)).rows == 4
    with pytest.raises(NotImplementedError, match="the recipe 'echo' measures nothing by itself"):
        trainer.evaluate()


def test_what_cannot_be_found_is_named(register):
    with pytest.raises(
        ValueError, match=r"'dqn' is not installed \(installed recipes: distill, dpo, eval"
    ):
        find_recipe("dqn")
    register("echo = stranger_recipe:EchoTrainer", "sft = stranger_recipe:ECHO")
    with pytest.raises(TypeError, match=r"must be a Recipe with name='echo'"):
        find_recipe("echo")
    with pytest.raises(ValueError, match=r"'sft' is registered more than once: rl_policy\.rec"):
        find_recipe("sft")
    assert describe_recipe("dpo").startswith("Train a model on preferences with DPO")
