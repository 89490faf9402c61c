"""Traces of a worker's memory against what real ranks allocate.

The oracle is a run of the same calls on gloo ranks, whose storages are added up, and for one rank
the events of torch's allocator too: see `memory_ranks`.
"""

import copy

import memory_ranks
import pytest
import torch
from losses_for_tests import make_loss
from rl_batched_data import BatchedDataDict
from rl_dtensor_worker import DTensorPolicyWorker
from rl_interfaces import resolve_policy_config
from rl_interfaces.backend.memory import (
    TokenIds,
    TraceRequest,
    extrapolate,
    trace_worker,
    write_stand_in,
)
from tiny_model import build_tokenizer
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

WIDTH, ROWS_PER_STEP, MICRO_BATCH = 192, 4, 2
# What the product promises of a plan.
TOLERANCE = 0.10
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": LlamaConfig(**_SIZES),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, head_dim=32),
    "gemma2": Gemma2Config(**_SIZES, head_dim=32),
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **_SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256
    ),
}
# Model, ranks, keys of the policy, keys of `dtensor_cfg`.
CASES = {
    "llama_dp2": ("llama", 2, {"precision": "bfloat16"}, {}),
    "qwen2_alone": ("qwen2", 1, {}, {}),
    "qwen3_tp2_checkpointed": (
        "qwen3",
        2,
        {"precision": "bfloat16"},
        {"tensor_parallel_size": 2, "activation_checkpointing": True},
    ),
    "llama_tp2_sp": ("llama", 2, {}, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "llama_cp2": ("llama", 2, {}, {"context_parallel_size": 2}),
    "gemma2_dp2": ("gemma2", 2, {"precision": "bfloat16"}, {}),
    "mixtral_dp2": ("mixtral", 2, {"precision": "bfloat16"}, {}),
    "mixtral_tp2": ("mixtral", 2, {"precision": "bfloat16"}, {"tensor_parallel_size": 2}),
    "qwen3_moe_dp2_checkpointed": (
        "qwen3_moe",
        2,
        {"precision": "bfloat16"},
        {"activation_checkpointing": True},
    ),
}
FAST = "llama_dp2"
# The least number of layers of which two depths are traced.
DEEP = 12


def full_rows(num_rows, width=WIDTH):
    mask = torch.ones(num_rows, width)
    mask[:, 0] = 0
    tokens = torch.arange(num_rows)[:, None].expand(num_rows, width) + 5
    return BatchedDataDict(
        {
            "input_ids": tokens.clone(),
            "input_lengths": torch.full((num_rows,), width),
            "token_mask": mask,
            "sample_mask": torch.ones(num_rows),
        }
    )


def write_model(path, config):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)


def config_of(path, world_size, keys, section):
    replicas = section.get("tensor_parallel_size", 1) * section.get("context_parallel_size", 1)
    return {
        "model_name": path,
        "precision": "float32",
        "train_global_batch_size": ROWS_PER_STEP * world_size // replicas,
        "train_micro_batch_size": MICRO_BATCH,
        "logprob_batch_size": MICRO_BATCH,
        "max_grad_norm": 1.0,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}},
        "dtensor_cfg": {"enabled": True, **section},
    } | keys


def trace(config, world_size, **options):
    request = TraceRequest(
        policy=resolve_policy_config(config),
        world_size=world_size,
        has_optimizer=True,
        **{"has_cuda_kernels": False, "is_sending": True, **options},
        training_rows=full_rows(ROWS_PER_STEP),
        scored_rows=full_rows(MICRO_BATCH),
        gbs=config["train_global_batch_size"],
    )
    return trace_worker(DTensorPolicyWorker, request, tokenizer=TokenIds(eos_token_id=2))


def arguments_of(config):
    return {
        "config": config,
        "rows": full_rows(ROWS_PER_STEP),
        "scored": full_rows(MICRO_BATCH),
        "loss": make_loss("nll"),
        "gbs": config["train_global_batch_size"],
    }


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=() if each == FAST else pytest.mark.slow) for each in CASES]
)
def test_a_trace_is_what_real_ranks_allocate(case, tmp_path, pools):
    model, world_size, keys, section = CASES[case]
    config = config_of(write_model(tmp_path / "model", MODELS[model]), world_size, keys, section)
    measured = pools(world_size).run(memory_ranks.measure_storages, **arguments_of(config))[0]
    traced = trace(config, world_size)
    for name in ("score", "train", "gather"):
        peak, after = measured[name]
        assert traced.phases[name].peak == pytest.approx(peak, rel=TOLERANCE), name
        assert traced.phases[name].after == pytest.approx(after, rel=TOLERANCE), name


@pytest.mark.slow
def test_storages_are_what_the_allocator_counts(tmp_path, pools):
    config = config_of(write_model(tmp_path / "model", MODELS["qwen2"]), 1, {}, {})
    (by_storages,) = pools(1).run(memory_ranks.measure_storages, **arguments_of(config))
    (by_events,) = pools(1).run(memory_ranks.measure_allocator, **arguments_of(config))
    for name in ("score", "train", "gather"):
        assert by_storages[name][0] == pytest.approx(by_events[name][0], rel=0.05), name


@pytest.mark.slow
def test_two_depths_give_the_peaks_of_a_deeper_model(tmp_path):
    section = {"tensor_parallel_size": 2, "activation_checkpointing": True}
    traces = {}
    for depth in (4, 6, DEEP):
        model = copy.deepcopy(MODELS["llama"])
        # Large enough to be sharded layer by layer at every depth.
        model.num_hidden_layers, model.vocab_size = depth, 65_536
        path = tmp_path / str(depth)
        path.mkdir()
        write_stand_in(model, path)
        config = config_of(str(path), 4, {"precision": "bfloat16"}, section)
        traces[depth] = trace(config, 4, has_cuda_kernels=True)
    deep = traces.pop(DEEP)
    for name in ("score", "train", "gather"):
        peaks = {depth: each.phases[name].peaks for depth, each in traces.items()}
        places = set.intersection(*map(set, peaks.values()))
        found = max(
            extrapolate({depth: each[place] for depth, each in peaks.items()}, DEEP)
            for place in places
        )
        assert found == pytest.approx(deep.phases[name].peak, rel=0.01), name


@pytest.mark.slow
def test_the_state_of_the_optimizer_is_there_in_every_step(tmp_path):
    config = config_of(write_model(tmp_path / "model", MODELS["llama"]), 1, {}, {})
    traced = trace(config, 1)
    train = traced.phases["train"]
    # Both moments of AdamW, beside the parameters, before anything is computed.
    assert traced.optimizer_bytes == pytest.approx(2 * traced.model_bytes, rel=0.01)
    assert min(train.peaks.values()) > traced.model_bytes + traced.optimizer_bytes
