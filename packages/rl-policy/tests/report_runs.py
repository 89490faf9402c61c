"""What the tests of reports share: run directories as runs leave them."""

import json

from rl_policy.config import load_run_config
from rl_policy.recipes.grpo import GrpoMetrics
from rl_policy.recipes.sft import SftMetrics
from rl_policy.run.directory import RunDirectory
from rl_policy.run.metrics import MetricsLog

# What would be markup, end a script, or run one, if a page took it for its own.
HOSTILE = "<img src=x onerror=fail()></script><script>fail()</script>{{data}}"


def write_run(path, *, steps=4, settings=(), prompt="2*4=", reward=0.5):
    """Write the directory of a finished run; return it."""
    directory = RunDirectory(path)
    directory.create(load_run_config("grpo", overrides=[f"grpo.steps={steps}", *settings]))
    directory.warm_up.mkdir()
    with MetricsLog(RunDirectory(directory.warm_up).metrics) as log:
        for step in range(3):
            log.write(SftMetrics(step=step, loss=2.0 / (step + 1), accuracy=0.25))
    with MetricsLog(directory.metrics) as log:
        log.write(GrpoMetrics(step=0, reward_mean=0.25, accuracy=0.125))
        for step in range(1, steps + 1):
            log.write(measured(step, reward=reward))
    rows = [*samples_of(0, "eval", prompt), *samples_of(steps, "train", prompt)]
    rows += samples_of(steps, "eval", prompt)
    directory.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    directory.environment.write_text(json.dumps({"python": "3.11.7", "gpus": []}))
    directory.final.mkdir()
    return path


def measured(step, *, reward):
    return GrpoMetrics(
        step=step,
        reward_mean=reward,
        reward_std=0.125,
        accuracy=0.75,
        loss=-0.01 * step,
        kl=0.5,
        entropy=1.5,
        completion_length_mean=3.0,
        completion_length_max=6.0,
        staleness=0.0,
        peak_memory_gib=1.5,
        step_s=1.0,
        move_s=0.1,
        generate_s=0.3,
        train_s=0.4,
        extra={"mismatch_kl": 0.001, "reward/exact_match": reward, "own_column": 7.0},
    )


def samples_of(step, kind, prompt):
    advantages = [None, None] if kind == "eval" else [0.5, -1.0]
    return [
        {
            "step": step,
            "kind": kind,
            "prompt": prompt,
            "answer": "8",
            "completion": completion,
            "reward": float(completion == "8"),
            "advantage": advantage,
            "tokens": [completion, "<|im_end|>"],
            "logprobs": [-0.5, -2.5],
        }
        for completion, advantage in zip(("8", "9"), advantages, strict=True)
    ]
