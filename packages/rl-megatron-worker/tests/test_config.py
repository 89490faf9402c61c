"""What the config says, and what is refused before a process starts."""

import copy

import pytest
import torch
from rl_megatron_worker import MegatronPolicyWorker
from rl_megatron_worker.config import EngineConfig
from tiny_models import build_tiny

pytestmark = pytest.mark.promise

ADAM = {"optimizer": "adam", "lr": 1e-3}
DDP = "distributed_data_parallel_config"


def config(**section):
    return {
        "model_name": "model",
        "precision": "float32",
        "train_global_batch_size": 8,
        "megatron_cfg": {"enabled": True, "optimizer": dict(ADAM), **section},
    }


def parse(given, *, world_size=4, init_optimizer=True):
    return EngineConfig.from_policy_config(
        given, world_size=world_size, init_optimizer=init_optimizer
    )


def test_every_documented_key_arrives():
    given = config(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        sequence_parallel=True,
        num_layers_in_first_pipeline_stage=3,
        activation_checkpointing=True,
        recompute_method="block",
        recompute_num_layers=2,
        empty_unused_memory_level=2,
        converter_type="llama",
        pipeline_dtype="bfloat16",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_router_dtype="fp32",
        apply_rope_fusion=False,
        scheduler={
            "lr_decay_style": "cosine",
            "lr_decay_iters": 10,
            "lr_warmup_iters": 2,
            "lr_warmup_init": 1e-5,
            "start_weight_decay": 0.1,
            "end_weight_decay": 0.2,
            "weight_decay_incr_style": "linear",
        },
        **{DDP: {"grad_reduce_in_fp32": False, "overlap_grad_reduce": True}},
    )
    given["precision"] = "bfloat16"
    given["megatron_cfg"]["optimizer"] |= {
        "min_lr": 1e-4,
        "weight_decay": 0.1,
        "bf16": True,
        "fp16": False,
        "params_dtype": "bfloat16",
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_eps": 1e-6,
        "use_distributed_optimizer": True,
        "clip_grad": 0.5,
    }
    parsed = parse(given, world_size=8)
    assert (parsed.layout.data, parsed.layout.tensor, parsed.layout.pipeline) == (2, 2, 2)
    assert parsed.layout.first_stage_layers == 3
    assert parsed.model.params_dtype == torch.bfloat16
    assert (parsed.model.recompute_granularity, parsed.model.recompute_method) == ("full", "block")
    assert parsed.model.recompute_num_layers == 2
    assert parsed.model.moe_options["moe_aux_loss_coeff"] == 0.01
    assert parsed.model.moe_options["moe_router_dtype"] == "fp32"
    assert not parsed.model.fuses_rope
    assert (parsed.converter_type, parsed.empty_unused_memory_level) == ("llama", 2)
    optimizer, scheduler = parsed.optimizer, parsed.scheduler
    assert (optimizer.lr, optimizer.min_lr, optimizer.weight_decay) == (1e-3, 1e-4, 0.1)
    assert (optimizer.adam_betas, optimizer.adam_eps) == ((0.8, 0.95), 1e-6)
    assert (optimizer.is_distributed, optimizer.max_grad_norm) == (True, 0.5)
    assert (scheduler.lr_decay_style, scheduler.lr_decay_steps) == ("cosine", 10)
    assert (scheduler.lr_warmup_steps, scheduler.lr_warmup_init) == (2, 1e-5)
    assert (scheduler.start_weight_decay, scheduler.end_weight_decay) == (0.1, 0.2)
    assert not parsed.data_parallel.grad_reduce_in_fp32
    assert parsed.data_parallel.overlap_grad_reduce
    assert parsed.sequence_multiple == 2


@pytest.mark.parametrize(
    ("name", "kwargs", "kind", "decoupled", "betas", "momentum", "decay"),
    [
        ("AdamW", {"betas": [0.9, 0.95], "eps": 1e-6}, "adam", True, (0.9, 0.95), 0.9, 0.01),
        ("Adam", {"weight_decay": 0.1}, "adam", False, (0.9, 0.999), 0.9, 0.1),
        ("SGD", {"momentum": 0.5}, "sgd", False, (0.9, 0.999), 0.5, 0.0),
    ],
)
def test_the_policys_optimizer_is_translated(name, kwargs, kind, decoupled, betas, momentum, decay):
    given = config()
    del given["megatron_cfg"]["optimizer"]
    given["optimizer"] = {"name": f"torch.optim.{name}", "kwargs": {"lr": 0.25, **kwargs}}
    given["max_grad_norm"] = 2.0
    optimizer = parse(given).optimizer
    assert (optimizer.kind, optimizer.lr, optimizer.max_grad_norm) == (kind, 0.25, 2.0)
    assert (optimizer.decoupled_weight_decay, optimizer.weight_decay) == (decoupled, decay)
    assert (optimizer.adam_betas, optimizer.sgd_momentum) == (betas, momentum)


def test_a_schedule_keeps_the_weight_decay_that_the_policys_optimizer_has():
    given = config(scheduler={"lr_warmup_iters": 2})
    del given["megatron_cfg"]["optimizer"]
    given["optimizer"] = {"name": "torch.optim.AdamW", "kwargs": {"weight_decay": 0.25}}
    scheduler = parse(given).scheduler
    assert (scheduler.start_weight_decay, scheduler.end_weight_decay) == (0.25, 0.25)


def test_without_an_optimizer_none_is_needed():
    given = config()
    del given["megatron_cfg"]["optimizer"]
    assert parse(given, init_optimizer=False).optimizer is None


REFUSED = {
    "sizes": ({"tensor_model_parallel_size": 3}, {}, "tensor_model_parallel_size=3"),
    "experts": ({"expert_model_parallel_size": 3}, {}, "expert_model_parallel_size=3"),
    "router": ({"moe_router_dtype": "fp16"}, {}, r"moe_router_dtype='fp16' must be one of"),
    "stages": ({"virtual_pipeline_model_parallel_size": 2}, {}, "pipeline_model_parallel_size > 1"),
    "pipeline_dtype": (
        {"pipeline_dtype": "bfloat16"},
        {},
        "precision='float32'",
    ),
    "level": (
        {"empty_unused_memory_level": 3},
        {},
        r"level=3 must be one of \(0, 1, 2\)",
    ),
    "fsdp": ({DDP: {"use_custom_fsdp": True}}, {}, "use_custom_fsdp=True"),
    "gather": ({DDP: {"overlap_param_gather": True}}, {}, "use_distributed_optimizer=True"),
    "kind": ({"optimizer": {**ADAM, "optimizer": "lion"}}, {}, "optimizer='lion' must be"),
    "rate": ({"optimizer": {"optimizer": "adam"}}, {}, "optimizer.lr is not set"),
    "bf16": ({"optimizer": {**ADAM, "bf16": True}}, {}, "bf16=True contradicts policy.precision"),
    "params": ({"optimizer": {**ADAM, "params_dtype": "float16"}}, {}, "params_dtype='float16'"),
    "clip": ({"optimizer": {**ADAM, "clip_grad": 2.0}}, {"max_grad_norm": 1.0}, "clip_grad=2.0"),
    "precise": (
        {"optimizer": {**ADAM, "use_precision_aware_optimizer": True}},
        {},
        "use_precision_aware_optimizer=True needs",
    ),
    "recompute": (
        {"activation_checkpointing": True, "recompute_granularity": "half"},
        {},
        "recompute_granularity='half' must be one of",
    ),
    "recompute-layers": (
        {"activation_checkpointing": True, "recompute_num_layers": 0},
        {},
        "recompute_num_layers=0 must be at least 1",
    ),
    "balance": (
        {"moe_router_load_balancing_type": "global_aux_loss"},
        {},
        "moe_router_load_balancing_type='global_aux_loss' must be one of",
    ),
    "balance-of-sequences": (
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01},
        {},
        "moe_router_load_balancing_type='seq_aux_loss' is per sequence",
    ),
    "weight": (
        {"moe_aux_loss_coeff": 0.01},
        {},
        "moe_aux_loss_coeff=0.01 needs .*type='aux_loss', got 'none'",
    ),
    "sinkhorn": (
        {"moe_router_load_balancing_type": "sinkhorn"},
        {},
        "moe_router_load_balancing_type='sinkhorn' routes tokens to other experts",
    ),
    "negative-weight": (
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": -0.01},
        {},
        "moe_aux_loss_coeff=-0.01 must be at least 0",
    ),
    "style": ({"scheduler": {"lr_decay_style": "cubic"}}, {}, "lr_decay_style='cubic'"),
    "decay": ({"scheduler": {"lr_decay_style": "linear"}}, {}, "lr_decay_iters is not set"),
    "warmup": (
        {"scheduler": {"lr_decay_iters": 2, "lr_warmup_iters": 3}},
        {},
        "lr_warmup_iters=3 must be below lr_decay_iters=2",
    ),
    "warmup-rate": (
        {"optimizer": ADAM, "scheduler": {"lr_warmup_init": 1.0, "lr_warmup_iters": 2}},
        {},
        "lr_warmup_init=1.0 must not be above policy.megatron_cfg.optimizer.lr=",
    ),
    "lowest-rate": ({"optimizer": {**ADAM, "min_lr": 1.0}}, {}, "min_lr=1.0 must not be above lr="),
    "distributed-sgd": (
        {"optimizer": {**ADAM, "optimizer": "sgd", "use_distributed_optimizer": True}},
        {},
        "use_distributed_optimizer=True needs .*optimizer='adam'",
    ),
    "head": ({}, {"head": "reward"}, "policy.head='reward' needs another backend"),
    "offload": ({}, {"fsdp_offload_enabled": True}, "fsdp_offload_enabled=True needs FSDP"),
    "torch": (
        {},
        {"scheduler": {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {}}},
        "policy.scheduler configures torch's schedulers",
    ),
    "unknown": ({"tensor_parallel_size": 2}, {}, "tensor_parallel_size is not a known key"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(case):
    section, policy, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        parse(copy.deepcopy(config(**section) | policy))


def test_what_training_alone_needs_is_not_asked_for_without_an_optimizer():
    given = config(**{DDP: {"overlap_grad_reduce": True, "overlap_param_gather": True}})
    given["megatron_cfg"]["optimizer"] = {**ADAM, "use_distributed_optimizer": True}
    for init_optimizer in (True, False):
        parse(given, init_optimizer=init_optimizer)


def test_a_torch_optimizer_without_counterpart_is_refused():
    given = config()
    del given["megatron_cfg"]["optimizer"]
    given["optimizer"] = {"name": "torch.optim.Adagrad", "kwargs": {}}
    with pytest.raises(ValueError, match=r"torch.optim.Adagrad' has no counterpart"):
        parse(given)
    given["optimizer"] = {"name": "torch.optim.AdamW", "kwargs": {"amsgrad": True}}
    with pytest.raises(ValueError, match=r"kwargs\.amsgrad=True has no counterpart"):
        parse(given)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tensor_model_parallel_size": 4}, "does not divide the model's 2 query groups"),
        ({"pipeline_model_parallel_size": 4, "num_layers_in_last_pipeline_stage": 3}, "4 layers"),
        ({"expert_model_parallel_size": 2}, "needs an MoE model"),
        (
            {"activation_checkpointing": True, "recompute_num_layers": 3},
            "recompute_num_layers=3 does not divide the 4 layers",
        ),
        (
            {
                "activation_checkpointing": True,
                "recompute_num_layers": 2,
                "pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 2,
                "virtual_pipeline_model_parallel_size": 2,
            },
            "recompute_num_layers=2 does not divide the 1 layers",
        ),
        (
            {
                "activation_checkpointing": True,
                "recompute_num_layers": 2,
                "pipeline_model_parallel_size": 2,
                "num_layers_in_last_pipeline_stage": 3,
            },
            "recompute_num_layers=2 does not divide the 3 layers",
        ),
        (
            {"converter_type": "nowhere"},
            "converter_type='nowhere'.*llama, mistral, mixtral, olmo2, olmo3, qwen2, qwen2_moe",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_a_rank_starts(tmp_path, section, message):
    given = config(**section) | {"model_name": build_tiny(tmp_path, "qwen3")}
    with pytest.raises(ValueError, match=message):
        MegatronPolicyWorker.validate_config(given, world_size=4)


def test_key_heads_of_linear_attention_that_ranks_do_not_divide_are_refused(tmp_path):
    # Of its attention there are four groups of queries.
    model = build_tiny(tmp_path, "qwen3_next", num_key_value_heads=4, num_hidden_layers=2)
    sizes = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    given = config(**sizes) | {"model_name": model}
    named = r"tensor_model_parallel_size=4 does not divide the model's 2 linear key heads"
    with pytest.raises(ValueError, match=named):
        MegatronPolicyWorker.validate_config(given, world_size=4)


def test_a_global_batch_that_ranks_do_not_divide_is_refused(tmp_path):
    given = config(tensor_model_parallel_size=2) | {
        "model_name": build_tiny(tmp_path, "qwen3"),
        "train_global_batch_size": 3,
    }
    with pytest.raises(
        ValueError, match=r"train_global_batch_size=3 is not divisible by the 2 data-parallel"
    ):
        MegatronPolicyWorker.validate_config(given, world_size=4)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="ranks may have GPUs")
def test_expert_and_expert_tensor_parallelism_together_need_gpus(tmp_path):
    section = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
    }
    given = config(**section) | {"model_name": build_tiny(tmp_path, "qwen3_moe")}
    with pytest.raises(ValueError, match=r"expert_tensor_parallel_size=2 needs GPUs"):
        MegatronPolicyWorker.validate_config(given, world_size=4)
