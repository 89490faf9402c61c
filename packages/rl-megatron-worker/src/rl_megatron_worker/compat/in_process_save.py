"""Megatron-core's checkpoint writer without forked processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

if TYPE_CHECKING:
    from pathlib import Path

    import torch.distributed as dist


class InProcessSave(TorchDistSaveShardedStrategy):
    """Writes the same format as Megatron-core's own strategy, in this process.

    Megatron-core forks writer processes and waits for them without a timeout: a killed writer hangs
    the job. Here an error on one rank is raised on all of them.

    Args:
        backend: Name of the format.
        version: Version of the format.
        group: A CPU process group of the ranks that save.
    """

    def __init__(self, backend: str, version: int, *, group: dist.ProcessGroup | None) -> None:
        super().__init__(backend, version)
        self._group = group

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write the tensors and objects; collective."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        save_tensors(
            mcore_to_pyt_state_dict(by_key, False),
            # With several threads, torch drops an exception raised in one of them.
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )
