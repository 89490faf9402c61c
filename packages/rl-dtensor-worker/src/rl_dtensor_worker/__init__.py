"""A policy worker for any transformers causal language model, on FSDP2 and DTensor.

The functions below are imported when they are first used: a driver needs the worker's class alone.
"""

from typing import TYPE_CHECKING

from rl_dtensor_worker.worker import DTensorPolicyWorker

if TYPE_CHECKING:
    from rl_dtensor_worker.parallel.fsdp import get_cpu_state_dict, unshard_fsdp2_model

__all__ = ["DTensorPolicyWorker", "get_cpu_state_dict", "unshard_fsdp2_model"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rl_dtensor_worker.parallel import fsdp

    return getattr(fsdp, name)
