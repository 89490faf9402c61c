"""Try models and write the table: `python -m checks.zoo [--types qwen3,gemma2] [--page FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from checks.workspace import ROOT
from checks.zoo import columns, page, types
from checks.zoo.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

Outcomes = dict[str, str]
_PAGE = ROOT / "docs/pages/models.md"


def main() -> int:
    """Return 1 if a model is wrong or crashes, or is no longer what the documentation says."""
    parser = argparse.ArgumentParser(prog="checks.zoo", description=__doc__)
    parser.add_argument("--types", default="", help="model types, separated by commas; all")
    parser.add_argument("--columns", default="", help=f"some of {', '.join(columns.TRIES)}; all")
    parser.add_argument("--results", type=Path, help="keep outcomes there, and go on from them")
    parser.add_argument("--page", type=Path, help="write the table there, or its rows of some")
    given = parser.parse_args()
    chosen = given.types.split(",") if given.types else types.all_types()
    if unknown := sorted(set(chosen) - set(types.all_types())):
        parser.error(f"--types: transformers has no causal language model of {unknown}")
    wanted = given.columns.split(",") if given.columns else list(columns.TRIES)
    if unknown := sorted(set(wanted) - set(columns.TRIES)):
        parser.error(f"--columns: {unknown} are none of {list(columns.TRIES)}")
    results = read(given.results)
    ranks = {count: Ranks(count) for count in (1, 2)}
    try:
        for model_type in chosen:
            outcomes = try_model(model_type, wanted, ranks)
            results[model_type] = results.get(model_type, {}) | outcomes
            if given.results:
                given.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    finally:
        for each in ranks.values():
            each.close()
    if given.page:
        is_part = bool(given.types or given.columns) and given.page.exists()
        before = page.read(given.page.read_text()) if is_part else page.Page({}, None)
        merged = merge(before.results, results)
        given.page.write_text(page.write(merged, since=before.since))
    faults = [
        f"{model_type}, {column}: {outcome}"
        for model_type in chosen
        for column, outcome in results[model_type].items()
        if outcome.startswith(("wrong", "crash"))
    ]
    if not given.page:
        known = page.read(_PAGE.read_text()).results
        faults += lost(known, {name: results[name] for name in chosen})
    print(*(["", *faults] if faults else ["nothing wrong, no crash"]), sep="\n")
    return 1 if faults else 0


def try_model(model_type: str, wanted: list[str], ranks: dict[int, Ranks]) -> Outcomes:
    """Return the outcome of each column for a type; one `model` if none can be built."""
    start = time.monotonic()
    found: Outcomes = {}
    with tempfile.TemporaryDirectory(prefix="zoo-") as directory:
        try:
            ranks[1].run(columns.prepare, directory, model_type)
        except ChildProcessError as error:
            found["model"] = f"not built: {' '.join(str(error).split())}"
        for name in [] if found else wanted:
            tried = columns.TRIES[name]
            try:
                each = ranks[tried.num_ranks].run(tried.function, directory, *tried.arguments)
            except ChildProcessError as error:
                found |= dict.fromkeys(tried.columns, f"crash: {' '.join(str(error).split())}")
            else:
                found |= worst(each)
    found = {column: said.replace(directory, "...") for column, said in found.items()}
    short = {column: outcome[:100] for column, outcome in found.items() if outcome != columns.EQUAL}
    print(f"{model_type} ({time.monotonic() - start:.0f} s): {short or 'all equal'}", flush=True)
    return found


def merge(before: Mapping[str, Outcomes], results: Mapping[str, Outcomes]) -> dict[str, Outcomes]:
    """Return the outcomes of an earlier run with those of columns that were tried anew."""
    merged = dict(before)
    for name, found in results.items():
        kept = {column: said for column, said in merged.get(name, {}).items() if column != "model"}
        merged[name] = found if "model" in found else kept | found
    return merged


def lost(before: Mapping[str, Mapping[str, str]], results: Mapping[str, Outcomes]) -> list[str]:
    """Return what was equal before, and is refused or not built now."""
    return [
        f"{name}, {column}: equal on the page, now {now}"
        for name, found in results.items()
        for column, outcome in before.get(name, {}).items()
        if outcome.startswith(columns.EQUAL)
        and (now := found.get("model") or found.get(column, columns.EQUAL)).startswith(
            ("refused", "not built")
        )
    ]


def worst(of_ranks: list[Outcomes]) -> Outcomes:
    """Return for each column what the ranks say, the worst if they differ."""
    order = ("crash", "wrong", "refused", columns.EQUAL)

    def severity(outcome: str) -> int:
        return next(place for place, kind in enumerate(order) if outcome.startswith(kind))

    return {
        column: min((each[column] for each in of_ranks), key=severity) for column in of_ranks[0]
    }


def read(path: Path | None) -> dict[str, Outcomes]:
    """Return the outcomes of an earlier run."""
    return json.loads(path.read_text()) if path and path.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
