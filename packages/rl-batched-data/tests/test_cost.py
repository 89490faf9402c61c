import pytest
from rl_batched_data import SequenceCost


def test_cost_is_linear_and_quadratic_in_the_length():
    assert SequenceCost(per_token=2.0, per_token_squared=0.01).of(100) == 300.0


def test_a_model_costs_its_multiplications_and_additions():
    cost = SequenceCost.from_model(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=2,
        vocab_size=10,
    )
    query_and_output = 2 * 8 * (4 * 2)
    key_and_value = 2 * 8 * (2 * 2)
    mlp = 3 * 8 * 16
    assert cost.per_token == 2 * (3 * (query_and_output + key_and_value + mlp) + 8 * 10)
    # Scores and weighted values: two products of head_dim per head and visible pair, half of L^2.
    assert cost.per_token_squared == 3 * 4 * (2 * 2 * 2) / 2


@pytest.mark.parametrize(("linear", "square"), [(-1.0, 1.0), (1.0, -1.0), (0.0, 0.0)])
def test_a_cost_that_is_negative_or_nothing_is_refused(linear, square):
    with pytest.raises(ValueError, match=f"per_token={linear} and per_token_squared={square}"):
        SequenceCost(per_token=linear, per_token_squared=square)
