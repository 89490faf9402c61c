"""What a config and its model are checked for before a process starts, and which layout they give.

A driver needs this module alone of a worker. What needs the model's code, which takes seconds to
import, is imported where a config asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_dtensor_worker.config import EngineConfig, load_model_config
from rl_dtensor_worker.model.quantized import take_quantization

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_interfaces import ParallelLayout
    from transformers import PreTrainedConfig

_PATH = "policy.dtensor_cfg"
# Model types of encoders, which are language models only with `is_decoder`.
_ENCODERS = frozenset(
    [
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ]
)
_DIVIDED = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)


def plan_layout(
    config: Mapping[str, object], *, world_size: int, init_optimizer: bool
) -> ParallelLayout:
    """Return the parallel layout of `world_size` ranks, and check config and model for it.

    Raises:
        ValueError: They do not fit; the message names key and numbers.
    """
    parsed = EngineConfig.from_policy_config(
        config, world_size=world_size, init_optimizer=init_optimizer
    )
    if parsed.custom_parallel_plan is not None:
        from rl_dtensor_worker.parallel.plans import load_custom_plan

        load_custom_plan(parsed.custom_parallel_plan)
    model_config = load_model_config(parsed)
    check_causal(model_config, parsed)
    if parsed.attn_implementation is not None:
        from rl_dtensor_worker.model.build import check_attention

        check_attention(model_config, parsed)
    take_quantization(model_config, parsed.model_name)
    check_sizes(
        model_config,
        tensor_parallel_size=parsed.layout.tensor_parallel,
        has_custom_plan=parsed.custom_parallel_plan is not None,
    )
    if parsed.adapters is not None or parsed.layout.tensor_parallel > 1:
        from rl_dtensor_worker.model.build import check_modules

        check_modules(parsed)
    if parsed.lays_out_rows:
        from rl_dtensor_worker.rehearsal import check_packing

        check_packing(parsed)
    return parsed.layout


def check_causal(model_config: PreTrainedConfig, config: EngineConfig) -> None:
    """Raise if the tokens of a language model are known to depend on what stands after them.

    Raises:
        ValueError: They do.
    """
    reason = _why_not_causal(model_config) if config.head == "language_model" else ""
    if reason:
        raise ValueError(
            f"policy.model_name={config.model_name!r} is not causal: its model_type is "
            f"{model_config.model_type!r} {reason}"
        )


def _why_not_causal(model_config: PreTrainedConfig) -> str:
    kind = model_config.model_type
    for kinds, flag in ((_ENCODERS, "is_decoder"), (frozenset(["xlm"]), "causal")):
        if kind in kinds and not getattr(model_config, flag):
            return (
                f"with {flag}=False, so that tokens see the tokens after them. A decoder of this "
                f"family has {flag}=True in its config.json"
            )
    return "whose tokens always see the tokens after them" if kind == "cpmant" else ""


def check_sizes(
    model_config: PreTrainedConfig, *, tensor_parallel_size: int, has_custom_plan: bool
) -> None:
    """Raise unless the tensor-parallel size fits the model.

    Every rank needs a part of the vocabulary; the last one's may be smaller. A user's plan has to
    share heads, experts and inner sizes equally. Where the model's own plan does not, `plan_of`
    replaces it.

    Raises:
        ValueError: It does not; the message names which.
    """
    text = model_config.get_text_config()
    size = text.vocab_size
    if -(-size // tensor_parallel_size) * (tensor_parallel_size - 1) >= size:
        raise ValueError(
            f"{_PATH}.tensor_parallel_size={tensor_parallel_size} leaves a rank without a part of "
            f"the model's vocab_size={size}"
        )
    for name in _DIVIDED if has_custom_plan else ():
        count = getattr(text, name, None)
        if isinstance(count, int) and count % tensor_parallel_size:
            raise ValueError(
                f"{_PATH}.tensor_parallel_size={tensor_parallel_size} does not divide the model's "
                f"{name}={count}"
            )
