"""A policy worker for any transformers causal language model, on FSDP2 and DTensor."""

from rl_dtensor_worker.parallel.fsdp import get_cpu_state_dict, unshard_fsdp2_model
from rl_dtensor_worker.worker import DTensorPolicyWorker

__all__ = ["DTensorPolicyWorker", "get_cpu_state_dict", "unshard_fsdp2_model"]
