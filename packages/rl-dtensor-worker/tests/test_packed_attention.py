import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import (
    LOGPROB_TOLERANCE,
    gradients_of,
    largest_difference,
    plain_gradients,
    plain_logprobs,
)
from rl_batched_data import PackedSequences, SlicedDataDict
from rl_batched_data.packing.packed_sequences import group_by_length
from rl_dtensor_worker.attention import (
    NAME,
    AttentionRows,
    use_packed_attention,
)
from rl_dtensor_worker.forward import Forward, find_token_head
from rl_dtensor_worker.mixing import take_attention
from rl_interfaces.backend.steps import MicroBatch
from tiny_model import make_batch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
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
    forward = Forward(model=model, head=head, temperature=1.0, width_multiple=1)
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
    torch.testing.assert_close(scores.detach(), expected, atol=LOGPROB_TOLERANCE, rtol=0)
    scores.sum().backward()

    ours, theirs = gradients_of(model), plain_gradients(build(name), batch)
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert largest_difference(ours, theirs) < 1e-5 * largest


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
    torch.testing.assert_close(scores, plain_logprobs(model, batch), atol=LOGPROB_TOLERANCE, rtol=0)
