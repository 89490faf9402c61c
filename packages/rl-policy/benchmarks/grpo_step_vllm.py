"""Measure a GRPO run with vLLM as the sampler: colocated, and apart on logical devices of its own.

The rest is as in `grpo_step`. TRL's colocated mode takes part if asked for, `--with-trl`: with
vLLM's build for the CPU its first hand-over of weights fails.

Needs vLLM: `nox -s bench-vllm -- rl-policy grpo_step_vllm`.
"""

from __future__ import annotations

from whole_step import run_benchmark
from whole_step.work import APART, COLOCATED

if __name__ == "__main__":
    run_benchmark(
        __doc__,
        name="grpo_step_vllm",
        samplers=[[COLOCATED, APART]],
        sizes=["toy", "deep"],
        with_trl=False,
    )
