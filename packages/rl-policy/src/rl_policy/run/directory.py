"""The directory of a run: created once, never overwritten, resumed on request."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from rl_policy.config import RunConfig, parse_run_config, read_yaml, render_run_config


class RunDirectory:
    """The paths of a run's files.

    Args:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.plot = path / "reward.png"
        self.checkpoints = path / "checkpoints"
        self.final = path / "final"
        self.adapters = path / "adapters"
        self.tiny_model = path / "tiny_model"
        self.warm_up = path / "warm_up"

    def require_new(self) -> None:
        """Raise `ValueError` if the directory exists."""
        if self.path.exists():
            raise ValueError(f"the run directory {self.path} exists, and is not overwritten")

    def create(self, config: RunConfig) -> None:
        """Create the directory, with the configuration in it.

        Raises:
            ValueError: It exists.
        """
        self.require_new()
        self.path.mkdir(parents=True)
        self.write_config(config)

    def write_config(self, config: RunConfig) -> None:
        """Write the configuration."""
        write_durably(self.config, render_run_config(config))

    def read_config(self) -> RunConfig:
        """Return the configuration that `create` wrote.

        Raises:
            ValueError: It cannot be read.
        """
        return parse_run_config(read_yaml(self.config))


def new_run_path(recipe: str, *, root: Path = Path("runs")) -> Path:
    """Return the path of a new dated directory below `root`; nothing is created."""
    stem = f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = [root / stem, *(root / f"{stem}-{number}" for number in range(2, 100))]
    return next(path for path in candidates if not path.exists())


def write_durably(path: Path, text: str) -> None:
    """Replace a text file atomically: after a crash it has the old text or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to the disk, as a rename alone does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
