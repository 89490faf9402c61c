"""Refits into vLLM: `LLM(..., weight_transfer_config={"backend": "rl_refit"})`.

vLLM imports `register` as a plug-in. Each of its workers is then a receiver:

    llm.init_weight_transfer_engine(init_info(sender.address))
    refit(llm, 3)  # while sender.send(3) runs
    sender.commit(3)
    on_workers(llm, require_ready)  # [3, ...], one per worker

Weights go through vLLM's own layerwise reload, never straight into live parameters. Run with vLLM
0.32. Importing this package does not import vLLM: `engine` and `reload` do, in vLLM's workers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rl_refit.vllm.workers import (
    abandon,
    commit,
    finish_update,
    init_info,
    last_report,
    load,
    on_workers,
    refit,
    require_ready,
    start_update,
)

BACKEND = "rl_refit"

__all__ = [
    "BACKEND",
    "abandon",
    "commit",
    "finish_update",
    "init_info",
    "last_report",
    "load",
    "on_workers",
    "refit",
    "register",
    "require_ready",
    "start_update",
]


def register() -> None:
    """Make the weight-transfer engine known to vLLM, which calls this in every process."""
    factory: Any = import_module("vllm.distributed.weight_transfer").WeightTransferEngineFactory
    # vLLM may load its plug-ins more than once in a process, and refuses a second registration.
    if BACKEND not in factory._registry:
        factory.register_engine(BACKEND, "rl_refit.vllm.engine", "RefitWeightTransferEngine")
