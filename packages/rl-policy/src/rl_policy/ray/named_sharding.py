"""Where each rank stands on the named axes of a parallel layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from rl_interfaces import ParallelLayout


class NamedSharding:
    """A grid of ranks whose axes have names.

    Example, 4 ranks as two data-parallel groups of two tensor-parallel ranks:
        sharding = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])
        sharding.get_worker_coords(2)                  -> {"data_parallel": 1, "tensor_parallel": 0}
        sharding.get_ranks_by_coord(tensor_parallel=1) -> [1, 3]

    Args:
        layout: One rank per cell, integers, each only once, `len(names)` dimensions.
        names: The name of each dimension, outermost first.

    Raises:
        ValueError: The layout and the names do not fit together, or a rank stands twice.
    """

    def __init__(self, layout: ArrayLike, names: Sequence[str]) -> None:
        ranks = np.asarray(layout)
        if not np.issubdtype(ranks.dtype, np.integer):
            raise ValueError(f"the layout must hold integers, got {ranks.dtype}")
        if ranks.ndim != len(names):
            raise ValueError(f"the layout has {ranks.ndim} dimensions, names has {list(names)}")
        if len(set(names)) != len(names):
            raise ValueError(f"an axis is named twice: {list(names)}")
        values, counts = np.unique(ranks, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"ranks stand twice in the layout: {values[counts > 1].tolist()}")
        self._ranks = ranks.copy()
        self._ranks.flags.writeable = False
        self.names = tuple(names)

    @classmethod
    def from_layout(cls, layout: ParallelLayout) -> NamedSharding:
        """Return the grid of a backend's layout: pipeline outermost, tensor innermost."""
        names = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")
        shape = [getattr(layout, name) for name in names]
        return cls(np.arange(layout.world_size).reshape(shape), names)

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis."""
        return dict(zip(self.names, self._ranks.shape, strict=True))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    def get_axis_size(self, name: str) -> int:
        """Return the size of one axis."""
        return self.shape[self._known(name)]

    def get_worker_coords(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on every axis."""
        found = np.argwhere(self._ranks == rank)
        if len(found) == 0:
            raise ValueError(f"rank {rank} is not in the layout of {self.size} ranks")
        return dict(zip(self.names, found[0].tolist(), strict=True))

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Return the ranks that stand at the given positions, in the order of the layout.

        Args:
            coords: A position per axis name. An axis that is left out takes all its positions.

        Raises:
            ValueError: The axis is unknown, or has no such position.
        """
        for name, position in coords.items():
            size = self.get_axis_size(name)
            if not 0 <= position < size:
                raise ValueError(f"{name}={position} is outside the axis, which has size {size}")
        index = tuple(coords.get(name, slice(None)) for name in self.names)
        return np.atleast_1d(self._ranks[index]).flatten().tolist()

    def _known(self, name: str) -> str:
        if name not in self.names:
            raise ValueError(f"{name!r} is not an axis, the axes are {list(self.names)}")
        return name
