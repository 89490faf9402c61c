"""Experiment trackers by name: TensorBoard, Weights & Biases, Trackio, MLflow, and other packages'.

`metrics.jsonl` is always written, as a resumed run and the report read it. The key `logger` names
the trackers that get the same numbers besides, each an extra of this package, or a tracker that
another package registers in the entry-point group `rl_policy.trackers`: a function of a
`TrackedRun` that returns a `Tracker`, such as its class. A tracker gets our columns, and those that
the field has a name for under that name too, see `FIELD_NAMES`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from rl_policy.config import flatten
from rl_policy.run.directory import write_durably

Numbers: TypeAlias = Mapping[str, float]
"""Measurements of a step by name."""

ENTRY_POINT_GROUP = "rl_policy.trackers"

JSONL = "jsonl"
"""The name of `metrics.jsonl` in the key `logger`; it is written whether named or not."""

FIELD_NAMES = {
    # As verl names the seconds of phases.
    "step_s": "timing_s/step",
    "move_s": "timing_s/move",
    "generate_s": "timing_s/gen",
    "reward_s": "timing_s/reward",
    "logprob_s": "timing_s/old_log_prob",
    "train_s": "timing_s/update_actor",
    "value_s": "timing_s/update_critic",
    "refit_s": "timing_s/update_weights",
    "tokens_per_s": "perf/tokens_per_s",
    "tokens_per_s_per_device": "perf/tokens_per_s_per_gpu",
    "tflops_per_s_per_device": "perf/tflops_per_s_per_gpu",
    "mfu": "perf/mfu",
    "peak_memory_gib": "perf/max_memory_allocated_gb",
    # As verl names what the value model does.
    "value_loss": "critic/vf_loss",
    "value_grad_norm": "critic/grad_norm",
    "value_clip_fraction": "critic/vf_clipfrac",
    "explained_variance": "critic/vf_explained_var",
    "return_mean": "critic/returns/mean",
    # As TRL names what a step measures.
    "reward_mean": "train/reward",
    "reward_std": "train/reward_std",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "kl": "train/kl",
    "entropy": "train/entropy",
    "completion_length_mean": "train/completions/mean_length",
    "completion_length_max": "train/completions/max_length",
    "truncated_share": "train/completions/clipped_ratio",
    "zero_advantage_share": "train/frac_reward_zero_std",
    "accuracy": "val/accuracy",
    "reward": "val/reward",
}
"""Our columns, and the names under which other trainers report the same."""


def with_field_names(row: Numbers) -> dict[str, float]:
    """Return the columns, and beside them those of `FIELD_NAMES` under the field's names.

    Example:
        with_field_names({"step_s": 2.0, "mine": 1.0})
            -> {"step_s": 2.0, "mine": 1.0, "timing_s/step": 2.0}
    """
    return {**row, **{FIELD_NAMES[name]: row[name] for name in row if name in FIELD_NAMES}}


class Tracker(Protocol):
    """Where the numbers of a run go, one call per step."""

    def log(self, numbers: Numbers, *, step: int) -> None:
        """Record the numbers of a step."""
        ...

    def close(self) -> None:
        """Finish the run in the tracker. Called once, also where the run has failed."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tracker knows of a run.

    Attributes:
        directory: The run's directory.
        project: Groups runs: a project, or an experiment of MLflow.
        name: The run's.
        config: The run's configuration, plain values.
        resumed_step: The last step that is kept of what was tracked; None for a new run.
    """

    directory: Path
    project: str
    name: str
    config: Mapping[str, Any]
    resumed_step: int | None = None

    def flat_config(self) -> dict[str, Any]:
        """Return the configuration by dotted key, as overrides name them."""
        return flatten(self.config)

    def known_id(self, tracker: str) -> str | None:
        """Return the id that the tracker gave this run before it was resumed."""
        return self._ids().get(tracker)

    def keep_id(self, tracker: str, value: str) -> None:
        """Keep the tracker's id of this run, for a resume to continue it there."""
        write_durably(self._path, json.dumps({**self._ids(), tracker: value}) + "\n")

    @property
    def _path(self) -> Path:
        return self.directory / "trackers.json"

    def _ids(self) -> dict[str, str]:
        if not self._path.exists():
            return {}
        return json.loads(self._path.read_text(encoding="utf-8"))


class TensorBoardTracker:
    """Events in the directory `tensorboard` of the run."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if run.resumed_step is None else run.resumed_step + 1
        self._events = SummaryWriter(str(run.directory / "tensorboard"), purge_step=purge_step)

    def log(self, numbers: Numbers, *, step: int) -> None:
        """See `Tracker`."""
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """See `Tracker`."""
        self._events.close()


class WandbTracker:
    """A run of Weights & Biases; its environment variables hold, `WANDB_MODE=offline` say.

    A step that is measured again after a resume keeps its first numbers there: the service takes
    no step twice.
    """

    def __init__(self, run: TrackedRun) -> None:
        wandb = import_module("wandb")
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            config=dict(run.config),
            dir=str(run.directory),
            id=run.known_id("wandb"),
            resume="allow",
            settings=wandb.Settings(silent=True),
        )
        run.keep_id("wandb", self._run.id)

    def log(self, numbers: Numbers, *, step: int) -> None:
        """See `Tracker`."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


class TrackioTracker:
    """A run of Trackio, in its local database; its environment variables hold."""

    def __init__(self, run: TrackedRun) -> None:
        self._trackio = import_module("trackio")
        # It prints how to look at the run, where standard output is the run's summary.
        with redirect_stdout(sys.stderr):
            self._run = self._trackio.init(
                project=run.project,
                name=run.known_id("trackio") or run.name,
                config=dict(run.config),
                resume="allow",
                embed=False,
            )
        run.keep_id("trackio", self._run.name)

    def log(self, numbers: Numbers, *, step: int) -> None:
        """See `Tracker`."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        with redirect_stdout(sys.stderr):
            self._trackio.finish()


class MlflowTracker:
    """A run of MLflow, in the store that `MLFLOW_TRACKING_URI` names.

    Without the variable it is `mlflow.db` in the run's directory. A run of the user's own that is
    active stays so, as the client is used. A step that is measured again is there twice.
    """

    def __init__(self, run: TrackedRun) -> None:
        mlflow = import_module("mlflow")
        own = f"sqlite:///{(run.directory / 'mlflow.db').absolute()}"
        self._entities = import_module("mlflow.entities")
        self._client = mlflow.MlflowClient(
            tracking_uri=None if mlflow.is_tracking_uri_set() else own
        )
        known = run.known_id("mlflow")
        self._id = known if known is not None else self._create(run)
        run.keep_id("mlflow", self._id)
        self._client.update_run(self._id, status="RUNNING")

    def log(self, numbers: Numbers, *, step: int) -> None:
        """See `Tracker`."""
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._id)

    def _create(self, run: TrackedRun) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        identity = (
            self._client.create_experiment(run.project)
            if experiment is None
            else experiment.experiment_id
        )
        created = self._client.create_run(identity, run_name=run.name)
        for key, value in run.flat_config().items():
            self._client.log_param(created.info.run_id, key, value)
        return created.info.run_id


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """A tracker that the key `logger` may name.

    Attributes:
        open: Its class.
        module: What it imports.
        extra: The extra of this package that installs that.
    """

    open: type[TensorBoardTracker | WandbTracker | TrackioTracker | MlflowTracker]
    module: str
    extra: str


KINDS = {
    "tensorboard": TrackerKind(TensorBoardTracker, "tensorboard", "tensorboard"),
    "wandb": TrackerKind(WandbTracker, "wandb", "wandb"),
    "trackio": TrackerKind(TrackioTracker, "trackio", "trackio"),
    "mlflow": TrackerKind(MlflowTracker, "mlflow", "mlflow"),
}
"""The trackers by name."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise `ValueError` unless every tracker is known, installed and named once.

    Nothing is imported.

    Args:
        names: The key `logger`.
    """
    key = f"logger={list(names)}"
    others = _registered()
    for name in names:
        if name not in (JSONL, *KINDS, *others):
            known = ", ".join([JSONL, *KINDS, *others])
            raise ValueError(
                f"{key}: there is no tracker {name!r}, but {known}; another package's is one that "
                f"it registers in the entry-point group {ENTRY_POINT_GROUP!r}"
            )
        if names.count(name) > 1:
            raise ValueError(f"{key} names {name!r} twice")
        values = {entry.value for entry in others.get(name, [])}
        if name in (JSONL, *KINDS):
            values.add("rl-policy's own")
        if len(values) > 1:
            found = " and ".join(sorted(values))
            raise ValueError(f"{key}: {name!r} is registered more than once: {found}")
        if name in KINDS and find_spec(KINDS[name].module) is None:
            raise ValueError(
                f"{key}: {KINDS[name].module} is not installed: leave {name!r} out, or "
                f'pip install "rl-policy[{KINDS[name].extra}]"'
            )


def open_trackers(names: Sequence[str], run: TrackedRun) -> list[Tracker]:
    """Return the trackers of a run; those already open are closed if one cannot be opened.

    Args:
        names: The key `logger`, which `check_trackers` has accepted.
        run: What the trackers get to know of the run.
    """
    opened: list[Tracker] = []
    others = _registered()
    try:
        for name in names:
            if name in KINDS:
                opened.append(KINDS[name].open(run))
            elif name != JSONL:
                opened.append(others[name][0].load()(run))
    except BaseException:
        for tracker in opened:
            tracker.close()
        raise
    return opened


def _registered() -> dict[str, list[EntryPoint]]:
    """Return the entry points of other packages' trackers by name."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda each: each.name):
        found.setdefault(entry.name, []).append(entry)
    return found
