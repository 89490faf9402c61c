"""Which module takes part in tensor parallelism how, and what is refused by name."""

import copy
from functools import partial
from unittest import mock

import parity_models
import parity_ranks
import pytest
import torch
import training_ranks
from family_models import build_family
from oracle import load, plain_logprobs, plain_training
from rank_pool import RankFailure
from rl_dtensor_worker import DTensorPolicyWorker
from rl_dtensor_worker.parallel.plans import apply_plan, plan_of
from rl_dtensor_worker.parallel.styles import TensorParallel
from tiny_model import make_batch, make_config
from tolerances import assert_all_close, assert_close
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    MoshiConfig,
    NemotronConfig,
    OPTConfig,
    Phi3Config,
)

TP2 = {"enabled": True, "tensor_parallel_size": 2}
PACKED = {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def assert_equals_plain(pools, path, section):
    """Score and train a model on two tensor-parallel ranks, and hold it against plain loops."""
    batch = make_batch(6)
    results = pools(2).run(
        parity_ranks.run_case,
        config=make_config(path, dtensor_cfg=TP2 | section),
        batch=batch,
        section=None,
        num_calls=3,
    )
    expected = plain_logprobs(load(path), batch)
    parameters, _, _ = plain_training(path, batch, global_batch_size=4, num_calls=3)
    for result in results:
        assert_close(result.columns["logprobs"], expected)
        assert_all_close(result.parameters, parameters)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return parity_models.build("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", list(parity_models.CONFIGS))
def test_the_plan_of_transformers_is_taken_and_tokens_are_apart(name):
    model = on_meta(parity_models.CONFIGS[name])
    styles = plan_of(model, custom=None, size=2)
    assert styles["model.embed_tokens"] == "embedding_rowwise"
    assert styles["lm_head"] == "colwise"
    assert styles["model.layers.1.self_attn.k_proj"] == "colwise"
    assert styles["model.layers.0.self_attn.o_proj"] == "rowwise"
    assert set(styles) <= {name for name, _ in model.named_modules()}
    norms = [inner for inner in styles if inner.endswith("input_layernorm")]
    assert norms == []


def test_a_key_for_every_layer_matches_one_part_of_a_name():
    styles = plan_of(on_meta(parity_models.CONFIGS["qwen3_moe"]), custom=None, size=2)
    assert styles["model.layers.0.mlp.experts"] == "moe_tp_experts"
    assert "model.layers.0.mlp.gate" not in styles


def test_a_plan_of_ours_stands_in_where_transformers_has_none():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = NemotronConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, **heads)
    styles = plan_of(on_meta(config), custom=None, size=2)
    assert styles["model.layers.1.mlp.down_proj"] == "rowwise"
    assert styles["model.layers.0.self_attn.v_proj"] == "colwise"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("UNMATCHED", ["model.layers.*.mlp.gate_porj", "matches no module"]),
        ("MISNAMED", ["model.layers.*.mlp.up_proj", "collwise", "ParallelStyle"]),
    ],
)
def test_a_custom_plan_with_a_mistake_is_refused_by_its_key(plan, words):
    with pytest.raises(ValueError, match=r"custom_parallel_plan") as error:
        plan_of(on_meta(parity_models.CONFIGS["llama"]), custom=f"plans_for_tests.{plan}", size=2)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_blocks_without_a_plan_gather_what_their_layers_give():
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "word_embed_proj_dim": 32}
    styles = plan_of(on_meta(OPTConfig(**sizes, num_attention_heads=2)), custom=None, size=2)
    layer = "model.decoder.layers.0"
    assert styles[f"{layer}.self_attn"] == "block"
    for leaf in ("self_attn.q_proj", "self_attn.out_proj", "fc1", "fc2"):
        assert styles[f"{layer}.{leaf}"] == "colwise_gather_output"
    assert styles["model.decoder.embed_positions"] == "positions"
    assert f"{layer}.final_layer_norm" not in styles


def test_a_block_that_a_plan_shards_in_part_gathers_and_keeps_its_experts_apart():
    # Attention sinks are one number per head, beside projections that are sharded by heads.
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    styles = plan_of(on_meta(GptOssConfig(**parity_models._COMMON, **sizes)), custom=None, size=2)
    assert styles["model.layers.1.self_attn"] == "block"
    assert styles["model.layers.1.self_attn.o_proj"] == "colwise_gather_output"
    assert styles["model.layers.0.mlp.experts"] == "moe_tp_experts"


def test_a_block_with_a_parameter_that_the_plan_leaves_out_gathers():
    model = on_meta(parity_models.CONFIGS["llama"])
    model.model.layers[1].mlp.act_fn = torch.nn.PReLU(device="meta")
    styles = plan_of(model, custom=None, size=2)
    assert styles["model.layers.1.mlp"] == "block"
    assert styles["model.layers.1.mlp.down_proj"] == "colwise_gather_output"
    assert styles["model.layers.0.mlp.down_proj"] == "rowwise"


def test_a_parameter_of_a_sharded_block_that_a_users_plan_leaves_out_is_refused():
    model = on_meta(parity_models.CONFIGS["llama"])
    model.model.layers[1].self_attn.scale = torch.nn.PReLU(device="meta")
    plan = plan_of(model, custom="plans_for_tests.ATTENTION", size=2)
    told = r"names no style for model\.layers\.1\.self_attn\.scale \(PReLU\).*custom_parallel_plan"
    with pytest.raises(ValueError, match=told):
        apply_plan(model, plan, mock.create_autospec(TensorParallel, instance=True))


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("gemma3n_text", r"uses altup\.correction_coefs\.weight without calling that layer"),
        ("gemma4", r"uses embed_tokens\.weight without calling that layer"),
        ("git", r"git\.image_encoder\..*class_embedding is used beside git\.image_encoder\..*"),
    ],
)
def test_models_that_cannot_be_sharded_are_refused_before_a_process_starts(
    tmp_path, model_type, told
):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    config = make_config(str(tmp_path), dtensor_cfg={"enabled": True})
    DTensorPolicyWorker.validate_config(config, world_size=2)
    with pytest.raises(ValueError, match=rf"policy\.dtensor_cfg\.tensor_parallel_size: .*{told}"):
        DTensorPolicyWorker.validate_config(config | {"dtensor_cfg": TP2}, world_size=2)


def test_a_users_plan_that_sequence_parallelism_does_not_know_all_of_is_refused_before(tmp_path):
    parity_models.CONFIGS["qwen3"].save_pretrained(tmp_path)
    section = TP2 | {"custom_parallel_plan": "plans_for_tests.GATHERED_QUERIES"}
    config = make_config(str(tmp_path), dtensor_cfg=section)
    DTensorPolicyWorker.validate_config(config, world_size=2)
    config["dtensor_cfg"] = section | {"sequence_parallel": True}
    told = r"sequence_parallel=True: the plan names no style for .*: switch sequence_parallel off"
    with pytest.raises(ValueError, match=told):
        DTensorPolicyWorker.validate_config(config, world_size=2)


UNEVEN = [("num_attention_heads", 3), ("intermediate_size", 97), ("num_experts", 5)]


def uneven(size, count):
    config = copy.deepcopy(parity_models.CONFIGS["qwen3_moe"])
    setattr(config, size, count)
    return config


def test_a_rank_without_a_token_is_refused(tmp_path):
    # Over four ranks three parts of seven tokens and one of four; over six none is left.
    uneven("vocab_size", 25).save_pretrained(tmp_path)
    config = make_config(str(tmp_path), dtensor_cfg={"enabled": True, "tensor_parallel_size": 4})
    DTensorPolicyWorker.validate_config(config, world_size=4)
    config["dtensor_cfg"]["tensor_parallel_size"] = 6
    with pytest.raises(ValueError, match=r"size=6 leaves a rank without a part of.*vocab_size=25"):
        DTensorPolicyWorker.validate_config(config, world_size=6)


@pytest.mark.parametrize(("size", "count"), UNEVEN)
def test_what_a_users_plan_cannot_share_equally_is_named(tmp_path, size, count):
    uneven(size, count).save_pretrained(tmp_path)
    section = TP2 | {"custom_parallel_plan": "plans_for_tests.ATTENTION"}
    config = make_config(str(tmp_path), dtensor_cfg=section)
    with pytest.raises(ValueError, match=f"tensor_parallel_size=2 does not divide.*{size}={count}"):
        DTensorPolicyWorker.validate_config(config, world_size=2)


@pytest.mark.parametrize(
    ("size", "count", "block"),
    [
        ("num_attention_heads", 3, "self_attn"),
        ("num_key_value_heads", 1, "self_attn"),
        ("num_experts", 5, "mlp"),
    ],
)
def test_blocks_that_a_plan_cannot_share_equally_gather(size, count, block):
    styles = plan_of(on_meta(uneven(size, count)), custom=None, size=2)
    others = {"self_attn", "mlp"} - {block}
    assert styles[f"model.layers.0.{block}"] == "block"
    assert not any(f"model.layers.0.{other}" in styles for other in others)


def test_one_head_of_keys_is_trained_on_two_ranks(pools, tiny_model):
    assert_equals_plain(pools, tiny_model, {})


def test_no_input_is_kept_after_a_call(pools, tmp_path):
    path = build_family(tmp_path, "gpt2", n_inner=48)
    config = make_config(path, dtensor_cfg=TP2)
    kept = pools(2).run(training_ranks.input_kept_after_scoring, config=config, batch=make_batch(2))
    assert kept == [False, False]


# Attention alone: the norms of queries and keys are of each rank's own heads, and in no plan.
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("model", "plan"), [("llama", "NAMED"), ("llama", "torch_styles"), ("qwen3", "ATTENTION")]
)
def test_a_custom_plan_gives_the_same_numbers(pools, tmp_path, model, plan):
    path = parity_models.build(model, tmp_path)
    assert_equals_plain(pools, path, {"custom_parallel_plan": f"plans_for_tests.{plan}"})


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("model", ["llama_tied", "gemma3"])
def test_a_loss_over_logits_gets_those_of_all_tokens(pools, tmp_path, model):
    path, batch = parity_models.build(model, tmp_path), make_batch(6)
    parameters, losses, _ = plain_training(path, batch, global_batch_size=4, num_calls=2)
    section = {**TP2, "sequence_parallel": True, "context_parallel_size": 2}
    results = pools(4).run(
        parity_ranks.run_case,
        config=make_config(path, dtensor_cfg=section),
        batch=batch,
        section=None,
        num_calls=2,
        loss="logits",
    )
    for result in results:
        assert_close(result.losses, losses, "losses")
        assert_all_close(result.parameters, parameters)


# Fused projections, which are gathered and then split; a plan of our own; and models without one,
# of plain layers, of layers that are stored the other way round, and with learned positions.
@pytest.mark.parametrize(
    ("make", "section"),
    [
        (Phi3Config, {}),
        (NemotronConfig, {}),
        (GPT2Config, {}),
        (partial(OPTConfig, ffn_dim=48, word_embed_proj_dim=64), {"sequence_parallel": True}),
    ],
    ids=["phi3", "nemotron", "gpt2", "opt"],
)
def test_other_plans_give_the_same_numbers(pools, tmp_path, make, section):
    torch.manual_seed(1)
    sizes = {key: value for key, value in parity_models._COMMON.items() if key != "bos_token_id"}
    config = make(**sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    parity_models.build_tokenizer().save_pretrained(tmp_path)
    assert_equals_plain(pools, str(tmp_path), section)


def test_norms_of_heads_that_transformers_does_not_name_are_of_a_ranks_own_heads():
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Glm4MoeConfig(**parity_models._COMMON, **experts, head_dim=16, use_qk_norm=True)
    styles = plan_of(on_meta(config), custom=None, size=2)
    for leaf in ("q_norm", "k_norm"):
        assert styles[f"model.layers.1.self_attn.{leaf}"] == "replicated_with_grad_allreduce"


@pytest.mark.parametrize(
    ("config", "layout", "words"),
    [
        (
            # Its config names a window that its masks do not have.
            MoshiConfig(
                **parity_models._COMMON, sliding_window=1000, ffn_dim=96, tie_word_embeddings=False
            ),
            {"sequence_packing": PACKED},
            ["sequence_packing", "MoshiForCausalLM", "leaks across sequences or loses tokens"],
        ),
    ],
    ids=["windows"],
)
def test_what_a_layout_would_compute_otherwise_is_refused(pools, tmp_path, config, layout, words):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    parity_models.build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RankFailure) as failure:
        pools(2).run(
            training_ranks.num_sharded_modules, config=make_config(str(tmp_path), **layout)
        )
    assert failure.value.kind == "ValueError"
    assert all(word in failure.value.text for word in words), failure.value.text


def test_a_parameter_beside_shared_parts_is_refused(pools, tmp_path):
    # Attention sinks: one number per head, in the module whose projections are sharded by heads.
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    config = GptOssConfig(**parity_models._COMMON, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(RankFailure) as failure:
        pools(2).run(
            parity_ranks.run_case,
            config=make_config(
                str(tmp_path),
                dtensor_cfg={**TP2, "custom_parallel_plan": "plans_for_tests.ATTENTION"},
            ),
            batch=make_batch(2),
            section=None,
            num_calls=1,
        )
    assert failure.value.kind == "ValueError"
    assert "self_attn.sinks" in failure.value.text
