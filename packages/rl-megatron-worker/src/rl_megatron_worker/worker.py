"""The worker: `rl_interfaces.backend.worker.EngineWorker` over Megatron-core's engine."""

from __future__ import annotations

from rl_interfaces.backend.worker import EngineWorker

from rl_megatron_worker.engine import MegatronEngine


class MegatronPolicyWorker(EngineWorker):
    """One rank of a policy on Megatron-core, for the models that `convert` knows.

    A plain class: it runs wherever torchrun's environment variables are set, on its GPU with NCCL
    or on the CPU with gloo. Every method is called on every rank. See `EngineWorker` for the
    arguments and calls, and `MegatronEngine` for what Megatron-core does below them.
    """

    engine_class = MegatronEngine

    def return_state_dict(self) -> dict[str, object]:
        """Return this rank's shard of the model's state, by chunk: `model0`, `model1` ..."""
        return {f"model{index}": chunk.state_dict() for index, chunk in enumerate(self.model)}
