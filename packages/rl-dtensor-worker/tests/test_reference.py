import pytest
import state_ranks
import torch
from oracle import load, plain_logprobs
from tiny_model import make_batch, make_config, rows_for_rank
from tolerances import assert_close


@pytest.mark.promise
def test_reference_stays_while_the_policy_moves(pools, tiny_model):
    batch = make_batch(8)
    expected = plain_logprobs(load(tiny_model), batch)
    ranks = pools(2).run(state_ranks.reference_stays, config=make_config(tiny_model), batch=batch)
    for rank, (policy, reference) in enumerate(ranks):
        columns = {"input_ids": torch.arange(8)}
        mine = rows_for_rank(columns, rank=rank, num_ranks=2, global_batch_size=4)
        assert_close(reference[0], expected[mine["input_ids"]])
        assert torch.equal(policy[0], reference[0])
        assert torch.equal(reference[0], reference[1])
        assert torch.equal(reference[0], reference[2])
        assert (policy[1] - policy[0]).abs().max() > 1e-3
        assert (policy[2] - policy[1]).abs().max() > 1e-3


def test_a_reference_in_the_compute_dtype_gives_the_same_bits(pools, tiny_model):
    config = make_config(tiny_model, precision="bfloat16")
    ranks = pools(2).run(state_ranks.reference_stays, config=config, batch=make_batch(8))
    for policy, reference in ranks:
        # The policy has not moved yet, and its float32 parameters are cast in the forward.
        assert torch.equal(policy[0], reference[0])
        assert torch.equal(reference[0], reference[2])
    for reference_bytes, policy_bytes in pools(2).run(state_ranks.bytes_of_copies, config=config):
        assert reference_bytes == policy_bytes / 2


def test_swaps_reuse_their_memory(pools, tiny_model):
    for addresses in pools(2).run(
        state_ranks.memory_of_swaps, config=make_config(tiny_model), batch=make_batch(8)
    ):
        assert addresses.first == addresses.third


def test_forwards_of_ones_own_see_the_weights_of_their_time(pools, tiny_model):
    for logits in pools(2).run(
        state_ranks.forwards_around_a_swap, config=make_config(tiny_model), batch=make_batch(4)
    ):
        assert torch.equal(logits.before, logits.after)
        assert not torch.equal(logits.before, logits.inside)


def test_the_policy_comes_back_bit_for_bit_even_after_an_error(pools, tiny_model):
    for swap in pools(2).run(
        state_ranks.reference_context_restores_after_an_error, config=make_config(tiny_model)
    ):
        assert swap.was_swapped
        assert swap.is_restored
