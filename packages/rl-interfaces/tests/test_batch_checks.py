import pytest
import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces import resolve_policy_config
from rl_interfaces.backend.steps import (
    check_scoring_batch,
    check_training_batch,
    with_readable_padding,
)
from rl_interfaces.backend.worker import WorkerSettings

pytestmark = pytest.mark.needs("rl-interfaces[backend]")


def _batch(**changes):
    columns = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
        "input_lengths": torch.tensor([3, 2]),
        "token_mask": torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]),
        "sample_mask": torch.ones(2),
        "advantages": torch.ones(2, 3),
        "images": torch.ones(2, 3, 4, 4),
        "text": ["a", "b"],
    }
    columns.update(changes)
    return BatchedDataDict({key: value for key, value in columns.items() if value is not None})


def test_good_batches_pass():
    check_training_batch(_batch(), needs_token_mask=True)
    check_training_batch(_batch(token_mask=None), needs_token_mask=False)
    check_scoring_batch(_batch(sample_mask=None, token_mask=None))


def test_padding_outside_the_vocabulary_is_replaced_and_nothing_else():
    data = _batch(input_ids=torch.tensor([[5, 6, 7], [8, 9, -100]]))
    check_scoring_batch(data, vocab_size=64)
    assert with_readable_padding(data, vocab_size=64)["input_ids"].tolist() == [
        [5, 6, 7],
        [8, 9, 0],
    ]
    assert data["input_ids"][1, 2] == -100
    fine = _batch(input_ids=torch.tensor([[5, 6, 7], [8, 9, 63]]))
    assert with_readable_padding(fine, vocab_size=64) is fine


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sample_mask": None}, ["'sample_mask' is missing"]),
        ({"token_mask": None}, ["'token_mask' is missing", "token-level"]),
        ({"token_mask": torch.ones(2)}, ["'token_mask'", "[2]", "[2, 3]"]),
        ({"sample_mask": torch.ones(2, 3)}, ["'sample_mask'", "[2, 3]", "expected [2]"]),
        ({"advantages": torch.ones(2, 4)}, ["'advantages'", "[2, 4]", "[2, 3]"]),
        ({"text": ["a"]}, ["'text': 1", "'input_ids': 2"]),
        ({"attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}, ["'attention_mask'[1]"]),
        ({"input_ids": torch.tensor([[5, 6, 7], [8, 64, 0]])}, ["'input_ids'[1, 1]=64", "64 tok"]),
        ({"input_ids": torch.tensor([[5, -1, 7], [8, 9, 0]])}, ["'input_ids'[0, 1]=-1", "64 tok"]),
    ],
)
def test_bad_batches_are_named(changes, words):
    with pytest.raises(ValueError, match=r".") as error:
        check_training_batch(_batch(**changes), needs_token_mask=True, vocab_size=64)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_samples_of_a_step_are_divided_by_the_data_parallel_ranks():
    config = resolve_policy_config({"model_name": "m", "train_global_batch_size": 6})
    settings = WorkerSettings.from_resolved(config)
    assert settings.rows_per_rank(None, num_ranks=3) == 2
    assert settings.rows_per_rank(8, num_ranks=4) == 2
    with pytest.raises(ValueError, match=r"policy\.train_global_batch_size=6 .* the 4 data-par"):
        settings.rows_per_rank(None, num_ranks=4)
    with pytest.raises(ValueError, match=r"gbs=5 .* the 4 data-parallel ranks"):
        settings.rows_per_rank(5, num_ranks=4)
    with pytest.raises(ValueError, match=r"gbs=0 must be positive"):
        settings.rows_per_rank(0, num_ranks=4)


@pytest.mark.parametrize(("is_enabled", "multiple"), [(True, 64), (False, 1)])
def test_a_section_that_is_off_rounds_no_lengths(is_enabled, multiple):
    budgets = {"train_mb_tokens": 128, "logprob_mb_tokens": 128, "sequence_length_round": 64}
    section = {"enabled": is_enabled, **budgets}
    resolved = resolve_policy_config({"model_name": "m", "sequence_packing": section})
    assert WorkerSettings.from_resolved(resolved).packed_multiple == multiple
