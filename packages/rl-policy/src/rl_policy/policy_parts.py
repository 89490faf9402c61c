"""What the calls of a policy work with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_policy import backends, dispatch

if TYPE_CHECKING:
    from rl_interfaces import Residency
    from transformers import PreTrainedTokenizerBase

    from rl_policy.worker_group import RayWorkerGroup


class PolicyParts:
    """The parts of a policy that its calls share, as its constructor sets them."""

    worker_group: RayWorkerGroup | None
    config: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase
    _backend: str
    _worker_class: type
    _has_optimizer: bool
    _may_be_saving: bool
    _residency: Residency
    _data_parallel: int
    _receivers: list[int]

    @property
    def _group(self) -> RayWorkerGroup:
        assert self.worker_group is not None
        return self.worker_group

    def _require(self, capability: type, *, lack: str) -> None:
        backends.require(self._backend, self._worker_class, capability, lack=lack)

    def _micro_batching(self, budget: str, **sizes: int | None) -> dispatch.MicroBatching | None:
        planned = dispatch.MicroBatching.of(self.config, budget)
        for name, size in sizes.items():
            if planned is not None:
                planned.refuse_size(name, size)
        return planned

    def _limits(self) -> dict[str, Any]:
        return {
            "pad_token_id": self.tokenizer.pad_token_id,
            "max_length": self.config.get("max_total_sequence_length"),
        }
