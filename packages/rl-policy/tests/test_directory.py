import pytest
from rl_policy.config import load_run_config
from rl_policy.run.directory import RunDirectory, new_run_path, write_durably


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
