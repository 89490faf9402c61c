"""What the tests of whole runs share: a configuration of small runs, and what they leave."""

import json
import sys

import yaml
from forked_python import rank_python
from patience import PATIENCE_S
from rl_policy.run.metrics import read_metrics

MODULE = [sys.executable, "-c", "from rl_policy.cli import main; main()"]
TWO_RANKS = "cluster.bundle_ct_per_node_list=[2]"
CONFIG = {
    # Each rank is a process of its own, which takes seconds to start.
    "cluster": {"bundle_ct_per_node_list": [1]},
    "data": {"num_heldout": 16, "num_validation": 16},
    "policy": {
        "train_global_batch_size": 8,
        "train_micro_batch_size": 4,
        "logprob_batch_size": 8,
        "optimizer": {"kwargs": {"lr": 1.0e-3}},
        "generation": {"max_new_tokens": 2},
        "timeout_s": PATIENCE_S,
    },
    "sft": {
        "steps": 40,
        "eval_every": 4,
        "stop_pass_rate": 0.7,
        "pass_samples": 2,
        "policy": {
            "train_global_batch_size": 32,
            "train_micro_batch_size": 16,
            "optimizer": {"kwargs": {"lr": 6.0e-3}},
        },
    },
    "grpo": {"steps": 4, "prompts_per_step": 4, "samples_per_prompt": 4, "eval_every": 2},
    "checkpoint": {"every": 2, "keep_last": 2},
}
# What a step measures by a clock, or of memory, differs from run to run.
PHASES = ("move_s", "generate_s", "reward_s", "logprob_s", "train_s")
SPEEDS = ("tokens_per_s", "tokens_per_s_per_device", "tflops_per_s_per_device", "mfu")
TIMES = {*SPEEDS, "peak_memory_gib", "step_s", *PHASES}


def forked_command(*arguments):
    """Return the command line of an `rl-policy` that is forked from a process with its imports."""
    return [rank_python(), *MODULE[1:], *arguments]


def write_workplace(path):
    """Write a configuration, and problems that are learnt in a few steps; return the directory."""
    problems = [{"prompt": f"{number}?", "answer": str(number % 2)} for number in range(200)]
    (path / "problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    (path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    return path


def measured(directory):
    """Return all metrics but the times."""
    return [
        {name: value for name, value in row.items() if name not in TIMES}
        for row in read_metrics(directory / "metrics.jsonl")
    ]
