import pytest
import torch
import training_ranks
from oracle import LOGPROB_TOLERANCE, load
from tiny_model import build_tokenizer, make_batch, make_config
from transformers import Qwen2Config, Qwen2ForCausalLM


def test_one_rank_may_run_alone_while_the_model_is_unsharded(pools, tiny_model):
    batch = make_batch(4)
    outcomes = pools(2).run(
        training_ranks.unsharded_forwards, config=make_config(tiny_model), batch=batch
    )
    assert all(outcome.same_shards and outcome.same_copies for outcome in outcomes)
    with torch.no_grad():
        expected = load(tiny_model)(batch["input_ids"]).logits
    torch.testing.assert_close(outcomes[0].logits, expected, atol=LOGPROB_TOLERANCE, rtol=0)
    assert outcomes[1].logits is None


def test_a_rank_is_left_unsharded_only_where_it_is_alone_and_casts_nothing(pools, tiny_model):
    def sharded(num_ranks, **overrides):
        config = make_config(tiny_model, **overrides)
        return pools(num_ranks).run(training_ranks.num_sharded_modules, config=config)[0]

    assert sharded(1) == 0
    assert sharded(1, precision="bfloat16") > 1
    assert sharded(1, dtensor_cfg={"enabled": True, "cpu_offload": True}) > 1
    assert sharded(2) > 1


def test_a_model_that_cannot_be_unsharded_is_sharded_again(pools, tiny_model):
    outcomes = pools(2).run(
        training_ranks.failing_unshard, config=make_config(tiny_model), batch=make_batch(4)
    )
    for outcome in outcomes:
        assert outcome.num_unsharded == 0
        assert outcome.same_shards
        assert outcome.same_flags


@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding_and_head_are_not_gathered_into_one_buffer(pools, tmp_path, is_tied):
    """Of 70B each takes 2 GiB in bfloat16, and its gradient 4 GiB."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=512, tie_word_embeddings=is_tied, **sizes, **heads)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    for largest, embedding in pools(2).run(
        training_ranks.largest_unit, config=make_config(str(tmp_path))
    ):
        assert embedding == 512 * 32
        assert largest == embedding + 32  # the final norm beside the head
