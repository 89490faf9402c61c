import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Tests import the modules beside them, and what the tests of rl-policy start processes with.
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "packages/rl-policy/tests")]


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """Return a tiny model with its tokenizer, as a run leaves them in `final/`."""
    from rl_policy.config import TinyModelSection
    from rl_policy.data.tiny_model import build_tiny_model, tiny_model_config

    path = tmp_path_factory.mktemp("finished") / "final"
    config = tiny_model_config(TinyModelSection(), max_sequence_length=64)
    build_tiny_model(path, config=config, seed=0)
    return path


@pytest.fixture
def workspace(tmp_path, finished_run, monkeypatch):
    """Return an empty directory but for a finished run, `runs/first`, and a started one."""
    from rl_policy.config import load_run_config
    from rl_policy.run.directory import RunDirectory

    model = tmp_path / "runs" / "first" / "final"
    model.parent.mkdir(parents=True)
    model.symlink_to(finished_run, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    RunDirectory(tmp_path / "started").create(load_run_config("grpo"))
    return tmp_path
