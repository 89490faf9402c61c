from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import (
    gradients_of,
    plain_gradients,
    plain_logprobs,
)
from rl_batched_data import PackedSequences, SlicedDataDict
from rl_batched_data.packing.context_shards import ContextShards
from rl_batched_data.packing.packed_sequences import group_by_length
from rl_dtensor_worker.attention import (
    NAME,
    AttentionRows,
    ChunkRows,
    FullRows,
    Heads,
    Window,
    use_packed_attention,
    window_of,
)
from rl_dtensor_worker.forward import Forward, find_token_head
from rl_dtensor_worker.mixing import take_attention
from rl_interfaces.backend.steps import MicroBatch
from tiny_model import make_batch
from tolerances import REPEATED, assert_all_close, assert_close
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mistral, window of 4": (MistralForCausalLM, MistralConfig, {"sliding_window": 4}),
    "gemma2, window of 4": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"sliding_window": 4, "attn_logit_softcapping": None},
    ),
    "llama4, chunks of 4": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48}
        | {"no_rope_layers": [1, 0]},
    ),
}


def build(name):
    torch.manual_seed(0)
    model, config, options = MODELS[name]
    return model(config(**SIZES, **options)).eval()


def packed_scores(model, batch):
    rows = SlicedDataDict(dict(batch))
    packed = PackedSequences.of(rows["input_lengths"], rows["input_ids"].shape[1], pad_multiple=4)
    micro_batch = MicroBatch(span=(0, rows.size), rows=rows, packed=packed)
    head = find_token_head(model)
    forward = Forward(model=model, head=head, width_multiple=1)
    return forward.logprobs(micro_batch)


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_equal_each_row_alone(name):
    batch = make_batch(9, width=14)
    expected = plain_logprobs(build(name), batch)
    model = build(name)
    with torch.no_grad():
        take_attention(model, tolerance=1e-5)
    assert model.config._attn_implementation == NAME
    scores = packed_scores(model, batch)
    assert_close(scores.detach(), expected)
    scores.sum().backward()

    assert_all_close(gradients_of(model), plain_gradients(build(name), batch))


def test_a_mask_of_its_own_is_still_respected():
    batch = make_batch(4)
    is_token = (torch.arange(12) < batch["input_lengths"][:, None]).long()
    left_padded, left_mask = batch["input_ids"].flip(1), is_token.flip(1)
    plain, ours = build("llama"), build("llama")
    assert use_packed_attention(ours)
    expected = plain(left_padded, attention_mask=left_mask).logits
    logits = ours(left_padded, attention_mask=left_mask).logits
    real = left_mask.bool()
    assert torch.equal(logits[real], expected[real])
    assert not torch.allclose(logits[real], ours(left_padded).logits[real], atol=1e-3)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any))
def test_every_token_has_a_place_of_its_own(lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSequences.of(torch.tensor(lengths), max(lengths))
    assert packed.cu_seqlens.tolist() == ends.tolist()
    rows = AttentionRows.of(packed)
    laid_out = torch.cat([tokens.flatten() for tokens in rows.groups.indices])
    assert laid_out[rows.places].tolist() == list(range(sum(lengths)))
    for indices, tokens in zip(group_by_length(lengths), rows.groups.indices, strict=True):
        assert tokens.shape == (len(indices), max(lengths[index] for index in indices))
        assert min(lengths[index] for index in indices) >= 0.7 * tokens.shape[1]
        assert tokens[:, 0].tolist() == [int(ends[index]) for index in indices]
    assert sum(tokens.numel() for tokens in rows.groups.indices) <= sum(lengths) / 0.7 + 1


def test_the_documented_example():
    rows = AttentionRows.of(PackedSequences.of(torch.tensor([4, 1, 3]), 4))
    found = [tokens.tolist() for tokens in rows.groups.indices]
    assert found == [[[0, 1, 2, 3], [5, 6, 7, 7]], [[4]]]
    assert rows.places.tolist() == [0, 1, 2, 3, 8, 4, 5, 6]


def test_another_attention_is_left_as_it_is():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | {"attn_implementation": "eager"}))).eval()
    assert not use_packed_attention(model)
    assert model.config._attn_implementation == "eager"
    batch = make_batch(5)
    scores = packed_scores(model, batch).detach()
    assert_close(scores, plain_logprobs(model, batch))


def seen_in_chunks(length, size):
    """Return which tokens each token of a sequence sees, `[length, length]` bool."""
    tokens = torch.arange(length)
    return (tokens <= tokens[:, None]) & (tokens // size == tokens[:, None] // size)


def attention_of(heads, seen):
    query, key, value = (states.double() for states in heads)
    scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("size", [1, 3, 4, 11, 20])
def test_chunks_are_counted_from_the_start_of_each_row(size):
    torch.manual_seed(0)
    heads = Heads(*torch.randn(3, 2, 4, 11, 8))
    found = FullRows().attend(torch.nn.Module(), heads, Window(size, is_chunk=True))
    expected = attention_of(heads, seen_in_chunks(11, size))
    torch.testing.assert_close(
        found.double(), expected, atol=REPEATED * float(heads.value.abs().max()), rtol=0
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_chunks_are_counted_from_the_start_of_each_sharded_sequence(num_ranks):
    torch.manual_seed(0)
    lengths, size = [8, 12], 5
    ends = torch.tensor([0, *lengths]).cumsum(0)
    heads = Heads(*torch.randn(3, 1, 4, 20, 8))
    full = torch.cat(
        [
            attention_of(Heads(*(each[:, :, a:b] for each in heads)), seen_in_chunks(b - a, size))
            for a, b in pairwise(ends.tolist())
        ],
        dim=1,
    )
    for rank in range(num_ranks):
        shards = ContextShards.of(ends, rank=rank, num_ranks=num_ranks, device=torch.device("cpu"))
        # Keys in the order in which the ranks' own are gathered.
        gathered = torch.empty(20, dtype=torch.int64)
        gathered[shards.gathered] = torch.arange(20)
        key, value = (each[:, :, gathered] for each in heads[1:])
        given = Heads(heads.query[:, :, shards.own], key, value)
        output = ChunkRows.of(shards.chunks).attend(given, Window(size, is_chunk=True))
        found = output.index_select(0, shards.places)[None]
        torch.testing.assert_close(
            found.double(),
            full[:, shards.own],
            atol=REPEATED * float(heads.value.abs().max()),
            rtol=0,
        )


@pytest.mark.parametrize(
    ("config", "passed", "expected"),
    [
        ({"layer_types": ["full_attention"]}, None, None),
        ({"layer_types": ["full_attention"]}, 7, Window(7)),
        ({"layer_types": ["sliding_attention"], "sliding_window": 5}, None, Window(5)),
        (
            {"layer_types": ["chunked_attention"], "attention_chunk_size": 6},
            None,
            Window(6, is_chunk=True),
        ),
        ({"layer_types": ["hybrid"]}, None, None),
        ({"sliding_window": 5}, None, Window(5)),
        ({"sliding_window": None}, None, None),
    ],
)
def test_a_window_that_a_mask_says_is_that_of_the_config(config, passed, expected):
    module = torch.nn.Module()
    module.config = LlamaConfig(**(SIZES | {"num_hidden_layers": 1} | config))
    module.layer_idx = 0
    assert window_of(module, passed) == expected


def test_another_kind_of_mask_is_refused_by_name():
    module = torch.nn.Module()
    module.config, module.layer_idx = LlamaConfig(**SIZES), 0
    module.config.layer_types = ["dilated_attention"]
    with pytest.raises(ValueError, match="Module implements its dilated_attention by a mask alone"):
        window_of(module, None)


def test_attention_that_several_layers_share_has_no_window_where_none_has():
    module = torch.nn.Module()
    module.config, module.layer_idx = LlamaConfig(**SIZES), None
    module.config.layer_types = ["mamba", "hybrid"]
    assert window_of(module, None) is None
    module.config.layer_types = ["full_attention", "sliding_attention"]
    module.config.sliding_window = 4
    with pytest.raises(ValueError, match="its sliding_attention of some layers by a mask alone"):
        window_of(module, None)
