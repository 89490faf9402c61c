"""A policy worker on Megatron-core: tensor, pipeline, context and expert parallelism."""

from rl_megatron_worker.worker import MegatronPolicyWorker

__all__ = ["MegatronPolicyWorker"]
