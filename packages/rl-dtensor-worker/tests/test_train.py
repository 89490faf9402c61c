import functools
import math

import pytest
import torch
import training_ranks
from oracle import (
    assert_trained_like,
    largest_difference,
    load,
    plain_training,
)
from rank_pool import RankFailure
from tiny_model import build_tiny_model, make_batch, make_config
from tolerances import SUMS, assert_all_close, assert_close


@functools.cache
def _plain(model_name, num_calls=3):
    return plain_training(model_name, make_batch(8), global_batch_size=4, num_calls=num_calls)


@pytest.mark.slow_beyond(2, every=5)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("mbs", [1, 2, 4])
@pytest.mark.promise_first(2)
def test_three_steps_equal_a_plain_loop(pools, tiny_model, num_ranks, mbs):
    # 8 rows in global batches of 4: two optimizer steps in each of three calls.
    plain = _plain(tiny_model)
    ranks = pools(num_ranks).run(
        training_ranks.train,
        config=make_config(tiny_model),
        batch=make_batch(8),
        num_calls=3,
        mbs=mbs,
    )
    for trained in ranks:
        assert_trained_like(plain, trained)
    moved = [
        (after.exact - before.detach()).abs() / after.bound
        for (_, before), after in zip(
            load(tiny_model).named_parameters(), plain.parameters.values(), strict=True
        )
    ]
    assert torch.cat([each.flatten() for each in moved]).median() > 100


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    "change",
    [
        {"dtensor_cfg": {"enabled": True, "activation_checkpointing": True}},
        {"activation_checkpointing_enabled": True},
        {"dtensor_cfg": {"enabled": True, "cpu_offload": True}},
        {"fsdp_offload_enabled": True},
        {"make_sequence_length_divisible_by": 8},
    ],
    ids=lambda change: next(iter(change)),
)
def test_options_that_save_memory_change_nothing(pools, tiny_model, change):
    parameters, losses, _ = _plain(tiny_model)
    config = make_config(tiny_model, **change)
    trained, *_ = pools(2).run(
        training_ranks.train, config=config, batch=make_batch(8), num_calls=3
    )
    assert_all_close(trained.parameters, parameters)
    assert_close(trained.losses, losses, "losses")


def test_untied_model_and_a_loss_over_logits(pools, tmp_path):
    model = build_tiny_model(tmp_path, tied=False)
    parameters, losses, _ = plain_training(
        model, make_batch(8), global_batch_size=4, num_calls=3, temperature=0.7
    )
    config = make_config(model, generation={"max_new_tokens": 8, "temperature": 0.7})
    for loss in ("logits", "nll"):
        trained, *_ = pools(2).run(
            training_ranks.train, config=config, batch=make_batch(8), num_calls=3, loss=loss
        )
        assert_all_close(trained.parameters, parameters)
        assert_close(trained.losses, losses, "losses")


def test_rows_that_the_layout_does_not_divide(pools, tiny_model):
    # 5 rows in global batches of 4: a step on 4, then one on the row that is left.
    batch = make_batch(5)
    parameters, losses, _ = plain_training(tiny_model, batch, global_batch_size=4, num_calls=2)
    for num_ranks in (1, 2):
        ranks = pools(num_ranks).run(
            training_ranks.train, config=make_config(tiny_model), batch=batch, num_calls=2, mbs=1
        )
        for trained in ranks:
            assert_all_close(trained.parameters, parameters)
            assert_close(trained.losses, losses, "losses")


def test_masked_rows_and_gbs_of_one_call(pools, tiny_model):
    batch = make_batch(6)
    batch["sample_mask"][2] = 0.0
    parameters, losses, _ = plain_training(tiny_model, batch, global_batch_size=6, num_calls=1)
    trained, *_ = pools(2).run(
        training_ranks.train, config=make_config(tiny_model), batch=batch, gbs=6, mbs=1
    )
    assert_all_close(trained.parameters, parameters)
    assert_close(trained.losses, losses, "losses")


def test_metrics_are_those_of_the_micro_batches_that_count(pools, tiny_model):
    batch = make_batch(6)
    batch["sample_mask"][0] = 0.0
    ranks = pools(2).run(
        training_ranks.train, config=make_config(tiny_model), batch=batch, gbs=6, mbs=1
    )
    metrics = [trained.results[0]["all_mb_metrics"] for trained in ranks]
    assert metrics[0]["num_valid_samples"] == [1, 1]
    assert metrics[1]["num_valid_samples"] == [1, 1, 1]
    shares = metrics[0]["nll"] + metrics[1]["nll"]
    assert sum(shares) == pytest.approx(float(ranks[0].losses[0]), rel=SUMS)
    assert metrics[0]["global_valid_seqs"] == [5.0, 5.0]
    assert metrics[0]["skipped_steps"] == [0]
    assert "skipped_steps" not in metrics[1]
    assert [trained.results[0]["rank"] for trained in ranks] == [0, 1]


def test_the_schedule_steps_once_per_call(pools, tiny_model):
    scheduler = [
        {
            "name": "torch.optim.lr_scheduler.LinearLR",
            "kwargs": {"start_factor": 0.5, "total_iters": 2},
        },
        {
            "name": "torch.optim.lr_scheduler.ConstantLR",
            "kwargs": {"factor": 1.0, "total_iters": 9},
        },
        {"milestones": [2]},
    ]
    config = make_config(tiny_model, scheduler=scheduler)
    (trained,) = pools(1).run(
        training_ranks.train, config=config, batch=make_batch(8), num_calls=3, mbs=4
    )
    rates = [result["all_mb_metrics"]["lr"] for result in trained.results]
    # Two optimizer steps a call share one rate.
    assert rates == [pytest.approx([rate] * 2) for rate in (5e-4, 7.5e-4, 1e-3)]


@pytest.mark.promise
def test_a_step_that_is_not_finite_changes_nothing(pools, tiny_model):
    trained, *_ = pools(2).run(
        training_ranks.train,
        config=make_config(tiny_model),
        batch=make_batch(8),
        loss="nonfinite",
    )
    assert largest_difference(trained.parameters, dict(load(tiny_model).named_parameters())) == 0
    assert not any(math.isfinite(norm) for norm in trained.grad_norms.tolist())
    assert trained.results[0]["all_mb_metrics"]["skipped_steps"] == [2]


def test_a_skipped_step_of_float16_names_the_loss_scale(pools, tiny_model):
    config = make_config(tiny_model, precision="float16")
    for texts in pools(2).run(
        training_ranks.warnings_of_skipped_steps, config=config, batch=make_batch(8)
    ):
        first, second = texts
        assert "not finite under the float16 loss scale 65536: it is halved to 32768" in first
        assert "loss scale 32768: it is halved to 16384" in second


def test_a_batch_in_which_nothing_counts_changes_nothing(pools, tiny_model):
    batch = make_batch(4)
    batch["sample_mask"].zero_()
    trained, *_ = pools(2).run(training_ranks.train, config=make_config(tiny_model), batch=batch)
    assert largest_difference(trained.parameters, dict(load(tiny_model).named_parameters())) == 0
    assert trained.losses.tolist() == [0.0]
    assert trained.results[0]["all_mb_metrics"]["skipped_steps"] == [1]


# float32 on one rank does without FSDP.
@pytest.mark.parametrize(
    ("num_ranks", "precision"), [(1, "float32"), (1, "bfloat16"), (2, "float32")]
)
def test_a_call_that_raises_leaves_no_gradients(pools, tiny_model, num_ranks, precision):
    batch, config = make_batch(4), make_config(tiny_model, precision=precision)
    config["train_micro_batch_size"] = 1
    expected, *_ = pools(num_ranks).run(training_ranks.train, config=config, batch=batch)
    for fails in ("loss", "forward", "backward", "evaluation"):
        trained, *_ = pools(num_ranks).run(
            training_ranks.train_after_a_failure,
            config=config,
            batch=batch,
            fails=fails,
            failing_batch=make_batch(4, seed=5),
        )
        assert torch.equal(trained.grad_norms, expected.grad_norms), fails
        assert largest_difference(trained.parameters, expected.parameters) == 0, fails


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_near_float32(pools, tiny_model, precision):
    _, losses, norms = _plain(tiny_model)
    trained, *_ = pools(2).run(
        training_ranks.train,
        config=make_config(tiny_model, precision=precision),
        batch=make_batch(8),
        num_calls=3,
    )
    assert all(tensor.dtype is torch.float32 for tensor in trained.parameters.values())
    # A relative step of bfloat16 is 2^-8; sums over tokens average it down.
    torch.testing.assert_close(trained.losses.double(), losses.exact, atol=0, rtol=2e-2)
    torch.testing.assert_close(trained.grad_norms.double(), norms.exact, atol=0, rtol=5e-2)


def test_eval_mode_leaves_no_trace_and_needs_no_optimizer(pools, tiny_model):
    batch = make_batch(8)
    trained, *_ = pools(2).run(training_ranks.train, config=make_config(tiny_model), batch=batch)
    config = make_config(tiny_model)
    del config["optimizer"]
    for outcome in pools(2).run(training_ranks.eval_leaves_no_trace, config=config, batch=batch):
        assert outcome.same_shards
        assert outcome.same_random
        assert outcome.same_mode
        assert outcome.result["grad_norm"] is None
        first = float(outcome.result["global_loss"][0])
        assert first == pytest.approx(float(trained.losses[0]), rel=SUMS)


@pytest.mark.parametrize(
    ("change", "loss", "options", "words"),
    [
        (lambda b: b.pop("sample_mask"), "nll", {}, ["sample_mask"]),
        (lambda b: b.pop("token_mask"), "nll", {}, ["token_mask", "token-level"]),
        (lambda b: b.update(token_mask=b["token_mask"][:, 1:]), "nll", {}, ["token_mask", "11"]),
        (lambda b: None, "nll", {"gbs": 5}, ["gbs=5", "2 data-parallel"]),
        (lambda b: None, "nll", {"mbs": 0}, ["mbs=0"]),
    ],
)
def test_bad_batches_are_named(pools, tiny_model, change, loss, options, words):
    batch = make_batch(4)
    change(batch)
    with pytest.raises(RankFailure) as failure:
        pools(2).run(
            training_ranks.train_as_given,
            config=make_config(tiny_model),
            batch=batch,
            loss=loss,
            **options,
        )
    assert failure.value.kind == "ValueError"
    assert all(word in failure.value.text for word in words)


def test_a_sequence_level_loss_needs_no_token_mask(pools, tiny_model):
    batch = make_batch(4)
    del batch["token_mask"]
    (result,) = pools(1).run(
        training_ranks.train_as_given,
        config=make_config(tiny_model),
        batch=batch,
        loss="sequence",
    )
    assert torch.isfinite(result["global_loss"]).all()
