"""What differs between the supported versions of Megatron-core, by what the installed one has."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.moe.router import TopKRouter

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

# Up to 0.16 a backend names the class of the experts and their layers; later it builds the experts.
_builds_experts = (
    "moe_use_legacy_grouped_gemm"
    not in inspect.signature(LocalSpecProvider.grouped_mlp_modules).parameters
)

# From 0.19 on the router multiplies its load-balancing loss by the number of ranks that share the
# tokens of a sequence. No signature tells; the code reads that group.
_counts_sharing_ranks = (
    "tp_cp_group" in TopKRouter.attach_and_log_load_balancing_loss.__code__.co_names
)


def balancing_loss_factor(num_sharing: int) -> int:
    """Return the factor on the load-balancing loss's weight that Megatron-core leaves out.

    Args:
        num_sharing: Number of tensor- and context-parallel ranks, which have a shard of the tokens.
    """
    return 1 if _counts_sharing_ranks else num_sharing


def experts_spec(
    experts: type[SequentialMLP], layers: MLPSubmodules
) -> partial[SequentialMLP] | tuple[type[SequentialMLP], MLPSubmodules]:
    """Return what `grouped_mlp_modules` of a backend does, for experts with these layers."""
    return partial(experts, submodules=layers) if _builds_experts else (experts, layers)


def latent_layers(layers: MLASelfAttentionSubmodules) -> dict[str, Any]:
    """Return the layers of latent attention as a spec names them, in the form that 0.19 wants.

    Where queries have no latent vector, 0.19 would put a norm before their projection instead.
    """
    names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
    return {name: getattr(layers, name) for name in (*names, "q_layernorm", "kv_layernorm")}


def gradients_in_norm(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """Return the gradients of an optimizer that count in the norm on this rank."""
    # Named otherwise up to 0.16.
    if hasattr(optimizer, "get_grads_for_grad_norm"):
        return cast("Any", optimizer).get_grads_for_grad_norm()
    return optimizer.get_main_grads_for_grad_norm()


@contextmanager
def query_norms_allowed(config: TransformerConfig) -> Generator[None, None, None]:
    """Let attention be built with norms of queries and keys, whatever `qk_layernorm` is.

    Megatron-core 0.19 refuses them without it. Beyond the construction it would sum their gradients
    over tensor-parallel ranks, as those of norms of each head, which latent attention's and those
    of all heads are not.
    """
    given = config.qk_layernorm
    config.qk_layernorm = True
    try:
        yield
    finally:
        config.qk_layernorm = given
