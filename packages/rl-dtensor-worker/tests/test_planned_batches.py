"""Dynamic and packed micro-batches, against plain transformers and a plain loop."""

import json
import shutil
from pathlib import Path

import pytest
import scoring_ranks
import torch
import training_ranks
from oracle import (
    assert_trained_like,
    load,
    plain_logprobs,
    plain_training,
)
from rank_pool import RankFailure
from tiny_model import make_batch, make_config
from tolerances import assert_all_close, assert_close

SECTIONS = ("dynamic_batching", "sequence_packing")


def planned_config(model, section, **overrides):
    budgets = {"enabled": True, "train_mb_tokens": 24, "logprob_mb_tokens": 24}
    return make_config(model, **{section: budgets}, **overrides)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_logprobs_equal_plain_transformers(pools, tiny_model, section, num_ranks, num_rows):
    # One row over two ranks: one of them makes its passes over a row that counts for nothing.
    batch = make_batch(num_rows)
    generation = {"max_new_tokens": 8, "temperature": 0.7}
    parts = pools(num_ranks).run(
        training_ranks.score_planned,
        config=planned_config(tiny_model, section, generation=generation),
        batch=batch,
        section=section,
        num_tokens=24,
    )
    scores = torch.zeros(batch["input_ids"].shape)
    scores[parts[0].order] = torch.cat([part.logprobs for part in parts])
    expected = plain_logprobs(load(tiny_model), batch, temperature=0.7)
    assert_close(scores, expected)
    assert torch.count_nonzero(scores) == torch.count_nonzero(expected.exact)


def test_packed_lengths_are_rounded_as_the_section_says(pools, tiny_model):
    batch, config = make_batch(6), planned_config(tiny_model, "sequence_packing")
    config["sequence_packing"]["sequence_length_round"] = 16
    ((lengths, scored),) = pools(1).run(
        training_ranks.packed_lengths, config=config, batch=batch, num_tokens=24
    )
    assert lengths
    assert all(length % 16 == 0 for length in lengths)
    assert sum(lengths) > int(batch["input_lengths"].sum())
    scores = torch.zeros(batch["input_ids"].shape)
    scores[scored.order] = scored.logprobs
    expected = plain_logprobs(load(tiny_model), batch)
    assert_close(scores, expected)


@pytest.mark.parametrize(
    ("section", "options"),
    [
        ("dynamic_batching", {"sequence_length_round": 5}),  # wider than the batch, too
        ("sequence_packing", {"sequence_length_pad_multiple": 4}),
    ],
)
def test_padding_inside_changes_nothing(pools, tiny_model, section, options):
    batch = make_batch(6)
    (found,) = pools(1).run(
        training_ranks.score_planned,
        config=planned_config(tiny_model, section),
        batch=batch,
        section=section,
        num_tokens=24,
        **options,
    )
    expected = plain_logprobs(load(tiny_model), batch)[found.order]
    assert_close(found.logprobs, expected)


@pytest.mark.slow_beyond(2, every=5)
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(("num_ranks", "loss"), [(1, "nll"), (2, "nll"), (2, "logits")])
def test_three_calls_equal_a_plain_loop(pools, tiny_model, section, num_ranks, loss):
    # 9 rows in global batches of 4: two full ones, then a row that leaves a rank without any.
    batch = make_batch(9)
    plain = plain_training(tiny_model, batch, global_batch_size=4, num_calls=3)
    ranks = pools(num_ranks).run(
        training_ranks.train_planned,
        config=planned_config(tiny_model, section),
        batch=batch,
        section=section,
        num_tokens=24,
        num_calls=3,
        loss=loss,
    )
    for trained in ranks:
        assert_trained_like(plain, trained)


@pytest.mark.parametrize("section", [None, *SECTIONS])
def test_no_call_writes_into_its_batch(pools, tiny_model, section):
    config = planned_config(tiny_model, section) if section else make_config(tiny_model)
    for kept in pools(2).run(
        training_ranks.calls_leave_the_batch_alone,
        config=config,
        batch=make_batch(6),
        section=section,
        num_tokens=24,
    ):
        assert all(kept.values()), kept


@pytest.mark.parametrize("section", SECTIONS)
def test_a_batch_without_a_plan_is_refused(pools, tiny_model, section):
    config = planned_config(tiny_model, section)
    with pytest.raises(RankFailure) as error:
        pools(2).run(training_ranks.train_as_given, config=config, batch=make_batch(4))
    assert f"policy.{section}.enabled=True" in error.value.text
    assert "shard_by_batch_size" in error.value.text


def test_a_size_of_micro_batches_beside_a_plan_is_refused(pools, tiny_model):
    with pytest.raises(RankFailure, match="micro-batches of 2 rows contradict the plan"):
        pools(2).run(
            training_ranks.train_as_planned,
            config=planned_config(tiny_model, "sequence_packing"),
            batch=make_batch(4),
            section="sequence_packing",
            num_tokens=[24, 24],
            mbs=2,
        )


def test_plans_that_were_not_made_together_are_refused(pools, tiny_model):
    with pytest.raises(RankFailure, match="were not sharded together"):
        pools(2).run(
            training_ranks.train_as_planned,
            config=planned_config(tiny_model, "sequence_packing"),
            batch=make_batch(12),
            section="sequence_packing",
            num_tokens=[12, 48],
        )


def test_an_attention_that_would_see_other_sequences_gets_one_by_one(pools, tiny_model, tmp_path):
    path, batch = (
        Path(shutil.copytree(tiny_model, tmp_path / "seeing")) / "config.json",
        make_batch(6),
    )
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"attn_implementation": "sees_everything"})
    )
    (scores,) = pools(1).run(
        scoring_ranks.score_with_attention,
        config=planned_config(tiny_model, "sequence_packing"),
        attention=str(path.parent),
        batch=batch,
        section="sequence_packing",
    )
    expected = plain_logprobs(load(tiny_model), batch)
    assert_close(scores, expected)


def test_generation_and_checkpointing_go_together_with_packing(pools, tiny_model):
    batch = make_batch(6)
    packed = planned_config(tiny_model, "sequence_packing")
    (found,) = pools(1).run(
        scoring_ranks.generate_then_score,
        config=packed,
        batch=batch,
        section="sequence_packing",
        num_tokens=24,
    )
    (padded,) = pools(1).run(
        scoring_ranks.generate, config=make_config(tiny_model), batch=batch, greedy=True
    )
    assert torch.equal(found.output_ids, padded.outputs[0]["output_ids"])
    expected = plain_logprobs(load(tiny_model), batch)[found.order]
    assert_close(found.logprobs, expected)

    parameters, _, _ = plain_training(tiny_model, make_batch(8), global_batch_size=4, num_calls=2)
    recomputing = {"enabled": True, "activation_checkpointing": True}
    trained, *_ = pools(2).run(
        training_ranks.train_planned,
        config=packed | {"dtensor_cfg": recomputing},
        batch=make_batch(8),
        section="sequence_packing",
        num_tokens=24,
        num_calls=2,
    )
    assert_all_close(trained.parameters, parameters)
