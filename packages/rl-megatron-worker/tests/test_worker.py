"""The worker's calls beyond the parity table."""

import pytest
import torch
from batches import laid_out, make_batch, make_config
from parity_checks import assert_equal_parameters, assert_parameters, joined
from plain_loop import (
    load,
    plain_balanced_norm,
    plain_logprobs,
    plain_training,
)
from tiny_models import build_tiny
from tolerances import LOGPROBS, assert_close, expected_of
from worker_ranks import (
    embeddings_with_noise,
    environment_of,
    fail_to_start,
    information,
    place_as_on_cuda,
    run_case,
    topk,
    train_after_a_failure,
    train_and_look,
    train_between_moves,
    train_compiled,
    train_with_text_metric,
    train_without_gathering,
    train_without_rows,
)

TP = "tensor_model_parallel_size"
OVERLAPPING = {"distributed_data_parallel_config": {"overlap_grad_reduce": True}}
PP = "pipeline_model_parallel_size"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(model):
    return plain_training(model, make_batch(6), global_batch_size=4, num_calls=3)


DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
VARIANTS = {
    "logits": (4, {TP: 2, PP: 2}, {}, "logits"),
    "distributed": (2, {}, DISTRIBUTED, "nll"),
    "overlapping": (
        2,
        {"distributed_data_parallel_config": OVERLAP},
        DISTRIBUTED,
        "nll",
    ),
    "overlapping_stages": (
        4,
        {PP: 2, "distributed_data_parallel_config": {"overlap_grad_reduce": True}},
        {},
        "nll",
    ),
    "recomputed": (2, {TP: 2, "activation_checkpointing": True}, {}, "nll"),
    "attention_recomputed": (
        2,
        {PP: 2, "activation_checkpointing": True, "recompute_granularity": "selective"},
        {},
        "nll",
    ),
}


@pytest.mark.slow_beyond(2, every=3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.promise_first(2)
def test_every_way_of_training_is_the_plain_loop(pools, model, plain, variant):
    num_ranks, layout, optimizer, loss = VARIANTS[variant]
    config = make_config(model, **layout)
    config["megatron_cfg"]["optimizer"] |= optimizer
    results = pools(num_ranks).run(
        run_case, config=config, batch=make_batch(6), section=None, num_calls=3, loss=loss
    )
    parameters, losses, norms = plain
    for result in results:
        for key, expected in (("losses", losses), ("grad_norms", norms)):
            assert_close(result[key], expected, key)
        assert_parameters(result["parameters"], parameters)
        torch.testing.assert_close(
            joined(results, "reference"), joined(results, "logprobs"), rtol=0, atol=0
        )


BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 2.0}


@pytest.mark.slow_beyond(2, every=3)
@pytest.mark.parametrize(
    ("num_ranks", "layout", "num_rows", "multiple"),
    [
        (1, {}, 4, 1),
        (2, {}, 4, 1),
        (2, {}, 3, 1),
        (2, {TP: 2, "sequence_parallel": True}, 4, 2),
        (2, {"context_parallel_size": 2}, 4, 4),
    ],
    ids=["one", "dp2", "dp2_idle", "tp2_sp", "cp2"],
)
def test_the_balancing_loss_weighs_what_its_coefficient_says(
    pools, tmp_path, num_ranks, layout, num_rows, multiple
):
    model = build_tiny(tmp_path, "qwen3_moe", num_hidden_layers=2)
    size = 1 if num_rows < 4 else 2
    sections = {"train_micro_batch_size": size}
    config = make_config(model, **BALANCED, **layout, sections=sections)
    batch = make_batch(num_rows)
    results = pools(num_ranks).run(train_and_look, config=config, batch=batch, loss="nll")
    expected, without = (
        plain_balanced_norm(
            model, laid_out(batch, 4, multiple), coefficient=coefficient, micro_batch_size=size
        )
        for coefficient in (2.0, 0.0)
    )
    assert abs(expected.exact - without.exact) > 0.01 * without.exact
    for result in results:
        (norm,) = result["results"][0]["grad_norm"]
        assert_close(norm, expected, "grad_norm")


@pytest.mark.parametrize(
    ("num_ranks", "layout", "vocab_size"),
    [
        (2, {TP: 2}, 66),
        # Shards of 34 and 33 tokens; rows on two ranks of their own, scored by the last stage.
        (4, {TP: 2, PP: 2}, 67),
        (4, {TP: 2, "sequence_parallel": True, "context_parallel_size": 2}, 67),
    ],
    ids=["tp2", "tp2_pp2", "tp2_sp_cp2"],
)
def test_a_loss_of_sharded_logits_equals_that_of_full_ones(
    pools, tmp_path, num_ranks, layout, vocab_size
):
    model = build_tiny(tmp_path, "qwen3", num_hidden_layers=2, vocab_size=vocab_size)
    arguments = {"config": make_config(model, **layout), "batch": make_batch(6)}
    runs = {
        "logits": pools(num_ranks).run(train_and_look, **arguments, loss="logits"),
        "sharded": pools(num_ranks).run(train_without_gathering, **arguments, loss="sharded"),
        "gathering": pools(num_ranks).run(train_without_gathering, **arguments, loss="gathering"),
    }
    plain = plain_training(model, make_batch(6), global_batch_size=4, num_calls=1)
    for found in (each for run in runs.values() for each in run):
        result = found["results"][0]
        assert_close(result["global_loss"], plain.losses, "global_loss")
        assert_close(result["grad_norm"], plain.norms, "grad_norm")
        assert_parameters(found["after"], plain.parameters)
    sizes = {size for each in runs["sharded"] for size in shard_sizes(each)}
    assert sizes <= {vocab_size // 2, -(-vocab_size // 2)}


def shard_sizes(found):
    return found["results"][0]["all_mb_metrics"]["shard_size"]


def test_metrics_come_once_from_each_data_parallel_place(pools, model):
    config = make_config(model, **{PP: 2})
    results = pools(4).run(run_case, config=config, batch=make_batch(6), section=None, num_calls=1)
    metrics = {result["place"]: result["metrics"] for result in results}
    for result in results:
        assert result["metrics"] == metrics[result["place"]]
    # Steps of 4 and 2 rows over two places, in micro-batches of 2.
    assert [sum(each["num_valid_samples"]) for each in metrics.values()] == [3, 3]
    assert sum(sum(each.get("skipped_steps", [])) for each in metrics.values()) == 0
    assert metrics[0]["lr"] == [1e-3] * len(metrics[0]["nll"])


def test_a_step_that_is_not_finite_changes_nothing(pools, model):
    for result in pools(2).run(
        train_and_look,
        config=make_config(model, **{PP: 2}),
        batch=make_batch(4),
        loss="nonfinite",
    ):
        assert not torch.isfinite(result["results"][0]["grad_norm"]).any()
        assert result["results"][0]["all_mb_metrics"]["skipped_steps"] == [1]
        for name, tensor in result["before"].items():
            assert torch.equal(result["after"][name], tensor)


def test_eval_mode_gives_the_loss_and_changes_nothing(pools, model, plain):
    for result in pools(2).run(
        train_and_look,
        config=make_config(model, **{TP: 2}),
        batch=make_batch(6),
        loss="nll",
        eval_mode=True,
    ):
        (only,) = result["results"]
        assert only["grad_norm"] is None
        assert_close(only["global_loss"][0], plain.losses[0], "global_loss")
        for name, tensor in result["before"].items():
            assert torch.equal(result["after"][name], tensor)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("layout", [{}, {TP: 2}, {PP: 2}, {"context_parallel_size": 2}])
def test_the_largest_logits_are_those_of_transformers(pools, model, layout):
    batch = make_batch(5)
    results = pools(2).run(topk, config=make_config(model, **layout), batch=batch, k=4)
    found = {key: joined(results, key) for key in ("topk_logits", "topk_indices")}
    plain_model = load(model)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        tokens = batch["input_ids"][row : row + 1, :length]
        logits = expected_of(
            lambda each, tokens=tokens: each(tokens).logits[0], plain_model, LOGPROBS
        )
        indices = logits.exact.topk(4).indices
        assert_close(found["topk_logits"][row, :length], logits.gather(indices))
        assert torch.equal(found["topk_indices"][row, :length], indices)
        assert not found["topk_logits"][row, length:].any()


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("layout", [{}, {TP: 2, "sequence_parallel": True}, {PP: 2}])
def test_bfloat16_stays_near_float32(pools, model, layout):
    config = make_config(model, sections={"precision": "bfloat16"}, **layout)
    batch = make_batch(6)
    results = pools(2).run(
        run_case, config=config, batch=batch, section=None, num_calls=2, loss="nll"
    )
    expected = plain_logprobs(load(model), batch, dtype=torch.bfloat16)
    assert_close(joined(results, "logprobs"), expected)
    for result in results:
        assert result["losses"].isfinite().all()
        assert all(each.dtype == torch.bfloat16 for each in result["sent"].values())


def test_residency_refuses_by_state_and_leaves_training_as_it_was(pools, model):
    config = make_config(model, **{PP: 2})
    config["megatron_cfg"]["optimizer"] |= DISTRIBUTED
    moved, plain = (
        pools(4).run(train_between_moves, config=config, batch=make_batch(4), moves=moves)
        for moves in (True, False)
    )
    for result, expected in zip(moved, plain, strict=True):
        assert torch.equal(result["losses"], expected["losses"])
        assert "prepare_for_training" in result["refused"]["refitting"]
        assert "prepare_for_lp_inference" in result["refused"]["offloaded"]
        assert "prepare_for_training" in result["refused"]["inference"]


@pytest.mark.parametrize("is_distributed", [False, True])
def test_parameters_move_as_cuda_has_it_done(pools, model, is_distributed):
    config = make_config(model)
    config["megatron_cfg"]["optimizer"]["use_distributed_optimizer"] = is_distributed
    assert pools(1).run(place_as_on_cuda, config=config) == [True]


def test_a_place_without_valid_samples_takes_part_in_the_reduction(pools, model):
    config = make_config(model, **{PP: 2}, **OVERLAPPING)
    results = pools(4).run(train_without_rows, config=config, batch=make_batch(4))
    for result in results:
        assert result["metrics"] == [[0.5]] * 2 if result["place"] else [[], []]
        assert_equal_parameters(result["weights"], results[0]["weights"], 0.0)


def test_a_metric_that_is_no_number_is_named_on_every_stage(pools, model):
    config = make_config(model, **{PP: 2})
    first, last = pools(2).run(train_with_text_metric, config=config, batch=make_batch(4))
    assert last.startswith("TypeError: the loss's metric 'device' is device(type='cpu'): ")
    assert first == f"RuntimeError: rank 1 failed: {last}"


def test_information(pools, model, tmp_path):
    config = make_config(model, sections={"profile_dir": str(tmp_path)}, **{PP: 2})
    results = pools(2).run(information, config=config)
    for rank, found in enumerate(results):
        info = found["gpu_info"]
        assert (info["rank"], info["world_size"], found["is_alive"]) == (rank, 2, True)
        assert found["device_id"] == info["global_device_id"]
        assert found["name"] == f"MegatronPolicyWorker[rank={rank}]"
        assert (tmp_path / f"rank_{rank}_0.json").stat().st_size > 0


def test_stages_get_the_same_noise_for_tied_embeddings(pools, tmp_path):
    model = build_tiny(tmp_path, "qwen3", tied=True, num_hidden_layers=2)
    first, last = pools(2).run(embeddings_with_noise, config=make_config(model, **{PP: 2}))
    for key in ("before", "after"):
        torch.testing.assert_close(first[key], last[key], rtol=0, atol=0)
    added = first["after"] - first["before"]
    assert added.std().item() == pytest.approx(0.01, rel=0.1)


def test_a_failed_start_leaves_no_group(pools, model):
    for found in pools(2).run(fail_to_start, config=make_config(model, **{PP: 2})):
        assert "nowhere" in found["error"]
        assert not found["has_default_group"]
        assert not found["has_model_parallel_groups"]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("num_ranks", "layout", "failing"),
    [
        (2, {PP: 2}, [1]),
        (4, {PP: 2} | OVERLAPPING, [3]),
        (2, {"activation_checkpointing": True} | OVERLAPPING, [0]),
        (2, {TP: 2}, [0, 1]),
    ],
    ids=["stages", "stages_of_two_places", "recomputed", "shared_layers"],
)
def test_a_loss_that_raises_raises_on_every_rank(pools, model, num_ranks, layout, failing):
    config = make_config(model, **layout, sections={"train_micro_batch_size": 1})
    arguments = {"config": config, "batch": make_batch(4)}
    results = pools(num_ranks).run(
        train_after_a_failure, **arguments, place_that_fails=num_ranks // 4
    )
    undisturbed = pools(num_ranks).run(train_and_look, **arguments, loss="nll")
    own = "LookupError: no such advantage"
    for rank, (result, expected) in enumerate(zip(results, undisturbed, strict=True)):
        error = own if rank in failing else f"RuntimeError: rank {failing[0]} failed: {own}"
        assert result["errors"] == [error, error]
        # Gradients accumulated before the failure are cleared.
        assert torch.equal(result["losses"], expected["results"][0]["global_loss"])
        assert_equal_parameters(result["weights"], expected["after"], 0.0)


def test_a_rank_has_the_environment_that_the_config_names(pools, model):
    config = make_config(model, env_vars={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})
    (found,) = pools(1).run(environment_of, config=config, name="PYTORCH_CUDA_ALLOC_CONF")
    assert found == [None, "expandable_segments:False", None]


def test_keys_of_the_references_examples_take_the_same_step(pools, tmp_path):
    path, batch, found = build_tiny(tmp_path, "llama"), make_batch(8), {}
    for is_set in (False, True):
        config = make_config(path, **{TP: 2})
        config["precision"] = "bfloat16"
        section = config["megatron_cfg"]
        section["optimizer"] |= {"bf16": True, "use_distributed_optimizer": True}
        if is_set:
            section["optimizer"] |= {
                "bf16": False,
                "params_dtype": "float32",
                "use_precision_aware_optimizer": True,
            }
            section |= {
                "converter_type": "Qwen2ForCausalLM",
                "expert_tensor_parallel_size": 1,
                "freeze_moe_router": True,
                "moe_router_dtype": "fp64",
                "moe_router_load_balancing_type": "aux_loss",
                "moe_router_bias_update_rate": 1e-3,
                "apply_rope_fusion": True,
                "distributed_data_parallel_config": {"average_in_collective": True},
            }
        found[is_set], *_ = pools(4).run(train_and_look, config=config, batch=batch, loss="nll")
    before, after = found[True]["before"], found[True]["after"]
    assert any(not torch.equal(before[name], after[name]) for name in before)
    for name, weight in found[False]["after"].items():
        assert torch.equal(after[name], weight), name


@pytest.mark.slow
def test_what_megatron_compiles_gives_the_same_numbers(pools, tmp_path):
    """A router that counts its tokens, which elsewhere in the tests runs as written."""
    model = build_tiny(tmp_path, "deepseek_v3", num_hidden_layers=2)
    arguments = {"config": make_config(model), "batch": make_batch(4), "loss": "nll"}
    # As written first: what is compiled once would run in both.
    (((written, num_written),), ((compiled, num_compiled),)) = (
        pools(1).run(train_compiled, compiles=compiles, **arguments) for compiles in (False, True)
    )
    assert num_written == 0
    assert num_compiled > 0
    assert_equal_parameters(compiled["after"], written["after"], 0.0)
    assert any(name.endswith("e_score_correction_bias") for name in compiled["after"])
