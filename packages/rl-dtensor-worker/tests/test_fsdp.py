import pytest
import torch
import training_ranks
from oracle import load
from tiny_model import build_tokenizer, make_batch, make_config
from tolerances import LOGPROBS, assert_close, expected_of
from transformers import Qwen2Config, Qwen2ForCausalLM


def test_one_rank_may_run_alone_while_the_model_is_unsharded(pools, tiny_model):
    batch = make_batch(4)
    outcomes = pools(2).run(
        training_ranks.unsharded_forwards, config=make_config(tiny_model), batch=batch
    )
    assert all(outcome.same_shards and outcome.same_copies for outcome in outcomes)
    expected = expected_of(
        lambda model: model(batch["input_ids"]).logits, load(tiny_model), LOGPROBS
    )
    assert_close(outcomes[0].logits, expected)
    assert outcomes[1].logits is None


def test_a_model_is_unsharded_only_where_each_rank_has_a_copy_and_casts_nothing(pools, tiny_model):
    def sharded(num_ranks, *, as_small=False, **overrides):
        config = make_config(tiny_model, **overrides)
        run = pools(num_ranks).run
        return run(training_ranks.num_sharded_modules, config=config, as_small=as_small)[0]

    copies = {"enabled": True, "data_parallel_replicate_size": 2}
    assert sharded(2, as_small=True) == 1
    assert sharded(2, dtensor_cfg=copies, as_small=True) == 0
    assert sharded(2, dtensor_cfg=copies, as_small=True, precision="bfloat16") == 1
    # FSDP sums a large model's gradients layer by layer, during the backward pass.
    assert sharded(2, dtensor_cfg=copies) > 1
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


# Two micro-batches a step: the copies' gradients are then summed in another order than the shards'.
@pytest.mark.parametrize(("mbs", "copies_are_equal"), [(2, True), (1, False)])
def test_the_size_of_fsdp_units_changes_no_bit(pools, tiny_model, mbs, copies_are_equal):
    def run(as_small, replicas=1):
        config = make_config(
            tiny_model,
            # Small enough that every step is clipped by its norm.
            max_grad_norm=0.1,
            train_micro_batch_size=mbs,
            dtensor_cfg={"enabled": True, "data_parallel_replicate_size": replicas},
            generation={"max_new_tokens": 4, "temperature": 1.0},
        )
        batch = make_batch(8)
        arguments = {"config": config, "batch": batch, "as_small": as_small}
        return pools(2).run(training_ranks.run_of_every_call, **arguments)

    by_layer, at_once, copied = run(False), run(True), run(True, 2)
    for rank in range(2):
        expected = by_layer[rank].values
        assert differing(expected, at_once[rank].values) == []
        if copies_are_equal:
            assert differing(expected, copied[rank].values) == []
    # Two steps. Every wait: rows, counts and losses of a call; norm, gather and sum of a step.
    counts = {"rows": 1, "counts": 1, "losses": 1, "norms": 2}
    train = at_once[0].collectives["train"]
    assert train["all_reduce"] == sum(counts.values())
    assert train["all_gather_single"] == train["reduce_scatter_single"] // (2 // mbs) == 2
    assert sum(at_once[0].collectives["get_logprobs"].values()) == 2
    # Copies are gathered never; their gradients are summed once a step.
    assert sum(copied[0].collectives["train"].values()) == 3 + 2
    assert sum(copied[0].collectives["get_logprobs"].values()) == 1


def differing(expected, found):
    """Return the names of the tensors that are not equal, bit by bit."""
    return [name for name in expected if not torch.equal(expected[name], found[name])]


def test_a_parameter_that_some_ranks_did_not_use_gets_the_sum_of_the_others(pools):
    for both, one, none in pools(2).run(training_ranks.sums_of_unused_parameters):
        torch.testing.assert_close(both, torch.full((2, 3), 3.0))
        torch.testing.assert_close(one, torch.full((2, 3), 5.0))
        assert none is None


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
