"""Sections `policy` in the shape of NeMo RL v0.3's examples, made by hand, mean here what they say.

Each shape is a combination of keys of those files that no other has. Numbers that belong to a
model's size are those of a tiny one.
"""

from copy import deepcopy

import backend_runs
import pytest
import torch
from rl_dtensor_worker.config import EngineConfig as DTensorConfig
from rl_interfaces import resolve_policy_config
from rl_interfaces.backend.generation import SamplingConfig
from rl_interfaces.config.resolve import merge_sections
from rl_megatron_worker.config import EngineConfig as MegatronConfig
from rl_policy.backends import TrainingBackend
from rl_policy.generation.vllm.config import generation_of_policy, parse_engine_config
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = pytest.mark.needs("rl-policy[all]")

WORLD_SIZE = 8
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
BUDGETS = {"train_mb_tokens": 2048, "logprob_mb_tokens": 4096}
DYNAMIC = {**BUDGETS, "sequence_length_round": 64}
PACKED = {**DYNAMIC, "algorithm": "modified_first_fit_decreasing"}


def schedule(start_factor, num_steps):
    linear = {"start_factor": start_factor, "end_factor": 1.0, "total_iters": num_steps}
    constant = {"factor": 1.0, "total_iters": 10_000_000_000}
    return [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": linear},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": constant},
        {"milestones": [num_steps]},
    ]


def adamw(**changed):
    kwargs = {"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, **changed}
    return {"name": "torch.optim.AdamW", "kwargs": kwargs}


SIZES = {
    "train_global_batch_size": 512,
    "train_micro_batch_size": 4,
    "generation_batch_size": 32,
    "logprob_batch_size": 8,
    "max_total_sequence_length": 512,
    "precision": "bfloat16",
    "max_grad_norm": 1.0,
}
FSDP_KEYS = {"fsdp_offload_enabled": False, "activation_checkpointing_enabled": False}
DTENSOR = {
    "enabled": True,
    "cpu_offload": False,
    "sequence_parallel": False,
    "activation_checkpointing": False,
    "tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "custom_parallel_plan": None,
}
GRPO = {
    **SIZES,
    **FSDP_KEYS,
    "dtensor_cfg": DTENSOR,
    "dynamic_batching": {"enabled": True, **DYNAMIC},
    "make_sequence_length_divisible_by": 1,
    "optimizer": adamw(foreach=False, fused=False),
    "scheduler": schedule(0.1, 50),
    "generation": GENERATION,
}
DDP = {
    "grad_reduce_in_fp32": False,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "average_in_collective": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
}
MEGATRON = {
    "enabled": True,
    "empty_unused_memory_level": 0,
    "activation_checkpointing": False,
    "converter_type": "Qwen3ForCausalLM",
    "tensor_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "context_parallel_size": 1,
    "pipeline_dtype": "bfloat16",
    "sequence_parallel": False,
    "freeze_moe_router": True,
    "moe_router_dtype": "fp64",
    "moe_router_load_balancing_type": "none",
    "moe_router_bias_update_rate": 0.0,
    "apply_rope_fusion": True,
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
        "lr_decay_iters": None,
        "lr_warmup_iters": 13,
        "lr_warmup_init": 5e-7,
    },
    "distributed_data_parallel_config": {**DDP, "use_custom_fsdp": False},
}
# Of files for supervised and preference training, which write the section out where it is off too.
MEGATRON_SFT = {
    **{key: value for key, value in MEGATRON.items() if key != "converter_type"},
    "empty_unused_memory_level": 1,
    "freeze_moe_router": False,
    "moe_router_dtype": None,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_bias_update_rate": 1e-3,
    "optimizer": {**MEGATRON["optimizer"], "bf16": False, "min_lr": 4.9999e-6},
    "scheduler": {**MEGATRON["scheduler"], "lr_warmup_iters": 50, "lr_warmup_init": 4.9999e-6},
    "distributed_data_parallel_config": DDP,
}
SFT = {
    "train_global_batch_size": 32,
    "train_micro_batch_size": 1,
    "max_total_sequence_length": 512,
    "precision": "bfloat16",
    **FSDP_KEYS,
    "tokenizer": {
        "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"
    },
    "dtensor_cfg": DTENSOR,
    "dynamic_batching": {"enabled": False},
    "make_sequence_length_divisible_by": 1,
    "max_grad_norm": 1.0,
    "optimizer": adamw(foreach=False, fused=False),
}
GRPO_MEGATRON = {
    **SIZES,
    "dtensor_cfg": {"enabled": False},
    "dynamic_batching": {"enabled": False},
    "sequence_packing": {"enabled": False, **PACKED, "algorithm": "modified_ffd"},
    "make_sequence_length_divisible_by": 1,
    "optimizer": None,
    "megatron_cfg": MEGATRON,
    "generation": GENERATION,
}
SHARDED = {"tensor_parallel_size": 2, "sequence_parallel": True}


def engines(section=GENERATION, **changed):
    """Return what changes in `generation`: its own keys, and those of `vllm_cfg`."""
    own = {key: changed.pop(key) for key in list(changed) if key in section}
    return {"generation": {**own, "vllm_cfg": changed}}


SHAPES = {
    "grpo": GRPO,
    "grpo_packed": merge_sections(
        {key: value for key, value in GRPO.items() if key not in FSDP_KEYS},
        {
            "megatron_cfg": {"enabled": False},
            "dynamic_batching": {"enabled": False},
            "sequence_packing": {"enabled": True, **PACKED},
        },
    ),
    "grpo_8b": GRPO
    | {
        "optimizer": adamw(lr=3e-7),
        "scheduler": schedule(0.1, 13),
        "train_micro_batch_size": 1,
        "logprob_batch_size": 2,
    },
    "grpo_tp": merge_sections(
        GRPO,
        {
            "dtensor_cfg": SHARDED,
            "sequence_packing": {"enabled": False},
            "make_sequence_length_divisible_by": 2,
            **engines(tensor_parallel_size=4, stop_token_ids=[5]),
        },
    ),
    "grpo_recomputed": merge_sections(
        GRPO,
        {
            "dtensor_cfg": {**SHARDED, "activation_checkpointing": True},
            "dynamic_batching": {"enabled": False},
            "make_sequence_length_divisible_by": 2,
            **engines(tensor_parallel_size=4),
        },
    ),
    "grpo_offloaded": merge_sections(
        GRPO,
        {
            "dtensor_cfg": {**SHARDED, "activation_checkpointing": True, "cpu_offload": True},
            "dynamic_batching": {"enabled": False},
            **engines(gpu_memory_utilization=0.8, load_format="dummy"),
        },
    ),
    # Sequences are sharded over one rank, and completions are truncated.
    "grpo_puzzle": merge_sections(
        GRPO,
        {
            "dtensor_cfg": {
                "cpu_offload": True,
                "activation_checkpointing": True,
                "sequence_parallel": True,
            },
            **engines(top_p=0.999, top_k=10_000),
        },
    ),
    "sft": SFT | {"megatron_cfg": MEGATRON_SFT | {"enabled": False}},
    "sft_tp": SFT
    | {
        "dtensor_cfg": {**DTENSOR, **SHARDED},
        "sequence_packing": {"enabled": False},
        "make_sequence_length_divisible_by": 2,
    },
    "sft_unclipped": SFT
    | {"dtensor_cfg": {**DTENSOR, "tensor_parallel_size": 2}, "max_grad_norm": None},
    "sft_packing_off": SFT
    | {
        "sequence_packing": {
            "enabled": False,
            "train_mb_tokens": 512,
            "algorithm": "modified_first_fit_decreasing",
            "sequence_length_round": 64,
        }
    },
    "sft_megatron": SFT
    | {
        "dtensor_cfg": {"enabled": False},
        "optimizer": None,
        "megatron_cfg": {
            **MEGATRON_SFT,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
        },
        "make_sequence_length_divisible_by": 2,
    },
    "dpo": SFT | {"scheduler": schedule(1e-9, 1), "train_global_batch_size": 256},
    "dpo_megatron": merge_sections(
        SFT,
        {
            "dtensor_cfg": {"enabled": False},
            "optimizer": None,
            "make_sequence_length_divisible_by": 2,
            "megatron_cfg": {
                **MEGATRON_SFT,
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "moe_router_dtype": "fp64",
                "optimizer": {**MEGATRON["optimizer"], "min_lr": 5e-6, "adam_beta2": 0.98},
                "scheduler": {
                    **MEGATRON["scheduler"],
                    "lr_decay_style": "linear",
                    "lr_decay_iters": 1_000_000_000,
                    "lr_warmup_iters": 2,
                    "lr_warmup_init": 1e-8,
                },
            },
        },
    ),
    "grpo_megatron": GRPO_MEGATRON,
    "grpo_megatron_packed": GRPO_MEGATRON
    | {
        "dynamic_batching": {"enabled": False, **DYNAMIC},
        "sequence_packing": {"enabled": True, **PACKED},
    },
    "grpo_megatron_stages": merge_sections(
        GRPO_MEGATRON,
        {
            **FSDP_KEYS,
            "scheduler": None,
            "megatron_cfg": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            "make_sequence_length_divisible_by": 2,
        },
    ),
    "grpo_megatron_not_sharded": merge_sections(
        GRPO_MEGATRON,
        {
            "megatron_cfg": {
                "distributed_data_parallel_config": {"data_parallel_sharding_strategy": "no_shard"}
            }
        },
    ),
    "grpo_megatron_experts": merge_sections(
        GRPO_MEGATRON,
        {
            **FSDP_KEYS,
            "scheduler": None,
            "megatron_cfg": {
                "empty_unused_memory_level": 1,
                # Of the file that it was made from, and not the model's.
                "converter_type": "LlamaForCausalLM",
                "tensor_model_parallel_size": 2,
                "expert_model_parallel_size": 4,
                "sequence_parallel": True,
                "env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
            },
            "make_sequence_length_divisible_by": 2,
            **engines(tensor_parallel_size=4),
        },
    ),
}
DTENSOR_SHAPES = [name for name, shape in SHAPES.items() if shape["dtensor_cfg"]["enabled"]]
MEGATRON_SHAPES = [name for name in SHAPES if name not in DTENSOR_SHAPES]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return backend_runs.save_model(tmp_path_factory.mktemp("m"), backend_runs.make_tokenizer())


@pytest.fixture(scope="module")
def model_with_experts(tmp_path_factory):
    path = tmp_path_factory.mktemp("experts")
    config = Qwen3MoeConfig(
        vocab_size=backend_runs.VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return str(path)


def resolved(name, model):
    named = {"model_name": model, "tokenizer": {"name": model}}
    return resolve_policy_config(merge_sections(deepcopy(SHAPES[name]), named))


def engine_config(parser, name, model="a-model"):
    return parser.from_policy_config(
        resolved(name, model), world_size=WORLD_SIZE, init_optimizer=True
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_section_of_the_reference_is_a_layout(name, model, model_with_experts):
    config = resolved(name, model_with_experts if name == "grpo_megatron_experts" else model)
    worker_class = TrainingBackend.of_config(config).worker_class
    layout = worker_class.validate_config(config, world_size=WORLD_SIZE, init_optimizer=True)
    given = SHAPES[name]
    sizes = given["dtensor_cfg"] if name in DTENSOR_SHAPES else given["megatron_cfg"]
    sharded = sizes.get("tensor_parallel_size") or sizes["tensor_model_parallel_size"]
    sharded *= sizes.get("pipeline_model_parallel_size", 1)
    assert layout.data_parallel == WORLD_SIZE // sharded


@pytest.mark.parametrize("name", [name for name in SHAPES if "generation" in SHAPES[name]])
def test_engines_of_a_section_sample_as_it_says(name):
    config, given = resolved(name, "a-model"), SHAPES[name]["generation"]
    generation = generation_of_policy(config)
    engine = parse_engine_config(generation, seed=0, path="policy.generation")
    for key, value in given["vllm_cfg"].items():
        assert getattr(engine, key) == value, key
    assert (engine.model_name, engine.is_colocated) == ("a-model", True)
    sampling = SamplingConfig.from_policy_config(config)
    # A completion may be as long as a row, and ends with it.
    assert sampling.max_new_tokens == config["max_total_sequence_length"] == 512
    assert (sampling.top_p, sampling.top_k) == (given["top_p"], given["top_k"])
    assert sampling.stop_token_ids == tuple(given["stop_token_ids"] or ())


@pytest.mark.parametrize("name", DTENSOR_SHAPES)
def test_a_dtensor_section_means_what_it_says_there(name):
    parsed, given = engine_config(DTensorConfig, name), SHAPES[name]
    section = given["dtensor_cfg"]
    for key in ("cpu_offload", "activation_checkpointing"):
        assert getattr(parsed, key) == section[key], key
    is_sharded = section["tensor_parallel_size"] > 1
    assert parsed.sequence_parallel == (section["sequence_parallel"] and is_sharded)
    assert parsed.compute_dtype is torch.bfloat16
    assert parsed.max_grad_norm == given["max_grad_norm"]
    assert parsed.optimizer is not None
    assert parsed.optimizer.kwargs == given["optimizer"]["kwargs"]
    assert (parsed.scheduler is None) == ("scheduler" not in given)
    modes = [
        key for key in ("dynamic_batching", "sequence_packing") if given.get(key, {}).get("enabled")
    ]
    assert [parsed.planned_by] == (modes or [None])


@pytest.mark.parametrize("name", MEGATRON_SHAPES)
def test_a_megatron_section_means_what_it_says_there(name):
    parsed, given = engine_config(MegatronConfig, name), SHAPES[name]
    section = given["megatron_cfg"]
    optimizer, scheduler = parsed.optimizer, parsed.scheduler
    # The model is in the policy's precision, the optimizer's own copy of it in float32.
    assert parsed.model.params_dtype is torch.bfloat16
    assert optimizer.is_distributed
    assert optimizer.wants_precision_aware
    assert (optimizer.lr, optimizer.min_lr) == (5e-6, section["optimizer"]["min_lr"])
    assert scheduler.lr_decay_style == section["scheduler"]["lr_decay_style"]
    assert scheduler.lr_warmup_steps == section["scheduler"]["lr_warmup_iters"]
    assert parsed.model.freezes_routers == section["freeze_moe_router"]
    assert parsed.model.moe_options.get("moe_router_dtype") == section["moe_router_dtype"]
    assert parsed.model.fuses_rope
    assert parsed.data_parallel.overlap_param_gather
    assert not parsed.data_parallel.grad_reduce_in_fp32
    assert parsed.layout.sequence_parallel == section["sequence_parallel"]


def test_a_completion_longer_than_a_row_is_refused(model):
    longer = merge_sections(SHAPES["grpo"], {"generation": {"max_new_tokens": 513}})
    config = resolve_policy_config(longer | {"model_name": model})
    worker_class = TrainingBackend.of_config(config).worker_class
    with pytest.raises(ValueError, match=r"max_new_tokens=513 is more than .*_length=512"):
        worker_class.validate_config(config, world_size=WORLD_SIZE, init_optimizer=True)
