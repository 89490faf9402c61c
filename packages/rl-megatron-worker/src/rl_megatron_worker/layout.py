"""Packed micro-batches on one rank: rows to tokens before the model, and back after it.

Under context parallelism this rank holds two chunks of every sequence, see
`rl_batched_data.packing.context_shards`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, cast

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from rl_batched_data.packing.context_shards import ContextShards
from rl_interfaces.backend.attention import RowGroups

from rl_megatron_worker.model.routes import COLUMN, FREE

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from rl_batched_data import PackedSequences
    from rl_batched_data.packing.context_shards import ContextChunks
    from rl_interfaces.backend.steps import MicroBatch

    from rl_megatron_worker.attention import KeyValueCache

    MaskedChunk = tuple[ContextChunks, torch.Tensor | None]


@dataclass(kw_only=True)
class PackedRows(PackedSeqParams):
    """`PackedSeqParams` for Megatron-core's layers, with this rank's shards and the cache."""

    cu_seqlens: torch.Tensor
    """`[sequences + 1]` int32 on the device. Those of `PackedSeqParams` may be on the CPU."""
    shards: ContextShards
    context_group: dist.ProcessGroup | None
    """None without context parallelism. Not `cp_group`, which Transformer Engine would use."""
    host_cu_seqlens: torch.Tensor
    """`cu_seqlens`, on the CPU if the caller has them there."""
    cache: KeyValueCache | None = None
    """Filled by the prefill and read by the steps after it; None outside of generation."""
    _masked: dict[int | None, list[MaskedChunk]] = field(default_factory=dict, init=False)
    """By window, see `masked_chunks`."""

    @classmethod
    def of(
        cls,
        cu_seqlens: torch.Tensor,
        *,
        max_seqlen: int,
        group: dist.ProcessGroup | None,
        host_cu_seqlens: torch.Tensor | None = None,
    ) -> PackedRows:
        """Return the parameters of a forward over these sequences.

        Args:
            cu_seqlens: `[sequences + 1]` int32: the start of each sequence, padding included, and
                the total, over all context-parallel ranks.
            max_seqlen: The longest sequence, padding included.
            group: The context-parallel group; None or of one rank without context parallelism.
            host_cu_seqlens: The same on the CPU, if the caller has them: reading the others waits
                for the device.

        Raises:
            ValueError: A sequence does not divide into the chunks of all ranks.
        """
        rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        host_cu_seqlens = cu_seqlens if host_cu_seqlens is None else host_cu_seqlens
        shards = ContextShards.of(
            host_cu_seqlens,
            rank=rank,
            num_ranks=num_ranks,
            device=cu_seqlens.device,
        )
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            cu_seqlens=cu_seqlens,
            host_cu_seqlens=host_cu_seqlens,
            shards=shards,
            context_group=group if num_ranks > 1 else None,
        )

    # Made when a layer asks for them: the flash kernel for packed sequences does not.
    @cached_property
    def queries(self) -> RowGroups:
        """The rows of the queries of `shards.chunks`."""
        return RowGroups.of(chunk.queries for chunk in self.shards.chunks)

    @cached_property
    def keys(self) -> RowGroups:
        """The rows of the keys of `shards.chunks`."""
        return RowGroups.of(chunk.keys for chunk in self.shards.chunks)

    @cached_property
    def full_sequences(self) -> ContextShards:
        """The full sequences, as those of a rank that shares them with no other."""
        if self.context_group is None:
            return self.shards
        device = self.cu_seqlens.device
        return ContextShards.of(self.host_cu_seqlens, rank=0, num_ranks=1, device=device)

    @cached_property
    def full_rows(self) -> RowGroups:
        """The rows of `full_sequences`."""
        return RowGroups.of(chunk.queries for chunk in self.full_sequences.chunks)

    def masked_chunks(self, sliding_window: int | None) -> list[MaskedChunk]:
        """Return the chunks of `shards` with their masks.

        Masks are made once per forward pass: all layers of one window attend with the same ones.
        """
        if sliding_window not in self._masked:
            self._masked[sliding_window] = [
                (chunk, chunk.mask(sliding_window)) for chunk in self.shards.chunks
            ]
        return self._masked[sliding_window]

    def shard(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of per-token values `[total, ...]`."""
        return values if self.context_group is None else values.index_select(0, self.shards.own)

    def gather_for_attention(self, values: torch.Tensor) -> torch.Tensor:
        """All-gather `[total / ranks, ...]` in rank order, the order of `ContextChunks.keys`.

        Each rank goes on with queries of its own, so the backward pass is a reduce-scatter.
        """
        if self.context_group is None:
            return values
        return gather_from_sequence_parallel_region(values.contiguous(), group=self.context_group)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """All-gather `[total / ranks, ...]` in the order of the packed tokens, `[total, ...]`.

        Every rank has to use the result in the same way: the backward pass takes the local slice of
        the gradient, without a reduction.
        """
        if self.context_group is None:
            return values
        joined = gather_from_sequence_parallel_region(
            values.contiguous(), tensor_parallel_output_grad=False, group=self.context_group
        )
        return joined.index_select(0, self.shards.gathered)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout:
    """A packed micro-batch, and how its rows map to the tokens of this rank."""

    micro_batch: MicroBatch
    packed: PackedSequences
    """The packing, over the tokens of all context-parallel ranks."""
    rows: PackedRows
    """The same as `PackedSeqParams`, which the model's layers take."""
    tokens: torch.Tensor
    """`[own tokens]` int64."""
    targets: torch.Tensor
    """`[own tokens]` int64: the next token of each token; arbitrary at the end of a row."""
    routes: torch.Tensor | None = None
    """`[own tokens, layers with experts, experts per token]`, see `Routes`; None: not given."""

    @classmethod
    def of(cls, micro_batch: MicroBatch, *, offsets_on_host: bool = False) -> PackedLayout:
        """Return the layout of a packed micro-batch.

        Args:
            micro_batch: The rows, packed.
            offsets_on_host: Have the sequences' offsets on the CPU, where Megatron-core's own
                layers read them, four times a layer. Transformer Engine takes them on the device.
        """
        packed = micro_batch.packed
        assert packed is not None, "every micro-batch is packed"
        group = cast("dist.ProcessGroup", parallel_state.get_context_parallel_group())
        rows = PackedRows.of(
            packed.cu_seqlens,
            max_seqlen=packed.max_seqlen,
            group=group,
            host_cu_seqlens=packed.host_cu_seqlens,
        )
        if offsets_on_host:
            rows.cu_seqlens_q = rows.cu_seqlens_kv = packed.host_cu_seqlens
        tokens = packed.pack(micro_batch.rows["input_ids"])[0]
        routes = cast("torch.Tensor | None", micro_batch.rows.get(COLUMN))
        if routes is not None:
            routes = rows.shard(packed.pack(routes, pad_value=FREE)[0])
        return cls(
            micro_batch=micro_batch,
            packed=packed,
            rows=rows,
            tokens=rows.shard(tokens),
            # Shifted before they are sharded: the next token may be on another rank.
            targets=rows.shard(tokens.roll(-1)),
            routes=routes,
        )

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return per-token values of this rank as gathered `[batch, width, ...]`; padding gets 0.

        Args:
            values: `[own tokens, ...]`.
        """
        return self.packed.unpack(self.rows.gather(values)[None])

    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return per-target values at the targets' positions; position 0 of each row gets 0."""
        # Token t holds the score of token t + 1. The first token of a row gets that of an arbitrary
        # target, from the end of the row before it: `skip_first` leaves it out.
        shifted = self.rows.gather(values).roll(1, dims=0)
        return self.packed.unpack(shifted[None], skip_first=True)
