"""The page of a report: one HTML file that opens without a network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_policy.report.charts import build_charts, build_warm_up_charts
from rl_policy.report.run_data import RunData
from rl_policy.run.directory import write_durably

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MARK = "<!-- A report of rl-policy. -->"
"""What a page begins with; a file without it is not overwritten."""


def require_plotly() -> None:
    """Raise `ValueError`, with the remedy, unless plotly is installed. Does not import it."""
    if find_spec("plotly") is None:
        raise ValueError('plotly is not installed: pip install "rl-policy[report]"')


def write_page(runs: Sequence[RunData], path: Path) -> None:
    """Write the report of a run, or the comparison of several.

    Args:
        runs: In the order of their columns and colours.
        path: The file.

    Raises:
        ValueError: There is a file that is no report, or it cannot be written.
    """
    try:
        require_replaceable(path)
        write_durably(path, render_page(runs))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error


def require_replaceable(path: Path) -> None:
    """Raise `ValueError` if a file is there that is no report."""
    if not path.exists():
        return
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            if file.read(len(MARK)) == MARK:
                return
    raise ValueError(f"{path} exists and is no report, and is not overwritten: give another --out")


def render_page(runs: Sequence[RunData]) -> str:
    """Return the page of one run, or of several side by side."""
    from plotly.offline import get_plotlyjs

    named = _with_distinct_names(runs)
    charts, warm_up = build_charts(named), build_warm_up_charts(named)
    data = {
        "charts": [
            *_plain(charts, group="charts"),
            *_plain(warm_up, group="warm-up-charts"),
        ],
        "samples": [{"run": run.name, **asdict(sample)} for run in named for sample in run.samples],
    }
    folder = files("rl_policy.report")
    parts = {
        "mark": MARK,
        "title": html.escape(" and ".join(run.name for run in named)),
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "summary": _summary(named),
        "warm_up": "" if warm_up else "hidden",
        "differences": _differences(named),
        "configuration": _configuration(named),
        "environment": _environment(named),
        "plotly": get_plotlyjs(),
        "data": _script_json(data),
        "script": (folder / "page.js").read_text(encoding="utf-8"),
    }
    page = (folder / "page.html").read_text(encoding="utf-8")
    # Split first: what is put in may look like a place itself.
    pieces = page.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled)


def _with_distinct_names(runs: Sequence[RunData]) -> list[RunData]:
    """Number the runs whose directories have one name."""
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=f"{run.name} ({index + 1})")
        for index, run in enumerate(runs)
    ]


def _plain(charts: Mapping[str, Figure], *, group: str) -> list[dict[str, Any]]:
    return [
        {"group": group, "title": title, **json.loads(str(figure.to_json()))}
        for title, figure in charts.items()
    ]


def _script_json(data: object) -> str:
    """Return JSON that nothing in it can end the script element around."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _summary(runs: Sequence[RunData]) -> str:
    rows = [
        [
            run.name,
            run.recipe,
            f"{run.rows[-1]['step']:g}",
            _score(run),
            run.state,
        ]
        for run in runs
    ]
    return _table(["run", "recipe", "steps", "held-out score", "state"], rows)


def _score(run: RunData) -> str:
    scores = run.scores()
    return f"{run.score_column} {scores[0]:.3f} \u2192 {scores[-1]:.3f}" if scores else "\u2013"


def _differences(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        changed = runs[0].changed()
        if not changed:
            return "<p>Nothing differs from the defaults.</p>"
        rows = [[key, *map(_shown, pair)] for key, pair in changed.items()]
        return _table(["key", "value", "default"], rows)
    return _compared("key", runs, [run.config for run in runs])


def _compared(head: str, runs: Sequence[RunData], columns: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of what is not the same in all runs."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [[key, *(_shown(column.get(key)) for column in columns)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return "<p>It is the same in all runs.</p>"
    return _table([head, *(run.name for run in runs)], differing)


def _configuration(runs: Sequence[RunData]) -> str:
    tables = (
        f"<details><summary>Complete configuration of {html.escape(run.name)}</summary>"
        f"{_table(['key', 'value'], [[key, _shown(value)] for key, value in run.config.items()])}"
        "</details>"
        for run in runs
    )
    return "".join(tables)


def _environment(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return _compared("", runs, [run.environment for run in runs])
    if not runs[0].environment:
        return "<p>The run has not recorded it.</p>"
    return _table(
        ["", "value"], [[key, _shown(value)] for key, value in runs[0].environment.items()]
    )


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f'<div class="scrolled"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
