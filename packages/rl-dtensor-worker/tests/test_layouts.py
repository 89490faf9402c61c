"""What a layout of ranks must not change: completions, checkpoints, memory savings, rounding."""

import copy

import loading_ranks
import parity_models
import parity_ranks
import pytest
import state_ranks
import torch
from oracle import assert_trained_like, load, plain_logprobs, plain_training
from test_parity import BATCHINGS, LAYOUTS, assert_equal_parameters, joined
from tiny_model import VOCAB_SIZE, make_batch, make_config
from tolerances import LOGPROBS, REPEATED, assert_alike, assert_close, expected_of
from transformers import AutoModelForSequenceClassification


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return parity_models.build("qwen3", tmp_path_factory.mktemp("qwen3"))


def config_of(path, layout, **overrides):
    num_ranks, sizes = LAYOUTS[layout]
    section = {"enabled": True, **sizes, **overrides.pop("dtensor_cfg", {})}
    return num_ranks, make_config(path, dtensor_cfg=section, **overrides)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "cp2", "dp2_tp2"])
def test_greedy_completions_are_those_of_plain_transformers(pools, qwen3, layout):
    prompts, model = make_batch(4, width=6), load(qwen3)
    num_ranks, config = config_of(qwen3, layout)
    results = pools(num_ranks).run(
        parity_ranks.generate_and_score, config=config, batch=prompts, greedy=True
    )
    places = {result.place: result.columns for result in results}
    completions = [
        tokens[:length].tolist()
        for place in sorted(places)
        for tokens, length in zip(
            places[place]["output_ids"], places[place]["unpadded_sequence_lengths"], strict=True
        )
    ]
    for row, prompt_length in enumerate(prompts["input_lengths"].tolist()):
        tokens = prompts["input_ids"][row : row + 1, :prompt_length]
        expected = model.generate(tokens, max_new_tokens=8, do_sample=False)[0]
        assert completions[row] == expected.tolist()


@pytest.mark.parametrize("layout", ["tp2_sp", "dp2_cp2"])
def test_ranks_that_share_rows_sample_the_same(pools, qwen3, layout):
    num_ranks, config = config_of(qwen3, layout)
    results = pools(num_ranks).run(
        parity_ranks.generate_and_score, config=config, batch=make_batch(4, width=6), greedy=False
    )
    for result in results:
        twin = next(other for other in results if other.place == result.place)
        columns = result.columns
        assert torch.equal(columns["output_ids"], twin.columns["output_ids"])
        is_new = torch.arange(columns["scored"].shape[1]) >= columns["prompt_lengths"][:, None]
        rows = {
            "input_ids": columns["output_ids"],
            "input_lengths": columns["unpadded_sequence_lengths"],
        }
        # The model has an id more than the tokenizer, which is scored and never sampled.
        for key, num_ids in (("scored", None), ("logprobs", VOCAB_SIZE)):
            expected = plain_logprobs(load(qwen3), rows, num_ids=num_ids)
            assert_close(columns[key][is_new], expected[is_new], key)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("tp2", "dp2"), ("dp2_tp2", "hybrid"), ("hybrid", "tp2_cp2"), ("replicated", "dp2")],
)
def test_a_checkpoint_loads_into_another_layout(pools, qwen3, tmp_path, saved, loaded):
    batch = make_batch(4)
    paths = {"weights_path": str(tmp_path / "w"), "optimizer_path": str(tmp_path / "o")}
    num_ranks, config = config_of(qwen3, saved)
    before, *_ = pools(num_ranks).run(
        parity_ranks.train_and_save, config=config, batch=batch, num_calls=2, **paths
    )
    num_ranks, config = config_of(qwen3, loaded)
    after, *_ = pools(num_ranks).run(
        parity_ranks.load_and_train, config=config, batch=batch, **paths
    )
    assert_equal_parameters(after.loaded, before.saved, 0.0)
    expected = plain_training(qwen3, batch, global_batch_size=4, num_calls=3).parameters
    for name, parameter in after.continued.items():
        assert_alike(parameter, before.continued[name], expected[name], name)


def test_a_checkpoint_continues_bit_for_bit_in_its_own_layout(pools, qwen3, tmp_path):
    batch = make_batch(4)
    paths = {"weights_path": str(tmp_path / "w"), "optimizer_path": str(tmp_path / "o")}
    num_ranks, config = config_of(qwen3, "tp2_sp")
    before, *_ = pools(num_ranks).run(
        parity_ranks.train_and_save, config=config, batch=batch, num_calls=2, **paths
    )
    after, *_ = pools(num_ranks).run(
        parity_ranks.load_and_train, config=config, batch=batch, **paths
    )
    assert_equal_parameters(after.continued, before.continued, 0.0)


@pytest.mark.slow_beyond(2, every=3)
@pytest.mark.parametrize("saving", ["activation_checkpointing", "cpu_offload"])
@pytest.mark.parametrize("layout", ["tp2_sp", "cp2"])
def test_what_saves_memory_changes_nothing(pools, qwen3, layout, saving):
    outcomes = []
    for section in ({}, {saving: True}):
        num_ranks, config = config_of(qwen3, layout, dtensor_cfg=section)
        outcomes.append(
            pools(num_ranks).run(
                parity_ranks.run_case,
                config=config,
                batch=make_batch(4),
                section="sequence_packing" if layout == "cp2" else None,
                num_calls=2,
            )[0]
        )
    plain, saved = outcomes
    assert torch.equal(plain.columns["logprobs"], saved.columns["logprobs"])
    assert_equal_parameters(saved.parameters, plain.parameters, 0.0)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("layout", ["tp2_sp", "cp2", "hybrid"])
def test_bfloat16_is_as_close_as_bfloat16_is(pools, qwen3, layout):
    batch = make_batch(4)
    num_ranks, config = config_of(qwen3, layout, precision="bfloat16")
    results = pools(num_ranks).run(
        parity_ranks.run_case, config=config, batch=batch, section=None, num_calls=1
    )
    expected = plain_logprobs(load(qwen3), batch, dtype=torch.bfloat16)
    assert_close(joined(results, "logprobs"), expected)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("layout", ["tp2_sp", "cp2", "dp2_tp2"])
def test_the_largest_logits_are_those_of_plain_transformers(pools, qwen3, layout):
    batch, model = make_batch(4), load(qwen3)
    num_ranks, config = config_of(qwen3, layout)
    results = pools(num_ranks).run(
        parity_ranks.call_in_layout, config=config, batch=batch, method="get_topk_logits", k=3
    )
    values, indices = joined(results, "topk_logits"), joined(results, "topk_indices")
    for row, length in enumerate(batch["input_lengths"].tolist()):
        tokens = batch["input_ids"][row : row + 1, :length]
        logits = expected_of(lambda each, tokens=tokens: each(tokens).logits[0], model, LOGPROBS)
        expected = logits.exact.topk(3).indices
        assert_close(values[row, :length], logits.gather(expected))
        assert torch.equal(indices[row, :length], expected)
        assert not values[row, length:].any()


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("layout", ["tp2", "tp2_sp"])
def test_a_loss_that_takes_its_shard_of_the_logits_equals_one_of_full_logits(
    pools, qwen3, layout, batching
):
    section = BATCHINGS[batching]
    budgets = {"train_mb_tokens": parity_ranks.BUDGET, "logprob_mb_tokens": parity_ranks.BUDGET}
    sections = {} if section is None else {section: {"enabled": True, **budgets}}
    num_ranks, config = config_of(qwen3, layout, **sections)
    outcomes = {
        loss: pools(num_ranks).run(
            parity_ranks.train_on_logits,
            config=config,
            batch=make_batch(4),
            section=section,
            loss=loss,
        )
        for loss in ("logits", "sharded_logits")
    }
    plain = plain_training(qwen3, make_batch(4), global_batch_size=4, num_calls=3)
    for full, sharded in zip(outcomes["logits"], outcomes["sharded_logits"], strict=True):
        assert full.num_gathers == 3 * 2  # each of two micro-batches in three calls
        assert sharded.num_gathers == 0
        for found in (full, sharded):
            assert_trained_like(plain, found)


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_a_reward_model_scores_alike(pools, tmp_path, layout):
    torch.manual_seed(2)
    model_config = copy.deepcopy(parity_models.CONFIGS["qwen3"])
    model_config.num_labels = 1
    AutoModelForSequenceClassification.from_config(model_config).save_pretrained(tmp_path)
    batch = make_batch(4)
    found = {}
    for each in ("dp2", layout):
        num_ranks, config = config_of(str(tmp_path), each, head="reward", generation=None)
        results = pools(num_ranks).run(
            parity_ranks.call_in_layout, config=config, batch=batch, method="score"
        )
        found[each] = joined(results, "scores")
    assert found[layout].abs().min() > 0
    atol = REPEATED * float(found["dp2"].abs().max())
    torch.testing.assert_close(found[layout], found["dp2"], atol=atol, rtol=0)


def test_a_process_may_join_one_group_after_another(pools, tmp_path):
    # First over a mesh that equals the worker's, while the groups behind it have other names.
    path = parity_models.build("qwen2", tmp_path)
    num_ranks, config = config_of(path, "dp2_tp2")
    pools(num_ranks).run(loading_ranks.load_over_two_axes, model_names=[path])
    results = pools(num_ranks).run(
        parity_ranks.run_case, config=config, batch=make_batch(4), section=None, num_calls=1
    )
    assert torch.isfinite(results[0].losses).all()


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_worker_that_trained_leaves_no_thread_of_its_groups(pools, qwen3, layout):
    num_ranks, config = config_of(qwen3, layout)
    before = pools(num_ranks).run(state_ranks.threads_of_groups)
    pools(num_ranks).run(
        parity_ranks.run_case, config=config, batch=make_batch(4), section=None, num_calls=1
    )
    assert pools(num_ranks).run(state_ranks.threads_of_groups) == before
