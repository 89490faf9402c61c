"""Data in Parquet and as datasets of Hugging Face."""

import os
import subprocess
import sys
from datetime import date

import datasets
import pytest
from patience import PATIENCE_S
from rl_policy.data.datasets import Problem, read_problems
from rl_policy.data.rows import GivenRows, read_rows

pytestmark = pytest.mark.needs("rl-policy[datasets]")

ROWS = [{"prompt": f"{n}?", "answer": str(n % 2), "level": n} for n in range(3)]
PROBLEMS = [Problem(row["prompt"], row["answer"]) for row in ROWS]


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return datasets.Dataset.from_list(ROWS)


def test_parquet_is_read(dataset):
    dataset.to_parquet("rows.parquet")
    problems = read_problems("rows.parquet", key="data.path")
    assert problems == PROBLEMS
    assert [each.columns for each in problems] == [{"level": n} for n in range(3)]


def test_a_saved_dataset_is_read(dataset):
    dataset.save_to_disk("saved")
    assert read_problems("saved", key="data.path") == PROBLEMS


def test_a_split_is_taken_and_a_missing_one_is_named(dataset):
    datasets.DatasetDict(train=dataset, test=dataset.select([1])).save_to_disk("both")
    assert read_problems("both", key="data.path", split="test") == PROBLEMS[1:2]
    with pytest.raises(ValueError, match=r"no split data.split='dev': it has 'train', 'test'"):
        read_problems("both", key="data.path", split="dev")


def test_a_directory_of_data_files_is_read(dataset, tmp_path, monkeypatch):
    (tmp_path / "files").mkdir()
    dataset.to_parquet("files/train-00000.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert read_problems("files", key="data.path") == PROBLEMS


def test_a_dataset_in_memory_is_rows(dataset):
    assert read_problems(GivenRows(dataset, key="data"), key="data.path") == PROBLEMS
    with pytest.raises(ValueError, match="got a mapping with 'train': take one of them"):
        GivenRows(datasets.DatasetDict(train=dataset), key="data.path")
    dated = datasets.Dataset.from_list([{"prompt": "1", "day": date(2026, 1, 2)}])
    with pytest.raises(ValueError, match=r"data.path\[0\] cannot be kept as JSON: .*date"):
        GivenRows(dated, key="data.path")


def test_what_cannot_be_read_is_named(dataset, tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "empty").mkdir()
    for name in ("broken.parquet", "absent.parquet", "empty"):
        with pytest.raises(ValueError, match=f"data.path={name} cannot be read"):
            read_rows(name, key="data.path")
    # A name of the hub, in a process that asks no hub.
    code = "from rl_policy.data.rows import read_rows; read_rows('org/name', key='data.path')"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "ValueError: data.path=org/name cannot be read" in result.stderr
