"""The command line: a command `rl-policy NAME` for each recipe, and those of `commands`.

Each step of a command imports what it needs, so that `--help` imports neither torch nor Ray.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from rl_policy.commands.verbs import (
    BAD_INPUT,
    FAILED,
    SIGNALLED,
    add_commands,
    bad_input_in_one_line,
    interrupted_by_signals,
    with_model_key,
)
from rl_policy.recipes import describe_recipe, installed_recipes

if TYPE_CHECKING:
    from rl_policy.config import RunConfig
    from rl_policy.run.directory import RunDirectory
    from rl_policy.run.inputs import RunInputs

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL] SECTION.KEY=VALUE",
        help="The model's directory or name, and configuration, over that of the file; texts "
        "are taken literally, other values are YAML. For example DIR "
        "policy.train_global_batch_size=32 data.path=problems.jsonl. --show-config lists the keys.",
        show_default="none",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        parser=Path,
        metavar="PATH",
        help="YAML file with the configuration.",
        show_default="none",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        parser=Path,
        metavar="PATH",
        help="Run directory, which must not exist.",
        show_default="runs/COMMAND-DATE-TIME, new",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        parser=Path,
        metavar="PATH",
        help="Continue the run of this directory from its newest checkpoint, with its "
        "configuration; only the number of steps, cluster.restarts, cluster.fork_workers, "
        "logger and checkpoint.* can be overridden.",
        show_default="none",
    ),
]
ShowConfig = Annotated[
    bool,
    typer.Option(
        "--show-config",
        help="Print the complete configuration of the run, with the meaning of each key, and exit.",
        show_default="off",
    ),
]


# Of a Python that has just started: `main` sets another.
_GC_THRESHOLD = gc.get_threshold()
_SHARED_MODULES = ("torch", "transformers")
"""What every command needs, and every rank."""
_MODULES_AHEAD = ("transformers.models.auto.modeling_auto",)
"""What any backend needs: a second, which a command with bad input does not wait for."""
# Of options; typer exports a subclass alone.
_USAGE_ERROR: Any = typer.BadParameter.__base__


def build_app() -> typer.Typer:
    """Return the command line, with a command for each recipe that is installed."""
    app = typer.Typer(
        help="Train a language model, on one machine or many. Commands are recipes, or are about "
        "what runs have left and what they need.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name in installed_recipes():
        app.command(name, help=describe_recipe(name))(_command_of(name))
    add_commands(app)
    return app


def main() -> None:
    """Run the command line."""
    # An import of torch makes objects by the hundred thousand and no garbage: to look for some
    # after every 700, Python's default, takes a tenth of the time until a run starts.
    gc.set_threshold(100_000)
    command = get_command(build_app())
    try:
        arguments = sys.argv[1:] or ["--help"]
        status = command(arguments, prog_name="rl-policy", standalone_mode=False)
    except _USAGE_ERROR as error:
        told = " ".join(error.format_message().split())
        typer.echo(f"error: {told} ({error.ctx.command_path} --help)", err=True)
        status = BAD_INPUT
    # Python looks for garbage once more at its end: with torch imported that takes a second.
    gc.freeze()
    sys.exit(status)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(version("rl-policy"))
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
            show_default="off",
        ),
    ] = False,
) -> None:
    """Take the options before a command."""


def _command_of(recipe: str) -> Callable[..., None]:
    """Return the command of a recipe, whose flags typer takes from the signature."""

    def command(
        overrides: Overrides = None,
        config: ConfigFile = None,
        out: Out = None,
        resume: Resume = None,
        show_config: ShowConfig = False,
    ) -> None:
        _command(recipe, overrides or [], config, out, resume, show_config=show_config)

    return command


def _command(
    recipe: str,
    overrides: list[str],
    config: Path | None,
    out: Path | None,
    resume: Path | None,
    *,
    show_config: bool,
) -> None:
    from rl_policy.ray.forks import forked_workers

    # Before a recipe's imports, as Ray is among them.
    forking = forked_workers(_SHARED_MODULES, _MODULES_AHEAD, gc_threshold=_GC_THRESHOLD)
    with nullcontext() if show_config else forking:
        with bad_input_in_one_line():
            overrides = with_model_key(overrides, recipe=recipe)
            directory, resolved = _resolve(recipe, overrides, config=config, out=out, resume=resume)
            if show_config:
                _show(resolved)
                return
            inputs = _prepare(resolved, directory, is_new=resume is None)
        _run(inputs, directory)


def _run(inputs: RunInputs, directory: RunDirectory) -> None:
    """Run the recipe; an end before its last step says in one line how to continue."""
    recipe = inputs.config.recipe
    with interrupted_by_signals() as received:
        try:
            _execute(inputs, directory)
        except KeyboardInterrupt:
            line = f"interrupted; continue with: rl-policy {recipe} --resume {directory.path}"
            typer.echo(line, err=True)
            number = received[0] if received else signal.SIGINT
            raise typer.Exit(SIGNALLED + number) from None
        except Exception as error:
            lines = _known_end(error, directory)
            if lines is None:
                raise
            lines.append(f"continue with: rl-policy {recipe} --resume {directory.path}")
            typer.echo("\n".join(lines), err=True)
            raise typer.Exit(FAILED) from None


def _known_end(error: Exception, directory: RunDirectory) -> list[str] | None:
    """Return the lines for an end that a traceback would not explain; None for any other."""
    from rl_policy.data.rewards import RewardError
    from rl_policy.ray.failures import RayStartError, death_behind
    from rl_policy.run.directory import is_disk_full

    if isinstance(error, (RewardError, RayStartError)):
        return [f"error: {' '.join(str(error).split())}"]
    if is_disk_full(error):
        return [f"error: {' '.join(str(error).split())}", "the checkpoints before it are whole"]
    death = death_behind(error)
    if death is not None:
        directory.record_failure(error)
        return [
            f"error: {death.summary}: {death.reason}",
            f"all that Ray reports of it is in {directory.failure}",
        ]
    return None


def _resolve(
    recipe: str,
    overrides: list[str],
    *,
    config: Path | None,
    out: Path | None,
    resume: Path | None,
) -> tuple[RunDirectory, RunConfig]:
    """Return the run's directory and configuration, without writing anything."""
    from rl_policy.config import load_run_config, override_resumed
    from rl_policy.run.directory import RunDirectory, new_run_path

    if resume is None:
        resolved = load_run_config(recipe, path=config, overrides=overrides)
        directory = RunDirectory(new_run_path(recipe) if out is None else out)
        directory.require_new()
        return directory, resolved
    for flag, value in (("--config", config), ("--out", out)):
        if value is not None:
            raise ValueError(f"{flag} {value} contradicts --resume {resume}: the run has its own")
    directory = RunDirectory(resume)
    resolved = directory.read_config()
    if resolved.recipe != recipe:
        raise ValueError(
            f"--resume {resume} is a run of {resolved.recipe!r}: use rl-policy {resolved.recipe}"
        )
    return directory, override_resumed(resolved, overrides)


def _show(config: RunConfig) -> None:
    from rl_policy.config import render_run_config

    typer.echo(render_run_config(config), nl=False)


def _prepare(config: RunConfig, directory: RunDirectory, *, is_new: bool) -> RunInputs:
    """Return the run's inputs, and write its configuration to its directory."""
    from transformers.utils import logging as transformers_logging

    from rl_policy.backends import enabled_backend
    from rl_policy.ray.forks import import_ahead, stop_forking
    from rl_policy.recipes import find_recipe
    from rl_policy.run.inputs import prepare_inputs

    policies = find_recipe(config.recipe).policies(config)
    names = [enabled_backend(policy, path=path) for path, policy in policies.items()]
    if config.cluster.fork_workers:
        import_ahead(names)
    else:
        stop_forking()
    transformers_logging.disable_progress_bar()
    inputs = prepare_inputs(config)
    if is_new:
        directory.create(config)
        directory.keep_data(inputs.digests())
    else:
        directory.check_data(inputs.digests(), path=config.data.path)
        directory.write_config(config)
    return inputs


def _execute(inputs: RunInputs, directory: RunDirectory) -> None:
    from rich.console import Console

    from rl_policy.run.metrics import RunDisplay
    from rl_policy.run.session import execute

    display = RunDisplay(Console(stderr=True))
    display.note(f"Run directory: {directory.path}")
    typer.echo(str(execute(inputs, directory, display=display)))
