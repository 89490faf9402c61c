"""How a model reads a micro-batch on this rank, and how its outputs return to the caller's rows."""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rl_batched_data import PackedTensor
from rl_interfaces.backend.steps import Concatenation, MicroBatch

from rl_dtensor_worker.attention import (
    AttentionRows,
    ContextRows,
    FullRows,
    SharedRows,
    layout_arguments,
    require_packed_attention,
    use_packed_attention,
)
from rl_dtensor_worker.mixing import (
    Mixing,
    PackedSequenceRows,
    PaddedRows,
)
from rl_dtensor_worker.parallel.structure import class_name

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from rl_batched_data import PackedSequences
    from rl_batched_data.packing.shared_prefixes import SharedPrefixes
    from rl_interfaces.backend.steps import Step
    from transformers import PreTrainedModel

    from rl_dtensor_worker.attention import AttentionLayout
    from rl_dtensor_worker.mixing import Sequences
    from rl_dtensor_worker.parallel.styles import TensorParallel

logger = logging.getLogger(__name__)

SHARING = "dtensor_cfg.share_prefixes=True"
# `[batch, seq]` columns that mark whether a token is of an image or of text.
TOKEN_COLUMNS = ("mm_token_type_ids", "token_type_ids")


def media_of(model: PreTrainedModel, rows: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the media of a micro-batch, each kind concatenated, as the model's forward takes them.

    Raises:
        ValueError: The forward has no argument of that name.
    """
    packed = {key: value for key, value in rows.items() if isinstance(value, PackedTensor)}
    if not packed:
        return {}
    taken = inspect.signature(model.forward).parameters
    unknown = sorted(set(packed) - set(taken))
    if unknown:
        raise ValueError(
            f"the batch has the media {unknown}, which {class_name(model)} does not take"
        )
    tensors = {key: value.as_tensor() for key, value in packed.items()}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


def token_columns_of(model: PreTrainedModel, rows: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the columns of `TOKEN_COLUMNS` that the model's forward takes."""
    present = {key: rows[key] for key in TOKEN_COLUMNS if key in rows}
    taken = inspect.signature(model.forward).parameters if present else {}
    return {
        key: column
        for key, column in present.items()
        if key in taken and isinstance(column, torch.Tensor)
    }


def check_same_media(
    steps: Sequence[Step], *, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise on every rank unless all ranks have the same kinds of media in each pass. Collective.

    FSDP shards the layers that read media: if they ran on some ranks only, their all-gathers would
    wait for the others.

    Raises:
        ValueError: Kinds differ; the message names the kind and the micro-batch.
    """
    kinds = sorted({key for step in steps for key in _kinds(step)})
    if not kinds:
        return
    present = torch.tensor(
        [[_has(step.rows[kind], span) for kind in kinds] for step in steps for span in step.spans],
        dtype=torch.int64,
        device=device,
    )
    # The ranks with media of each kind: all or none, or the layers would run on some alone.
    dist.all_reduce(present, group=group)
    uneven = ((present > 0) & (present < dist.get_world_size(group))).nonzero().tolist()
    if uneven:
        number, kind = uneven[0]
        raise ValueError(
            f"micro-batch {number} has {kinds[kind]!r} on some ranks and none on others: give "
            "every rank's micro-batches rows with media, or none"
        )


def _kinds(step: Step) -> list[str]:
    return [key for key, value in step.rows.items() if isinstance(value, PackedTensor)]


def _has(column: PackedTensor, span: tuple[int, int]) -> bool:
    return any(column.tensors[row] is not None for row in range(*span))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout(ABC):
    """The arguments of a forward, and the mapping of its outputs back to the caller's rows."""

    tokens: torch.Tensor
    """`[rows, seq]` int64, the model's `input_ids`."""
    targets: torch.Tensor
    """`[rows, seq]` int64: the next token at each position; arbitrary after a row's last."""
    arguments: dict[str, object] = field(default_factory=dict[str, object])
    """Further keyword arguments of the model's forward."""
    predictors: torch.Tensor | None = None
    """`[targets]` int64: the position whose logits predict each target, of one packed row. None:
    each target has a position of its own, the same as among `tokens`."""
    sequences: Sequences | None = None
    """The sequences, for blocks that are run on unpacked rows. None: rows as they are."""

    @abstractmethod
    def to_rows(self, values: torch.Tensor, *, masked: bool = True) -> torch.Tensor:
        """Return per-position values as `[batch, width, ...]`.

        Args:
            values: `[rows, seq, ...]`.
            masked: Whether padding is 0; otherwise it is arbitrary.
        """

    @abstractmethod
    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return per-target values shifted to their token's position; position 0 is 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedLayout(RowLayout):
    """Right-padded rows.

    With causal attention no token sees the padding to its right, so no mask is needed and attention
    takes its fastest path.
    """

    is_token: torch.Tensor
    """`[batch, width]` bool: tokens among the caller's rows, padding elsewhere."""

    @classmethod
    def of(
        cls, input_ids: torch.Tensor, lengths: torch.Tensor, *, width: int, width_multiple: int
    ) -> PaddedLayout:
        """Return rows truncated to `width`, then padded to `width_multiple`."""
        tokens = _fit(input_ids, width, width_multiple)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return cls(
            tokens=tokens,
            # The last column's target is the row's first token; `targets_to_rows` drops it.
            targets=tokens.roll(-1, dims=1),
            is_token=positions < lengths[:, None],
        )

    def for_sequence_parallel(self, model: PreTrainedModel, mixing: Mixing) -> PaddedLayout:
        """Return the same for a model whose activations are sharded along the sequence.

        From a local shard the model can derive neither a causal mask nor position ids, so both are
        passed explicitly.
        """
        width = self.tokens.shape[1]
        positions = torch.arange(width, device=self.tokens.device)[None]
        return replace(
            self,
            arguments=_attention_arguments(model, mixing, FullRows(), self.tokens.device)
            | {"position_ids": positions},
            sequences=PaddedRows(num_tokens=width),
        )

    def to_rows(self, values: torch.Tensor, *, masked: bool = True) -> torch.Tensor:
        """See `RowLayout.to_rows`."""
        width, trailing = self.is_token.shape[1], values.ndim - 2
        rows = values[:, :width]
        # The micro-batch was narrower than the caller's rows.
        if rows.shape[1] < width:
            rows = F.pad(rows, (0, 0) * trailing + (0, width - rows.shape[1]))
        if not masked:
            return rows
        return torch.where(self.is_token.view(*self.is_token.shape, *[1] * trailing), rows, 0)

    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """See `RowLayout.targets_to_rows`."""
        first = torch.zeros_like(values[:, :1])
        return self.to_rows(torch.cat([first, values[:, :-1]], dim=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout(RowLayout):
    """Packed rows.

    Attention implementations other than `rl_packed_sdpa` detect sequence boundaries from where
    `position_ids` restart, which transformers does only without a mask and without a cache.
    """

    packed: PackedSequences

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        packed: PackedSequences,
        mixing: Mixing,
    ) -> PackedLayout:
        """Return the packed tokens `[1, total]` and the arguments that mark their boundaries."""
        tokens, rows = packed.pack(input_ids), AttentionRows.of(packed)
        arguments: dict[str, object] = {"attention_mask": None, "position_ids": packed.position_ids}
        if mixing.takes_layout and use_packed_attention(model):
            arguments |= layout_arguments(rows, tokens.device)
        return cls(
            tokens=tokens,
            targets=tokens.roll(-1, dims=1),
            packed=packed,
            arguments=arguments,
            sequences=PackedSequenceRows(rows=rows) if mixing.way.names else None,
        )

    def to_rows(self, values: torch.Tensor, *, masked: bool = True) -> torch.Tensor:
        """See `RowLayout.to_rows`."""
        return self.packed.unpack(values)

    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """See `RowLayout.targets_to_rows`."""
        return self.packed.unpack(values.roll(1, dims=1), skip_first=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedLayout(RowLayout):
    """Packed rows that share prefixes."""

    shared: SharedPrefixes

    @classmethod
    def of(
        cls, model: PreTrainedModel, input_ids: torch.Tensor, shared: SharedPrefixes
    ) -> SharedLayout:
        """Return the packed tokens `[1, total]`, and the targets `[1, scores]`."""
        require_packed_attention(model)
        tokens = shared.packed.pack(input_ids)
        positions = {"position_ids": shared.packed.position_ids}
        return cls(
            tokens=tokens,
            targets=input_ids.flatten().index_select(0, shared.targets)[None],
            predictors=shared.predictors,
            arguments=layout_arguments(SharedRows.of(shared), tokens.device) | positions,
            shared=shared,
        )

    def to_rows(self, values: torch.Tensor, *, masked: bool = True) -> torch.Tensor:
        """See `RowLayout.to_rows`."""
        return self.shared.packed.unpack(values)

    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """See `RowLayout.targets_to_rows`."""
        return self.shared.scores_to_rows(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextLayout(RowLayout):
    """Packed rows, of which this rank has some chunks."""

    packed: PackedSequences
    """The packed sequences of all ranks."""
    rows: ContextRows

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        packed: PackedSequences,
        group: dist.ProcessGroup,
        mixing: Mixing,
    ) -> ContextLayout:
        """Return this rank's tokens `[1, total / ranks]`."""
        rows = ContextRows.of(packed, group)
        tokens = packed.pack(input_ids)
        positions = {"position_ids": rows.shard(packed.position_ids)}
        return cls(
            tokens=rows.shard(tokens),
            # Shifted before sharding: the next token may be in another rank's chunk.
            targets=rows.shard(tokens.roll(-1, dims=1)),
            packed=packed,
            rows=rows,
            arguments=_attention_arguments(model, mixing, rows, tokens.device) | positions,
            sequences=(
                PackedSequenceRows(rows=AttentionRows.of(packed), context=rows)
                if mixing.way.names
                else None
            ),
        )

    def to_rows(self, values: torch.Tensor, *, masked: bool = True) -> torch.Tensor:
        """See `RowLayout.to_rows`."""
        return self.packed.unpack(self.rows.gather(values))

    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """See `RowLayout.targets_to_rows`."""
        # Gathered before the shift: a chunk's last score is of a token in another chunk.
        return self.packed.unpack(self.rows.gather(values).roll(1, dims=1), skip_first=True)


def _attention_arguments(
    model: PreTrainedModel, mixing: Mixing, layout: AttentionLayout, device: torch.device
) -> dict[str, object]:
    """Return the arguments by which a model attends according to a layout that it needs.

    Raises:
        ValueError: The model uses another implementation than `sdpa`.
    """
    if not mixing.takes_layout:
        return {"attention_mask": None}
    require_packed_attention(model)
    return layout_arguments(layout, device)


def _fit(column: torch.Tensor, width: int, width_multiple: int) -> torch.Tensor:
    return F.pad(column[:, :width], (0, -width % width_multiple))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelContext:
    """The ranks that run one forward together; by default this one alone."""

    tensor_parallel: TensorParallel | None = None
    """The ranks that shard each layer."""
    context_group: dist.ProcessGroup | None = None
    """The ranks that shard each sequence from end to end of the model."""
    shares_prefixes: bool = False
    """Whether the common start of neighbouring rows is computed once."""
    mixing: Mixing = field(default_factory=Mixing)
    """Which of the model's blocks are run on unpacked rows."""

    def lay_out(
        self, model: PreTrainedModel, micro_batch: MicroBatch, width_multiple: int
    ) -> RowLayout:
        """Return the layout in which `model` reads `micro_batch` on this rank.

        Args:
            model: The model.
            micro_batch: The rows.
            width_multiple: Padded rows are completed to a multiple of this, and of the ranks that
                shard the sequence.

        Raises:
            ValueError: The model or the layout does not support a kind of media in the batch.
        """
        rows, packed = micro_batch.rows, micro_batch.packed
        input_ids, media = rows["input_ids"], media_of(model, rows)
        shards_sequence = self._sequence_shards > 1
        if media and (shards_sequence or packed is not None):
            raise ValueError(
                f"the batch has {sorted(media)}, whose tokens need unsharded, padded rows: use "
                "policy.dynamic_batching instead of policy.sequence_packing, and neither "
                "policy.dtensor_cfg.sequence_parallel nor context_parallel_size"
            )
        if micro_batch.shared is not None:
            return SharedLayout.of(model, input_ids, micro_batch.shared)
        if packed is not None and self.context_group is not None:
            return ContextLayout.of(model, input_ids, packed, self.context_group, self.mixing)
        if packed is not None:
            return PackedLayout.of(model, input_ids, packed, self.mixing)
        lengths, multiple = rows["input_lengths"], math.lcm(width_multiple, self._sequence_shards)
        # Columns that are padding in all rows are not computed.
        width = micro_batch.width or min(int(lengths.max()), input_ids.shape[1])
        layout = PaddedLayout.of(input_ids, lengths, width=width, width_multiple=multiple)
        if self._shards_whole_model:
            return layout.for_sequence_parallel(model, self.mixing)
        # Media are not padded: their tokens stand among the rows already.
        layout.arguments.update(media)
        for key, column in token_columns_of(model, rows).items():
            layout.arguments[key] = _fit(column, width, multiple)
        return layout

    def concatenation(self) -> Concatenation:
        """Return the multiples to which packed micro-batches are padded."""
        if self.context_group is None:
            return Concatenation(
                total_multiple=self._sequence_shards, shares_prefixes=self.shares_prefixes
            )
        ranks = self.context_group.size()
        # Each rank has two chunks of every sequence, see `rl_batched_data.packing.context_shards`.
        return Concatenation(
            # Padded micro-batches as well: chunks are of packed sequences.
            always=True,
            sequence_multiple=2 * ranks,
            total_multiple=math.lcm(2 * ranks, ranks * self._sequence_shards),
        )

    def features(self, *, packed: bool) -> list[str]:
        """Return the config keys and values that attention must support beyond padded rows.

        Args:
            packed: Whether micro-batches are packed.
        """
        # Rows with too little in common are laid out as without sharing.
        found = [SHARING] if self.shares_prefixes else []
        if self.context_group is not None:
            found.append(f"dtensor_cfg.context_parallel_size={self.context_group.size()}")
            return found
        if self._sequence_shards > 1:
            found.append("dtensor_cfg.sequence_parallel=True")
        if packed:
            found.append("sequence_packing.enabled=True")
        return found

    @contextmanager
    def unsharded_sequences(self) -> Generator[None, None, None]:
        """Switch sequence parallelism off inside, see `TensorParallel.unsharded_sequences`."""
        tp = self.tensor_parallel
        with nullcontext() if tp is None else tp.unsharded_sequences():
            yield

    @property
    def shards_sequences(self) -> bool:
        """Whether sequence parallelism is on."""
        return self.tensor_parallel is not None and self.tensor_parallel.shards_sequences

    @property
    def _sequence_shards(self) -> int:
        tp = self.tensor_parallel
        return tp.size if tp is not None and tp.shards_sequences else 1

    @property
    def _shards_whole_model(self) -> bool:
        """Whether what a model makes for all its layers, such as masks, sees local sequences."""
        return self.tensor_parallel is not None and self.tensor_parallel.sequence_parallel
