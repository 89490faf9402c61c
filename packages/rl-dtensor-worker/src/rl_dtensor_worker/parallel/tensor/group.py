"""The tensor-parallel group, and how activations enter and leave the layers that it shards.

Parameters are DTensors on the mesh axis `tp`, so that the optimizer, checkpoints and weight
transfer see shards with their placements. A forward pass sees the local shards as plain tensors,
which keeps DTensor's dispatch out of it: a layer costs its kernels and its collectives.

Between layers activations are replicated or, with sequence parallelism, sharded along the sequence
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"). In both
cases `gather_input` leads into a sharded layer and `reduce_output` out of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Placement, Replicate, distribute_tensor

from rl_dtensor_worker.parallel.tensor import collectives

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch
    from torch.distributed.device_mesh import DeviceMesh

SEQUENCE_DIM = -2
"""Sequence dim of activations: of `[batch, seq, hidden]` and of packed `[tokens, hidden]`."""


class TensorParallel:
    """The ranks that shard each layer together.

    Args:
        mesh: Their one-axis mesh.
        sequence_parallel: Whether activations between layers are sharded along the sequence.
    """

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.size = mesh.size()
        self.sequence_parallel = sequence_parallel
        self._last_gather: tuple[torch.Tensor, torch.Tensor] | None = None
        self._input_is_gathered = False
        self._distributed: dict[nn.Parameter, nn.Parameter] = {}

    @contextmanager
    def unsharded_sequences(self) -> Generator[None, None, None]:
        """Switch sequence parallelism off inside.

        For forwards without gradients, whose sequences may be of any length: sequence parallelism
        needs lengths that the group divides.
        """
        before, self.sequence_parallel = self.sequence_parallel, False
        try:
            yield
        finally:
            self.sequence_parallel = before

    def gather_input(self, values: torch.Tensor) -> torch.Tensor:
        """Return the full `values`, for a layer whose parameters are sharded.

        Modules that take the same tensor, such as the query, key and value projections, share one
        gather, and so one collective in the backward pass.
        """
        if self._input_is_gathered:
            return values
        if self._last_gather is None or self._last_gather[0] is not values:
            self._last_gather = values, self.gather_input_once(values)
        return self._last_gather[1]

    def gather_input_once(self, values: torch.Tensor) -> torch.Tensor:
        """Return what `gather_input` does without sharing it.

        For modules that no `reduce_output` follows, which would leave a gather that outlives them.
        """
        if self.sequence_parallel:
            return collectives.gather_for_sharded_use(values, self.group, SEQUENCE_DIM)
        return collectives.copy_to_group(values, self.group)

    @contextmanager
    def input_is_gathered(self) -> Generator[None, None, None]:
        """Make `gather_input` the identity: a surrounding block has gathered already."""
        self._input_is_gathered = True
        try:
            yield
        finally:
            self._input_is_gathered = False

    def reduce_output(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' partial `values`; its local chunk with sequence parallelism.

        The chunk is along the sequence.
        """
        # The next layer's input is another tensor; holding this one would only keep memory.
        self._last_gather = None
        if self.sequence_parallel:
            return collectives.reduce_scatter_to_group(values, self.group, SEQUENCE_DIM)
        return collectives.reduce_from_group(values, self.group)

    def distribute(self, module: nn.Module, placements: dict[str, Placement]) -> None:
        """Replace the module's own parameters by DTensors on this group; tied ones stay tied.

        Args:
            module: Its submodules are left alone.
            placements: By parameter name; a parameter that is not named is replicated.

        Raises:
            ValueError: A parameter is tied to one with another placement.
        """
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = placements.get(name, Replicate())
            known = self._distributed.get(parameter)
            if known is None:
                known = nn.Parameter(
                    # Without a source rank: every rank has the tensor, on the meta device.
                    distribute_tensor(parameter, self.mesh, [placement], src_data_rank=None),
                    requires_grad=parameter.requires_grad,
                )
                self._distributed[parameter] = self._distributed[known] = known
            if known.placements != (placement,):  # type: ignore[attr-defined]
                raise ValueError(
                    f"{type(module).__name__}.{name} is tied to a parameter that is placed as "
                    f"{known.placements}, and would be {placement}: "  # type: ignore[attr-defined]
                    "the plan must treat both alike"
                )
            module.register_parameter(name, known)
