"""The batches that a worker is checked with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_interfaces.testing.worker.oracle import Columns

_PROMPT = 2  # tokens that are no targets, in rows that are long enough


def make_columns(
    lengths: Sequence[int], *, tokens: Sequence[int], pad: int, width: int | None = None, seed: int
) -> Columns:
    """Return right-padded rows of random tokens.

    The first tokens of each row are no targets, and every fourth row does not count.

    Args:
        lengths: Tokens of each row.
        tokens: The ids to draw from.
        pad: The id beyond a row's end.
        width: Columns; as many as the longest row has where None.
        seed: Of the draw.
    """
    sizes = torch.tensor(lengths)
    positions = torch.arange(width or int(sizes.max()))
    generator = torch.Generator().manual_seed(seed)
    shape = (len(sizes), len(positions))
    drawn = torch.tensor(tokens)[torch.randint(len(tokens), shape, generator=generator)]
    inside = positions < sizes[:, None]
    row_id = torch.arange(len(sizes))
    return {
        "input_ids": torch.where(inside, drawn, torch.tensor(pad)),
        "input_lengths": sizes,
        "token_mask": (inside & (positions >= _PROMPT)).float(),
        "sample_mask": (row_id % 4 != 1).float(),
        "row_id": row_id,
    }
