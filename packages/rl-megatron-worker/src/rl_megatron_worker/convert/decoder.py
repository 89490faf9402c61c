"""Parameter mappings of a decoder with rotary embeddings, grouped queries and gated MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_megatron_worker.convert.mappings import GateUp, Mapping, Qkv, Vocabulary

if TYPE_CHECKING:
    from rl_megatron_worker.model.config import Architecture

EMBEDDING = "model.embed_tokens.weight"


def decoder_mappings(architecture: Architecture) -> list[Mapping]:
    """Return the mapping of every parameter, in the order of export.

    The Hugging Face names are those of Llama, Qwen2, Qwen3 and Qwen3-MoE checkpoints.
    """
    hidden_size = architecture.transformer["hidden_size"]
    vocabulary = (architecture.vocab_size, hidden_size)
    mappings: list[Mapping] = [
        Vocabulary(names=("embedding.word_embeddings.weight",), sources={EMBEDDING: vocabulary})
    ]
    for layer in range(architecture.num_layers):
        mappings += _attention(architecture, layer)
        mappings += _experts(architecture, layer) or _gated_mlp(architecture, layer)
        mappings += _norms(hidden_size, layer)
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


def _attention(architecture: Architecture, layer: int) -> list[Mapping]:
    fields = architecture.transformer
    hidden_size, head_size = fields["hidden_size"], fields["kv_channels"]
    num_heads, num_groups = fields["num_attention_heads"], fields["num_query_groups"]
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    rows = {"q_proj": num_heads, "k_proj": num_groups, "v_proj": num_groups}
    rows = {f"{theirs}.{name}": heads * head_size for name, heads in rows.items()}
    mappings: list[Mapping] = [
        Qkv(
            names=(f"{ours}.linear_qkv.weight",),
            sources={f"{name}.weight": (count, hidden_size) for name, count in rows.items()},
            num_groups=num_groups,
        )
    ]
    if fields["add_qkv_bias"]:
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
    if fields["qk_layernorm"]:
        mappings += [
            Mapping(
                names=(f"{ours}.{which}_layernorm.weight",),
                sources={f"{theirs}.{which}_norm.weight": (head_size,)},
            )
            for which in ("q", "k")
        ]
    return mappings


def _norms(hidden_size: int, layer: int) -> list[Mapping]:
    """Return the two norms; Transformer Engine fuses them with the linear layers after them."""
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    names = {
        "input_layernorm": ("input_layernorm", "self_attention.linear_qkv"),
        "post_attention_layernorm": ("pre_mlp_layernorm", "mlp.linear_fc1"),
    }
    return [
        Mapping(
            names=(f"{ours}.{norm}.weight", f"{ours}.{fused_with}.layer_norm_weight"),
            sources={f"{theirs}.{name}.weight": (hidden_size,)},
        )
        for name, (norm, fused_with) in names.items()
    ]


def _gated_mlp(architecture: Architecture, layer: int) -> list[Mapping]:
    return _gated_projections(
        f"decoder.layers.{layer}.mlp",
        f"model.layers.{layer}.mlp",
        hidden_size=architecture.transformer["hidden_size"],
        inner_size=architecture.transformer["ffn_hidden_size"],
        expert=None,
    )


def _experts(architecture: Architecture, layer: int) -> list[Mapping]:
    """Return the router and experts of an MoE layer; an empty list for a dense layer."""
    if not architecture.has_experts(layer):
        return []
    fields = architecture.transformer
    num_experts, hidden_size = fields["num_moe_experts"], fields["hidden_size"]
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    mappings = [
        Mapping(
            names=(f"{ours}.router.weight",),
            sources={f"{theirs}.gate.weight": (num_experts, hidden_size)},
        )
    ]
    for expert in range(num_experts):
        mappings += _gated_projections(
            f"{ours}.experts.local_experts.{expert}",
            f"{theirs}.experts.{expert}",
            hidden_size=hidden_size,
            inner_size=fields["moe_ffn_hidden_size"],
            expert=expert,
        )
    return mappings


def _gated_projections(
    ours: str, theirs: str, *, hidden_size: int, inner_size: int, expert: int | None
) -> list[Mapping]:
    inner = (inner_size, hidden_size)
    return [
        GateUp(
            names=(f"{ours}.linear_fc1.weight",),
            sources={f"{theirs}.gate_proj.weight": inner, f"{theirs}.up_proj.weight": inner},
            expert=expert,
        ),
        Mapping(
            names=(f"{ours}.linear_fc2.weight",),
            sources={f"{theirs}.down_proj.weight": (hidden_size, inner_size)},
            dim=1,
            expert=expert,
        ),
    ]
