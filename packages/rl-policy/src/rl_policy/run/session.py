"""A run in progress: its devices, the policies it opens, the loop of steps, the summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import yaml

from rl_policy.config import RunConfig, Settings, naming_section, render_run_config
from rl_policy.data.datasets import SourcedT, Stream, open_stream
from rl_policy.data.rewards import RewardError
from rl_policy.data.tiny_model import build_tiny_model, tiny_model_config
from rl_policy.policy import Policy
from rl_policy.ray.cluster import SESSION, RayVirtualCluster
from rl_policy.ray.failures import death_behind
from rl_policy.recipes import Recipe, find_recipe
from rl_policy.run.directory import (
    Checkpoint,
    CheckpointManager,
    RunDirectory,
    RunState,
    is_disk_full,
    write_directory,
)
from rl_policy.run.environment import record_environment, recorded_status
from rl_policy.run.inputs import RunInputs
from rl_policy.run.metrics import (
    MetricsLog,
    Phase,
    RunDisplay,
    StepMetrics,
    find_scores,
    read_metrics,
)
from rl_policy.run.samples import SampleLog
from rl_policy.run.trackers import TrackedRun, open_trackers

InputsT = TypeVar("InputsT", bound=RunInputs, covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Session(Generic[InputsT]):
    """A run in progress.

    Attributes:
        inputs: What the recipe prepared.
        directory: The files.
        cluster: The devices of its policies.
        display: Shows the progress.
    """

    inputs: InputsT
    directory: RunDirectory
    cluster: RayVirtualCluster
    display: RunDisplay

    @property
    def config(self) -> RunConfig:
        """The configuration."""
        return self.inputs.config

    @property
    def samples(self) -> SampleLog:
        """The completions that are recorded for the report."""
        limit = self.config.report.samples
        return SampleLog(self.directory.samples, limit=limit, encoder=self.inputs.encoder)

    def open_stream(self, items: Sequence[SourcedT], *, position: int) -> Stream[SourcedT]:
        """Return the stream of items, in the order of the run's seed and by its weights.

        Args:
            items: With the numbers of their sources.
            position: Items that were drawn before.
        """
        config = self.config
        return open_stream(items, weights=config.data.weights, seed=config.seed, position=position)

    def checkpoints(self) -> CheckpointManager:
        """Return the checkpoints of the run's directory, less what an interruption left behind."""
        keep_last = self.config.checkpoint.keep_last
        manager = CheckpointManager(self.directory.checkpoints, keep_last=keep_last)
        manager.remove_partial()
        return manager

    def open_log(self, start: RunState) -> MetricsLog:
        """Return the log of the run's directory, with the measurements up to a state.

        Args:
            start: The state that the run starts from. A new run drops what an earlier start left
                that was interrupted before its first checkpoint.
        """
        resumed_step = start.step
        if start.is_new:
            resumed_step = -1 if self.directory.metrics.exists() else None
        if resumed_step is not None:
            self.samples.keep_steps(resumed_step)
        tracked = TrackedRun(
            directory=self.directory.path,
            project=self.config.tracking.project,
            name=self._tracked_name(),
            # As it is written, which is plain values.
            config=yaml.safe_load(render_run_config(self.config)),
            resumed_step=resumed_step,
        )
        return MetricsLog(
            self.directory.metrics,
            trackers=open_trackers(self.config.logger, tracked),
            resumed_step=resumed_step,
        )

    def _tracked_name(self) -> str:
        """Return the run's name in trackers; a phase in a subdirectory adds the name of that."""
        path = self.directory.path.absolute()
        # Only the run's own directory has the configuration.
        root, phase = (path, []) if self.directory.config.exists() else (path.parent, [path.name])
        return "-".join([self.config.tracking.name or root.name, *phase])

    def record(self, metrics: StepMetrics) -> None:
        """Write and show the one measurement of a run that takes no steps."""
        with self.open_log(RunState()) as log:
            log.write(metrics)
            log.sync()
        numbers = {name: value for name, value in metrics.row().items() if value is not None}
        text = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items() if name != "step")
        self.display.note(text)


AnySession: TypeAlias = Session[RunInputs]
"""A run of whatever recipe."""


@contextmanager
def open_cluster(config: RunConfig) -> Iterator[RayVirtualCluster]:
    """Yield the devices of policies, which colocated engines share, and release them."""
    cluster = RayVirtualCluster(
        **config.cluster.arguments(), max_colocated_worker_groups=_num_groups(config)
    )
    SESSION.enter(id(config), num_cpus=num_logical_cpus(config))
    try:
        yield cluster
    finally:
        cluster.shutdown()
        SESSION.leave(id(config))


def num_logical_cpus(config: RunConfig) -> int:
    """Return the CPUs that a local Ray has to offer to a run.

    It is started with what its first user asks for: a placement group of more bundles would never
    be ready.
    """
    num_cpus = _num_groups(config) * sum(config.cluster.bundle_ct_per_node_list)
    has_own_bundles = config.has_engines and not config.is_colocated
    return num_cpus + (sum(config.engine_bundles) if has_own_bundles else 0)


def _num_groups(config: RunConfig) -> int:
    """Return the groups of workers that share the devices: policies, and colocated engines."""
    shares = config.has_engines and config.is_colocated
    return find_recipe(config.recipe).num_policies + int(shares)


@contextmanager
def open_policy(
    session: AnySession,
    policy: Settings,
    *,
    path: str = "policy",
    model: str,
    has_reference: bool,
    is_trained: bool = True,
    checkpoint: Checkpoint | None = None,
) -> Iterator[tuple[Policy, RunState]]:
    """Yield a policy and the state of the run; end its processes afterwards.

    Args:
        session: The run.
        policy: The section `policy` of the configuration, complete.
        path: The section's path, which its errors name.
        model: Name or directory of the model to start from, which is the reference too.
        has_reference: Whether to keep the reference.
        is_trained: Whether it has an optimizer.
        checkpoint: Whose weights and state these are. None: the newest of the run's directory, if
            there is one.
    """
    checkpoint = checkpoint or session.checkpoints().latest()
    config: Any = {**policy, "model_name": model}  # a PolicyConfig, and third parties' sections
    with naming_section(path):
        opened = Policy(
            session.cluster,
            config,
            session.inputs.tokenizer,
            weights_path=None if checkpoint is None else checkpoint.weights,
            optimizer_path=checkpoint.optimizer if checkpoint and is_trained else None,
            init_optimizer=is_trained,
            init_reference_model=has_reference,
        )
    try:
        yield opened, RunState() if checkpoint is None else checkpoint.state
    finally:
        opened.shutdown()


def base_model(session: AnySession) -> str:
    """Return name or directory of the model that the run starts from; the tiny one is built now."""
    config = session.config
    if not config.has_builtin_model:
        return config.policy["model_name"]
    shape = tiny_model_config(
        config.tiny_model, max_sequence_length=config.policy["max_total_sequence_length"]
    )

    def build(path: Path) -> None:
        build_tiny_model(path, config=shape, seed=config.seed)

    path = session.directory.tiny_model
    if not path.is_dir():
        write_directory(path, build)
    return str(path)


def save_final(session: AnySession, policy: Policy) -> None:
    """Write model and tokenizer as a Hugging Face directory, and adapters into another."""

    def write(path: Path) -> None:
        policy.save_hf_checkpoint(path)
        session.inputs.tokenizer.save_pretrained(path)

    if policy.has_adapters:
        write_directory(session.directory.adapters, policy.save_adapters)
    write_directory(session.directory.final, write)


class Trainer(Protocol):
    """The training and evaluation steps of a recipe."""

    @property
    def is_done(self) -> bool:
        """Whether the goal is reached, and no step has to follow."""
        ...

    @property
    def data_position(self) -> int:
        """Items drawn from the training data so far; a resumed run continues there."""
        ...

    @property
    def weight_version(self) -> int:
        """The last weight version that engines had; -1 without engines."""
        ...

    def measure_start(self) -> StepMetrics:
        """Return the measurements before the first step, as step 0."""
        ...

    def take_step(self, step: int, *, is_measured: bool, needs_score: bool) -> StepMetrics:
        """Take a step, and return its metrics.

        Args:
            step: Its number, from 1.
            is_measured: Whether the configuration asks for all measurements after it.
            needs_score: Whether the score is needed, if not the others: a checkpoint follows.
        """
        ...


def run_loop(
    session: AnySession,
    trainer: Trainer,
    policy: Policy,
    *,
    name: str,
    num_steps: int,
    eval_every: int,
    eval_at_start: bool = True,
    start: RunState,
    save_also: Callable[[Path], None] | None = None,
) -> None:
    """Take the steps that are left, record and save them, and write the final model.

    Args:
        session: The run.
        trainer: Takes the steps.
        policy: What is trained.
        name: Of the phase, for the display.
        num_steps: The last step.
        eval_every: Steps between two measurements.
        eval_at_start: Whether a new run measures before its first step.
        start: The state of the checkpoint that `policy` was loaded from; step 0 for a new run.
        save_also: Writes what else a checkpoint has into its directory.
    """
    state, every, saved = start, session.config.checkpoint.every, start.step
    with (
        session.open_log(state) as log,
        session.display.phase(name, total=num_steps, completed=state.step) as phase,
    ):
        if state.is_new and eval_at_start:
            state = _record(trainer, state, trainer.measure_start(), log=log, phase=phase)
        can_return = policy.keep_random_state()
        while state.step < num_steps and not state.is_done:
            step = state.step + 1
            is_saved = step % every == 0 or step == num_steps
            try:
                metrics = trainer.take_step(
                    step,
                    is_measured=step % eval_every == 0 or step == num_steps,
                    needs_score=is_saved,
                )
            except RewardError as error:
                # The policy is that of the last recorded step, unless this step has trained it.
                # With the random state of then, the resumed run samples the same again.
                if state.step > saved and can_return and not error.policy_has_changed:
                    policy.restore_random_state()
                    log.sync()
                    _save_if_there_is_room(session, policy, state, save_also)
                raise
            state = _record(trainer, state, metrics, log=log, phase=phase)
            if is_saved or state.is_done:
                # First the log: a checkpoint whose measurements are lost could not be resumed.
                log.sync()
                _save_if_there_is_room(session, policy, state, save_also)
                saved = state.step
            policy.keep_random_state()
    save_final(session, policy)


def save_checkpoint(
    session: AnySession,
    policy: Policy,
    state: RunState,
    *,
    save_also: Callable[[Path], None] | None = None,
) -> None:
    """Save the policy and the state of the run, and what `save_also` writes."""

    def write(checkpoint: Checkpoint) -> None:
        policy.save_checkpoint(checkpoint.weights, checkpoint.optimizer, checkpoint.tokenizer)
        if save_also is not None:
            save_also(checkpoint.path)

    session.checkpoints().save(state, write)


def _save_if_there_is_room(
    session: AnySession,
    policy: Policy,
    state: RunState,
    save_also: Callable[[Path], None] | None,
) -> None:
    try:
        save_checkpoint(session, policy, state, save_also=save_also)
    except Exception as error:
        if not (session.config.checkpoint.skip_when_full and is_disk_full(error)):
            raise
        # The next measurements need the room that a part of it has taken.
        session.checkpoints().remove_partial()
        session.display.note(f"no checkpoint of step {state.step}: {error}")


def _record(
    trainer: Trainer, state: RunState, metrics: StepMetrics, *, log: MetricsLog, phase: Phase
) -> RunState:
    """Write and show the metrics, and return the state after them."""
    log.write(metrics)
    score = metrics.score()
    phase.advance(metrics.step, metrics.shown(), is_measured=score is not None)
    return replace(
        state,
        step=metrics.step,
        data_position=trainer.data_position,
        score=state.score if score is None else score,
        is_done=trainer.is_done,
        weight_version=trainer.weight_version,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The result of a run.

    Attributes:
        steps: Steps of the recipe.
        score_name: The column of the score, `accuracy` or `reward`; None if the recipe has none.
        first_score: The first score that was measured on held-out data; None if none was.
        last_score: The last.
        seconds: Of this call, which may have resumed a run.
        restarts: How often its workers were started again, as one had died.
        final: The trained model; None if nothing was trained.
        metrics: The file with all measurements.
    """

    steps: int
    score_name: str | None
    first_score: float | None
    last_score: float | None
    seconds: float
    restarts: int
    final: Path | None
    metrics: Path

    def __str__(self) -> str:
        """Return it as a sentence."""
        restarts = f", restarts: {self.restarts}" if self.restarts else ""
        time = f"({self.seconds:.0f} s{restarts})"
        if self.final is None:
            measured = "" if self.first_score is None else f"{self.first_score:.3f} "
            return f"Measured {self.score_name} {measured}{time}; all numbers are in {self.metrics}"
        score = ""
        if self.first_score is not None and self.last_score is not None:
            score = (
                f"Held-out {self.score_name} {self.first_score:.3f} -> {self.last_score:.3f} in "
            )
        return f"{score}{self.steps} steps {time}; the model is in {self.final}"


def execute(inputs: RunInputs, directory: RunDirectory, *, display: RunDisplay) -> RunSummary:
    """Carry out a run, or the rest of it, in a directory that holds its configuration.

    Where a worker dies, it goes on from the newest checkpoint as often as `cluster.restarts` says.

    Args:
        inputs: What `prepare_inputs` returned.
        directory: Created.
        display: Shows the progress.
    """
    started = perf_counter()
    recipe, restarts = find_recipe(inputs.config.recipe), 0
    record_environment(directory.environment)
    with recorded_status(directory.status):
        while not _run_to_the_end(recipe, inputs, directory, display=display, restarts=restarts):
            restarts += 1
    # After it has ended: the report says how.
    if inputs.config.report.at_end:
        _write_report(directory, display)
    rows = read_metrics(directory.metrics)
    score_name, scores = find_scores(rows, recipe.metrics.score_column)
    return RunSummary(
        steps=int(rows[-1]["step"] or 0),
        score_name=score_name,
        first_score=scores[0] if scores else None,
        last_score=scores[-1] if scores else None,
        seconds=perf_counter() - started,
        restarts=restarts,
        final=directory.final if directory.final.is_dir() else None,
        metrics=directory.metrics,
    )


def _write_report(directory: RunDirectory, display: RunDisplay) -> None:
    if find_spec("plotly") is None:
        display.note(
            f"{directory.report} is not written, as plotly is not installed: "
            'pip install "rl-policy[report]", then rl-policy report'
        )
        return
    from rl_policy.report.page import write_page
    from rl_policy.report.run_data import read_run

    write_page([read_run(directory.path)], directory.report)


def _run_to_the_end(
    recipe: Recipe[Any],
    inputs: RunInputs,
    directory: RunDirectory,
    *,
    display: RunDisplay,
    restarts: int,
) -> bool:
    """Run the recipe from the newest checkpoint; return False if a restart has to follow.

    All of its processes have then ended, and the devices are released: a node that is lost, or has
    come back, is noticed by asking for them again.
    """
    config = inputs.config
    try:
        with open_cluster(config) as cluster:
            session = Session(inputs=inputs, directory=directory, cluster=cluster, display=display)
            recipe.run(session, base_model(session))
    except Exception as error:
        death = death_behind(error)
        if death is None or restarts == config.cluster.restarts:
            raise
        directory.record_failure(error)
        turn = f"restart {restarts + 1} of {config.cluster.restarts}"
        display.note(f"{death.summary}: {death.reason}; {turn}")
        return False
    return True
