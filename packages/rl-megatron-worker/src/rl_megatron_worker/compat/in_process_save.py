"""Writing Megatron-core's checkpoints without processes of their own."""

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
    """Writes what Megatron-core's own strategy does, in this process.

    Megatron-core's forks processes and waits for them without a limit, so that one which is killed
    stops the job for good. Here what fails on one rank is raised on all of them.

    Args:
        backend: Name of the format.
        version: Its version.
        group: The ranks that save, on the CPU.
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
            # With several threads, torch loses what one of them raises.
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )
