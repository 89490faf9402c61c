"""Record what models of vLLM consume under tensor parallelism, and compare with their own loads.

Started by `test_vllm.py` as a process of its own: vLLM's groups are global.
"""

import sys
import tempfile
from unittest.mock import patch

import torch
import vllm.distributed.parallel_state as parallel_state
from rl_refit.resharding.consumers import record
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader.utils import initialize_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "dense": Qwen2Config(**SIZES, architectures=["Qwen2ForCausalLM"]),
    "experts": Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        architectures=["Qwen3MoeForCausalLM"],
    ),
}


def check(vllm_config, weights, *, rank, tp):
    """Compare the parameters that slices fill with those that the model's loader fills."""
    # As vLLM's own tests do: the layers read size and rank from the group.
    group = parallel_state.get_tp_group()
    vllm_config.compilation_config.static_forward_context.clear()
    with patch.object(group, "world_size", tp), patch.object(group, "rank_in_group", rank):
        model = initialize_model(vllm_config)
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.data.zero_()
        metadata = [(name, t.dtype, tuple(t.shape)) for name, t in weights.items()]
        found = record(model.load_weights, metadata, parameters)
        assert not any(bool(parameter.any()) for parameter in parameters.values())
        assert not found.full, found.full
        assert not found.unused, found.unused
        mine = {name: torch.zeros_like(each.data) for name, each in parameters.items()}
        for each in found.slices:
            each.want(mine).data.copy_(each.box.view_of(weights[each.name]))
        model.load_weights(iter(weights.items()))
    for name, parameter in parameters.items():
        assert torch.equal(mine[name], parameter.data), name
        assert bool(parameter.any()), name
    return len(found.slices)


def check_kind(kind):
    """Compare on every rank of three sizes."""
    folder = tempfile.mkdtemp()
    CONFIGS[kind].save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.bfloat16)
    weights = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    config = ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16")
    vllm_config = VllmConfig(model_config=config)
    with set_current_vllm_config(vllm_config), torch.no_grad():
        if not parallel_state.model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
        for tp in (1, 2, 4):
            for rank in range(tp):
                assert check(vllm_config, weights, rank=rank, tp=tp) >= len(weights)


def main(kinds):
    for kind in kinds:
        check_kind(kind)
    sys.stdout.write("all refits are as they should be\n")


if __name__ == "__main__":
    main(sys.argv[1:])
