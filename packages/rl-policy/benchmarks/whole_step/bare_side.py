"""Start what any run over Ray has to start, and nothing else, with a meter on it.

    python -m whole_step.bare_side INPUTS RANKS

These are a driver that has torch, Ray, and for each rank a process that imports what trains and
loads the model.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray
from rl_policy.ray.cluster import RayVirtualCluster

from whole_step.clocks import PhaseMeter


class BareRank:
    """Loads a model as a training worker does."""

    def load(self, model: str) -> None:
        """Import torch and transformers, and load the model."""
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(model)


def start(inputs: Path, ranks: int) -> None:
    """Load the model on all ranks, and write when that was done."""
    meter = PhaseMeter(inputs / "phases.jsonl", root=os.getpid())
    cluster = RayVirtualCluster([ranks], use_gpus=False)
    try:
        cluster.get_placement_groups()
        # Without a CPU of their own: the placement groups hold those of the cluster.
        hosts = [ray.remote(BareRank).options(num_cpus=0).remote() for _ in range(ranks)]
        ray.get([host.load.remote(str(inputs / "model")) for host in hosts], timeout=300)
        meter.end_step(0)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    start(Path(sys.argv[1]), int(sys.argv[2]))
