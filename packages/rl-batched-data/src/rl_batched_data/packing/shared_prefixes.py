"""Packed rows whose common start is computed once: the samples of a prompt share its tokens.

    rows             packed tokens
    p p p a a        p p p | a a | b | c c c        the start that a group of rows has in common,
    p p p b          prefix  own tokens of each     then the tokens that each row has of its own
    p p p c c c

Own tokens attend to the prefix of their group and to those before them in their row, so that each
token sees what it would see in a row by itself: log-probabilities and gradients are the same, and a
prompt is computed once for all its samples. As Prefix Grouper does (Liu et al. 2025,
arXiv:2506.05433).
"""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, cast

import torch

from rl_batched_data.columns import round_up, to_device
from rl_batched_data.packing.context_shards import MASK_ELEMENTS, ContextChunks
from rl_batched_data.packing.packed_sequences import PackedSequences, group_by_length

# Sharing costs masks and gathers: it has to save at least this share of a group's tokens.
_LEAST_SAVING = 1 / 8
# Of nested common starts, as a system prompt, a prompt and the same first words are.
_MOST_NESTED = 32


class _Group(NamedTuple):
    """Neighbouring rows with a common start."""

    low: int
    high: int
    """Rows `[low, high)`."""
    prefix: int
    """Tokens that they have in common; fewer than any of them has."""

    @property
    def saved(self) -> int:
        """Tokens that need not be computed."""
        return (self.high - self.low - 1) * self.prefix


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedPrefixes:
    """The layout of rows that share prefixes. Build one with `share_prefixes`."""

    packed: PackedSequences
    """The packed tokens. A prefix has one place for all rows of its group."""
    predictors: torch.Tensor
    """`[scores]` int64: index of the packed token after which each scored token stands.

    The last token of a prefix predicts the first own token of each row, so there are more scores
    than packed tokens have successors."""
    targets: torch.Tensor
    """`[scores]` int64: index of each scored token in the flattened rows."""
    score_places: torch.Tensor
    """`[row tokens]` int64: which score each token has, of all tokens but the rows' first."""
    score_rows: torch.Tensor
    """`[row tokens]` int64: index of each of these tokens in the flattened rows."""
    chunks: list[ContextChunks]
    """Rows for batched attention: prefixes, and own tokens with the keys of prefix and row."""
    places: torch.Tensor
    """`[total]` int64: index of each packed token in the flattened queries of all chunks."""

    def to(self, device: torch.device | str) -> SharedPrefixes:
        """Return the same layout with its tensors on `device`."""
        on_device = torch.device(device)
        return replace(
            self,
            packed=self.packed.to(device),
            predictors=to_device(self.predictors, on_device),
            targets=to_device(self.targets, on_device),
            score_places=to_device(self.score_places, on_device),
            score_rows=to_device(self.score_rows, on_device),
            chunks=[chunk.to(on_device) for chunk in self.chunks],
            places=to_device(self.places, on_device),
        )

    def scores_to_rows(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores of tokens at their place in the padded rows; differentiable.

        Args:
            scores: `[1, scores]`.

        Returns:
            `[rows, width]`; 0 at each row's first token and at padding.
        """
        flat = scores.squeeze(0)
        rows = flat.new_zeros(self.packed.num_rows * self.packed.width)
        rows = rows.index_copy(0, self.score_rows, flat.index_select(0, self.score_places))
        return rows.view(self.packed.num_rows, self.packed.width)


def share_prefixes(
    input_ids: torch.Tensor, lengths: torch.Tensor, *, total_multiple: int = 1
) -> SharedPrefixes | None:
    """Return the layout in which neighbouring rows share their common start; None if too few do.

    Args:
        input_ids: `[rows, width]` int64, right-padded, on the CPU.
        lengths: `[rows]` int64, on the CPU.
        total_multiple: The packed tokens are padded to a multiple of this.
    """
    sizes = cast(list[int], lengths.tolist())
    groups = _choose_groups(_common_starts(input_ids, lengths), sizes)
    if not any(group.prefix for group in groups):
        return None
    prefix, first = torch.zeros_like(lengths), torch.zeros_like(lengths)
    for low, high, length in groups:
        prefix[low:high], first[low:high] = length, low
    # Packed as the prefix of each group, and then the own tokens of its rows.
    is_first = first == torch.arange(len(sizes))
    own = lengths - prefix
    ends = (own + prefix * is_first).cumsum(0)
    starts = ends - own
    prefix_starts = (starts - prefix)[first]
    used = int(ends[-1])
    total = round_up(used, total_multiple)
    # Of every token of the rows: its row, and its place there.
    row = torch.repeat_interleave(lengths)
    token = torch.arange(len(row))
    row_starts = lengths.cumsum(0) - lengths
    place = token - row_starts[row]
    in_prefix = place < prefix[row]
    packed_index = torch.where(
        in_prefix, prefix_starts[row] + place, starts[row] + place - prefix[row]
    )
    position_ids = torch.arange(total) - used
    position_ids[packed_index] = place
    row_index = row * input_ids.shape[1] + place
    # A token of a prefix has one score for the whole group, that in its first row.
    owner = torch.where(in_prefix, row_starts[first[row]] + place, token)
    is_scored = (owner == token) & (place > 0)
    score = is_scored.cumsum(0) - 1
    scored = is_scored.nonzero()[:, 0]
    segments = _Segments(starts=starts, own=own, prefix=prefix, prefix_starts=prefix_starts)
    chunks, places = segments.chunks(is_first, used=used, total=total)
    bounds = cast(list[int], torch.cat([prefix_starts, starts]).tolist())
    edges = torch.tensor(sorted({*bounds, used, total}))
    packed = PackedSequences(
        position_ids=position_ids[None],
        cu_seqlens=edges.int(),
        host_cu_seqlens=edges.int(),
        max_seqlen=max(sizes),
        num_rows=len(sizes),
        width=input_ids.shape[1],
        packed_index=packed_index,
        row_index=row_index,
    )
    return SharedPrefixes(
        packed=packed,
        # Tokens of a row are neighbours in this order, and a scored one is not a row's first.
        predictors=packed_index[scored - 1],
        targets=row_index[scored],
        score_places=score[owner[place > 0]],
        score_rows=row_index[place > 0],
        chunks=chunks,
        places=places,
    )


def _common_starts(input_ids: torch.Tensor, lengths: torch.Tensor) -> list[int]:
    """Return how many tokens each row has in common with the next one, at most all but one."""
    is_same = (input_ids[1:] == input_ids[:-1]).to(torch.int32).cumprod(1).sum(1)
    longest = torch.minimum(lengths[1:], lengths[:-1]) - 1
    return cast(list[int], torch.minimum(is_same, longest).clamp(min=0).tolist())


def _choose_groups(common: list[int], sizes: list[int]) -> list[_Group]:
    """Return all rows in groups of neighbours, so that many tokens are shared.

    Example, common starts [9, 9, 1, 7]: rows 0 to 2 share 9 tokens, rows 3 and 4 share 7
    """

    def best(low: int, high: int, nested: int) -> list[_Group]:
        inner = common[low : high - 1]
        if not inner:
            return [_Group(low, high, 0)]
        shortest = min(inner)
        together = _Group(low, high, shortest)
        if shortest == max(inner) or nested == 0:
            return [together]
        cuts = [low, *(low + 1 + at for at, each in enumerate(inner) if each == shortest), high]
        apart = [group for part in pairwise(cuts) for group in best(*part, nested - 1)]
        return apart if sum(group.saved for group in apart) > together.saved else [together]

    groups: list[_Group] = []
    for group in best(0, len(sizes), _MOST_NESTED):
        if group.saved >= _LEAST_SAVING * sum(sizes[group.low : group.high]):
            groups.append(group)
        else:
            groups += [_Group(row, row + 1, 0) for row in range(group.low, group.high)]
    return groups


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Segments:
    """Where the tokens of each row are: `[rows]` int64 each, on the CPU."""

    starts: torch.Tensor
    """Index of the row's first own token in the packed tokens."""
    own: torch.Tensor
    """Own tokens."""
    prefix: torch.Tensor
    """Tokens of the prefix; 0 in a row that shares none."""
    prefix_starts: torch.Tensor
    """Index of the prefix's first token."""

    def chunks(
        self, is_first: torch.Tensor, *, used: int, total: int
    ) -> tuple[list[ContextChunks], torch.Tensor]:
        """Return the rows for attention, and where each packed token is in them.

        Args:
            is_first: `[rows]` bool: which rows are the first of their group.
            used: Packed tokens without the padding at the end.
            total: With it.
        """
        shares = self.prefix > 0
        whole = (~shares).nonzero()[:, 0]
        heads = (is_first & shares).nonzero()[:, 0]
        # Sequences by themselves: rows that share nothing, prefixes, and the padding.
        starts = torch.cat([self.starts[whole], self.prefix_starts[heads], torch.tensor([used])])
        sizes = torch.cat([self.own[whole], self.prefix[heads], torch.tensor([total - used])])
        nothing = torch.zeros_like(sizes)
        alone = _Segments(starts=starts, own=sizes, prefix=nothing, prefix_starts=starts)
        chunks: list[ContextChunks] = []
        places = torch.empty(total, dtype=torch.int64)
        base = 0
        rows = shares.nonzero()[:, 0]
        sharing = _Segments(
            starts=self.starts[rows],
            own=self.own[rows],
            prefix=self.prefix[rows],
            prefix_starts=self.prefix_starts[rows],
        )
        for segments in (alone, sharing):
            for together in segments._together():
                chunk, is_token = segments._rows(together, total=total)
                flat = base + torch.arange(is_token.numel()).view(is_token.shape)
                places[chunk.queries[is_token]] = flat[is_token]
                base += is_token.numel()
                chunks.append(chunk)
        return chunks, places

    def _together(self) -> list[list[int]]:
        """Return groups of segments with a similar number of keys, whose mask is not too large."""
        groups: list[list[int]] = []
        own = cast(list[int], self.own.tolist())
        keys = cast(list[int], (self.own + self.prefix).tolist())
        for group in group_by_length(keys):
            widest = max(own[index] for index in group)
            # Causal attention of whole sequences needs no mask.
            needs_mask = bool(self.prefix[group].any())
            most = max(1, MASK_ELEMENTS // (widest * keys[group[0]])) if needs_mask else len(group)
            groups += [group[at : at + most] for at in range(0, len(group), most)]
        return groups

    def _rows(self, together: list[int], *, total: int) -> tuple[ContextChunks, torch.Tensor]:
        """Return segments as rows of attention, and which of their queries are no padding."""
        start, own = self.starts[together, None], self.own[together, None]
        prefix, prefix_start = self.prefix[together, None], self.prefix_starts[together, None]
        offsets = torch.arange(int(own.max()))
        key = torch.arange(int((own + prefix).max()))
        keys = torch.where(key < prefix, prefix_start + key, start + key - prefix)
        chunk = ContextChunks(
            # Padding reads any token: its own output is dropped, and no query sees its key.
            queries=(start + offsets).clamp(max=total - 1),
            keys=keys.clamp(max=total - 1),
            query_positions=prefix + offsets,
            # Without a prefix causal rows may be padded; with one, the last query has to be at the
            # last key.
            is_causal=not bool(prefix.any()) or _are_equal(own, prefix),
        )
        return chunk, offsets < own


def _are_equal(*columns: torch.Tensor) -> bool:
    return all(bool((column == column[0]).all()) for column in columns)
