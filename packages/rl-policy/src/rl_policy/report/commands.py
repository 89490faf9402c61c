"""The commands `report`, `compare` and `watch` of the command line.

Each imports what it needs when it is called, so that `--help` imports neither torch nor plotly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_BAD_INPUT, _FAILED = 2, 1
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


def add_commands(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("report")(report)
    app.command("compare")(compare)
    app.command("watch")(watch)


def report(run_dir: _RunDir, out: _Out = None) -> None:
    """Write the report of a run, in progress or not: one page that opens without a network."""
    _write([run_dir], run_dir / "report.html" if out is None else out)


def compare(run_dirs: _RunDirs, out: _ComparisonOut = None) -> None:
    """Write a page that shows several runs side by side."""
    if len(run_dirs) < 2:
        _refuse(f"RUN_DIR={run_dirs[0]} is one run: give two or more, or use rl-policy report")
    _write(run_dirs, Path("compare.html") if out is None else out)


def watch(run_dir: _RunDir) -> None:
    """Show the steps of a run in progress until it ends, or until Ctrl-C."""
    from rich.console import Console

    from rl_policy.report.watch import watch as follow

    try:
        state = follow(run_dir, Console())
    except ValueError as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    typer.echo(f"the run {run_dir} is {state}")
    if state != "finished":
        raise typer.Exit(_FAILED)


def _write(run_dirs: list[Path], out: Path) -> None:
    from rl_policy.report.page import require_plotly, require_replaceable, write_page
    from rl_policy.report.run_data import read_run

    try:
        require_plotly()
        require_replaceable(out)
        write_page([read_run(each) for each in run_dirs], out)
    except ValueError as error:
        _refuse(str(error))
    typer.echo(str(out))


def _refuse(reason: str) -> None:
    typer.echo(f"error: {' '.join(reason.split())}", err=True)
    raise typer.Exit(_BAD_INPUT)
