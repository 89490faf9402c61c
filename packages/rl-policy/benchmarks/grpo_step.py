"""Measure a GRPO run as a whole, in turns with TRL's `GRPOTrainer` on the same work.

Both get the same model, problems, reward, group size, completion length, optimizer and batch sizes,
and a reference model. Each run is a process of its own, started as a user starts it. What differs
is printed. Seconds are wall clock; processor seconds are those of the whole process tree, which
other work on the machine changes little.

Parts can be measured one by one, `--size toy --ranks 2`: results are kept below `--out`, and
`--page` writes all of them. With `--rounds 0` nothing is measured.
"""

from __future__ import annotations

from whole_step import run_benchmark
from whole_step.work import WORKERS, WORKS

if __name__ == "__main__":
    run_benchmark(__doc__, name="grpo_step", samplers=[[WORKERS]], sizes=[*WORKS])
