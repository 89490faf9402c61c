"""Forward passes of generation: with a key-value cache, or recomputing the full sequences."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rl_batched_data import BatchedDataDict, PackedSequences, SlicedDataDict
from rl_interfaces.backend.generation import find_repeats
from rl_interfaces.backend.steps import Concatenation, MicroBatch

from rl_megatron_worker.attention import KeyValueCache
from rl_megatron_worker.layout import PackedLayout
from rl_megatron_worker.model.build import rotary_embeddings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rl_interfaces.backend.generation import Decoder
    from torch import nn

    from rl_megatron_worker.model.heads import TokenHead
    from rl_megatron_worker.parallel.schedule import Schedule

Frequencies = torch.Tensor | tuple[torch.Tensor, float]


def open_decoder(
    schedule: Schedule, head: TokenHead | None, concatenation: Concatenation
) -> Decoder:
    """Return a decoder for some rows, with a key-value cache if the attention supports one.

    Context parallelism and Transformer Engine's attention do not.

    Args:
        schedule: Runs the model.
        head: The output head; None on stages before the last.
        concatenation: The layout's requirements on packed rows.
    """
    if schedule.takes_cache:
        return CachedDecoder(schedule, head, concatenation)
    return FullDecoder(schedule, head, concatenation)


class ExpertSync:
    """Synchronises the forward passes of expert-parallel ranks that generate different rows.

    The all-to-all of an MoE layer involves all ranks, but rows finish at different steps. So the
    ranks agree before each forward whether any has rows left; a rank that has none joins with a
    dummy token.

    Args:
        group: The data-parallel ranks.
        device: The device of the process group's backend.
        enabled: Whether expert-parallel groups span data-parallel ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, enabled: bool) -> None:
        self._group, self._device, self._enabled = group, device, enabled

    def synchronised(self, decoder: Decoder) -> Decoder:
        """Return a decoder that synchronises with the other ranks before each forward."""
        return _SyncedDecoder(decoder, self._any_rank_active) if self._enabled else decoder

    @contextmanager
    def joining(self, new_decoder: Callable[[], Decoder]) -> Generator[None, None, None]:
        """After the body, join the other ranks' forwards until none has rows left."""
        yield
        one = torch.ones(1, dtype=torch.int64, device=self._device)
        # Ranks with rows announce each forward; this one answers "no rows" until all have none.
        while self._enabled and self._any_rank_active(has_rows=False):
            new_decoder().prefill(one[:, None], one)

    def _any_rank_active(self, *, has_rows: bool) -> bool:
        flag = torch.tensor(has_rows, dtype=torch.int64, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag)


class _SyncedDecoder:
    """A decoder that announces each forward to the other ranks."""

    def __init__(self, decoder: Decoder, announce: Callable[..., bool]) -> None:
        self._decoder, self._announce = decoder, announce

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See `Decoder.prefill`."""
        self._announce(has_rows=True)
        return self._decoder.prefill(prompts, lengths)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder.step`."""
        self._announce(has_rows=True)
        return self._decoder.step(tokens)

    def keep(self, rows: torch.Tensor) -> None:
        """See `Decoder.keep`."""
        self._decoder.keep(rows)


class FullDecoder:
    """A `Decoder` that recomputes all tokens for each new one."""

    def __init__(
        self, schedule: Schedule, head: TokenHead | None, concatenation: Concatenation
    ) -> None:
        self._schedule = schedule
        self._head = head
        self._concatenation = concatenation

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See `Decoder.prefill`."""
        self._tokens, self._lengths = prompts, lengths
        return self._logits(self._pack(prompts, lengths))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder.step`."""
        if int(self._lengths.max()) == self._tokens.shape[1]:
            # In blocks, as every growth copies all tokens.
            self._tokens = torch.nn.functional.pad(self._tokens, (0, 16))
        self._tokens = self._tokens.scatter(1, self._lengths[:, None], tokens[:, None])
        self._lengths = self._lengths + 1
        return self._logits(self._pack(self._tokens, self._lengths))

    def keep(self, rows: torch.Tensor) -> None:
        """See `Decoder.keep`."""
        self._tokens, self._lengths = self._tokens[rows], self._lengths[rows]

    def _pack(self, tokens: torch.Tensor, lengths: torch.Tensor) -> PackedLayout:
        rows = SlicedDataDict(BatchedDataDict({"input_ids": tokens, "input_lengths": lengths}))
        packed = self._concatenation.of(rows)
        micro_batch = MicroBatch(span=(0, len(tokens)), rows=rows, packed=packed)
        return self._schedule.lay_out_one(micro_batch)

    def _logits(self, layout: PackedLayout) -> torch.Tensor:
        """Return the next-token logits of each row, `[rows, vocab]`, on all stages."""

        def score(layout: PackedLayout, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
            assert self._head is not None, "only the last stage has hidden states to score"
            rows = layout.to_rows(hidden)
            last = layout.micro_batch.rows["input_lengths"] - 1
            return {"logits": self._head.logits(rows[torch.arange(len(rows)), last])}

        return self._schedule.run_one(layout, score)["logits"]


class CachedDecoder(FullDecoder):
    """A `Decoder` with a key-value cache; rows with the same prompt share its prefill."""

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See `Decoder.prefill`."""
        repeats = find_repeats(prompts, lengths)
        first = slice(None) if repeats is None else repeats.first
        # Before the pass: the layers fill the cache as they compute keys and values.
        layout = self._pack(prompts[first], lengths[first])
        self._cache = KeyValueCache(
            prompts=layout.packed, lengths=lengths, longest=int(lengths.max())
        )
        layout.rows.cache = self._cache
        logits = self._logits(layout)
        if repeats is None:
            return logits
        self._cache.select(repeats.copies)
        return logits[repeats.copies]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder.step`."""
        # Out of place: the caller's prompt lengths stay as they are.
        self._cache.lengths = self._cache.lengths + 1
        self._cache.longest += 1
        layout = self._pack_step(tokens)
        with self._rotary_positions(self._cache.positions(layout.packed.total_length)):
            return self._logits(layout)

    def keep(self, rows: torch.Tensor) -> None:
        """See `Decoder.keep`."""
        self._cache.select(rows)
        self._cache.lengths = self._cache.lengths[rows]
        self._cache.longest = int(self._cache.lengths.max())

    def _pack_step(self, tokens: torch.Tensor) -> PackedLayout:
        ones = torch.ones_like(tokens)
        rows = SlicedDataDict(
            BatchedDataDict({"input_ids": tokens[:, None], "input_lengths": ones})
        )
        multiple = self._concatenation.total_multiple
        # Each row is a sequence of one token: not one of them, but their total has to divide.
        total = -(-len(tokens) // multiple) * multiple
        packed = PackedSequences.of(ones, 1, total_length=total)
        layout = self._schedule.lay_out_one(
            MicroBatch(span=(0, len(tokens)), rows=rows, packed=packed)
        )
        layout.rows.cache = self._cache
        # Rotary frequencies are computed up to this length.
        layout.rows.max_seqlen_q = layout.rows.max_seqlen_kv = self._cache.longest
        return layout

    @contextmanager
    def _rotary_positions(self, positions: torch.Tensor) -> Generator[None, None, None]:
        """Use the rotary embeddings of `positions`, one per token.

        Each row is a packed sequence of one token, which Megatron-core would place at position 0.
        Given one frequency per token, it applies them token by token.
        """

        def at_positions(_: nn.Module, __: object, found: Frequencies) -> Frequencies:
            if isinstance(found, tuple):  # With a factor on sines and cosines.
                return found[0].index_select(0, positions), found[1]
            return found.index_select(0, positions)

        modules = [each for chunk in self._schedule.chunks for each in rotary_embeddings(chunk)]
        hooks = [module.register_forward_hook(at_positions) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
