"""Commands of `rl-policy` that carry out no recipe.

Each imports what it needs when it is called, so that `--help` imports neither torch nor Ray.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from rl_policy.backends import BackendNotInstalledError
from rl_policy.recipes import installed_recipes

FAILED, BAD_INPUT = 1, 2
"""The exit status of a command that fails, and of one with bad input."""
SIGNALLED = 128
"""A shell's status of a process that a signal has ended is above this by the signal's number."""
_INTERRUPTED = 130

_RunDir = Annotated[Path, typer.Argument(parser=Path, metavar="RUN_DIR", help="A run directory.")]
_RunDirs = Annotated[
    list[Path],
    typer.Argument(parser=Path, metavar="RUN_DIR...", help="Two run directories or more."),
]
_Out = Annotated[
    Path | None,
    typer.Option(
        parser=Path, metavar="PATH", help="The page.", show_default="report.html in RUN_DIR"
    ),
]
_ComparisonOut = Annotated[
    Path | None,
    typer.Option(parser=Path, metavar="PATH", help="The page.", show_default="compare.html"),
]

_ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", parser=Path, metavar="PATH", help="YAML file.", show_default="none"),
]
_Host = Annotated[str, typer.Option(help="The address to listen on.")]
_Port = Annotated[
    int, typer.Option(help="The port to listen on; 0 for a free one.", min=0, max=65535)
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (merge, report, compare, watch, doctor, plan):
        app.command(command.__name__)(command)
    app.command("convert-config")(convert_config)
    app.command("serve")(serve)
    app.command("serve-tinker")(serve_tinker)


@contextmanager
def bad_input_in_one_line() -> Iterator[None]:
    """End the command with the status of bad input, and one line, for what names it."""
    try:
        yield
    except (ValueError, BackendNotInstalledError, NotImplementedError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(BAD_INPUT) from None


@contextmanager
def interrupted_by_signals() -> Iterator[list[int]]:
    """Let SIGTERM end the block as Ctrl-C does, in order, and a second signal the process at once.

    Yields:
        The number of the signal, once it has been received.
    """
    received: list[int] = []
    # A job in a shell's background ignores SIGINT, and goes on to.
    caught = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        for each in caught:
            signal.signal(each, signal.SIG_DFL)
        # Of all exceptions, Ray's calls pass on this one alone.
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in caught}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def merge(
    path: Annotated[Path, typer.Argument(parser=Path, metavar="DIR", help="A run, or adapters.")],
    out: Annotated[
        Path, typer.Option(parser=Path, metavar="PATH", help="The model, which must not exist.")
    ],
    step: Annotated[
        int | None,
        typer.Option(help="Of the run's checkpoint.", show_default="the newest", min=0),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Of the adapters.", show_default="the one that they name"),
    ] = None,
) -> None:
    """Write a checkpoint of a run, or adapters merged into their model, for transformers.

    The result is a directory that `AutoModelForCausalLM.from_pretrained` loads.
    """
    from rl_policy.run.export import merge as write

    with bad_input_in_one_line():
        made_of = write(path, out, step=step, model=model)
    typer.echo(f"{made_of}; the model is in {out}")


def convert_config(
    path: Annotated[Path, typer.Argument(parser=Path, metavar="FILE", help="Of NeMo RL.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Over it.", show_default="none"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=Path, metavar="PATH", help="The new file.", show_default="printed"),
    ] = None,
) -> None:
    """Write a configuration of NeMo RL as one of ours, and say of every key what became of it.

    The exit status is 2 if what comes out is no run yet; the last line says why.
    """
    from rl_policy.commands.convert_config import convert
    from rl_policy.run.directory import require_new_directory

    with bad_input_in_one_line():
        if out is not None:
            require_new_directory(out, key="--out")
        conversion = convert(path, overrides)
    for fate in conversion.fates:
        typer.echo(str(fate), err=True)
    if out is None:
        typer.echo(conversion.render(), nl=False)
    else:
        out.write_text(conversion.render(), encoding="utf-8")
    if conversion.problem is not None:
        typer.echo(f"error: {conversion.problem}", err=True)
        raise typer.Exit(BAD_INPUT)


def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_DIR|MODEL", help="A run's directory, or a model's directory or name."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SECTION.KEY=VALUE",
            help="Of the sections policy, cluster and serve. For example "
            "policy.generation.vllm_cfg.max_model_len=4096 serve.tool_call_parser=hermes.",
            show_default="none",
        ),
    ] = None,
    config: _ConfigFile = None,
    step: Annotated[
        int | None,
        typer.Option(help="Of the run's checkpoint.", show_default="the newest", min=0),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Under which clients know the model.", show_default="RUN_DIR|MODEL"),
    ] = None,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    key_file: Annotated[
        Path,
        typer.Option(
            parser=Path,
            metavar="PATH",
            help="The API key, for its owner alone; made if there is none.",
            show_default="serve-key",
        ),
    ] = Path("serve-key"),
) -> None:
    """Serve a model to agents that speak OpenAI's protocol, until Ctrl-C.

    vLLM's own server, whose answers have what training needs: the ids of the tokens, their
    log-probabilities, and the version of the weights. Of a run, the newest checkpoint is served,
    and its step is the version.
    """
    from rl_policy.commands.serve import ServeOptions, load_serve_config
    from rl_policy.commands.serve import serve as run_server

    with bad_input_in_one_line():
        loaded = load_serve_config(target, path=config, overrides=overrides or [])
    options = ServeOptions(
        target=target, step=step, name=name or target, host=host, port=port, key_file=key_file
    )

    def until_signal() -> int:
        run_server(loaded, options, tell=_tell)
        return 0

    _end_of_server(until_signal)


def serve_tinker(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The base model, a directory or name.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SECTION.KEY=VALUE",
            help="Of the sections policy, cluster and tinker. For example "
            "policy.dtensor_cfg.lora.r=64 cluster.bundle_ct_per_node_list=[8].",
            show_default="none",
        ),
    ] = None,
    config: _ConfigFile = None,
    name: Annotated[
        str | None,
        typer.Option(help="Under which clients know the model.", show_default="MODEL"),
    ] = None,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    state_dir: Annotated[
        Path,
        typer.Option(
            parser=Path,
            metavar="PATH",
            help="Checkpoints and the API key, for its owner alone.",
            show_default="tinker-state",
        ),
    ] = Path("tinker-state"),
) -> None:
    """Serve a base model to the public tinker client, until Ctrl-C.

    Each training client has adapters and an optimizer of its own. The client's API key is in the
    state directory, or is what TINKER_API_KEY is for this command too.
    """
    from rl_policy.tinker.command import ServerOptions, load_server_config, require_extra
    from rl_policy.tinker.command import serve as run_server

    with bad_input_in_one_line():
        require_extra()
        loaded = load_server_config(model, path=config, overrides=overrides or [])
    options = ServerOptions(
        model=model, name=name or model, host=host, port=port, state_dir=state_dir
    )
    _end_of_server(
        lambda: run_server(loaded, options, tell=lambda line: typer.echo(line, err=True))
    )


def _end_of_server(run: Callable[[], int]) -> NoReturn:
    """Run a server until a signal; end the command with the status of what has ended it.

    Args:
        run: Returns the number of the signal if it has caught one itself, else 0.
    """
    from rl_policy.ray.failures import RayStartError, WorkerGroupError, death_behind

    with interrupted_by_signals() as received:
        try:
            with bad_input_in_one_line():
                number = run()
        except KeyboardInterrupt:
            number = received[0] if received else signal.SIGINT
        except (RayStartError, WorkerGroupError) as error:
            death = death_behind(error)
            text = " ".join(str(error).split()) if death is None else death.summary
            reason = "" if death is None else f": {death.reason}"
            typer.echo(f"error: {text}{reason}", err=True)
            raise typer.Exit(FAILED) from None
    raise typer.Exit(SIGNALLED + number if number else 0)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def doctor(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PART", help="What to look at.", show_default="all, in about a minute"
        ),
    ] = None,
) -> None:
    """Look for what this machine lacks: versions, devices, packages, limits, ranks, ray.

    A line for each, and below it what to do. The exit status is 1 if something has to be done.
    """
    from rl_policy.commands.doctor import findings

    is_ok = True
    with bad_input_in_one_line():
        for finding in findings(parts or ()):
            typer.echo(str(finding))
            is_ok &= finding.is_ok
    if not is_ok:
        raise typer.Exit(FAILED)


def plan(
    gpus: Annotated[int, typer.Option(help="Devices of the policy.")],
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Of each device: 80GB, 141GiB.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] SECTION.KEY=VALUE", help="As of a run.", show_default="none"
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            parser=Path,
            metavar="PATH",
            help="YAML file with the configuration.",
            show_default="none",
        ),
    ] = None,
    recipe: Annotated[str, typer.Option(help="The command that is planned.")] = "grpo",
    gpus_per_node: Annotated[int, typer.Option(help="Devices of a node.")] = 8,
    reserve: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="For driver, NCCL and fragments.", show_default="3GiB"),
    ] = None,
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="Trace all layers.", show_default="off")
    ] = False,
) -> None:
    """Show what each device holds in each phase of a step, before anything is launched.

    The worker runs without a GPU, on tensors without memory, and needs config.json alone of the
    model. The exit status is 1 if a phase does not fit.
    """
    from rl_policy.planning.request import plan_memory

    with bad_input_in_one_line():
        planned = plan_memory(
            with_model_key(settings or [], recipe=recipe),
            gpus=gpus,
            memory=memory,
            recipe=recipe,
            config=config,
            gpus_per_node=gpus_per_node,
            reserve=reserve,
            all_layers=all_layers,
        )
    typer.echo(str(planned))
    if not planned.fits:
        raise typer.Exit(FAILED)


def report(run_dir: _RunDir, out: _Out = None) -> None:
    """Write the report of a run, in progress or not: one page that opens without a network."""
    _write([run_dir], run_dir / "report.html" if out is None else out)


def compare(run_dirs: _RunDirs, out: _ComparisonOut = None) -> None:
    """Write a page that shows several runs side by side."""
    with bad_input_in_one_line():
        if len(run_dirs) < 2:
            raise ValueError(
                f"RUN_DIR={run_dirs[0]} is one run: give two or more, or use rl-policy report"
            )
    _write(run_dirs, Path("compare.html") if out is None else out)


def watch(run_dir: _RunDir) -> None:
    """Show the steps of a run in progress until it ends, or until Ctrl-C."""
    from rich.console import Console

    from rl_policy.report.watch import watch as follow

    try:
        with bad_input_in_one_line():
            state = follow(run_dir, Console())
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    typer.echo(f"the run {run_dir} is {state}")
    if state != "finished":
        raise typer.Exit(FAILED)


def _write(run_dirs: list[Path], out: Path) -> None:
    from rl_policy.report.page import require_plotly, require_replaceable, write_page
    from rl_policy.report.run_data import read_run

    with bad_input_in_one_line():
        require_plotly()
        require_replaceable(out)
        write_page([read_run(each) for each in run_dirs], out)
    typer.echo(str(out))


def with_model_key(arguments: list[str], *, recipe: str) -> list[str]:
    """Return arguments with the key of a model that is named first, without one.

    Example:
        with_model_key(["runs/first/final", "seed=1"], recipe="grpo")
        -> ["policy.model_name=runs/first/final", "seed=1"]

    Raises:
        ValueError: The first is the name of a recipe, or there is no `recipe`.
    """
    first = arguments[0] if arguments else ""
    if not first or "=" in first:
        return arguments
    is_place = "/" in first or os.path.isdir(first)
    if not is_place and first in installed_recipes():
        raise ValueError(
            f"MODEL={first!r} is a recipe: rl-policy {first} runs it, and rl-policy plan --recipe "
            f"{first} plans it; policy.model_name={first} is a model of that name"
        )
    if not is_place and _is_key(first, recipe=recipe):
        return arguments
    return [f"policy.model_name={first}", *arguments[1:]]


def _is_key(word: str, *, recipe: str) -> bool:
    """Return whether a word without a value starts as the keys of a run do."""
    from rl_policy.config import RunConfig
    from rl_policy.recipes import find_recipe

    section = word.partition(".")[0]
    known = {*RunConfig.model_fields, *find_recipe(recipe).sections, *installed_recipes()}
    return section in known
