"""The page of the documentation that the benchmark writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from whole_step.results import Comparison, table
from whole_step.work import WORKERS, differences

HEAD = """\
# Benchmarks

A GRPO run as a whole, in turns with TRL's `GRPOTrainer` on the same model, problems, reward, group
size, completion lengths, optimizer and batch sizes, each started as a user starts it. This page is
written by the benchmark:

    nox -s "bench(rl-policy)" -- --page docs/pages/benchmarks.md
    nox -s bench-vllm -- rl-policy --page docs/pages/benchmarks.md

A cell is the ratio of ours to TRL's, and in brackets the two numbers in seconds; below 1, ours is
faster. Wall clock is that of the driver or of TRL's first rank, processor time that of the whole
process tree.

- `start`: from the command to the first GRPO step, with all imports and the load of the model.
- `first step`: with what is done once. `step`: the mean of the following ones.
- The phases below it add up to `step`: `generate` is prompts to tokens, `score` rewards, and
  log-probabilities of policy and reference, `train` the optimizer steps, `move` residency and the
  hand-over of devices, `refit` new weights for the engines, and `other` all the rest.
"""


def write_page(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Write the page."""
    path.write_text(render(comparisons))


def render(comparisons: Sequence[Comparison]) -> str:
    """Return the page as Markdown."""
    lines = [HEAD]
    for with_engines in (False, True):
        group = [each for each in comparisons if (each.sampler != WORKERS) == with_engines]
        if not group:
            continue
        lines.append("## With vLLM as the sampler\n" if with_engines else "## One sampler each\n")
        lines += _differences(group)
        for name in dict.fromkeys(each.work for each in group):
            same = [each for each in group if each.work == name]
            lines += [f"### {_title(same[0])}\n", f"{same[0].description}.\n"]
            for each in sorted(same, key=lambda one: (one.ranks, one.sampler)):
                lines += _section(each)
    return "\n".join(lines).rstrip() + "\n"


def _title(comparison: Comparison) -> str:
    suffix = "" if comparison.sampler == WORKERS else ", with vLLM"
    return f"Size: {comparison.work}{suffix}"


def _differences(group: Sequence[Comparison]) -> list[str]:
    machines = [f"On {each}.\n" for each in dict.fromkeys(each.machine for each in group)]
    heading = "What is not the same on the two sides:\n"
    return [*machines, heading, *(f"- {line}" for line in differences(group[0].sampler)), ""]


def _section(comparison: Comparison) -> list[str]:
    count = comparison.ranks
    ranks = "One training process" if count == 1 else f"{count} training processes"
    others = f"other programs used up to {comparison.beside():.0%} of the processors"
    facts = f"{ranks}; {comparison.rounds} rounds on {comparison.date}, {others}.\n"
    head, *rows = table(comparison)
    rule = ["---"] * len(head)
    cells = [head, rule, *rows]
    return [facts, *(f"| {' | '.join(row)} |" for row in cells), ""]
