"""Sequence parallelism of models whose code outside of blocks needs full sequences."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import parity_ranks
import pytest
import torch
import training_ranks
from family_models import build_family
from rank_pool import RankFailure
from rl_dtensor_worker.layout import ParallelContext
from rl_dtensor_worker.mixing import Way
from rl_dtensor_worker.parallel.sequence import repeated_layers, run_edges, shard_in_layers
from rl_dtensor_worker.parallel.structure import blocks_of
from rl_dtensor_worker.parallel.styles import SequenceScope, TensorParallel, _has_tokens_of
from rl_dtensor_worker.startup import _report
from test_parity import assert_step_of_transformers
from tiny_model import make_batch, make_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

PACKED = {"enabled": True, "train_mb_tokens": 24, "logprob_mb_tokens": 24}
SIZES = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1}
PER_LAYER = {"per_layer_config": {}, "hidden_size_per_layer_input": 8, "head_dim": 8}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
LONGCAT = LATENT | {
    "head_dim": 8,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "num_layers": 2,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 2,
}
STREAMS = LATENT | {
    "num_key_value_heads": 1,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 8,
}


def edges(joined):
    return run_edges([str(index) for index in range(len(joined) + 1)], joined)


def test_a_run_goes_from_the_first_layer_to_the_last():
    assert edges([True, True]) == ({"0"}, {"2"})


def test_a_module_between_two_layers_ends_a_run():
    assert edges([True, False, True]) == ({"0", "2"}, {"1", "3"})


def test_a_layer_that_is_called_twice_has_one_role():
    # After "b" a run ends once, so that it ends each time.
    names, joined = ["a", "b", "a", "b", "c"], [True, False, True, True]
    assert run_edges(names, joined) == ({"a", "c"}, {"b", "c"})


def test_no_layer_has_no_run():
    assert run_edges([], []) == (set(), set())


@pytest.mark.parametrize(
    ("shape", "hidden", "is_like"),
    [
        ((2, 6, 32), (2, 6, 32), True),
        ((2, 6, 4, 32), (2, 6, 4, 32), True),
        ((2, 6, 32), (2, 6, 4, 32), True),
        ((2, 6, 4), (2, 6, 32), True),
        ((1, 6, 8), (2, 6, 32), False),  # rotary embeddings of all rows
        ((2, 1, 1, 1), (2, 1, 32), False),  # a mask beside one token
        ((2, 6, 12, 12), (2, 6, 32), False),  # weights of as many heads as tokens
        ((8, 1, 12), (2, 1, 32), False),  # position biases of heads
        ((2, 6), (2, 6, 32), False),
    ],
)
def test_hidden_states_are_told_from_masks_and_biases(shape, hidden, is_like):
    assert _has_tokens_of(torch.zeros(shape), torch.Size(hidden)) is is_like
    assert not _has_tokens_of(torch.zeros(shape, dtype=torch.int64), torch.Size(hidden))


def runs_of(model):
    """Return the longest run of a model's layers, and the boundary of each layer."""
    tp = mock.create_autospec(TensorParallel, instance=True, spec_set=False)
    tp.unsharded_sequences.side_effect = nullcontext
    longest = shard_in_layers(model.eval(), tp)
    found = {}
    for name, layer in repeated_layers(model).items():
        if isinstance(layer.forward, partial):
            found[name] = layer.forward.func.__self__
    return longest, found


def gpt2():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(GPT2Config(**SIZES))


def test_layers_that_follow_each_other_are_one_run():
    longest, found = runs_of(gpt2())
    assert longest == 4
    assert [each.starts for each in found.values()] == [True, False, False, False]
    assert [each.ends for each in found.values()] == [False, False, False, True]
    assert {each.per_token for each in found.values()} == {frozenset({"hidden_states"})}


def test_a_norm_between_layers_ends_a_run_though_it_returns_nothing_to_them():
    model = gpt2()
    norm, second = nn.LayerNorm(32), model.transformer.h[1]
    model.transformer.extra = norm
    second.register_forward_pre_hook(lambda _, args: (norm(args[0]), None)[1])
    longest, found = runs_of(model)
    assert longest == 3
    assert [each.ends for each in found.values()] == [True, False, False, True]


def test_what_a_layer_is_given_per_token_is_found():
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    config = AutoConfig.for_model(
        "gemma4_text",
        **PER_LAYER,
        **sizes,
        hidden_size=32,
        num_hidden_layers=2,
        vocab_size=64,
        vocab_size_per_layer_input=64,
        num_global_key_value_heads=2,
        global_head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    _, found = runs_of(AutoModelForCausalLM.from_config(config))
    for each in found.values():
        assert each.per_token == {"hidden_states", "per_layer_input"}


def test_layers_are_the_members_of_the_list_that_contain_them():
    config = AutoConfig.for_model(
        "roberta-prelayernorm", is_decoder=True, num_hidden_layers=2, hidden_size=48, vocab_size=64
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = [f"roberta_prelayernorm.encoder.layer.{index}" for index in range(2)]
    assert [*repeated_layers(model)] == names


def test_a_layer_may_have_several_blocks_of_a_kind():
    config = AutoConfig.for_model("longcat_flash", **LONGCAT, hidden_size=32, vocab_size=64)
    with torch.device("meta"):
        names = blocks_of(AutoModelForCausalLM.from_config(config))
    of_first = {n.removeprefix("model.layers.0.") for n in names if ".layers.0." in n}
    assert {"self_attn.0", "self_attn.1", "mlps.0", "mlps.1", "mlp"} <= of_first
    assert "self_attn" not in of_first


def test_packed_and_sharded_sequences_are_both_checked():
    tp = mock.create_autospec(TensorParallel, instance=True, spec_set=False)
    tp.size, tp.shards_sequences = 2, True
    found = ParallelContext(tensor_parallel=tp).features(packed=True)
    assert found == ["dtensor_cfg.sequence_parallel=True", "sequence_packing.enabled=True"]


def test_the_log_says_where_activations_are_full(caplog):
    model = gpt2()
    _report(model, SequenceScope.MODEL, Way())
    assert not caplog.messages
    _report(model, SequenceScope.BETWEEN_LAYERS, Way(keeps_mask=True))
    layers, mask = caplog.messages
    assert "shards what activation_checkpointing keeps between the decoder layers of GPT2" in layers
    assert "sequence_packing.enabled=True: GPT2LMHeadModel adds a bias" in mask


LAYERS, BETWEEN = SequenceScope.LAYERS, SequenceScope.BETWEEN_LAYERS
CASES = {
    # Learned positions and a view of the shape of the tokens.
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_inner": 48}, {}, LAYERS),
    "gpt2, packed": ("gpt2", {"n_embd": 32, "n_head": 4, "n_inner": 48}, PACKED, LAYERS),
    # A bias of positions for all layers.
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}, {}, LAYERS),
    # Further inputs of each layer, per token.
    "gemma4": (
        "gemma4_text",
        PER_LAYER
        | {"vocab_size_per_layer_input": 64, "num_global_key_value_heads": 2, "global_head_dim": 8}
        | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
        {},
        LAYERS,
    ),
    # Two attentions in a layer.
    "longcat": ("longcat_flash", LONGCAT, {}, SequenceScope.MODEL),
    # A bias that a block returns to its caller.
    "neox japanese": ("gpt_neox_japanese", {}, {}, LAYERS),
    # Layers whose code needs full sequences.
    "roberta": ("roberta-prelayernorm", {"is_decoder": True}, {}, BETWEEN),
    # Several streams of hidden states.
    "streams": ("deepseek_v4", STREAMS, {}, LAYERS),
}


@pytest.mark.slow_beyond(4)
@pytest.mark.parametrize("case", CASES)
def test_sharded_sequences_equal_full_ones(pools, tmp_path, case):
    model_type, options, packing, scope = CASES[case]
    path = build_family(tmp_path, model_type, **options | {"initializer_range": 0.2})
    batch = make_batch(4)
    section = {
        "enabled": True,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "activation_checkpointing": model_type != "gpt_neox_japanese",
    }
    packed = {"sequence_packing": packing} if packing else {}
    config = make_config(path, dtensor_cfg=section, **packed)
    assert pools(2).run(training_ranks.sequence_scope, config=config) == [scope.name] * 2
    results = pools(2).run(
        parity_ranks.run_case,
        config=config,
        batch=batch,
        section="sequence_packing" if packing else None,
        num_calls=1,
    )
    assert_step_of_transformers(results, path, batch)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_scores_that_are_right_beside_a_wrong_gradient_are_not_enough(pools, tmp_path, precision):
    section = {"enabled": True, "tensor_parallel_size": 2, "sequence_parallel": True}
    path = build_family(tmp_path, "llama")
    config = make_config(path, dtensor_cfg=section, precision=precision)
    scopes_of = partial(pools(2).run, training_ranks.sequence_scope)
    assert scopes_of(config=config) == ["MODEL"] * 2
    # Only between layers no parameter sees the tokens of one rank.
    assert scopes_of(config=config, sums=False) == ["BETWEEN_LAYERS"] * 2
    told = (
        r"policy\.dtensor_cfg\.sequence_parallel=True: LlamaForCausalLM gets a wrong gradient of "
        r"model\.\S*norm\S* \(by \d[\d.e+-]* of its norm\), though its scores are right\. Leave"
    )
    config["model_name"] = build_family(tmp_path / "one", "llama", num_hidden_layers=1)
    with pytest.raises(RankFailure, match=told) as failure:
        scopes_of(config=config, sums=False)
    assert failure.value.kind == "ValueError"
