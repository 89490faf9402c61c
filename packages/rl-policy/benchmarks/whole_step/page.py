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

    nox -s "bench(rl-policy)" -- grpo_step --page docs/pages/benchmarks.md
    nox -s bench-vllm -- rl-policy grpo_step_vllm --page docs/pages/benchmarks.md

A cell is the ratio of ours to TRL's, and in brackets the two numbers in seconds; below 1, ours is
faster. Wall clock is that of the driver or of TRL's first rank, processor time that of the whole
process tree.

- `start`: from the command to the first GRPO step, with all imports and the load of the model.
- `start, bare Ray`: what no run over Ray can do without. A driver imports torch, Ray starts as
  rl-policy starts it, and a process for each rank imports torch and transformers and loads the
  model.
- `first step`: with what is done once. `step`: the mean of the following ones.
- The phases below it add up to `step`: `generate` is prompts to tokens, `score` rewards, and
  log-probabilities of policy and reference, `train` the optimizer steps, `move` residency and the
  hand-over of devices, `refit` new weights for the engines, and `other` all the rest.
"""


WITHOUT_TRL = """\
Ours alone, as shares of a step: TRL 1.16 starts its colocated engine on vLLM 0.32's build for the
CPU, and fails at the first hand-over of weights (`grpo_step_vllm --with-trl`):

```text
trl/generation/vllm_generation.py, sync_weights: model.load_weights([(name, param)])
vllm/model_executor/layers/linear.py, load_weights: param.weight_loader(...)
AttributeError: 'Parameter' object has no attribute 'weight_loader'
```

It writes into live parameters. The build for the CPU has packed these for its kernels by then and
dropped them; only vLLM's own lifecycle of a reload, which rl-refit goes through, restores them.
"""


def write_page(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Write the page."""
    path.write_text(render(comparisons))


def render(comparisons: Sequence[Comparison]) -> str:
    """Return the page as Markdown."""
    by_trainers = [each for each in comparisons if each.sampler == WORKERS]
    by_engines = [each for each in comparisons if each.sampler != WORKERS]
    lines = [HEAD, *_chapter("## The trainer samples\n", by_trainers)]
    if any(each.peer() is not None for each in by_engines):
        lines += _chapter("## vLLM samples\n", by_engines)
    else:
        lines += _chapter(f"## vLLM samples\n\n{WITHOUT_TRL}", by_engines)
    return "\n".join(lines).rstrip() + "\n"


def _chapter(heading: str, group: Sequence[Comparison]) -> list[str]:
    lines = [heading]
    lines += [f"On {each}.\n" for each in dict.fromkeys(each.machine for each in group)]
    if any(each.peer() is not None for each in group):
        lines.append("What is not the same on the two sides:\n")
        lines += [*(f"- {line}" for line in differences(group[0].sampler)), ""]
    for name in dict.fromkeys(each.work for each in group):
        same = [each for each in group if each.work == name]
        lines += [f"### {_title(same[0])}\n", f"{same[0].description}.\n"]
        for each in sorted(same, key=lambda one: (one.ranks, one.sampler)):
            lines += _section(each)
    return lines


def _title(comparison: Comparison) -> str:
    suffix = "" if comparison.sampler == WORKERS else ", with vLLM"
    return f"Size: {comparison.work}{suffix}"


def _section(comparison: Comparison) -> list[str]:
    count = comparison.ranks
    ranks = "One training process" if count == 1 else f"{count} training processes"
    rounds = "one round" if comparison.rounds == 1 else f"{comparison.rounds} rounds"
    others = f"other programs used up to {comparison.beside():.0%} of the processors"
    facts = f"{ranks}; {rounds} on {comparison.date}, {others}.\n"
    head, *rows = table(comparison)
    rule = ["---"] * len(head)
    cells = [head, rule, *rows]
    return [facts, *(f"| {' | '.join(row)} |" for row in cells), ""]
