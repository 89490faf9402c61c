"""The contexts in which a forward and backward pass over sharded sequences runs."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch
    from torch.distributed.device_mesh import DeviceMesh


def create_context_parallel_ctx(
    cp_mesh: DeviceMesh,
    cp_buffers: list[torch.Tensor],
    cp_seq_dims: list[int],
    cp_no_restore_buffers: set[torch.Tensor],
    cp_rotate_method: str | None = None,
) -> Any:
    """Return torch's context-parallel context over `cp_buffers`.

    Args:
        cp_mesh: The one-axis mesh of the ranks that share each sequence.
        cp_buffers: Tensors to shard along their sequence dimension while inside.
        cp_seq_dims: That dimension of each.
        cp_no_restore_buffers: Those of them that need not be whole again afterwards.
        cp_rotate_method: `allgather` or `alltoall`: how keys and values travel.
    """
    if cp_rotate_method is not None:
        set_rotate_method(cp_rotate_method)
    return context_parallel(
        cp_mesh,
        buffers=cp_buffers,
        buffer_seq_dims=cp_seq_dims,
        no_restore_buffers=cp_no_restore_buffers,
    )


@contextmanager
def train_context(
    cp_context: Generator[None, None, None] | None = None,
) -> Generator[None, None, None]:
    """Enter `cp_context`, with the attention kernels that it can shard; nothing when it is None."""
    with ExitStack() as stack:
        if cp_context is not None:
            stack.enter_context(
                sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
            )
            stack.enter_context(cp_context)  # type: ignore[arg-type]
        yield
