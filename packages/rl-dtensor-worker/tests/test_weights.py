"""The weights that leave the worker, against the checkpoint it was built from."""

from pathlib import Path

import pytest
import torch
import weights_ranks
from family_models import EXPERTS, build_family
from oracle import load
from rl_dtensor_worker.model.convert import Reversal
from rl_dtensor_worker.weights import ModelWeights
from rl_refit import block_fp8
from rl_refit.plan import block_of
from safetensors.torch import load_file
from tiny_model import build_tiny_model, make_config
from transformers import Qwen2Config, Qwen2ForCausalLM


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request, tmp_path_factory):
    return build_tiny_model(
        tmp_path_factory.mktemp(request.param), tied=request.param == "tied", width=48
    )


def expected_tensors(model, dtype):
    return {name: tensor.detach().to(dtype) for name, tensor in load(model).named_parameters()}


def assert_shards_are(expected, ranks):
    """What the ranks hold has to be the tensors, each element of them."""
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for name, shard in (each for held in ranks for each in held.items()):
        assert shard.shape == tuple(expected[name].shape), name
        shard.box.view_of(found[name]).copy_(shard.data)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_shards_of_converted_tensors_are_refused(pools, tmp_path):
    path = build_family(tmp_path / "model", "qwen3_moe", **EXPERTS["qwen3_moe"])
    for gathered in pools(2).run(weights_ranks.gather_weights, config=make_config(path)):
        assert "is converted from" in gathered.shards


@pytest.mark.slow_beyond(3, every=5)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.promise_first(2)
def test_every_rank_gets_every_tensor_bit_for_bit(pools, model, num_ranks, precision):
    # 48 and 64 rows over three ranks: the last shards are short, or empty.
    expected = expected_tensors(model, getattr(torch, precision))
    config = make_config(model, precision=precision, train_global_batch_size=6)
    ranks = pools(num_ranks).run(weights_ranks.gather_weights, config=config)
    assert_shards_are(expected, [gathered.shards for gathered in ranks])
    for gathered in ranks:
        assert [each.name for each in gathered.metadata] == list(expected)
        for name, dtype, shape in gathered.metadata:
            assert (dtype, shape) == (expected[name].dtype, tuple(expected[name].shape))
        for tensors in gathered.passes:
            assert [name for name, _ in tensors] == list(expected)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("model_type", "num_ranks", "tensor_parallel_size"),
    # 160 rows over three ranks: a block lies on two of them, and begins within a shard.
    [("qwen2", 3, 1), ("qwen2", 2, 2), ("qwen2", 4, 2), ("qwen3_moe", 2, 1), ("gpt_oss", 2, 1)],
)
def test_blocks_are_those_of_the_full_tensors(
    pools, tmp_path, model_type, num_ranks, tensor_parallel_size
):
    if model_type == "qwen2":
        path = build_tiny_model(tmp_path / "model", tied=False, width=160)
    else:
        path = build_family(tmp_path / "model", model_type, **EXPERTS[model_type])
    section = {"enabled": True, "tensor_parallel_size": tensor_parallel_size}
    config = make_config(
        path, precision="bfloat16", train_global_batch_size=12, dtensor_cfg=section
    )
    expected = {}
    for name, tensor in load_file(f"{path}/model.safetensors").items():
        expected[name] = tensor.bfloat16()
        if tensor.ndim > 1:
            values, scales = block_fp8.quantize(expected[name])
            expected |= {name: values.view(torch.uint8), name + block_fp8.SCALES: scales}
    for gathered in pools(num_ranks).run(weights_ranks.gather_quantized, config=config):
        early, late, some = map(dict, gathered.passes)
        assert list(early) == list(late) == [meta.name for meta in gathered.metadata]
        assert early.keys() == expected.keys()
        assert list(some) == list(early)[1::3]
        shapes = {meta.name: meta.shape for meta in gathered.metadata}
        for found in (early, late, some):
            for name, tensor in found.items():
                assert torch.equal(tensor, expected[name]), name
                assert tuple(tensor.shape) == shapes[name]


@pytest.mark.slow_beyond(7, every=3)
@pytest.mark.parametrize(
    ("model_type", "num_ranks", "tensor_parallel_size"),
    [
        *((model_type, 2, 1) for model_type in EXPERTS),
        *((model_type, 1, 1) for model_type in EXPERTS),
        *((model_type, 2, 2) for model_type in ("mixtral", "minimax_m2", "qwen3_moe")),
    ],
)
def test_names_and_shapes_are_those_of_the_checkpoint(
    pools, tmp_path, model_type, num_ranks, tensor_parallel_size
):
    # transformers fuses the experts of most of these in memory, and renames others' tensors.
    path = build_family(tmp_path / "model", model_type, **EXPERTS[model_type])
    stored = load_file(f"{path}/model.safetensors")
    section = {"enabled": True, "tensor_parallel_size": tensor_parallel_size}
    ranks = pools(num_ranks).run(
        weights_ranks.gather_and_export,
        config=make_config(path, dtensor_cfg=section),
        directory=str(tmp_path / "exported"),
    )
    files = sorted(Path(tmp_path / "exported").glob("*.safetensors"))
    assert len(files) > 1
    exported = {name: each for file in files for name, each in load_file(file).items()}
    for gathered in ranks:
        assert {each.name for each in gathered.metadata} == stored.keys() == exported.keys()
        sent, chosen = map(dict, gathered.passes)
        assert [each.name for each in gathered.metadata] == list(sent)
        assert list(chosen) == list(sent)[1::3]
        for name, dtype, shape in gathered.metadata:
            assert (dtype, shape) == (torch.float32, tuple(stored[name].shape))
        for found in (sent, chosen, exported):
            assert all(torch.equal(tensor, stored[name]) for name, tensor in found.items())


def test_a_tensor_is_converted_when_its_turn_comes(monkeypatch, tmp_path):
    path = build_family(tmp_path, "mixtral", **EXPERTS["mixtral"])
    source = ModelWeights(load(path), wire_dtype=torch.float32, device=torch.device("cpu"))
    groups = source.converted_together()
    assert max(map(len, groups)) == 2 * 4  # gate and up projection of each expert
    converted, convert = [], Reversal.convert

    def counted(reversal, model, tensors):
        converted.append(reversal.names)
        return convert(reversal, model, tensors)

    monkeypatch.setattr(Reversal, "convert", counted)
    place = {name: index for index, names in enumerate(groups) for name in names}
    for name, _ in source:
        assert len(converted) == place[name] + 1


def test_parameters_that_are_offloaded_are_gathered_too(pools, model):
    config = make_config(model, dtensor_cfg={"enabled": True, "cpu_offload": True})
    expected = expected_tensors(model, torch.float32)
    for gathered in pools(2).run(weights_ranks.gather_weights, config=config):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in gathered.passes[0])


def test_groups_are_what_is_gathered_at_a_time(pools, model):
    (gathered,) = pools(1).run(weights_ranks.gather_groups, config=make_config(model))
    names = [each.name for each in gathered.metadata]
    assert [name for group, _ in gathered.groups for name in group] == names
    blocks = [group for group, _ in gathered.groups if block_of(group[0])]
    assert [block_of(block[0]) for block in blocks] == ["model.layers.0.", "model.layers.1."]
    tensors = [tensor for _, each in gathered.groups for tensor in each]
    assert all(torch.equal(a, b) for a, (_, b) in zip(tensors, gathered.tensors, strict=True))


@pytest.mark.needs("rl-policy[all]")
@pytest.mark.vllm
def test_it_has_all_that_vllm_asks_of_a_source():
    base = pytest.importorskip("vllm.distributed.weight_transfer.base")
    asked = {name for name in dir(base.WeightSource) if not name.startswith("_")}
    assert asked == {"metadata", "held_names", "groups", "iter_groups"}
    assert all(hasattr(ModelWeights, name) for name in asked)
    module = Qwen2ForCausalLM(Qwen2Config(hidden_size=64, num_hidden_layers=3, vocab_size=64))
    ours = ModelWeights(module, wire_dtype=torch.float32, device=torch.device("cpu"))
    theirs = base.ModuleSource(module)
    assert ours.groups() == theirs.groups()
    for mine, other in zip(ours.metadata(), theirs.metadata(), strict=True):
        assert (mine.name, mine.dtype, mine.shape) == (other.name, other.dtype, other.shape)
    for (names, tensors), (other_names, other_tensors) in zip(
        ours.iter_groups(), theirs.iter_groups(), strict=True
    ):
        assert names == other_names
        assert all(torch.equal(a, b) for a, b in zip(tensors, other_tensors, strict=True))
