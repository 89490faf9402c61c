"""A GRPO run as a whole, ours and TRL's in turns: what `grpo_step` and `grpo_step_vllm` share.

command --> own_, trl_, plain_ or bare_side --> phases.jsonl --> measure --> results --> page
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from whole_step.measure import measure_bare_start, measure_in_turns
from whole_step.page import write_page
from whole_step.results import Comparison, aligned, compare, load, merge, save, table
from whole_step.work import WORKS, Work, differences, runs_of


def run_benchmark(
    description: str | None,
    *,
    name: str,
    samplers: Sequence[Sequence[str]],
    sizes: Sequence[str],
    with_trl: bool = True,
) -> None:
    """Compare both sides as the command line asks for, and print and keep what was measured.

    Args:
        description: Of the benchmark.
        name: Of its results below `--out`.
        samplers: Those that take turns, for each comparison; TRL has the first.
        sizes: Names of the sizes that it takes unless asked for others.
        with_trl: Whether TRL takes part without `--with-trl`.
    """
    # So that the runs end with the benchmark.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = _parse(description, sizes=sizes, with_trl=with_trl)
    path = options.out / f"{name}.json"
    rounds = 1 if options.quick else options.rounds
    parts = itertools.product(
        ["toy"] if options.quick else options.size, options.ranks, samplers if rounds else []
    )
    for size, ranks, group in parts:
        found = _compare(
            WORKS[size],
            ranks=ranks,
            samplers=group,
            rounds=rounds,
            most_beside=options.most_beside,
            with_trl=options.with_trl,
        )
        # After each comparison: a run in parts, or one that is ended, loses nothing.
        save(merge(load(path), [found]), path)
    if options.page is not None:
        files = sorted(options.out.glob("grpo_step*.json"))
        write_page(options.page, [each for file in files for each in load(file)])
        print(f"written to {options.page}")


def _compare(
    work: Work,
    *,
    ranks: int,
    samplers: Sequence[str],
    rounds: int,
    most_beside: float,
    with_trl: bool,
) -> Comparison:
    print(f"\n{work.name}: {work}", flush=True)
    if with_trl:
        print("what is not the same on the two sides:", flush=True)
        print("\n".join(f"- {line}" for line in differences(samplers[0])), flush=True)
    runs = runs_of(work, ranks=ranks, samplers=tuple(samplers), with_trl=with_trl)
    measured = measure_in_turns(runs, rounds=rounds, most_beside=most_beside)
    bare = measure_bare_start(runs[0], rounds=rounds) if with_trl else None
    found = compare(runs, measured, rounds=rounds, bare_start=bare)
    others = f"other programs used up to {found.beside():.0%} of the processors"
    print(f"{found.work}, {ranks} ranks, {found.machine}; {others}", flush=True)
    print(aligned(table(found)), flush=True)
    return found


def _parse(description: str | None, *, sizes: Sequence[str], with_trl: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="the toy alone, in one round")
    parser.add_argument("--size", nargs="+", choices=[*WORKS], default=[*sizes])
    parser.add_argument("--ranks", nargs="+", type=int, choices=[1, 2], default=[1, 2])
    parser.add_argument(
        "--with-trl", action="store_true", default=with_trl, help="let TRL take turns in any case"
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side; 0 for none")
    parser.add_argument(
        "--most-beside",
        type=float,
        default=0.05,
        help="repeat a run, twice at most, if other programs used more of the processors",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmarks"), help="folder of the results"
    )
    parser.add_argument("--page", type=Path, help="write all results of the folder to this page")
    return parser.parse_args()
