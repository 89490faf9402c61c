"""How a Megatron-core parameter is assembled from Hugging Face tensors, as slices.

A mapping is data: names, shapes and, for any tensor-parallel size, the slices of the Hugging Face
tensors that a rank's shard is concatenated from. The same slices serve to read a shard from a
checkpoint and to write it back. `decoder_mappings` are those of a decoder with rotary embeddings,
grouped queries and gated MLPs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Mapping as Map

    import torch

    from rl_megatron_worker.model.config import Architecture, Fields

EMBEDDING = "model.embed_tokens.weight"
Shape = tuple[int, ...]


class Piece(NamedTuple):
    """The slice `start:stop` of a tensor along the sharded dimension."""

    source: str | None
    """Name of the Hugging Face tensor; None for `stop - start` rows of zeros."""
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.stop - self.start


class HeldSlice(NamedTuple):
    """The slice of a Hugging Face tensor that some rows of a rank's shard are."""

    source: str
    """Name of the tensor."""
    offset: Shape
    """Of the slice's first element in the full tensor."""
    data: torch.Tensor
    """A view of the shard, of the slice's shape."""


class ReadSlice(Protocol):
    """Reads a slice of a Hugging Face tensor."""

    def __call__(self, name: str, *, dim: int, start: int, stop: int) -> torch.Tensor:
        """Return the slice `start:stop` of the tensor along `dim`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapping:
    """A one-to-one mapping, and the base class of the others."""

    names: tuple[str, ...]
    """The global names of the parameter: layers and experts are counted from 0 over all ranks. The
    name in local layers first, then Transformer Engine's if it differs."""
    sources: dict[str, Shape]
    """Full shapes of the Hugging Face tensors, by name. They differ in `piece_dim` only."""
    dim: int | None = None
    """The dimension sharded by tensor parallelism; None if the parameter is replicated."""
    expert: int | None = None
    """Index of the expert that it belongs to: it is on the ranks that hold this expert, sharded by
    expert-tensor parallelism. None for parameters outside of experts."""
    tied_name: str | None = None
    """Set for a tied copy of a parameter that is exported under its own mapping: the name under
    which a checkpoint may hold the tensor a second time."""

    @property
    def is_copy(self) -> bool:
        """Whether it is a tied copy, which is not exported."""
        return self.tied_name is not None

    @property
    def piece_dim(self) -> int:
        """The dimension along which pieces are concatenated."""
        return self.dim or 0

    def all_pieces(self, *, size: int, length: int) -> list[Piece]:
        """Return the pieces of all `size` shards, of `length` rows each, in rank order."""
        return [Piece(name, 0, shape[self.piece_dim]) for name, shape in self.sources.items()]

    def pieces(self, *, rank: int, size: int, length: int) -> list[Piece]:
        """Return the pieces of a rank's shard.

        Args:
            rank: The tensor-parallel rank.
            size: The tensor-parallel size.
            length: Size of each rank's shard along `piece_dim`, padding included.
        """
        # Replicated: every rank has the one shard.
        if self.dim is None:
            rank, size = 0, 1
        every = self.all_pieces(size=size, length=length)
        assert total_length(every) == size * length, (self.names[0], size, length)
        return slice_pieces(every, rank * length, (rank + 1) * length)

    def shard_shape(self, size: int) -> Shape:
        """Return the shape of a rank's shard, without padding."""
        shapes = list(self.sources.values())
        shard = list(shapes[0])
        rows = sum(shape[self.piece_dim] for shape in shapes)
        shard[self.piece_dim] = rows if self.dim is None else rows // size
        return tuple(shard)

    def fill(self, shard: torch.Tensor, read: ReadSlice, *, rank: int, size: int) -> None:
        """Fill a rank's `shard` in place with the slices that it consists of."""
        offset = 0
        for piece in self.pieces(rank=rank, size=size, length=shard.shape[self.piece_dim]):
            target = shard.narrow(self.piece_dim, offset, piece.length)
            if piece.source is None:
                target.zero_()
            else:
                part = read(piece.source, dim=self.piece_dim, start=piece.start, stop=piece.stop)
                target.copy_(part)
            offset += piece.length

    def unshard(
        self, shard: torch.Tensor, into: Map[str, torch.Tensor], *, rank: int, size: int
    ) -> None:
        """Copy a rank's `shard` into its slices of the full tensors in `into`."""
        for source, offset, data in self.slices(shard, rank=rank, size=size):
            # A caller may ask for one of the tensors of a fused parameter.
            if source in into:
                target = into[source]
                for dim, (start, length) in enumerate(zip(offset, data.shape, strict=True)):
                    target = target.narrow(dim, start, length)
                target.copy_(data)

    def slices(self, shard: torch.Tensor, *, rank: int, size: int) -> Iterator[HeldSlice]:
        """Yield the slices that a rank's `shard` consists of, without its padding.

        Raises:
            ValueError: It does not consist of slices, see `StackedExpert`.
        """
        offset = 0
        for piece in self.pieces(rank=rank, size=size, length=shard.shape[self.piece_dim]):
            if piece.source is not None:
                start = [0] * shard.ndim
                start[self.piece_dim] = piece.start
                data = shard.narrow(self.piece_dim, offset, piece.length)
                yield HeldSlice(piece.source, tuple(start), data)
            offset += piece.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary(Mapping):
    """One row per token, padded with zero rows to a multiple of the tensor-parallel size.

    No token looks the padding up and the softmax excludes its logits: it gets no gradient, and
    neither weight decay nor the optimizer's moments move it away from zero.
    """

    dim: int | None = 0

    def all_pieces(self, *, size: int, length: int) -> list[Piece]:
        """Return the rows of the tokens, and the padding."""
        ((name, shape),) = self.sources.items()
        padding = max(0, size * length - shape[0])
        return [Piece(name, 0, shape[0]), *([Piece(None, 0, padding)] if padding else [])]


@dataclass(frozen=True, kw_only=True, slots=True)
class Qkv(Mapping):
    """The fused QKV projection, interleaved by query group: queries, then key, then value.

    `sources` are `q_proj`, `k_proj` and `v_proj`, in this order; weights or biases.

    Example: 4 heads in 2 groups are `q0 q1 k0 v0 q2 q3 k1 v1`.
    """

    num_groups: int
    dim: int | None = 0

    def all_pieces(self, *, size: int, length: int) -> list[Piece]:
        """Return three pieces for each query group."""
        # Interleaved by group, so that a shard of some groups is an attention of its own.
        rows = [(name, shape[0] // self.num_groups) for name, shape in self.sources.items()]
        return [
            Piece(name, group * num_rows, (group + 1) * num_rows)
            for group in range(self.num_groups)
            for name, num_rows in rows
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class GateUp(Mapping):
    """The fused gate and up projection: each rank's shard is its gate shard, then its up shard.

    `sources` are gate and up, in this order.
    """

    dim: int | None = 0

    def all_pieces(self, *, size: int, length: int) -> list[Piece]:
        """Return two pieces for each rank."""
        # GPTModel splits its local output in halves: gate and up of a rank have to be adjacent.
        half = length // 2
        return [
            Piece(name, rank * half, (rank + 1) * half)
            for rank in range(size)
            for name in self.sources
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedGateUp(GateUp):
    """A `GateUp` whose one source is all of gate, then all of up."""

    def all_pieces(self, *, size: int, length: int) -> list[Piece]:
        """Return two pieces for each rank."""
        ((name, _),) = self.sources.items()
        half = length // 2
        return [
            Piece(name, start, start + half)
            for rank in range(size)
            for start in (rank * half, (size + rank) * half)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reordered(Mapping):
    """The rows of its sources in another order, in which every rank has the next ones."""

    order: tuple[Piece, ...]
    dim: int | None = 0

    def all_pieces(self, *, size: int, length: int) -> list[Piece]:
        """Return them in this order."""
        return [*self.order]


def _sections(name: str, *sizes: int, num_groups: int) -> tuple[Piece, ...]:
    """Return the order in which groups follow each other, each with its share of all sections.

    Args:
        name: The source: section after section.
        sizes: Rows of each section.
        num_groups: Number of groups.
    """
    ends = list(accumulate(sizes))
    return tuple(
        Piece(
            name,
            end - size + group * size // num_groups,
            end - size + (group + 1) * size // num_groups,
        )
        for group in range(num_groups)
        for size, end in zip(sizes, ends, strict=True)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedExpert(Mapping):
    """An expert's parameter, whose one source stacks those of all experts, as gpt-oss has them.

    Matrices are transposed there: `[experts, inputs, outputs]`.

    Example: the outputs `gate0 up0 gate1 up1` are interleaved; two ranks have `gate0 up0` and
    `gate1 up1`, one has `gate0 gate1 up0 up1`.
    """

    interleaved: bool = False
    """Whether its outputs are gate and up in turn, which a rank has one after the other."""

    def shard_shape(self, size: int) -> Shape:
        """See `Mapping.shard_shape`."""
        (shape,) = self.sources.values()
        shard = list(reversed(shape[1:]))
        if self.dim is not None:
            shard[self.dim] //= size
        return tuple(shard)

    def fill(self, shard: torch.Tensor, read: ReadSlice, *, rank: int, size: int) -> None:
        """See `Mapping.fill`."""
        (name,) = self.sources
        assert self.expert is not None
        (stacked,) = read(name, dim=0, start=self.expert, stop=self.expert + 1)
        self._in_order(shard).copy_(self._of_rank(stacked, rank=rank, size=size))

    def unshard(
        self, shard: torch.Tensor, into: Map[str, torch.Tensor], *, rank: int, size: int
    ) -> None:
        """See `Mapping.unshard`."""
        (name,) = self.sources
        if name in into:
            assert self.expert is not None
            target = self._of_rank(into[name][self.expert], rank=rank, size=size)
            target.copy_(self._in_order(shard))

    def slices(self, shard: torch.Tensor, *, rank: int, size: int) -> Iterator[HeldSlice]:
        """See `Mapping.slices`.

        Raises:
            ValueError: Gate and up are interleaved: a rank has every second column of each.
        """
        (name,) = self.sources
        assert self.expert is not None
        if self.interleaved:
            raise ValueError(
                f"{name} has interleaved gate and up columns, of which a rank's shard is no slice: "
                "send full tensors"
            )
        own = shard.mT if shard.ndim == 2 else shard
        start = [0] * shard.ndim
        if self.dim is not None:
            # Matrices are transposed.
            start[shard.ndim - 1 - self.dim] = rank * shard.shape[self.dim]
        yield HeldSlice(name, (self.expert, *start), own[None])

    def _of_rank(self, stacked: torch.Tensor, *, rank: int, size: int) -> torch.Tensor:
        """Return a view of the rank's share of this expert's tensor, as `_in_order` has it."""
        own = stacked.mT if stacked.ndim == 2 else stacked
        if self.dim is None:
            return own
        if self.interleaved:
            own = own.unflatten(0, (-1, 2))
        length = own.shape[self.dim] // size
        own = own.narrow(self.dim, rank * length, length)
        return own.transpose(0, 1) if self.interleaved else own

    def _in_order(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a view of a rank's shard, with gate and up in dimension 0 if it has both."""
        return shard.unflatten(0, (2, -1)) if self.interleaved else shard


def slice_pieces(pieces: list[Piece], start: int, stop: int) -> list[Piece]:
    """Return the pieces of the rows `start:stop` of the concatenation of `pieces`.

    Example: of `[("q", 0, 4), ("k", 0, 2)]` the rows 3 to 5 are `[("q", 3, 4), ("k", 0, 1)]`.
    """
    kept: list[Piece] = []
    offset = 0
    for source, first, last in pieces:
        begin = max(first, first + start - offset)
        end = min(last, first + stop - offset)
        if begin < end:
            kept.append(Piece(source, begin, end))
        offset += last - first
    return kept


def total_length(pieces: list[Piece]) -> int:
    """Return the total number of rows of `pieces`."""
    return sum(piece.length for piece in pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNames:
    """How a checkpoint names what layers have, where families differ; by default as Qwen's do."""

    norm_before_attention: str = "input_layernorm"
    norm_before_mlp: str = "post_attention_layernorm"
    norm_after_attention: str = "post_self_attn_layernorm"
    norm_after_mlp: str = "post_mlp_layernorm"
    fused_mlp: str | None = None
    """Gate and up projection of dense layers in one tensor; None: they are two."""
    experts: str = "mlp"
    """The router and the experts."""
    router: str = "gate"
    stacked_experts: bool = False
    """Whether one tensor has a projection of all experts, see `StackedExpert`."""
    shared_expert: str = "shared_expert"
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"


def decoder_mappings(architecture: Architecture, names: LayerNames | None = None) -> list[Mapping]:
    """Return the mapping of every parameter, in the order of export.

    The other Hugging Face names are those of Llama, Qwen2, Qwen3 and Qwen3-MoE checkpoints.
    """
    names = names or LayerNames()
    hidden_size = architecture.transformer["hidden_size"]
    vocabulary = (architecture.vocab_size, hidden_size)
    mappings: list[Mapping] = [
        Vocabulary(names=("embedding.word_embeddings.weight",), sources={EMBEDDING: vocabulary})
    ]
    for layer in range(architecture.num_layers):
        mappings += _attention(architecture, layer)
        mappings += _experts(architecture, layer, names) or _gated_mlp(architecture, layer, names)
        mappings += _norms(architecture, layer, names)
    mappings.append(
        Mapping(
            names=("decoder.final_layernorm.weight",),
            sources={"model.norm.weight": (hidden_size,)},
        )
    )
    mappings.append(_output_layer(vocabulary, tied=architecture.tied_embeddings))
    return mappings


def _output_layer(vocabulary: tuple[int, int], *, tied: bool) -> Mapping:
    """If tied, it is a separate parameter only if the embedding is on another stage."""
    name = "lm_head.weight"
    return Vocabulary(
        names=("output_layer.weight",),
        sources={EMBEDDING if tied else name: vocabulary},
        tied_name=name if tied else None,
    )


def _latent_attention(fields: Fields, ours: str, theirs: str) -> list[Mapping]:
    """Return the projections of multi-head latent attention, and the norms of latent vectors."""
    hidden_size, num_heads = fields["hidden_size"], fields["num_attention_heads"]
    shared, value = fields["qk_pos_emb_head_dim"], fields["v_head_dim"]
    query, latent = fields["qk_head_dim"] + shared, fields["kv_lora_rank"]
    tensors = [
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", (latent + shared, hidden_size), None),
        ("kv_layernorm", "kv_a_layernorm", (latent,), None),
        ("linear_kv_up_proj", "kv_b_proj", (num_heads * (query - shared + value), latent), 0),
        ("linear_proj", "o_proj", (hidden_size, num_heads * value), 1),
    ]
    rank = fields["q_lora_rank"]
    if rank is None:
        tensors.append(("linear_q_proj", "q_proj", (num_heads * query, hidden_size), 0))
    else:
        tensors += [
            ("linear_q_down_proj", "q_a_proj", (rank, hidden_size), None),
            ("q_layernorm", "q_a_layernorm", (rank,), None),
            ("linear_q_up_proj", "q_b_proj", (num_heads * query, rank), 0),
        ]
    return [
        Mapping(
            names=(f"{ours}.{own}.weight",), sources={f"{theirs}.{name}.weight": shape}, dim=dim
        )
        for own, name, shape, dim in tensors
    ]


def _gated_qkv(fields: Fields, ours: str, theirs: str) -> Mapping:
    """Return the QKV projection of attention whose queries have gates: after those of a group."""
    hidden_size, size = fields["hidden_size"], fields["kv_channels"]
    num_heads, num_groups = fields["num_attention_heads"], fields["num_query_groups"]
    query, key, value = (f"{theirs}.{name}_proj.weight" for name in ("q", "k", "v"))
    order: list[Piece] = []
    for group in range(num_groups):
        heads = range(group * num_heads // num_groups, (group + 1) * num_heads // num_groups)
        # Each head's gate is after its query.
        order += [Piece(query, 2 * head * size, (2 * head + 1) * size) for head in heads]
        order += [Piece(query, (2 * head + 1) * size, (2 * head + 2) * size) for head in heads]
        order += [Piece(name, group * size, (group + 1) * size) for name in (key, value)]
    return Reordered(
        names=(f"{ours}.linear_qkv.weight",),
        sources={
            query: (2 * num_heads * size, hidden_size),
            key: (num_groups * size, hidden_size),
            value: (num_groups * size, hidden_size),
        },
        order=tuple(order),
    )


def _gated_delta_net(fields: Fields, ours: str, theirs: str) -> list[Mapping]:
    """Return linear attention: what belongs to a key's head is together, see `GatedDeltaNet`."""
    hidden_size, kernel = fields["hidden_size"], fields["linear_conv_kernel_dim"]
    num_keys, num_values = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    keys = num_keys * fields["linear_key_head_dim"]
    values = num_values * fields["linear_value_head_dim"]
    conv = f"{theirs}.conv1d.weight"
    found: list[Mapping] = [
        Qkv(
            names=(f"{ours}.in_proj.weight",),
            sources={
                f"{theirs}.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden_size),
                f"{theirs}.in_proj_ba.weight": (2 * num_values, hidden_size),
            },
            num_groups=num_keys,
        ),
        Reordered(
            names=(f"{ours}.conv_weight",),
            sources={conv: (2 * keys + values, 1, kernel)},
            order=_sections(conv, keys, keys, values, num_groups=num_keys),
        ),
        Mapping(
            names=(f"{ours}.norm_weight",),
            sources={f"{theirs}.norm.weight": (fields["linear_value_head_dim"],)},
        ),
        Mapping(
            names=(f"{ours}.out_proj.weight",),
            sources={f"{theirs}.out_proj.weight": (hidden_size, values)},
            dim=1,
        ),
    ]
    found += [
        Mapping(names=(f"{ours}.{name}",), sources={f"{theirs}.{name}": (num_values,)}, dim=0)
        for name in ("dt_bias", "A_log")
    ]
    return found


def _attention(architecture: Architecture, layer: int) -> list[Mapping]:
    fields = architecture.transformer
    hidden_size, head_size = fields["hidden_size"], fields["kv_channels"]
    num_heads, num_groups = fields["num_attention_heads"], fields["num_query_groups"]
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    if fields.get("multi_latent_attention"):
        return _latent_attention(fields, ours, theirs)
    if architecture.is_linear(layer):
        return _gated_delta_net(fields, ours, f"model.layers.{layer}.linear_attn")
    rows = {"q_proj": num_heads, "k_proj": num_groups, "v_proj": num_groups}
    rows = {f"{theirs}.{name}": heads * head_size for name, heads in rows.items()}
    mappings: list[Mapping] = [
        Qkv(
            names=(f"{ours}.linear_qkv.weight",),
            sources={f"{name}.weight": (count, hidden_size) for name, count in rows.items()},
            num_groups=num_groups,
        )
    ]
    if fields.get("attention_output_gate"):
        mappings = [_gated_qkv(fields, ours, theirs)]
    has_biases = fields["add_bias_linear"]
    if fields["add_qkv_bias"] or has_biases:
        mappings.append(
            Qkv(
                names=(f"{ours}.linear_qkv.bias",),
                sources={f"{name}.bias": (count,) for name, count in rows.items()},
                num_groups=num_groups,
            )
        )
    mappings.append(
        Mapping(
            names=(f"{ours}.linear_proj.weight",),
            sources={f"{theirs}.o_proj.weight": (hidden_size, num_heads * head_size)},
            dim=1,
        )
    )
    if has_biases:
        mappings.append(
            Mapping(
                names=(f"{ours}.linear_proj.bias",),
                sources={f"{theirs}.o_proj.bias": (hidden_size,)},
            )
        )
    if fields.get("softmax_type") == "learnable":
        mappings.append(
            Mapping(
                names=(f"{ours}.core_attention.softmax_offset",),
                sources={f"{theirs}.sinks": (num_heads,)},
                dim=0,
            )
        )
    if fields.get("norm_of_all_heads"):
        mappings += [
            Mapping(
                names=(f"{ours}.{which}_layernorm.weight",),
                sources={f"{theirs}.{which}_norm.weight": (num * head_size,)},
                dim=0,
            )
            for which, num in (("q", num_heads), ("k", num_groups))
        ]
    if fields["qk_layernorm"]:
        mappings += [
            Mapping(
                names=(f"{ours}.{which}_layernorm.weight",),
                sources={f"{theirs}.{which}_norm.weight": (head_size,)},
            )
            for which in ("q", "k")
        ]
    return mappings


def _norms(architecture: Architecture, layer: int, names: LayerNames) -> list[Mapping]:
    """Return the norms of a layer; Transformer Engine fuses some with the linear layers after."""
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    found: list[tuple[str, str]] = []
    if architecture.transformer.get("norm_before", True):
        found += [
            (names.norm_before_attention, "input_layernorm.weight"),
            (names.norm_before_mlp, "pre_mlp_layernorm.weight"),
        ]
    if architecture.transformer.get("norm_after"):
        found += [
            (names.norm_after_attention, "self_attn_bda.weight"),
            (names.norm_after_mlp, "mlp_bda.weight"),
        ]
    fused = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    if architecture.transformer.get("own_layers"):
        fused = {}
    shape = (architecture.transformer["hidden_size"],)
    return [
        Mapping(
            names=tuple(f"{ours}.{each}" for each in (own, fused.get(own)) if each is not None),
            sources={f"{theirs}.{name}.weight": shape},
        )
        for name, own in found
    ]


def _gated_mlp(architecture: Architecture, layer: int, names: LayerNames) -> list[Mapping]:
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    sizes = {
        "hidden_size": architecture.transformer["hidden_size"],
        "inner_size": architecture.transformer["ffn_hidden_size"],
    }
    fc1, fc2 = _gated_projections(ours, theirs, expert=None, **sizes)
    if names.fused_mlp is not None:
        shape = (2 * sizes["inner_size"], sizes["hidden_size"])
        fc1 = FusedGateUp(names=fc1.names, sources={f"{theirs}.{names.fused_mlp}.weight": shape})
    return [fc1, fc2]


def _experts(architecture: Architecture, layer: int, names: LayerNames) -> list[Mapping]:
    """Return the router and experts of an MoE layer; an empty list for a dense layer."""
    if not architecture.has_experts(layer):
        return []
    fields = architecture.transformer
    num_experts, hidden_size = fields["num_moe_experts"], fields["hidden_size"]
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.{names.experts}"
    mappings = [
        Mapping(
            names=(f"{ours}.router.weight",),
            sources={f"{theirs}.{names.router}.weight": (num_experts, hidden_size)},
        )
    ]
    if fields["add_bias_linear"]:
        mappings.append(
            Mapping(
                names=(f"{ours}.router.bias",),
                sources={f"{theirs}.{names.router}.bias": (num_experts,)},
            )
        )
    if fields.get("moe_router_enable_expert_bias"):
        mappings.append(
            Mapping(
                names=(f"{ours}.router.expert_bias",),
                sources={f"{theirs}.gate.e_score_correction_bias": (num_experts,)},
            )
        )
    if names.stacked_experts:
        return mappings + _stacked_experts(fields, f"{ours}.experts", f"{theirs}.experts")
    for expert in range(num_experts):
        mappings += _gated_projections(
            f"{ours}.experts.local_experts.{expert}",
            f"{theirs}.experts.{expert}",
            hidden_size=hidden_size,
            inner_size=fields["moe_ffn_hidden_size"],
            expert=expert,
            names=names,
        )
    return mappings + _shared_expert(fields, ours, f"{theirs}.{names.shared_expert}")


def _stacked_experts(fields: Fields, ours: str, theirs: str) -> list[Mapping]:
    """Return the projections of experts that are stacked, and their biases."""
    num_experts, hidden_size = fields["num_moe_experts"], fields["hidden_size"]
    inner_size = fields["moe_ffn_hidden_size"]
    tensors: list[tuple[str, str, Shape, int | None]] = [
        ("linear_fc1.weight", "gate_up_proj", (hidden_size, 2 * inner_size), 0),
        ("linear_fc1.bias", "gate_up_proj_bias", (2 * inner_size,), 0),
        ("linear_fc2.weight", "down_proj", (inner_size, hidden_size), 1),
        ("linear_fc2.bias", "down_proj_bias", (hidden_size,), None),
    ]
    return [
        StackedExpert(
            names=(f"{ours}.local_experts.{expert}.{own}",),
            sources={f"{theirs}.{name}": (num_experts, *shape)},
            dim=dim,
            expert=expert,
            interleaved=own.startswith("linear_fc1"),
        )
        for own, name, shape, dim in tensors
        for expert in range(num_experts)
    ]


def _shared_expert(fields: Fields, ours: str, theirs: str) -> list[Mapping]:
    """Return the expert that all tokens go to, and the gate on its output; empty without one."""
    inner_size = fields.get("moe_shared_expert_intermediate_size")
    if inner_size is None:
        return []
    hidden_size = fields["hidden_size"]
    found = _gated_projections(
        f"{ours}.shared_experts",
        theirs,
        hidden_size=hidden_size,
        inner_size=inner_size,
        expert=None,
    )
    if fields.get("moe_shared_expert_gate"):
        found.append(
            Mapping(
                names=(f"{ours}.shared_experts.gate_weight",),
                sources={f"{theirs}_gate.weight": (1, hidden_size)},
            )
        )
    return found


def _gated_projections(
    ours: str,
    theirs: str,
    *,
    hidden_size: int,
    inner_size: int,
    expert: int | None,
    names: LayerNames | None = None,
) -> list[Mapping]:
    inner, leaf = (inner_size, hidden_size), names or LayerNames()
    return [
        GateUp(
            names=(f"{ours}.linear_fc1.weight",),
            sources={
                f"{theirs}.{leaf.expert_gate}.weight": inner,
                f"{theirs}.{leaf.expert_up}.weight": inner,
            },
            expert=expert,
        ),
        Mapping(
            names=(f"{ours}.linear_fc2.weight",),
            sources={f"{theirs}.{leaf.expert_down}.weight": (hidden_size, inner_size)},
            dim=1,
            expert=expert,
        ),
    ]
