"""Sections `policy` in the shape of NeMo RL v0.3's examples, made by hand, mean here what they say.

Numbers that belong to a model's size are those of a tiny one.
"""

from copy import deepcopy

import backend_runs
import pytest
import torch
from rl_interfaces import resolve_policy_config
from rl_interfaces.backend.generation import SamplingConfig
from rl_megatron_worker.config import EngineConfig
from rl_policy.backends import TrainingBackend

pytestmark = pytest.mark.needs("rl-policy[all]")

GENERATION = {
    "backend": "vllm",
    "max_new_tokens": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "stop_token_ids": None,
    "stop_strings": None,
    "vllm_cfg": {
        "async_engine": False,
        "precision": "bfloat16",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "gpu_memory_utilization": 0.6,
        "max_model_len": 512,
        "enforce_eager": False,
    },
    "colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}},
}
SCHEDULE = [
    {
        "name": "torch.optim.lr_scheduler.LinearLR",
        "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 50},
    },
    {
        "name": "torch.optim.lr_scheduler.ConstantLR",
        "kwargs": {"factor": 1.0, "total_iters": 10_000_000_000},
    },
    {"milestones": [50]},
]
ADAMW = {
    "name": "torch.optim.AdamW",
    "kwargs": {
        "lr": 5e-6,
        "weight_decay": 0.01,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "foreach": False,
        "fused": False,
    },
}
BUDGETS = {"train_mb_tokens": 2048, "logprob_mb_tokens": 4096}
SIZES = {
    "train_global_batch_size": 512,
    "train_micro_batch_size": 4,
    "generation_batch_size": 32,
    "logprob_batch_size": 8,
    "max_total_sequence_length": 512,
    "precision": "bfloat16",
    "max_grad_norm": 1.0,
}
DTENSOR = {
    **SIZES,
    "fsdp_offload_enabled": False,
    "activation_checkpointing_enabled": False,
    "dtensor_cfg": {
        "enabled": True,
        "cpu_offload": False,
        "sequence_parallel": True,
        "activation_checkpointing": True,
        "tensor_parallel_size": 2,
        "context_parallel_size": 1,
        "custom_parallel_plan": None,
    },
    "dynamic_batching": {"enabled": True, **BUDGETS, "sequence_length_round": 64},
    "sequence_packing": {
        "enabled": False,
        **BUDGETS,
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_round": 64,
    },
    "make_sequence_length_divisible_by": 2,
    "optimizer": ADAMW,
    "scheduler": SCHEDULE,
    "generation": GENERATION,
}
SFT = {
    "train_global_batch_size": 512,
    "train_micro_batch_size": 2,
    "max_total_sequence_length": 512,
    "precision": "bfloat16",
    "fsdp_offload_enabled": False,
    "activation_checkpointing_enabled": False,
    "dtensor_cfg": {
        "enabled": True,
        "cpu_offload": False,
        "sequence_parallel": False,
        "activation_checkpointing": False,
        "tensor_parallel_size": 1,
        "context_parallel_size": 1,
        "custom_parallel_plan": None,
    },
    "dynamic_batching": {"enabled": False},
    "sequence_packing": {"enabled": False},
    "make_sequence_length_divisible_by": 1,
    "max_grad_norm": None,
    "optimizer": ADAMW,
}
MEGATRON = {
    **SIZES,
    "dtensor_cfg": {"enabled": False},
    "dynamic_batching": {"enabled": False, **BUDGETS, "sequence_length_round": 64},
    "sequence_packing": {
        "enabled": True,
        **BUDGETS,
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_round": 64,
    },
    "make_sequence_length_divisible_by": 1,
    "optimizer": None,
    "megatron_cfg": {
        "enabled": True,
        "empty_unused_memory_level": 0,
        "activation_checkpointing": False,
        "converter_type": "Qwen3ForCausalLM",
        "tensor_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "context_parallel_size": 1,
        "pipeline_dtype": "bfloat16",
        "sequence_parallel": False,
        "freeze_moe_router": True,
        "optimizer": {
            "optimizer": "adam",
            "lr": 5e-6,
            "min_lr": 5e-7,
            "weight_decay": 0.01,
            "bf16": True,
            "fp16": False,
            "params_dtype": "float32",
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_eps": 1e-8,
            "sgd_momentum": 0.9,
            "use_distributed_optimizer": True,
            "use_precision_aware_optimizer": True,
            "clip_grad": 1.0,
        },
        "scheduler": {
            "start_weight_decay": 0.01,
            "end_weight_decay": 0.01,
            "weight_decay_incr_style": "constant",
            "lr_decay_style": "constant",
            "lr_decay_iters": 1000,
            "lr_warmup_iters": 13,
            "lr_warmup_init": 5e-7,
        },
        "distributed_data_parallel_config": {
            "grad_reduce_in_fp32": False,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "average_in_collective": True,
            "use_custom_fsdp": False,
            "data_parallel_sharding_strategy": "no_shard",
        },
    },
    "generation": GENERATION,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(backend_runs.save_model(tmp_path_factory.mktemp("m"), backend_runs.make_tokenizer()))


def layout_of(section, model):
    config = resolve_policy_config(
        {**deepcopy(section), "model_name": model, "tokenizer": {"name": model}}
    )
    worker_class = TrainingBackend.of_config(config).worker_class
    return config, worker_class.validate_config(config, world_size=4, init_optimizer=True)


@pytest.mark.parametrize(
    ("section", "data_parallel"),
    [(DTENSOR, 2), (SFT, 4), (MEGATRON, 2)],
    ids=["dtensor", "sft", "megatron"],
)
def test_a_section_of_the_reference_is_a_layout(model, section, data_parallel):
    config, layout = layout_of(section, model)
    assert layout.data_parallel == data_parallel
    if "generation" in section:
        # A completion may be as long as a row, and ends with it.
        assert SamplingConfig.from_policy_config(config).max_new_tokens == 512


def test_keys_of_a_section_mean_what_they_say_there(model):
    config, _ = layout_of(MEGATRON, model)
    parsed = EngineConfig.from_policy_config(config, world_size=4, init_optimizer=True)
    assert parsed.optimizer.is_distributed
    assert parsed.optimizer.wants_precision_aware
    assert parsed.model.freezes_routers
    assert parsed.model.params_dtype is torch.bfloat16
    longer = DTENSOR | {"generation": GENERATION | {"max_new_tokens": 513}}
    with pytest.raises(ValueError, match=r"max_new_tokens=513 is more than .*_length=512"):
        layout_of(longer, model)
