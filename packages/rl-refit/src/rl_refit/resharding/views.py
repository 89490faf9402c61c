"""The boxes of a contiguous tensor that a strided view of it consists of."""

from __future__ import annotations

from collections.abc import Sequence

from rl_refit.resharding.slices import Box

MOST_SLICES = 4096
"""Of one copy, whose elements are no box of the source: more are not listed."""


class NoSlicesError(Exception):
    """The elements of a view are not a moderate number of boxes."""


def slices_of(
    shape: Sequence[int],
    source: tuple[int, Sequence[int]],
    target: tuple[int, Sequence[int]],
    full_shape: tuple[int, ...],
) -> list[tuple[Box, int, tuple[int, ...]]]:
    """Return the boxes of a contiguous tensor that a view of it consists of.

    Args:
        shape: Of the view, and of the view that it is copied into.
        source: Offset and strides of the view in the contiguous tensor.
        target: Offset and strides of the view that it is copied into.
        full_shape: Of the contiguous tensor.

    Returns:
        For each box, in the tensor's dims, the offset and the strides of its elements' places.

    Example: the transpose of a `[2, 3]` matrix, copied into a contiguous `[3, 2]`
        slices_of((3, 2), (0, (1, 3)), (0, (2, 1)), (2, 3)) -> [(Box((0, 0), (2, 3)), 0, (1, 2))]
    """
    if 0 in shape:
        return []
    axes = [
        (size, step, to)
        for size, step, to in zip(shape, source[1], target[1], strict=True)
        if size > 1
    ]
    full_strides = [1] * len(full_shape)
    for dim in range(len(full_shape) - 2, -1, -1):
        full_strides[dim] = full_strides[dim + 1] * full_shape[dim + 1]
    return _boxes(axes, source[0], target[0], full_shape, full_strides)


def _boxes(
    axes: list[tuple[int, int, int]],
    start: int,
    place: int,
    full_shape: Sequence[int],
    full_strides: Sequence[int],
) -> list[tuple[Box, int, tuple[int, ...]]]:
    offset: list[int] = []
    rest = start
    for step in full_strides:
        offset.append(rest // step)
        rest %= step
    sizes, strides = [1] * len(full_shape), [0] * len(full_shape)
    # From the smallest step up, so that the outer half of a dim that was split is met last.
    pending = sorted(axes, key=lambda axis: axis[1])
    while pending:
        size, step, to = pending.pop(0)
        if step == 0:
            raise NoSlicesError("the loader repeats its elements")
        dim = max(
            (d for d, each in enumerate(full_strides) if each <= step and full_shape[d] > 1),
            key=lambda d: full_strides[d],
        )
        unit = full_strides[dim]
        room = full_shape[dim] - offset[dim]
        if step == unit and sizes[dim] == 1 and size > room:
            # It runs over several dims, as of a flattened view: split it.
            inner = full_shape[dim]
            if offset[dim] or size % inner:
                raise NoSlicesError("the loader takes a range that begins or ends within a row")
            pending.insert(0, (inner, step, to))
            pending.insert(1, (size // inner, step * inner, to * inner))
            continue
        is_next = step == unit * sizes[dim] and (sizes[dim] == 1 or to == strides[dim] * sizes[dim])
        if is_next and offset[dim] + sizes[dim] * size <= full_shape[dim]:
            strides[dim] = to if sizes[dim] == 1 else strides[dim]
            sizes[dim] *= size
            continue
        return _one_by_one(axes, (size, step, to), start, place, full_shape, full_strides)
    return [(Box(tuple(offset), tuple(sizes)), place, tuple(strides))]


def _one_by_one(
    axes: list[tuple[int, int, int]],
    axis: tuple[int, int, int],
    start: int,
    place: int,
    full_shape: Sequence[int],
    full_strides: Sequence[int],
) -> list[tuple[Box, int, tuple[int, ...]]]:
    """Return the boxes of each index of an axis that is along no dim of the tensor."""
    size, step, to = axis
    if axes.count(axis) != 1:
        # It is a half of an axis that was split, or there twice: the view overlaps itself.
        raise NoSlicesError("the loader repeats its elements")
    others = [each for each in axes if each != axis]
    found: list[tuple[Box, int, tuple[int, ...]]] = []
    for index in range(size):
        found += _boxes(others, start + index * step, place + index * to, full_shape, full_strides)
        if len(found) > MOST_SLICES:
            raise NoSlicesError(f"the loader takes over {MOST_SLICES} slices at once")
    return found
