"""Layout of packed sequences: from the padded rows of a micro-batch to one row, and back."""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import torch

from rl_batched_data.columns import round_up, to_device

# Shortest over longest sequence of a group: trades padding against kernel launches.
_SHORTEST_SHARE = 0.7


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedSequences:
    """The packed layout of padded rows.

    Example, rows of 3 and 2 tokens, pad_multiple=4, total_length=12:
        input      = [[11, 12, 13], [21, 22, 0]]
        pack       -> [[11, 12, 13, 0, 21, 22, 0, 0, 0, 0, 0, 0]]
        position_ids = [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]]
        cu_seqlens   = [0, 4, 8, 12]
        max_seqlen   = 4
    """

    position_ids: torch.Tensor
    """`[1, total]` int64; restarts at every sequence, and at the trailing padding."""
    cu_seqlens: torch.Tensor
    """`[sequences + 1]` int32: cumulative lengths, padding included, as varlen attention takes."""
    max_seqlen: int
    """Length of the longest sequence, padding included."""
    num_rows: int
    """Number of packed rows."""
    width: int
    """Padded width of the rows."""
    packed_index: torch.Tensor
    """`[tokens]` int64: index of each token in the packed row."""
    row_index: torch.Tensor
    """`[tokens]` int64: index of each token in the flattened rows."""
    host_cu_seqlens: torch.Tensor
    """`cu_seqlens` on the CPU, for plans: reading it does not wait for a device."""

    @classmethod
    def of(
        cls,
        lengths: torch.Tensor,
        width: int,
        *,
        pad_multiple: int = 1,
        total_length: int | None = None,
    ) -> PackedSequences:
        """Return the layout of rows of the given lengths, on the device of `lengths`.

        Args:
            lengths: `[rows]` int64, tokens per row.
            width: Padded width of the rows.
            pad_multiple: Each sequence is padded to a multiple of this.
            total_length: The packed row is padded to this length; unpadded when None.

        Raises:
            ValueError: The sequences exceed `total_length`, or one of them exceeds `width`.
        """
        sizes = cast(list[int], lengths.tolist())
        padded = [round_up(size, pad_multiple) for size in sizes]
        total = sum(padded) if total_length is None else total_length
        if sum(padded) > total or max(sizes, default=0) > width:
            raise ValueError(
                f"sequences of {sum(padded)} tokens, padding included, of up to "
                f"{max(sizes, default=0)} each, do not fit into total_length={total} "
                f"and width={width}"
            )
        # Trailing padding is a sequence of its own: `cu_seqlens` must cover the packed row.
        segments = padded if sum(padded) == total else [*padded, total - sum(padded)]
        ends = list(accumulate(segments))
        starts = [end - segment for end, segment in zip(ends, segments, strict=True)]
        offset = _restarting(sizes)
        rows = torch.repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
        packed_starts = torch.tensor(starts, dtype=torch.int64)
        host_cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32)
        device = lengths.device
        return cls(
            position_ids=to_device(_restarting(segments)[None], device),
            cu_seqlens=to_device(host_cu_seqlens, device),
            host_cu_seqlens=host_cu_seqlens,
            max_seqlen=max(segments, default=0),
            num_rows=len(sizes),
            width=width,
            packed_index=to_device(packed_starts[rows] + offset, device),
            row_index=to_device(rows * width + offset, device),
        )

    @property
    def total_length(self) -> int:
        """Length of the packed row, padding included."""
        return self.position_ids.shape[1]

    def to(self, device: torch.device | str) -> PackedSequences:
        """Return the same layout with its tensors on `device`."""
        return replace(
            self,
            position_ids=to_device(self.position_ids, device),
            cu_seqlens=to_device(self.cu_seqlens, device),
            packed_index=to_device(self.packed_index, device),
            row_index=to_device(self.row_index, device),
        )

    def pack(self, values: torch.Tensor, *, pad_value: float = 0) -> torch.Tensor:
        """Return per-token values packed.

        Args:
            values: `[rows, width, ...]`.
            pad_value: Value of the padding.

        Returns:
            `[1, total, ...]`.
        """
        flat = values.flatten(0, 1)
        packed = flat.new_full((self.total_length, *flat.shape[1:]), pad_value)
        return packed.index_copy(0, self.packed_index, flat.index_select(0, self.row_index))[None]

    def unpack(
        self, values: torch.Tensor, *, pad_value: float = 0, skip_first: bool = False
    ) -> torch.Tensor:
        """Return packed per-token values as padded rows; differentiable.

        Args:
            values: `[1, total, ...]`.
            pad_value: Value of the padding.
            skip_first: Set the first position of each row to `pad_value` as well: a shifted value
                there belongs to the previous sequence of the packed row.

        Returns:
            `[rows, width, ...]`.
        """
        flat = values.squeeze(0)
        rows = flat.new_full((self.num_rows * self.width, *flat.shape[1:]), pad_value)
        rows = rows.index_copy(0, self.row_index, flat.index_select(0, self.packed_index))
        rows = rows.view(self.num_rows, self.width, *flat.shape[1:])
        if not skip_first or self.width == 0:
            return rows
        # Not by a mask: how many tokens one selects is known only once the device has been read.
        first = rows.new_full((self.num_rows, 1, *flat.shape[1:]), pad_value)
        return torch.cat([first, rows[:, 1:]], dim=1)


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Return groups of sequences of similar length, longest first; empty sequences are dropped.

    Example: [4, 1, 3] -> [[0, 2], [1]]
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if lengths[index] == 0:
            continue
        if groups and lengths[index] >= _SHORTEST_SHARE * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _restarting(sizes: list[int]) -> torch.Tensor:
    """Return the concatenated ranges 0..size-1 of all sizes."""
    return torch.cat([torch.arange(size) for size in sizes] or [torch.arange(0)])
