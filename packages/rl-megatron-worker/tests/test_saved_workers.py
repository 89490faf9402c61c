"""A worker that is saved in one layout of ranks and goes on in another."""

from pathlib import Path

import pytest
import torch
from batches import make_batch, make_config
from parity_checks import assert_equal_parameters, in_memory
from plain_loop import load, plain_training
from tiny_models import build_tiny
from tolerances import assert_alike
from transformers import AutoTokenizer
from worker_ranks import load_and_train, train_and_save

TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
GENERATION_CONFIG = '{"do_sample": false, "temperature": 0.6, "eos_token_id": [1, 7]}'

# Families with modules that Megatron-core does not know, and biases of routers.
OWN_MODULES = {
    "deepseek_v3": {},
    "gpt_oss": {},
    "olmo2": {},
    # Where a key is not rotated its bias has no gradient, and Adam's direction is that of rounding.
    "glm4": {"attention_bias": False},
    "qwen3_next": {},
}


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """What two tensor-parallel ranks saved, and what became of them."""
    model = build_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=True, num_hidden_layers=2)
    # transformers reads it, and would not write it.
    (Path(model) / "generation_config.json").write_text(GENERATION_CONFIG)
    directory = tmp_path_factory.mktemp("saved")
    results = pools(2).run(
        train_and_save,
        config=make_config(model, **{TP: 2}),
        batch=make_batch(4),
        directory=str(directory),
    )
    return model, directory, results


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [(2, {TP: 2}), (2, {PP: 2}), (2, {}), (1, {})],
    ids=["tp2", "pp2", "dp2", "one"],
)
def test_training_goes_on(pools, saved, num_ranks, layout):
    model, directory, results = saved
    same = layout == {TP: 2}
    for rank, found in enumerate(
        pools(num_ranks).run(
            load_and_train,
            config=make_config(model, **layout),
            batch=make_batch(4),
            directory=str(directory),
        )
    ):
        for name, tensor in results[0]["saved"].items():
            assert torch.equal(found["loaded"][name], tensor)
        assert_both_went_on(found["after"], results[0]["after"], model)
        if same:
            assert_equal_parameters(found["after"], results[0]["after"], 0.0)
            assert torch.equal(found["drawn"], results[rank]["drawn"])


def assert_both_went_on(found, other, model):
    """Hold two runs of as many steps against each other, at what rounding explains."""
    plain = plain_training(model, make_batch(4), global_batch_size=4, num_calls=3)
    assert found.keys() == other.keys()
    for name, tensor in found.items():
        assert_alike(tensor, other[name], in_memory(plain.parameters, name), name)


def test_a_worker_that_is_off_the_device_is_saved_and_stays_there(saved):
    assert all("'offloaded'" in result["refused"] for result in saved[2])


def test_what_is_exported_is_what_was_saved(saved):
    _, directory, results = saved
    exported = load(directory / "exported").state_dict()
    assert len(list((directory / "exported").glob("*.safetensors"))) > 1
    assert_equal_parameters(results[0]["saved"], exported, 0.0)
    assert (directory / "exported/generation_config.json").read_text() == GENERATION_CONFIG
    assert AutoTokenizer.from_pretrained(directory / "exported").pad_token == "<pad>"
    assert AutoTokenizer.from_pretrained(directory / "tokenizer").pad_token == "<pad>"


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN_MODULES)
def test_modules_of_our_own_are_saved_by_sharded_ranks_and_loaded_by_one(pools, tmp_path, kind):
    model = build_tiny(tmp_path / "model", kind, num_hidden_layers=2, **OWN_MODULES[kind])
    sizes = {TP: 2, "sequence_parallel": True}
    saving = {"batch": make_batch(4), "directory": str(tmp_path)}
    saved, _ = pools(2).run(train_and_save, config=make_config(model, **sizes), **saving)
    (found,) = pools(1).run(load_and_train, config=make_config(model), **saving)
    assert found["loaded"].keys() == saved["saved"].keys()
    for name, tensor in saved["saved"].items():
        assert torch.equal(found["loaded"][name], tensor), name
    assert_both_went_on(found["after"], saved["after"], model)
