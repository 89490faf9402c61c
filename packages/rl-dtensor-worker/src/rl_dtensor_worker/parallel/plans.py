"""Tensor-parallel plans: which style each module of a model gets.

A plan maps patterns of module names, in which `*` matches one component, to styles: transformers'
style names or, in a user's plan, torch's `ParallelStyle` objects. Modules that no pattern matches
are replicated.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    parallelize_module,
)

from rl_dtensor_worker.model.lora import adapted_layers
from rl_dtensor_worker.parallel.styles import (
    Column,
    Experts,
    GatheredColumn,
    OutputLayer,
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
    from collections.abc import Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

    from rl_dtensor_worker.parallel.styles import TensorParallel

Plan = dict[str, "str | ParallelStyle"]
AppliedPlan = dict[str, "str | ParallelStyle | type[Style]"]

STYLES: dict[str, type[Style]] = {
    "colwise": Column,
    "colwise_gather_output": GatheredColumn,
    "colwise_rep": GatheredColumn,
    "rowwise": Row,
    "rowwise_split_input": SplitRow,
    "rowwise_rep": SplitRow,
    "embedding_rowwise": VocabularyEmbedding,
    "moe_tp_experts": Experts,
    "replicated_with_grad_allreduce": ReplicatedOnShards,
    "sequence_parallel": Replicated,
}
"""By the style names that a plan can use."""

_HEAD_NORMS = {
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "q_proj"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "k_proj"),
}
"""The projection whose output each per-head norm takes, by the norm's name."""

_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
_OWN_PLANS: dict[str, dict[str, str]] = {
    "nemotron": {
        **{f"self_attn.{name}_proj": "colwise" for name in "qkv"},
        "self_attn.o_proj": "rowwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
    },
}
"""By `model_type`, within a decoder layer: for models that declare no plan."""

_DIVIDED = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "vocab_size",
)
_PATH = "policy.dtensor_cfg"


def check_sizes(model_config: PreTrainedConfig, *, tensor_parallel_size: int) -> None:
    """Raise unless the tensor-parallel size divides the model's sizes.

    Raises:
        ValueError: It does not divide heads, experts or another size; the message names which.
    """
    text = model_config.get_text_config()
    for name in _DIVIDED:
        count = getattr(text, name, None)
        if isinstance(count, int) and count % tensor_parallel_size:
            raise ValueError(
                f"{_PATH}.tensor_parallel_size={tensor_parallel_size} does not divide the model's "
                f"{name}={count}"
            )


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


def plan_of(model: PreTrainedModel, *, custom: str | None) -> AppliedPlan:
    """Return the style of each sharded module, by its name in `model`.

    Submodules of a layer with adapters have styles of their own.

    Args:
        model: The model, unsharded.
        custom: Dotted path of a user's plan. None: the model's own.

    Raises:
        ValueError: A pattern of the user's plan matches no module, the model has no plan, or its
            plan has an unsupported style.
    """
    if custom is not None:
        plan: Mapping[str, str | ParallelStyle] = load_custom_plan(custom)
    else:
        plan = _plan_of_model(model)
    modules = dict(model.named_modules())
    styles: dict[str, str | ParallelStyle] = {}
    for pattern, style in plan.items():
        names = _matches(pattern, modules)
        if custom is not None and not names:
            raise ValueError(
                f"{_PATH}.custom_parallel_plan={custom!r}: {pattern!r} matches no module of "
                f"{type(model).__name__}"
            )
        styles |= dict.fromkeys(names, style)
    # These replace the plan's own: most plans gather the logits.
    styles |= _vocabulary_styles(model)
    styles |= _head_norm_styles(modules, styles)
    styles |= _activation_styles(modules, styles)

    def style_of(name: str) -> type[Style] | ParallelStyle | None:
        style = styles.get(name)
        return STYLES[style] if isinstance(style, str) else style

    # Last: the style of an adapter follows from its layer's.
    return {**styles, **adapter_styles(model, adapted_layers(model), style_of)}


def apply_plan(
    model: PreTrainedModel,
    styles: Mapping[str, str | ParallelStyle | type[Style]],
    tp: TensorParallel,
) -> None:
    """Shard each module of `model` by its style; afterwards every parameter is a DTensor.

    Raises:
        ValueError: A module has a parameter of its own beside sharded submodules, or the gradient
            of a replicated one may be partial on each rank.
    """
    _check_replicated(model, styles)
    # A list, as styles replace parameters and forwards while the model is walked.
    for name, module in list(model.named_modules()):
        style = styles.get(name)
        if isinstance(style, ParallelStyle):
            parallelize_module(module, tp.mesh, style)
        elif style is not None:
            kind = _style_class(style, module, model) if isinstance(style, str) else style
            kind(tp).apply(module)
        elif own := [parameter for parameter, _ in module.named_parameters(recurse=False)]:
            if shared := [inner for inner in styles if inner.startswith(f"{name}.")]:
                raise ValueError(
                    f"{_PATH}.tensor_parallel_size: {name}.{own[0]} is used beside {shared[0]}, "
                    "which is sharded: this model is not supported"
                )
            Replicated(tp).apply(module)
    if tp.sequence_parallel:
        for module in _regions(model, styles):
            Region(tp).apply(module)


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
            if _has_parameters(each) and not is_named:
                raise ValueError(
                    f"{_PATH}.tensor_parallel_size: the plan names no style for {inner} "
                    f"({type(each).__name__}), beside {name}, which is sharded: its gradient may "
                    f"be partial on each rank. Name it in {_PATH}.custom_parallel_plan: "
                    "'replicated_with_grad_allreduce' if its input is sharded, "
                    "'sequence_parallel' if it is not"
                )


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
    columns = [name for name, style in styles.items() if style in _COLUMNS]
    names = {name.rpartition(".")[0] for name in columns if model.get_submodule(name) is not output}
    for name in sorted(names):
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            if _has_parameters(module) and inner not in styles:
                raise ValueError(
                    f"{_PATH}.sequence_parallel=True: the plan names no style for {inner}, "
                    f"inside {name}, which is sharded: switch sequence_parallel off, or give "
                    f"{_PATH}.custom_parallel_plan"
                )
    return [model.get_submodule(name) for name in sorted(names)]


def _plan_of_model(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan that the model declares, else the one in `_OWN_PLANS`."""
    declared: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    if set(declared) - {"lm_head"}:
        _check_declared(model, declared)
        return declared
    model_type: str = model.config.model_type
    if model_type not in _OWN_PLANS:
        raise ValueError(
            f"{_PATH}.tensor_parallel_size: {type(model).__name__} declares no plan, and there is "
            f"none here for model_type={model_type!r}: give {_PATH}.custom_parallel_plan"
        )
    return {f"model.layers.*.{name}": style for name, style in _OWN_PLANS[model_type].items()}


def _check_declared(model: PreTrainedModel, plan: Mapping[str, str]) -> None:
    """Raise if the model's plan has an unsupported style.

    Entries for parameters of experts are part of the style of the experts module.
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    for pattern, style in plan.items():
        owner = pattern.rpartition(".")[0]
        of_experts = plan.get(owner) == "moe_tp_experts"
        on_parameter = not _matches(pattern, modules) and bool(_matches(pattern, parameters))
        unknown = style not in STYLES and bool(_matches(pattern, modules))
        if unknown or (on_parameter and not of_experts):
            raise ValueError(
                f"{_PATH}.tensor_parallel_size: the plan of {type(model).__name__} has the style "
                f"{style!r} for {pattern!r}, which is not supported: give "
                f"{_PATH}.custom_parallel_plan"
            )


def _vocabulary_styles(model: PreTrainedModel) -> dict[str, str | ParallelStyle]:
    """Return vocabulary-sharded styles of embedding and output layer, whatever the plan says.

    Log-probabilities are computed from sharded logits, which are never gathered.
    """
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    found: dict[str, str | ParallelStyle] = {
        names[model.get_input_embeddings()]: "embedding_rowwise"
    }
    output = model.get_output_embeddings()
    if output is not None:
        found[names[output]] = "colwise"
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
        if name not in styles and styles.get(projection) == "colwise" and _has_parameters(module):
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
        if type(module).__module__ == "transformers.activations" and _has_parameters(module)
    ]
    return {
        name: "replicated_with_grad_allreduce"
        for name in activations
        if name not in styles and name.rpartition(".")[0] in sharding
    }


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _style_class(style: str, module: nn.Module, model: PreTrainedModel) -> type[Style]:
    return OutputLayer if module is model.get_output_embeddings() else STYLES[style]


def _matches(pattern: str, names: Mapping[str, object]) -> list[str]:
    # `*` is one component of a name, as in transformers' plans.
    expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return [name for name in names if expression.fullmatch(name)]
