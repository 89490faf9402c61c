"""Blocks that mix tokens otherwise than by dispatched attention, packed and sharded."""

import parity_ranks
import pytest
import scoring_ranks
import torch
from family_models import EXPERTS, HYBRIDS, SIZES, build_family
from oracle import load, plain_logprobs, plain_training
from rl_dtensor_worker import attention, mixing
from rl_dtensor_worker.attention import Heads, packed_attention_forward, sink_attention
from rl_dtensor_worker.mixing import Way, take_attention, ways_of
from test_parity import assert_step_of_transformers
from tiny_model import make_batch, make_config
from tolerances import REPEATED, assert_all_close, assert_close
from torch.nn.functional import softmax
from transformers import AutoConfig, AutoModelForCausalLM

PACKED = {"enabled": True, "train_mb_tokens": 24, "logprob_mb_tokens": 24}
LAYOUTS = {
    "packed": (1, {"sequence_packing": PACKED}),
    "cp2": (2, {"dtensor_cfg": {"enabled": True, "context_parallel_size": 2}}),
}


def tiny(model_type):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | (HYBRIDS | EXPERTS).get(model_type, {}))
    return AutoModelForCausalLM.from_config(config).eval()


def names_of(model):
    """Return the leaves of the names in each way that is found for a model."""
    take_attention(model, tolerance=1e-3)
    return [
        {name.rpartition(".")[2] for name in way.names} for way in ways_of(model, torch.no_grad)
    ]


@pytest.mark.slow_beyond(5, every=3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", [*HYBRIDS, "gpt_oss"])
def test_packed_and_sharded_sequences_equal_plain_ones(pools, tmp_path, model_type, layout):
    num_ranks, settings = LAYOUTS[layout]
    options = (HYBRIDS | EXPERTS)[model_type]
    path = build_family(tmp_path, model_type, **options | {"initializer_range": 0.2})
    batch = make_batch(4)
    section = "sequence_packing" if layout == "packed" else None
    results = pools(num_ranks).run(
        parity_ranks.run_case,
        config=make_config(path, **settings),
        batch=batch,
        section=section,
        num_calls=1,
    )
    assert_step_of_transformers(results, path, batch)


def test_a_backward_pass_that_repeats_a_forward_has_its_sequences(pools, tmp_path):
    path, batch = build_family(tmp_path, "qwen3_5_text", **HYBRIDS["qwen3_5_text"]), make_batch(4)
    checkpointed = {"enabled": True, "activation_checkpointing": True}
    (result,) = pools(1).run(
        parity_ranks.run_case,
        config=make_config(path, sequence_packing=PACKED, dtensor_cfg=checkpointed),
        batch=batch,
        section="sequence_packing",
        num_calls=1,
    )
    parameters, _, _ = plain_training(path, batch, global_batch_size=4, num_calls=1)
    assert_all_close(result.parameters, parameters)


def test_blocks_beside_attention_are_found_first():
    assert names_of(tiny("qwen3_next")) == [
        set(),
        {"linear_attn"},
        *[{"linear_attn", "self_attn"}] * 3,
    ]


def test_a_model_of_attention_alone_has_none_beside_it():
    assert names_of(tiny("qwen3_moe")) == [set(), *[{"self_attn"}] * 3]


def test_an_attention_that_computes_otherwise_is_not_taken(monkeypatch):
    model = tiny("gpt_oss")
    take_attention(model, tolerance=1e-3)
    assert model.config._attn_implementation == attention.NAME
    monkeypatch.setattr(attention, "packed_attention_forward", without_sinks)
    model = tiny("gpt_oss")
    take_attention(model, tolerance=1e-3)
    assert model.config._attn_implementation == "eager"


def without_sinks(*args, s_aux, **kwargs):
    return packed_attention_forward(*args, **kwargs)


LLAMA4 = {
    "attention_chunk_size": 4,
    "num_local_experts": 2,
    "intermediate_size_mlp": 48,
    "head_dim": 8,
    "no_rope_layers": [1, 0],
}
IN_MASKS = {
    "chunks": ("llama4_text", LLAMA4),
    # Queries of later tokens are scaled, by where they are in the row: beyond what a start probes.
    "temperature": ("llama4_text", LLAMA4 | {"floor_scale": 21}),
    "window": ("phimoe", EXPERTS["phimoe"] | {"sliding_window": 6}),
    "alibi": ("falcon", {"alibi": True, "ffn_hidden_size": 48}),
}


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("case", IN_MASKS)
def test_what_masks_say_holds_in_packed_sequences(pools, tmp_path, case):
    model_type, options = IN_MASKS[case]
    path = build_family(tmp_path, model_type, **options | {"initializer_range": 0.2})
    batch = make_batch(4)
    (result,) = pools(1).run(
        parity_ranks.run_case,
        config=make_config(path, sequence_packing=PACKED),
        batch=batch,
        section="sequence_packing",
        num_calls=1,
    )
    expected = plain_logprobs(load(path), batch)[result.order or list(range(4))]
    assert_close(result.columns["logprobs"], expected)
    parameters, _, _ = plain_training(path, batch, global_batch_size=4, num_calls=1)
    assert_all_close(result.parameters, parameters)


def test_short_windows_are_taken_back():
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama4_text", **SIZES | LLAMA4 | {"attention_chunk_size": 64})
    model = AutoModelForCausalLM.from_config(config).eval()
    assert take_attention(model, tolerance=1e-3)
    scale = model.model.layers[1].self_attn.floor_scale
    with mixing.short_windows(model):
        assert model.config.attention_chunk_size == 4
        assert model.model.layers[1].self_attn.floor_scale == 4
    assert model.config.attention_chunk_size == 64
    assert model.model.layers[1].self_attn.floor_scale == scale > 4


def test_windows_that_layers_pass_on_are_not_read_from_masks():
    assert not take_attention(tiny("gpt_oss"), tolerance=1e-3)


def test_a_mask_of_packed_tokens_as_one_row_is_that_of_each_row():
    mask = torch.full((1, 2, 6, 6), -9e9).triu(1) + torch.arange(6)
    rows = mixing._mask_of_rows(mask, torch.zeros(3, 4, 8))
    assert torch.equal(rows, mask[..., :4, :4])
    seen = torch.ones(1, 1, 6, 6).tril().bool()
    assert torch.equal(mixing._mask_of_rows(seen, torch.zeros(3, 4, 8)), seen[..., :4, :4])


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(6, 6).tril().triu(-2).bool()[None, None],
        torch.block_diag(*torch.ones(2, 3, 3)).tril().bool()[None, None],
        torch.ones(1, 1, 3, 3).tril().bool(),
        torch.ones(1, 6),
    ],
    ids=["window", "sequences", "too short", "of tokens"],
)
def test_another_mask_is_not_that_of_each_row(mask):
    with pytest.raises(ValueError, match="is not that of one causal row"):
        mixing._mask_of_rows(mask, torch.zeros(3, 4, 8))


@pytest.mark.parametrize("shape", [(4, 1, 9), (1, 4, 1, 9)])
def test_position_biases_of_rows_start_anew(shape):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    biases = (slopes[:, None] * torch.arange(9)).view(shape)
    found = mixing._alibi_of_rows(biases, torch.zeros(3, 5, 8)).view(3, 4, 5)
    assert torch.equal(found, (slopes[:, None] * torch.arange(5)).expand(3, 4, 5))


def test_sinks_with_capped_scores_are_refused():
    query, key, value = torch.randn(3, 1, 2, 6, 8)
    both = {"softcap": 2.0, "s_aux": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"policy\.model_name: sinks with capped scores"):
        packed_attention_forward(torch.nn.Module(), query, key, value, None, **both)


def test_a_window_holds_without_a_mask_too():
    query, key, value = torch.randn(3, 1, 2, 6, 8)
    module = torch.nn.Module()
    found, _ = packed_attention_forward(module, query, key, value, None, sliding_window=3)
    band = torch.ones(6, 6).tril().triu(-2).bool()
    expected, _ = packed_attention_forward(module, query, key, value, band)
    atol = REPEATED * float(value.abs().max())
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def test_windows_that_a_mask_says_are_not_replaced_by_full_rows():
    model = tiny("gpt_oss")
    take_attention(model, tolerance=1e-3)
    _, rows = ways_of(model, torch.no_grad)
    assert {name.rpartition(".")[2] for name in rows.names} == {"self_attn"}
    assert rows.takes_rows


def test_experts_that_flatten_their_rows_mix_nothing():
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama4_text", **SIZES | LLAMA4)
    found = names_of(AutoModelForCausalLM.from_config(config).eval())
    assert found == [set(), {"self_attn"}]


def test_what_was_chosen_before_is_taken_back():
    model, batch = tiny("qwen3_next"), torch.arange(8)[None]
    chosen = mixing.Mixing()
    chosen.attention = "sdpa"
    forwards = {name: each.forward for name, each in model.named_modules()}
    chosen.choose(model, Way(names=("model.layers.0.linear_attn",)), "sdpa")
    assert model.model.layers[0].linear_attn.forward != forwards["model.layers.0.linear_attn"]
    # No sequences are given: rows as they are.
    assert torch.equal(model(batch).logits, tiny("qwen3_next")(batch).logits)
    chosen.choose(model, Way(), "sdpa")
    assert {name: each.forward for name, each in model.named_modules()} == forwards


@pytest.mark.parametrize("mask", [None, "bool", "additive"])
def test_a_sink_is_one_more_score_without_a_value(mask):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 5, 6), torch.randn(2, 2, 5, 6), torch.randn(2, 2, 5, 6)
    sinks = torch.randn(4, requires_grad=True)
    visible = torch.ones(5, 5).tril().bool()
    given = {
        None: None,
        "bool": visible,
        "additive": torch.zeros(5, 5).masked_fill(~visible, float("-inf")),
    }[mask]
    output = sink_attention(Heads(query, key, value), given, sinks=sinks, scaling=0.3)
    keys, values = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = (0.3 * query @ keys.transpose(-1, -2)).masked_fill(~visible, float("-inf"))
    column = sinks[None, :, None, None].expand(2, 4, 5, 1)
    weights = softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    expected = (weights @ values).transpose(1, 2)
    atol = REPEATED * float(value.abs().max())
    torch.testing.assert_close(output, expected, atol=atol, rtol=0)
    (found,) = torch.autograd.grad(output.square().sum(), sinks)
    (wanted,) = torch.autograd.grad(expected.square().sum(), sinks)
    torch.testing.assert_close(found, wanted, atol=REPEATED * float(wanted.abs().max()), rtol=0)


def test_an_attention_of_a_user_keeps_its_own(pools, tmp_path):
    path, batch = build_family(tmp_path, "gpt_oss", **EXPERTS["gpt_oss"]), make_batch(4)
    results = pools(1).run(
        scoring_ranks.score_in_layout,
        config=make_config(path, dtensor_cfg={"enabled": True, "attn_implementation": "eager"}),
        batch=batch,
    )
    expected = plain_logprobs(load(path), batch)
    assert_close(results[0], expected)
