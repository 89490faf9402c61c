"""What the benchmarks share: their options, and a table that is printed and written as JSON."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def option_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of `out`, the folder for the JSON, and `quick`: take the smaller sizes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmarks"), help="folder for the JSON"
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    return parser


def parse_options(description: str | None) -> argparse.Namespace:
    """Return what the command line says, see `option_parser`."""
    return option_parser(description).parse_args()


def report(name: str, title: str, rows: Sequence[Row], out: Path) -> None:
    """Print `rows` as a table and write them to `out/name.json` with the machine's facts."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_text(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps({"title": title, "machine": facts, "rows": list(rows)}, indent=2))
    print(f"written to {path}")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
