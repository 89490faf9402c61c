"""The files of a run: its directory, and checkpoints that are complete or absent.

What is written gets its name by a rename once it is complete, so that no crash leaves half of it
under that name. A run directory is created once, never overwritten, and resumed on request.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rl_interfaces.backend.checkpoint.directories import sync

from rl_policy.config import RunConfig, parse_run_config, read_yaml, render_run_config
from rl_policy.data.rewards import GivenReward
from rl_policy.data.rows import GivenRows
from rl_policy.environments.pool import GivenEnvironment

_PREFIX, _PARTIAL, _STATE, _LATEST = "step_", ".partial", "state.json", "latest"


class RunDirectory:
    """The paths of a run's files.

    Args:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.environment = path / "environment.json"
        self.status = path / "status.json"
        self.report = path / "report.html"
        self.plot = path / "reward.png"
        self.checkpoints = path / "checkpoints"
        self.trained = path / "trained.jsonl"
        self.timeline = path / "timeline.jsonl"
        self.timeline_plot = path / "timeline.png"
        self.completions = path / "completions.jsonl"
        self.final = path / "final"
        self.adapters = path / "adapters"
        self.tiny_model = path / "tiny_model"
        self.warm_up = path / "warm_up"
        self.teacher = path / "teacher"
        self.failure = path / "failure.txt"
        self.data = path / "data.json"

    def require_new(self) -> None:
        """Raise `ValueError` if the directory exists, or cannot be created."""
        try:
            self.path.lstat()
        except FileNotFoundError:
            above = next(each for each in self.path.absolute().parents if each.exists())
            if not os.access(above, os.W_OK | os.X_OK):
                raise ValueError(self._refusal(f"{above} is not writable")) from None
        except (OSError, ValueError) as error:  # below a file, too long, a null byte
            raise ValueError(self._refusal(error)) from error
        else:
            raise ValueError(f"the run directory {self.path} exists, and is not overwritten")

    def create(self, config: RunConfig) -> None:
        """Create the directory, with the configuration and the data that Python gave in it.

        Raises:
            ValueError: It exists, or cannot be created.
        """
        self.require_new()
        try:
            self.path.mkdir(parents=True)
            config = self._keep_rows(config)
        except OSError as error:
            raise ValueError(self._refusal(error)) from error
        self.write_config(config)

    def _keep_rows(self, config: RunConfig) -> RunConfig:
        """Write data that has no file; return the configuration that names its new one."""
        files = {"path": self.path / "data.jsonl", "heldout_path": self.path / "heldout.jsonl"}
        kept: dict[str, str] = {}
        for key, path in files.items():
            rows = getattr(config.data, key)
            if isinstance(rows, GivenRows):
                rows.write(path)
                kept[key] = str(path.absolute())
        return config.model_copy(update={"data": config.data.model_copy(update=kept)})

    def write_config(self, config: RunConfig) -> None:
        """Write the configuration.

        Raises:
            ValueError: It cannot be written.
        """
        try:
            write_durably(self.config, render_run_config(config))
        except OSError as error:
            raise ValueError(f"{self.config} cannot be written: {error}") from error

    def keep_data(self, digests: Mapping[str, str]) -> None:
        """Write digests of the rows that the run was prepared with, for `check_data`."""
        write_durably(self.data, json.dumps(digests, indent=1) + "\n")

    def check_data(self, digests: Mapping[str, str], *, path: object) -> None:
        """Raise `ValueError` unless a resumed run has the rows that it began with.

        Args:
            digests: Those of the rows as they are now.
            path: `data.path`, for the error.
        """
        if not self.data.exists():
            return  # of a run that an earlier version began
        kept = json.loads(self.data.read_text(encoding="utf-8"))
        changed = [name for name in {**kept, **digests} if kept.get(name) != digests.get(name)]
        if changed:
            counts = ", ".join(
                f"{name}: {_num_rows(kept, name)} then, {_num_rows(digests, name)} now"
                for name in changed
            )
            raise ValueError(
                f"data.path={path}: the rows have changed since the run in {self.path} began "
                f"({counts}), and a resumed run would train on others, or on what it measures: "
                "restore the data, or start a new run from the model of this one"
            )

    def record_failure(self, error: Exception) -> None:
        """Append an exception that a worker's death has raised, with all that Ray reports of it."""
        with self.failure.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\n")
            file.writelines(traceback.format_exception(error))

    def _refusal(self, reason: object) -> str:
        return f"--out {self.path} cannot be created: {reason}"

    def read_config(
        self,
        *,
        functions: Sequence[str | GivenReward] | None = None,
        environment: str | GivenEnvironment | None = None,
    ) -> RunConfig:
        """Return the configuration that `create` wrote.

        Args:
            functions: Those of the reward, where Python gave some, which no file has.
            environment: The same for the environment.

        Raises:
            ValueError: It cannot be read, or the functions or the environment are others.
        """
        content = read_yaml(self.config)
        if environment is not None:
            kept = content.get("environment", {}).get("function")
            if kept != str(environment):
                raise ValueError(
                    f"{self.config} has environment.function={kept}, and {environment} is given: "
                    "a run goes on with the environment that it has"
                )
            content["environment"]["function"] = environment
        if functions is not None:
            kept = content.get("reward", {}).get("function")
            kept = [kept] if isinstance(kept, str) else kept
            given = [str(each) for each in functions]
            if kept != given:
                raise ValueError(
                    f"{self.config} has reward.function={kept}, and {given} are given: a run goes "
                    "on with the reward that it has"
                )
            content["reward"]["function"] = list(functions)
        return parse_run_config(content)


def _num_rows(digests: Mapping[str, str], name: str) -> str:
    return digests.get(name, "none").rpartition(" ")[0] or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What a run has to know to be resumed, beside what the policy saves.

    Attributes:
        step: Steps taken.
        data_position: Items drawn from the training data.
        score: The last score, by which the best checkpoint is chosen, see `StepMetrics`.
        is_done: Whether no step follows, whatever the configuration says.
        weight_version: The last weight version that engines had; -1 without engines.
    """

    step: int = 0
    data_position: int = 0
    score: float = 0.0
    is_done: bool = False
    weight_version: int = -1

    @property
    def is_new(self) -> bool:
        """Whether no step was taken yet."""
        return self.step == 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        path: Its directory, with the parts below and the state as JSON.
        state: Of the run.
    """

    path: Path
    state: RunState

    @property
    def weights(self) -> Path:
        """The sharded weights."""
        return self.path / "weights"

    @property
    def optimizer(self) -> Path:
        """Optimizer, scheduler and random state."""
        return self.path / "optimizer"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer."""
        return self.path / "tokenizer"

    def within(self, name: str) -> Checkpoint:
        """Return the checkpoint of another policy of the run, in a directory of this one."""
        return Checkpoint(self.path / name, self.state)


class CheckpointManager:
    """The checkpoints `step_N` below a directory.

    A checkpoint is written under another name, flushed to the disk, and renamed: a directory of
    that name is complete. `latest` is a link to the newest.

    Args:
        directory: Created with the first checkpoint.
        keep_last: Newest checkpoints to keep; the one with the best score is kept besides.
    """

    def __init__(self, directory: Path, *, keep_last: int = 1) -> None:
        self._directory = directory
        self._keep_last = keep_last

    def save(self, state: RunState, write: Callable[[Checkpoint], None]) -> Checkpoint:
        """Save a checkpoint, and remove those that are no longer kept.

        Args:
            state: Of the run.
            write: Writes the parts of the checkpoint that it is given.
        """
        name = f"{_PREFIX}{state.step}"
        partial = self._directory / f"{name}{_PARTIAL}"
        self.remove_partial()
        partial.mkdir(parents=True)
        write(Checkpoint(partial, state))
        # All files before the rename: after a power loss, a name on the disk may precede its data.
        (partial / _STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
        _sync_tree(partial)
        final = partial.rename(self._directory / name)
        self._link(final.name)
        sync(self._directory)
        self._rotate()
        return Checkpoint(final, state)

    def all(self) -> list[Checkpoint]:
        """Return the complete checkpoints, oldest first."""
        if not self._directory.is_dir():
            return []
        paths = [
            path
            for path in self._directory.iterdir()
            if path.name.startswith(_PREFIX) and path.name.removeprefix(_PREFIX).isdigit()
        ]
        checkpoints = [Checkpoint(path, _read_state(path)) for path in paths]
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.state.step)

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint; None if there is none."""
        return next(reversed(self.all()), None)

    def remove_partial(self) -> None:
        """Remove what an interrupted `save` left behind, or a removal that was interrupted."""
        for path in self._directory.glob(f"{_PREFIX}*{_PARTIAL}"):
            shutil.rmtree(path)

    def _link(self, name: str) -> None:
        latest = self._directory / _LATEST
        if latest.is_dir() and not latest.is_symlink():
            shutil.rmtree(latest)  # of a run that was copied with what its links refer to
        # By a rename too: there is no moment without a link.
        partial = latest.with_name(latest.name + _PARTIAL)
        partial.unlink(missing_ok=True)
        partial.symlink_to(name)
        partial.replace(latest)

    def _rotate(self) -> None:
        checkpoints = self.all()
        # Of equally good ones the newest is the best, so that fewer are kept.
        best = max(checkpoints, key=lambda each: (each.state.score, each.state.step))
        for checkpoint in checkpoints[: -self._keep_last]:
            if checkpoint != best:
                # Renamed first: a directory that is half removed must not look complete.
                name = checkpoint.path.name + _PARTIAL
                shutil.rmtree(checkpoint.path.rename(self._directory / name))


def _read_state(path: Path) -> RunState:
    return RunState(**json.loads((path / _STATE).read_text(encoding="utf-8")))


def _sync_tree(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in files:
            with (Path(directory) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync(Path(directory))


def is_disk_full(error: Exception) -> bool:
    """Return whether an exception, or what a rank has reported in it, is a disk without room."""
    return os.strerror(errno.ENOSPC) in str(error)


def new_run_path(recipe: str, *, root: Path = Path("runs")) -> Path:
    """Return the path of a new dated directory below `root`; nothing is created."""
    stem = f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = [root / stem, *(root / f"{stem}-{number}" for number in range(2, 100))]
    return next(path for path in candidates if not path.exists())


def require_new_directory(path: Path, *, key: str) -> None:
    """Raise `ValueError` if a directory that is to be written exists.

    Args:
        path: The directory.
        key: What names it, for the error.
    """
    if os.path.lexists(path):
        raise ValueError(f"{key} {path} exists, and is not overwritten")


def write_directory(path: Path, write: Callable[[Path], None]) -> None:
    """Write a directory under another name, and rename it in place of what is there."""
    partial = path.with_name(path.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    write(partial)
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    # A rename alone is not durable: the entry has to reach the disk too.
    sync(path.parent)


def write_durably(path: Path, text: str) -> None:
    """Replace a text file atomically: after a crash it has the old text or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync(path.parent)


def keep_secret(path: Path, make: Callable[[], str]) -> str:
    """Return the text of a file that its owner alone can read, which is made if there is none.

    Args:
        path: The file. One that is there is taken as it is, whoever can read it.
        make: Returns the text of a new one.
    """
    if not path.exists():
        # Renamed when it is complete: on a full disk the next reader would find half of it.
        partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(make())
        partial.replace(path)
    return path.read_text().strip()
