"""Tensor parallelism: the ranks that share each layer.

Parameters are DTensors on the axis `tp`, for whoever saves, sends or steps them; a forward sees
this rank's shards as plain tensors, so that a layer costs its kernels and its collectives alone.
Between layers activations are whole on every rank, or, under sequence parallelism, cut along the
sequence (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"):
either way `enter` leads into the parallel part of a layer, and `leave` out of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, distribute_tensor

from rl_dtensor_worker.parallel.tensor import collectives

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch.distributed.device_mesh import DeviceMesh

SEQUENCE = -2
"""The sequence's dimension: of `[batch, seq, hidden]`, and of tokens laid end to end."""


class TensorParallel:
    """The ranks that share each layer, and how activations come to them and go.

    Args:
        mesh: The one-axis mesh of these ranks.
        sequence_parallel: Whether activations between layers are cut along the sequence.
    """

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.size = mesh.size()
        self.cuts_sequence = sequence_parallel
        self._entered: tuple[torch.Tensor, torch.Tensor] | None = None
        self._inside = False
        self._distributed: dict[nn.Parameter, nn.Parameter] = {}

    @contextmanager
    def whole_sequences(self) -> Generator[None, None, None]:
        """Leave sequences whole inside, for forwards without gradients of any length."""
        before, self.cuts_sequence = self.cuts_sequence, False
        try:
            yield
        finally:
            self.cuts_sequence = before

    def enter(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` whole, for each rank to use in its own way.

        What several modules take, such as the input of three projections, enters once.
        """
        if self._inside:
            return values
        if self._entered is None or self._entered[0] is not values:
            self._entered = values, self.enter_alone(values)
        return self._entered[1]

    def enter_alone(self, values: torch.Tensor) -> torch.Tensor:
        """Return what `enter` returns, for a module that nothing leaves."""
        if self.cuts_sequence:
            return collectives.gather_parts(values, self.group, SEQUENCE)
        return collectives.copy_to_ranks(values, self.group)

    @contextmanager
    def inside(self) -> Generator[None, None, None]:
        """Take it that what enters has been made whole already."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def leave(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' `values`, or this rank's part of it."""
        self._entered = None
        if self.cuts_sequence:
            return collectives.scatter_sum(values, self.group, SEQUENCE)
        return collectives.sum_over_ranks(values, self.group)

    def distribute(self, module: nn.Module, placements: dict[str, Placement]) -> None:
        """Make the module's own parameters DTensors on these ranks; tied ones stay tied.

        Raises:
            ValueError: A parameter is tied to one that is placed in another way.
        """
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = placements.get(name, Replicate())
            known = self._distributed.get(parameter)
            if known is None:
                known = nn.Parameter(
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
