"""`NamedSharding`: where each rank stands in the parallel layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from rl_interfaces import ParallelLayout

DATA_AXIS = "data_parallel"
"""The axis over which batches are sharded."""


class NamedSharding:
    """A grid of ranks with named axes.

    Example, 4 ranks as two data-parallel groups of two tensor-parallel ranks:
        sharding = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])
        sharding.get_worker_coords(2)                  -> {"data_parallel": 1, "tensor_parallel": 0}
        sharding.get_ranks_by_coord(tensor_parallel=1) -> [1, 3]
        sharding.get_ranks(data_parallel=1, tensor_parallel=0) -> 2

    Args:
        layout: The rank of each cell: unique integers, `len(names)` dimensions.
        names: The name of each dimension, outermost first.

    Raises:
        ValueError: The layout does not fit the names, or a rank is not unique.
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
        self._names = tuple(names)

    @classmethod
    def from_layout(cls, layout: ParallelLayout) -> NamedSharding:
        """Return the grid of a backend's layout: pipeline outermost, tensor innermost."""
        names = ("pipeline_parallel", DATA_AXIS, "context_parallel", "tensor_parallel")
        shape = [getattr(layout, name) for name in names]
        return cls(np.arange(layout.world_size).reshape(shape), names)

    @property
    def names(self) -> list[str]:
        """The axes, outermost first."""
        return list(self._names)

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis."""
        return dict(zip(self._names, self._ranks.shape, strict=True))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._ranks.ndim

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    @property
    def layout(self) -> np.ndarray:
        """A copy of the ranks, with one dimension per axis."""
        return self._ranks.copy()

    def __eq__(self, other: object) -> bool:
        """Return whether `other` has the same ranks at the same places of the same axes."""
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(self._ranks, other._ranks)

    def __repr__(self) -> str:
        """Return an expression that makes an equal one."""
        return f"NamedSharding({self._ranks.tolist()}, {self.names})"

    def get_axis_index(self, name: str) -> int:
        """Return the place of one axis among `names`.

        Raises:
            ValueError: The axis is unknown.
        """
        if name not in self._names:
            raise ValueError(f"{name!r} is not an axis, the axes are {self.names}")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Return the size of one axis.

        Raises:
            ValueError: The axis is unknown.
        """
        return self._ranks.shape[self.get_axis_index(name)]

    def get_worker_coords(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on every axis.

        Raises:
            ValueError: The rank is unknown.
        """
        found = np.argwhere(self._ranks == rank)
        if len(found) == 0:
            raise ValueError(f"rank {rank} is not in the layout of {self.size} ranks")
        return dict(zip(self._names, found[0].tolist(), strict=True))

    def get_positions(self, name: str) -> list[int]:
        """Return the position on one axis of every rank, for ranks 0, 1, ...

        Raises:
            ValueError: The axis is unknown.
        """
        size, axis = self.get_axis_size(name), self.get_axis_index(name)
        shape = [size if place == axis else 1 for place in range(self.ndim)]
        positions = np.broadcast_to(np.arange(size).reshape(shape), self._ranks.shape)
        return positions.flatten()[np.argsort(self._ranks, axis=None)].tolist()

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Return the ranks at the given positions, in the order of the layout.

        Args:
            coords: A position per axis name. An axis that is left out takes all its positions; one
                outside its axis has no ranks.

        Raises:
            ValueError: An axis is unknown.
        """
        if any(not 0 <= coords[name] < self.get_axis_size(name) for name in coords):
            return []
        return self._at(coords).flatten().tolist()

    def get_ranks(self, **coords: int) -> int | NamedSharding:
        """Return the rank at a position on every axis, or the grid of the axes that are left out.

        Raises:
            ValueError: An axis is unknown.
            IndexError: A position is outside its axis.
        """
        for name, position in coords.items():
            size = self.get_axis_size(name)
            if not 0 <= position < size:
                raise IndexError(f"{name}={position} is outside the axis, which has size {size}")
        left = [name for name in self._names if name not in coords]
        ranks = self._at(coords)
        return NamedSharding(ranks, left) if left else int(ranks)

    def _at(self, coords: Mapping[str, int]) -> np.ndarray:
        return np.asarray(self._ranks[tuple(coords.get(name, slice(None)) for name in self._names)])
