"""Tensor-parallel plans: which style each module of a model gets.

A plan maps patterns of module names, in which `*` matches one component, to styles: transformers'
style names or, in a user's plan, torch's `ParallelStyle` objects. Modules that no pattern matches
are replicated.
"""

from __future__ import annotations

import importlib
import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    parallelize_module,
)

from rl_dtensor_worker.model.lora import adapted_layers
from rl_dtensor_worker.parallel.structure import (
    COLUMNS,
    blocks_of,
    class_name,
    decoder_layers,
    gathered_styles,
    has_parameters,
    inside,
    takes_choice,
    undivided_blocks,
    unplanned_blocks,
)
from rl_dtensor_worker.parallel.styles import (
    Block,
    Column,
    Experts,
    GatheredColumn,
    GatheredConv1D,
    OutputBias,
    OutputLayer,
    Positions,
    Region,
    Replicated,
    ReplicatedOnShards,
    Row,
    SplitRow,
    Style,
    VocabularyEmbedding,
    adapter_styles,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

    from rl_dtensor_worker.parallel.styles import TensorParallel

logger = logging.getLogger(__name__)

_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
Plan = dict[str, "str | ParallelStyle"]
AppliedPlan = dict[str, "str | ParallelStyle | type[Style]"]

STYLES: dict[str, type[Style]] = {
    "colwise": Column,
    "colwise_gather_output": GatheredColumn,
    "colwise_rep": GatheredColumn,
    "conv1d_gather_output": GatheredConv1D,
    "rowwise": Row,
    "rowwise_split_input": SplitRow,
    "rowwise_rep": SplitRow,
    "embedding_rowwise": VocabularyEmbedding,
    "moe_tp_experts": Experts,
    "replicated_with_grad_allreduce": ReplicatedOnShards,
    "sequence_parallel": Replicated,
    "positions": Positions,
    "block": Block,
    "output_bias": OutputBias,
}
"""By the style names that a plan can use."""

_HEAD_NORMS = {
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "q_proj"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "k_proj"),
}
"""The projection whose output each per-head norm takes, by the norm's name."""

_OWN_PLANS: dict[str, dict[str, str]] = {
    "nemotron": {
        **{f"self_attn.{name}_proj": "colwise" for name in "qkv"},
        "self_attn.o_proj": "rowwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
    },
}
"""By `model_type`, within a decoder layer: for models that declare no plan."""

_PATH = "policy.dtensor_cfg"
# What torch says of a `DTensor` in an operation of plain tensors.
_MIXED_TENSORS = "mixed torch.Tensor and DTensor"


def load_custom_plan(path: str) -> Plan:
    """Return the plan behind a dotted path: a dict, or a function without arguments.

    Raises:
        ValueError: The path cannot be imported, or is not a plan.
    """
    key = f"{_PATH}.custom_parallel_plan={path!r}"
    module_name, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key} cannot be imported: {error}") from error
    plan = found() if callable(found) else found
    if not isinstance(plan, dict) or not plan:
        raise ValueError(f"{key} is {type(plan).__name__}, not a dict with an entry or more")
    for pattern, style in plan.items():
        if not (isinstance(style, ParallelStyle) or style in STYLES):
            raise ValueError(
                f"{key}: {pattern!r} has the style {style!r}, which is neither a ParallelStyle "
                f"nor one of {sorted(STYLES)}"
            )
    return plan


def plan_of(model: PreTrainedModel, *, custom: str | None, size: int) -> AppliedPlan:
    """Return the style of each sharded module, by its name in `model`.

    Submodules of a layer with adapters have styles of their own. Blocks of which the model's own
    plan says nothing, or something unsupported, are treated as in `structure`.

    Args:
        model: The model, unsharded.
        custom: Dotted path of a user's plan. None: the model's own.
        size: The tensor-parallel size.

    Raises:
        ValueError: A pattern of the user's plan matches no module.
    """
    modules = dict(model.named_modules())
    styles: dict[str, str | ParallelStyle] = {}
    for pattern, style in (
        _declared(model) if custom is None else load_custom_plan(custom)
    ).items():
        names = _matches(pattern, modules)
        if custom is not None and not names:
            raise ValueError(
                f"{_PATH}.custom_parallel_plan={custom!r}: {pattern!r} matches no module of "
                f"{type(model).__name__}"
            )
        styles |= dict.fromkeys(names, style)
    # These replace the plan's own: most plans gather the logits.
    styles |= _vocabulary_styles(model, size)
    styles |= _head_norm_styles(modules, styles)
    styles |= _activation_styles(modules, styles)
    if custom is None:
        styles = _completed(model, styles, size)

    def style_of(name: str) -> type[Style] | ParallelStyle | None:
        style = styles.get(name)
        return STYLES[style] if isinstance(style, str) else style

    # Last: the style of an adapter follows from its layer's.
    return {**styles, **adapter_styles(model, adapted_layers(model), style_of)}


def check_plan(
    model: PreTrainedModel,
    styles: Mapping[str, str | ParallelStyle | type[Style]],
    *,
    sequence_parallel: bool,
) -> None:
    """Raise if a plan cannot be applied to a model, which is read and not changed.

    Raises:
        ValueError: A module has a parameter of its own beside sharded submodules, the gradient of a
            replicated one may be partial on each rank, or the model uses a sharded parameter
            without calling its layer.
    """
    _check_replicated(model, styles)
    _check_beside(model, styles)
    if sequence_parallel:
        _regions(model, styles)
    used = _used_without_a_call(model.config)
    if used:
        raise ValueError(
            f"{_PATH}.tensor_parallel_size: {class_name(model)} uses {used} without calling that "
            "layer, which is sharded. Leave the key out"
        )


def apply_plan(
    model: PreTrainedModel,
    styles: Mapping[str, str | ParallelStyle | type[Style]],
    tp: TensorParallel,
) -> None:
    """Shard each module of `model` by its style; afterwards every parameter is a DTensor.

    Raises:
        ValueError: See `check_plan`.
    """
    check_plan(model, styles, sequence_parallel=tp.sequence_parallel)
    # A list, as styles replace parameters and forwards while the model is walked.
    for name, module in list(model.named_modules()):
        style = styles.get(name)
        if isinstance(style, ParallelStyle):
            parallelize_module(module, tp.mesh, style)
        elif style is not None:
            kind = _style_class(style, module, model) if isinstance(style, str) else style
            kind(tp).apply(module)
        elif has_parameters(module):
            Replicated(tp).apply(module)
    if tp.sequence_parallel:
        for module in _regions(model, styles):
            Region(tp).apply(module)


@contextmanager
def refusing_shards(
    model: PreTrainedModel, tp: TensorParallel | None
) -> Generator[None, None, None]:
    """Refuse a model whose forward, inside, uses a sharded parameter without calling its layer.

    Raises:
        ValueError: It does; the message says which operation.
    """
    try:
        yield
    except RuntimeError as error:
        if tp is None or _MIXED_TENSORS not in str(error):
            raise
        raise ValueError(
            f"{_PATH}.tensor_parallel_size={tp.size}: {class_name(model)} uses parameters of "
            f"sharded layers without calling these: {error}. Leave the key out"
        ) from error


def _around_blocks(model: PreTrainedModel) -> set[str]:
    """Return the modules around blocks, in which activations are as between layers."""
    return {
        ".".join(parts[:depth])
        for parts in (name.split(".") for name in blocks_of(model))
        for depth in range(1, len(parts))
    }


def _check_replicated(
    model: PreTrainedModel, styles: Mapping[str, str | ParallelStyle | type[Style]]
) -> None:
    """Raise if a block with sharded activations has parameters that no style is named for.

    A replicated parameter that meets a shard of the activations has a partial gradient on each
    rank. Without a reduction the ranks' copies would be trained apart.

    Raises:
        ValueError: A block has such a parameter.
    """
    output = model.get_output_embeddings()  # type: ignore[operator]
    for name, style in styles.items():
        module = model.get_submodule(name)
        if module is output or not (style == "colwise" or isinstance(style, ColwiseParallel)):
            continue
        block = name.rpartition(".")[0]
        for inner, each in model.get_submodule(block).named_modules(prefix=block):
            # `apply_plan` refuses a module with parameters of its own beside sharded submodules.
            holds_shards = any(other.startswith(f"{inner}.") for other in styles)
            is_named = inner in styles or _is_inside(inner, styles) or holds_shards
            if has_parameters(each) and not is_named:
                raise ValueError(
                    f"{_PATH}.tensor_parallel_size: the plan names no style for {inner} "
                    f"({type(each).__name__}), beside {name}, which is sharded: its gradient may "
                    f"be partial on each rank. Name it in {_PATH}.custom_parallel_plan: "
                    "'replicated_with_grad_allreduce' if its input is sharded, "
                    "'sequence_parallel' if it is not"
                )


def _check_beside(
    model: PreTrainedModel, styles: Mapping[str, str | ParallelStyle | type[Style]]
) -> None:
    """Raise if a module without a style has parameters of its own beside sharded submodules.

    Raises:
        ValueError: One has.
    """
    around = _around_blocks(model)
    blocks = [name for name, style in styles.items() if style == "block"]
    for name, module in model.named_modules():
        if name in styles or name in around or not has_parameters(module):
            continue
        sharded = [each for each in styles if each.startswith(f"{name}.")]
        if sharded and not any(name.startswith(f"{block}.") for block in blocks):
            own = next(parameter for parameter, _ in module.named_parameters(recurse=False))
            raise ValueError(
                f"{_PATH}.tensor_parallel_size: {name}.{own} is used beside {sharded[0]}, "
                "which is sharded: this model is not supported"
            )


def _used_without_a_call(model_config: PreTrainedConfig) -> str:
    """Return the parameter outside of blocks that a model uses itself, for types that are known.

    Of other types the first forward says it, see `refusing_shards`.
    """
    text = model_config.get_text_config()
    if text.model_type == "gemma3n_text":
        return "altup.correction_coefs.weight"
    # Where it reads images too, it puts the embedding of padding in their place.
    if model_config.model_type == "gemma4" and text.hidden_size_per_layer_input:
        return "embed_tokens.weight"
    return ""


def _is_inside(name: str, styles: Mapping[str, object]) -> bool:
    """Return whether a module that contains `name` has a style, which is then for all of it."""
    parents = name.split(".")
    return any(".".join(parents[:depth]) in styles for depth in range(1, len(parents)))


def _regions(
    model: PreTrainedModel, styles: Mapping[str, str | ParallelStyle | type[Style]]
) -> list[nn.Module]:
    """Return the blocks inside which sequence parallelism must gather the sequences.

    Raises:
        ValueError: A block has a submodule that is not in the plan, so that it is unknown whether
            its gradient is full or partial on each rank.
    """
    output = model.get_output_embeddings()  # type: ignore[operator]
    whole = [name for name, style in styles.items() if style == "block"]
    in_blocks = {each for name in whole for each in inside(name, styles)}
    columns = [n for n, style in styles.items() if style in COLUMNS and n not in in_blocks]
    layers = decoder_layers(model)
    names = {name.rpartition(".")[0] for name in columns if model.get_submodule(name) is not output}
    # A sharded layer beside the blocks gathers for itself.
    names -= layers.keys()
    for name in sorted(names):
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            if has_parameters(module) and inner not in styles:
                raise ValueError(
                    f"{_PATH}.sequence_parallel=True: the plan names no style for {inner}, "
                    f"inside {name}, which is sharded: switch sequence_parallel off, or give "
                    f"{_PATH}.custom_parallel_plan"
                )
    return [model.get_submodule(name) for name in sorted(names)]


def _declared(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan that the model declares, else the one in `_OWN_PLANS`."""
    declared: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    if set(declared) - {"lm_head"}:
        return declared
    own = _OWN_PLANS.get(model.config.model_type, {})
    return {f"model.layers.*.{name}": style for name, style in own.items()}


def _completed(
    model: PreTrainedModel, styles: Mapping[str, str | ParallelStyle], size: int
) -> dict[str, str | ParallelStyle]:
    """Return the same with styles for the blocks that a model's own plan leaves out."""
    known = {
        name: style
        for name, style in styles.items()
        if style in STYLES
        and (style != "moe_tp_experts" or takes_choice(model.get_submodule(name)))
    }
    unsupported = [*(styles.keys() - known.keys()), *_planned_parameters(model, known)]
    adapted = adapted_layers(model)
    undivided = undivided_blocks(model, known, size)
    if undivided and dist.is_initialized() and dist.get_rank() == 0:
        logger.warning(
            "%s.tensor_parallel_size=%d does not divide the heads, experts or inner sizes of %s: "
            "the outputs of their layers are gathered, which takes more communication",
            _PATH,
            size,
            sorted({_LAYER_NUMBER.sub(".*", name) for name in undivided}),
        )
    for name in dict.fromkeys([*undivided, *unplanned_blocks(model, known, unsupported)]):
        for each in inside(name, known):
            del known[each]
        known |= gathered_styles(
            name, model.get_submodule(name), tensor_parallel_size=size, adapted=adapted
        )
    return known | _position_styles(model, known)


def _planned_parameters(model: PreTrainedModel, styles: Mapping[str, object]) -> list[str]:
    """Return the single parameters for which the model's plan has a style.

    Those of experts are part of the style of the experts module; no other is supported.
    """
    parameters = dict(model.named_parameters())
    found = [name for pattern in _declared(model) for name in _matches(pattern, parameters)]
    return [each for each in found if styles.get(each.rpartition(".")[0]) != "moe_tp_experts"]


def _position_styles(model: PreTrainedModel, styles: Mapping[str, object]) -> dict[str, str]:
    """Return the style of embeddings outside of the layers, beside that of the tokens."""
    layers = list(decoder_layers(model))
    return {
        name: "positions"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and name not in styles
        and not any(name.startswith(f"{layer}.") for layer in layers)
    }


def _vocabulary_styles(model: PreTrainedModel, size: int) -> dict[str, str | ParallelStyle]:
    """Return vocabulary-sharded styles of embedding and output layer, whatever the plan says.

    Log-probabilities are computed from sharded logits, which are never gathered.
    """
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()
    found: dict[str, str | ParallelStyle] = {}
    is_sharded, vocab_size = False, model.config.get_text_config().vocab_size
    # Some have a norm inside; and some have rows beside those of the vocabulary.
    for each in embedding.modules():
        if isinstance(each, nn.Embedding):
            is_sharded = each.num_embeddings == vocab_size or each.num_embeddings % size == 0
            found[names[each]] = "embedding_rowwise" if is_sharded else "positions"
        elif is_sharded and has_parameters(each):
            # It gets zeros for the tokens of other ranks.
            found[names[each]] = "replicated_with_grad_allreduce"
    output = model.get_output_embeddings()
    if output is not None:
        found[names[output]] = "colwise"
        tied = {id(parameter) for parameter in output.parameters()}
        for module, name in names.items():
            own = [id(parameter) for parameter in module.parameters(recurse=False)]
            if own and module is not output and name not in found and tied.issuperset(own):
                found[name] = "output_bias"
    return found


def _head_norm_styles(
    modules: Mapping[str, nn.Module], styles: Mapping[str, str | ParallelStyle]
) -> dict[str, str | ParallelStyle]:
    """Return the style of per-head norms that a plan does not name.

    A norm of local heads has a partial gradient. Some of transformers' plans have no style for
    them, and users' plans usually name projections only.
    """
    found: dict[str, str | ParallelStyle] = {}
    for name, module in modules.items():
        block, _, leaf = name.rpartition(".")
        projection = f"{block}.{_HEAD_NORMS.get(leaf)}"
        if name not in styles and styles.get(projection) == "colwise" and has_parameters(module):
            found[name] = "replicated_with_grad_allreduce"
    return found


def _activation_styles(
    modules: Mapping[str, nn.Module], styles: Mapping[str, str | ParallelStyle]
) -> dict[str, str | ParallelStyle]:
    """Return the style of trained activation functions that a plan does not name.

    They stand between sharded outputs and sharded inputs. transformers' plan of Apertus names none
    for its xIELU, whose parameters have partial gradients there.
    """
    sharding = {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}
    activations = [
        name
        for name, module in modules.items()
        if type(module).__module__ == "transformers.activations" and has_parameters(module)
    ]
    return {
        name: "replicated_with_grad_allreduce"
        for name in activations
        if name not in styles and name.rpartition(".")[0] in sharding
    }


def _style_class(style: str, module: nn.Module, model: PreTrainedModel) -> type[Style]:
    return OutputLayer if module is model.get_output_embeddings() else STYLES[style]


def _matches(pattern: str, names: Mapping[str, object]) -> list[str]:
    # `*` is one component of a name, as in transformers' plans.
    expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return [name for name in names if expression.fullmatch(name)]
