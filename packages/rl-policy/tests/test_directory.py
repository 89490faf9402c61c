import os
import shutil
from pathlib import Path

import pytest
from rl_policy.config import load_run_config
from rl_policy.run.directory import (
    CheckpointManager,
    RunDirectory,
    RunState,
    new_run_path,
    write_durably,
)


def test_a_run_directory_holds_its_configuration(tmp_path):
    config = load_run_config("grpo", overrides=["grpo.steps=7"])
    directory = RunDirectory(tmp_path / "a" / "run")
    directory.create(config)
    assert RunDirectory(tmp_path / "a" / "run").read_config() == config


def test_a_directory_that_exists_is_not_overwritten(tmp_path):
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(ValueError, match=r"the run directory .* exists"):
        RunDirectory(tmp_path).create(load_run_config("grpo"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the config .*config.yaml"):
        RunDirectory(tmp_path).read_config()


def test_new_paths_are_free(tmp_path):
    first = new_run_path("grpo", root=tmp_path)
    first.mkdir(parents=True)
    second = new_run_path("grpo", root=tmp_path)
    assert first.name.startswith("grpo-")
    assert second != first
    assert not second.exists()


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    write_durably(path, "old")
    write_durably(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def save(manager, step, accuracy=0.5):
    def write(checkpoint):
        checkpoint.weights.mkdir()
        (checkpoint.weights / "shard").write_text(str(step))

    return manager.save(RunState(step=step, data_position=10 * step, score=accuracy), write)


def names(directory):
    """Return the checkpoints of a directory, complete or not."""
    return sorted(each for each in os.listdir(directory) if each != "latest")


def test_what_is_saved_is_found_again(tmp_path):
    manager = CheckpointManager(tmp_path / "checkpoints", keep_last=2)
    assert manager.latest() is None
    saved = save(manager, 5)
    found = CheckpointManager(tmp_path / "checkpoints", keep_last=2).latest()
    assert found == saved
    assert found.path.name == "step_5"
    assert found.state == RunState(step=5, data_position=50, score=0.5)
    assert (found.weights / "shard").read_text() == "5"


def test_a_link_leads_to_the_newest(tmp_path):
    manager, latest = CheckpointManager(tmp_path, keep_last=1), tmp_path / "latest"
    for step in (1, 2):
        save(manager, step)
        assert latest.readlink() == Path(f"step_{step}")
        assert (latest / "weights" / "shard").read_text() == str(step)
    # A copy that was made with what links refer to.
    latest.unlink()
    shutil.copytree(tmp_path / "step_2", latest)
    save(manager, 3)
    assert latest.readlink() == Path("step_3")
    assert [checkpoint.state.step for checkpoint in manager.all()] == [3]


def test_newest_is_by_number_not_by_name(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=3)
    for step in (9, 10, 100):
        save(manager, step)
    assert [checkpoint.state.step for checkpoint in manager.all()] == [9, 10, 100]
    assert manager.latest().state.step == 100


@pytest.mark.parametrize(
    ("accuracies", "kept"),
    [
        ([0.9, 0.1, 0.2, 0.3], ["step_1", "step_3", "step_4"]),
        ([0.1, 0.2, 0.9, 0.3], ["step_3", "step_4"]),
        ([0.1, 0.9, 0.2, 0.3], ["step_2", "step_3", "step_4"]),
        ([0.5, 0.5, 0.5, 0.5], ["step_3", "step_4"]),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, accuracies, kept):
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step, accuracy in enumerate(accuracies, start=1):
        save(manager, step, accuracy)
    assert names(tmp_path) == kept


def test_a_checkpoint_that_was_not_finished_is_not_taken(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2)
    save(manager, 1)

    def fail(checkpoint):
        checkpoint.weights.mkdir()
        raise RuntimeError("the machine went away")

    with pytest.raises(RuntimeError):
        manager.save(RunState(step=2, score=0.9), fail)
    assert names(tmp_path) == ["step_1", "step_2.partial"]
    resumed = CheckpointManager(tmp_path, keep_last=2)
    assert resumed.latest().state.step == 1
    save(resumed, 2)
    assert names(tmp_path) == ["step_1", "step_2"]


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "step_by_step.txt").write_text("notes")
    manager = CheckpointManager(tmp_path, keep_last=1)
    for step in (1, 2):
        save(manager, step)
    assert names(tmp_path) == ["step_2", "step_by_step.txt"]
