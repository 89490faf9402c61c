"""What a run directory says of its run, read for a report. The run may be in progress."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_policy.config import flatten, new_run_config, read_yaml
from rl_policy.recipes import find_recipe
from rl_policy.run.directory import RunDirectory
from rl_policy.run.environment import state_of
from rl_policy.run.metrics import Row, find_scores
from rl_policy.run.samples import Sample, read_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """A run as its directory has it.

    Attributes:
        name: That of its directory.
        recipe: The command.
        score_column: The column that says how good the model is; None if the recipe has none.
        rows: The objects of `metrics.jsonl`.
        samples: Of `samples.jsonl`.
        warm_up: The objects of the warm-up's `metrics.jsonl`; empty without one.
        config: The complete configuration, values by dotted key.
        defaults: The configuration of a run of the same model that sets nothing else.
        environment: What `describe_environment` returned.
        state: See `rl_policy.run.environment.state_of`.
    """

    name: str
    recipe: str
    score_column: str | None
    rows: list[Row]
    samples: list[Sample] = field(default_factory=list)
    warm_up: list[Row] = field(default_factory=list)
    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    state: str = "running"

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Return value and default of each key that has another value than its default."""
        keys = dict.fromkeys([*self.config, *self.defaults])
        pairs = {key: (self.config.get(key), self.defaults.get(key)) for key in keys}
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}

    def scores(self) -> list[float]:
        """Return the scores that were measured, in the order of the steps."""
        return find_scores(self.rows, self.score_column)[1]


def require_run(path: Path) -> RunDirectory:
    """Return the directory of a run.

    Raises:
        ValueError: It holds no run.
    """
    directory = RunDirectory(path)
    if not directory.config.is_file():
        raise ValueError(
            f"RUN_DIR={path} holds no run, as there is no {directory.config}: give a directory "
            "that --out has named, or one of runs/"
        )
    return directory


def read_run(path: Path) -> RunData:
    """Return what a run directory says of its run.

    Raises:
        ValueError: It holds no run, or one without any measurement yet, or of a recipe that is not
            installed.
    """
    directory = require_run(path)
    # As it is written: functions that a Python program gave have only their names there.
    config = read_yaml(directory.config)
    rows = read_rows(directory.metrics)
    if not rows:
        raise ValueError(
            f"RUN_DIR={path} has no measurements yet, as {directory.metrics} is missing or empty: "
            "wait for its first step, rl-policy watch shows it"
        )
    recipe, model_name = config["recipe"], config["policy"]["model_name"]
    return RunData(
        name=path.absolute().name,
        recipe=recipe,
        score_column=find_scores(rows, find_recipe(recipe).metrics.score_column)[0],
        rows=rows,
        samples=read_samples(directory.samples),
        warm_up=read_rows(RunDirectory(directory.warm_up).metrics),
        config=flatten(config),
        defaults=flatten(
            new_run_config(recipe, {"policy": {"model_name": model_name}}).model_dump()
        ),
        environment=_read_object(directory.environment),
        state=state_of(directory),
    )


def read_rows(path: Path) -> list[Row]:
    """Return the complete lines of a `metrics.jsonl`; none if there is no such file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _read_object(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
