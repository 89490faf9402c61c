"""Rows of a micro-batch as one concatenated sequence, and back."""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import torch

from rl_batched_data.padding import round_up

# Rows of a group are at most this much shorter than its longest: padding against kernel launches.
_SHORTEST_SHARE = 0.7


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedSequences:
    """Where the tokens of some rows lie once they are concatenated.

    Example, rows of 3 and 2 tokens, pad_multiple=4, total_length=12:
        input      = [[11, 12, 13], [21, 22, 0]]
        pack       -> [[11, 12, 13, 0, 21, 22, 0, 0, 0, 0, 0, 0]]
        position_ids = [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]]
        cu_seqlens   = [0, 4, 8, 12]
        max_seqlen   = 4
    """

    position_ids: torch.Tensor
    """`[1, total]` int64; restarts with every sequence, and with the padding at the end."""
    cu_seqlens: torch.Tensor
    """int32: where each sequence starts, padding included, and the total."""
    max_seqlen: int
    """The longest sequence, padding included."""
    num_rows: int
    """Rows that are packed."""
    width: int
    """Size of the sequence axis of the rows."""
    packed_index: torch.Tensor
    """`[tokens]` int64: where each token lies in the concatenation."""
    row_index: torch.Tensor
    """`[tokens]` int64: where it lies in the rows, laid end to end."""

    @classmethod
    def of(
        cls,
        lengths: torch.Tensor,
        width: int,
        *,
        pad_multiple: int = 1,
        total_length: int | None = None,
    ) -> PackedSequences:
        """Return the layout of rows with these lengths, on the device of `lengths`.

        Args:
            lengths: `[rows]` int64, tokens per row.
            width: Size of the sequence axis of the rows.
            pad_multiple: Each sequence is padded to a multiple of this.
            total_length: The concatenation is padded to this; no more than needed when None.

        Raises:
            ValueError: The sequences are longer than `total_length`, or one than `width`.
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
        segments = padded if sum(padded) == total else [*padded, total - sum(padded)]
        ends = list(accumulate(segments))
        starts = [end - segment for end, segment in zip(ends, segments, strict=True)]
        offset = _restarting(sizes)
        rows = torch.repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
        packed_starts = torch.tensor(starts, dtype=torch.int64)
        device = lengths.device
        return cls(
            position_ids=_restarting(segments)[None].to(device),
            cu_seqlens=torch.tensor([0, *ends], dtype=torch.int32, device=device),
            max_seqlen=max(segments, default=0),
            num_rows=len(sizes),
            width=width,
            packed_index=(packed_starts[rows] + offset).to(device),
            row_index=(rows * width + offset).to(device),
        )

    @property
    def total_length(self) -> int:
        """Tokens of the concatenation, padding included."""
        return self.position_ids.shape[1]

    def to(self, device: torch.device | str) -> PackedSequences:
        """Return the same layout with its tensors on `device`."""
        return replace(
            self,
            position_ids=self.position_ids.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            packed_index=self.packed_index.to(device),
            row_index=self.row_index.to(device),
        )

    def pack(self, values: torch.Tensor, *, pad_value: float = 0) -> torch.Tensor:
        """Return per-token values concatenated, `pad_value` in the padding.

        Args:
            values: `[rows, width, ...]`.
            pad_value: Fills the padding.

        Returns:
            `[1, total, ...]`.
        """
        flat = values.flatten(0, 1)
        packed = flat.new_full((self.total_length, *flat.shape[1:]), pad_value)
        return packed.index_copy(0, self.packed_index, flat.index_select(0, self.row_index))[None]

    def unpack(
        self, values: torch.Tensor, *, pad_value: float = 0, skip_first: bool = False
    ) -> torch.Tensor:
        """Return per-token values as rows, `pad_value` in the padding; gradients flow back.

        Args:
            values: `[1, total, ...]`.
            pad_value: Fills the padding.
            skip_first: Leave the first position of each row at `pad_value` as well: in the
                concatenation, it follows upon another sequence.

        Returns:
            `[rows, width, ...]`.
        """
        flat = values.squeeze(0)
        taken, put = self.packed_index, self.row_index
        if skip_first:
            follows = put % max(self.width, 1) != 0
            taken, put = taken[follows], put[follows]
        rows = flat.new_full((self.num_rows * self.width, *flat.shape[1:]), pad_value)
        rows = rows.index_copy(0, put, flat.index_select(0, taken))
        return rows.view(self.num_rows, self.width, *flat.shape[1:])


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Return the sequences in groups of about one length, the longest first, none of length 0.

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
    """Return 0, 1, ... per size, one after the other."""
    return torch.cat([torch.arange(size) for size in sizes] or [torch.arange(0)])
