"""The forwards of generation: with a key-value cache, or over everything again."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_batched_data import BatchedDataDict, PackedSequences, SlicedDataDict
from rl_interfaces.backend.steps import Concatenation, MicroBatch

from rl_megatron_worker.attention.cache import KeyValueCache
from rl_megatron_worker.attention.layout import PackedLayout
from rl_megatron_worker.model.build import unwrapped
from rl_megatron_worker.parallel.stages import share_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rl_interfaces.backend.generation.loop import Decoder

    from rl_megatron_worker.model.heads import TokenHead
    from rl_megatron_worker.parallel.schedule import Schedule


def open_decoder(
    schedule: Schedule, head: TokenHead | None, concatenation: Concatenation
) -> Decoder:
    """Return what gives the logits of some rows: with a cache, where the layers can have one.

    They cannot where ranks share sequences, nor with Transformer Engine's attention.

    Args:
        schedule: The model.
        head: What the last stage makes of hidden states; None on the others.
        concatenation: What the layout asks of rows that are laid end to end.
    """
    if schedule.takes_cache:
        return CachedForward(schedule, head, concatenation)
    return WholeForward(schedule, head, concatenation)


class Pace:
    """Lets ranks that deal out experts among them go forward together, whatever rows they have.

    Every forward of one is one of all, and rows end where they end. So each rank says before each
    whether it has rows left, and those that have none go along with a token of their own.

    Args:
        group: The ranks with other rows.
        device: Where the group's tensors lie.
        is_kept: Whether the ranks depend on each other at all.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, is_kept: bool) -> None:
        self._group, self._device, self._is_kept = group, device, is_kept

    def keeping(self, decoder: Decoder) -> Decoder:
        """Return a decoder that meets the others before each forward."""
        return _Paced(decoder, self._anybody) if self._is_kept else decoder

    @contextmanager
    def kept(self, new_decoder: Callable[[], Decoder]) -> Generator[None, None, None]:
        """Go along until no rank has rows left, after the body."""
        yield
        one = torch.ones(1, dtype=torch.int64, device=self._device)
        while self._is_kept and self._anybody(has_rows=False):
            new_decoder().prefill(one[:, None], one)

    def _anybody(self, *, has_rows: bool) -> bool:
        flag = torch.tensor(has_rows, dtype=torch.int64, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag)


class _Paced:
    """A decoder each of whose forwards others have been told of."""

    def __init__(self, decoder: Decoder, tell: Callable[..., bool]) -> None:
        self._decoder, self._tell = decoder, tell

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See `Decoder.prefill`."""
        self._tell(has_rows=True)
        return self._decoder.prefill(prompts, lengths)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder.step`."""
        self._tell(has_rows=True)
        return self._decoder.step(tokens)


class WholeForward:
    """A `Decoder` that runs the model over all tokens for each new one."""

    def __init__(
        self, schedule: Schedule, head: TokenHead | None, concatenation: Concatenation
    ) -> None:
        self._schedule = schedule
        self._head = head
        self._concatenation = concatenation

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See `Decoder.prefill`."""
        self._tokens, self._lengths = prompts, lengths
        return self._logits(self._lay_out(prompts, lengths))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder.step`."""
        if int(self._lengths.max()) == self._tokens.shape[1]:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, 16))
        self._tokens = self._tokens.scatter(1, self._lengths[:, None], tokens[:, None])
        self._lengths = self._lengths + 1
        return self._logits(self._lay_out(self._tokens, self._lengths))

    def _lay_out(self, tokens: torch.Tensor, lengths: torch.Tensor) -> PackedLayout:
        rows: SlicedDataDict[Any] = SlicedDataDict(
            BatchedDataDict({"input_ids": tokens, "input_lengths": lengths})
        )
        packed = self._concatenation.of(rows)
        return PackedLayout.of(MicroBatch(span=(0, len(tokens)), rows=rows, packed=packed))

    def _logits(self, layout: PackedLayout) -> torch.Tensor:
        """Return the logits after the last token of each row, `[rows, vocab]`, on all stages."""

        def score(layout: PackedLayout, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
            assert self._head is not None, "only the last stage has hidden states to score"
            rows = layout.to_rows(hidden)
            last = layout.micro_batch.rows["input_lengths"] - 1
            return {"logits": self._head.logits(rows[torch.arange(len(rows)), last])}

        found = self._schedule.run_one(layout, score)
        device = self._schedule.runtime.device
        return share_tensors(found or {}, device=device)["logits"]


class CachedForward(WholeForward):
    """A `Decoder` with a key-value cache."""

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See `Decoder.prefill`."""
        layout = self._lay_out(prompts, lengths)
        self._cache = KeyValueCache(prompts=layout.packed, lengths=lengths)
        layout.rows.cache = self._cache
        return self._logits(layout)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder.step`."""
        self._cache.lengths = self._cache.lengths + 1
        layout = self._lay_out_step(tokens)
        with self._rotating(self._cache.positions(layout.packed.total_length)):
            return self._logits(layout)

    def _lay_out_step(self, tokens: torch.Tensor) -> PackedLayout:
        ones = torch.ones_like(tokens)
        rows: SlicedDataDict[Any] = SlicedDataDict(
            BatchedDataDict({"input_ids": tokens[:, None], "input_lengths": ones})
        )
        multiple = self._concatenation.total_multiple
        total = -(-len(tokens) // multiple) * multiple
        packed = PackedSequences.of(ones, 1, total_length=total)
        layout = PackedLayout.of(MicroBatch(span=(0, len(tokens)), rows=rows, packed=packed))
        layout.rows.cache = self._cache
        # Rotary embeddings are made for as many positions as there are.
        layout.rows.max_seqlen_q = layout.rows.max_seqlen_kv = int(self._cache.lengths.max())
        return layout

    @contextmanager
    def _rotating(self, positions: torch.Tensor) -> Generator[None, None, None]:
        """Let rotary embeddings be those of `positions`, one per token.

        Megatron-core takes frequencies that are as many as the tokens for those of each of them.
        """

        def at_positions(module: Any, args: Any, frequencies: torch.Tensor) -> torch.Tensor:
            return frequencies.index_select(0, positions)

        modules = [unwrapped(chunk).rotary_pos_emb for chunk in self._schedule.chunks]
        hooks = [module.register_forward_hook(at_positions) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
