"""From a checkpoint into the ranks of any layout and out again, bit for bit."""

import convert_ranks
import pytest
import torch
from rl_interfaces.backend.checkpoint.hf_files import plan_files
from rl_megatron_worker.convert.mappings import StackedExpert
from rl_megatron_worker.weights import MegatronWeights
from rl_refit.plan import block_of
from safetensors.torch import load_file
from tiny_models import KINDS, WITH_EXPERTS, build_tiny, build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
VIRTUAL = PP2 | {"virtual_pipeline_model_parallel_size": 2}
UNEVEN = PP2 | {"num_layers_in_first_pipeline_stage": 1}
SEQUENCE = TP2 | {"sequence_parallel": True}

DENSE = tuple(kind for kind in KINDS if kind not in WITH_EXPERTS)
# Ranks, layout, kinds. Experts under tensor parallelism want sequence parallelism too.
LAYOUTS = {
    "one rank": (1, {}, KINDS),
    "tp2": (2, TP2, DENSE),
    "tp2 of experts": (2, SEQUENCE, WITH_EXPERTS),
    "pp2": (2, PP2, KINDS),
    "virtual pp2": (2, VIRTUAL, KINDS),
    "uneven pp2": (2, UNEVEN, KINDS),
    "tp2 ep2": (2, SEQUENCE | EP2, WITH_EXPERTS),
    "tp2 virtual pp2": (4, TP2 | VIRTUAL, DENSE),
    "pp2 ep2": (4, PP2 | EP2, WITH_EXPERTS),
    "tp2 pp2 ep2": (4, SEQUENCE | PP2 | EP2, WITH_EXPERTS),
    "tp2 cp2": (4, TP2 | {"context_parallel_size": 2}, ["qwen3"]),
    "tp4, more than groups": (4, {"tensor_model_parallel_size": 4}, DENSE),
}
# Where each kind comes with tied embeddings and without: on one rank, and over two stages.
WITH_BOTH = ("one rank", "pp2")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """`models(kind, tied)` gives the path of a tiny model."""
    built = {}

    def path_of(kind, tied=False):
        if (kind, tied) not in built:
            built[kind, tied] = build_tiny(tmp_path_factory.mktemp(kind), kind, tied=tied)
        return built[kind, tied]

    return path_of


def stored(path):
    return load_file(f"{path}/model.safetensors")


def assert_same(tensors, expected):
    tensors = dict(tensors)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


def assert_shards_are(expected, ranks):
    """What the ranks hold has to be the tensors, each element of them."""
    if any("gate_up_proj_bias" in name for name in expected):
        assert all("interleaved" in each for each in ranks)
        return
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for name, shard in ((n, s) for held in ranks for n, shards in held.items() for s in shards):
        assert shard.shape == tuple(expected[name].shape), name
        assert torch.equal(shard.data, shard.box.view_of(expected[name])), (name, shard.box)
        shard.box.view_of(found[name]).copy_(shard.data)
    assert_same(found, expected)


def models_of(layout):
    """Return kinds and whether embeddings are tied: of most layouts every other kind's are."""
    kinds = LAYOUTS[layout][2]
    if layout in WITH_BOTH:
        return [(kind, tied) for kind in kinds for tied in (False, True)]
    first = list(LAYOUTS).index(layout)
    return [(kind, (first + index) % 2 == 1) for index, kind in enumerate(kinds)]


@pytest.mark.slow_beyond(4, every=3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.promise_first(2)
def test_every_rank_gets_every_tensor_bit_for_bit(pools, models, layout):
    num_ranks, sizes, _ = LAYOUTS[layout]
    paths = [models(*each) for each in models_of(layout)]
    ranks = pools(num_ranks).run(convert_ranks.load_and_gather, paths=paths, layout=sizes)
    for index, path in enumerate(paths):
        assert_shards_are(stored(path), [rank[index]["shards"] for rank in ranks])
    for rank in ranks:
        for path, found in zip(paths, rank, strict=True):
            expected = stored(path)
            names = [meta.name for meta in found["metadata"]]
            assert [name for group in found["groups"] for name in group] == names
            assert len(names) == len(expected)
            for tensors in found["passes"]:
                assert [name for name, _ in tensors] == names
                assert_same(tensors, expected)
            for meta in found["metadata"]:
                assert (meta.dtype, meta.shape) == (torch.float32, tuple(expected[meta.name].shape))


def test_a_tied_output_is_exported_once(models):
    assert "lm_head.weight" in stored(models("llama"))
    assert "lm_head.weight" not in stored(models("llama", tied=True))


def test_experts_sharded_over_two_axes_are_gathered(pools, models):
    path = models("qwen3_moe")
    run = convert_ranks.load_and_gather_experts_sharded_twice
    for found in pools(4).run(run, path=path):
        assert_same(found["passes"][0], stored(path))


@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_tensors_are_cast_to_the_wire_dtype(pools, models, dtype, wire_dtype):
    path = models("qwen2")
    expected = {n: tensor.to(dtype).to(wire_dtype) for n, tensor in stored(path).items()}
    for (found,) in pools(2).run(
        convert_ranks.load_and_gather,
        paths=[path],
        layout=TP2,
        dtype=dtype,
        wire_dtype=wire_dtype,
        ddp=True,
    ):
        assert {meta.dtype for meta in found["metadata"]} == {wire_dtype}
        assert_same(found["passes"][0], expected)


@pytest.mark.parametrize("layout", ["tp2", "virtual pp2", "tp2 ep2"])
def test_some_tensors_and_their_groups(pools, models, layout):
    num_ranks, sizes, (*_, kind) = LAYOUTS[layout]
    path = models(kind)
    expected = stored(path)
    names = [
        "model.layers.3.self_attn.v_proj.weight",
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.embed_tokens.weight",
    ]
    if kind in WITH_EXPERTS:
        names += [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (3, 2, 0)]
    for found in pools(num_ranks).run(
        convert_ranks.gather_some, path=path, layout=sizes, names=names
    ):
        groups = found["groups"]
        assert [name for name, _ in found["named"]] == names
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found["named"])
        layers = [{block_of(name) for name in group} for group, _ in groups]
        assert layers == [{""}, *({f"model.layers.{i}."} for i in range(4)), {""}]
        assert_same([pair for group in groups for pair in zip(*group, strict=True)], expected)
        assert "model.layers.99.mlp.up_proj.weight" in found["error"]


def test_metadata_is_not_collective(pools, models):
    path = models("qwen2")
    found, _ = pools(2).run(convert_ranks.metadata_on_one_rank, path=path, layout=PP2)
    assert {meta.name for meta in found["metadata"]} == stored(path).keys()
    assert len(found["groups"]) == 6


def test_gathered_tensors_follow_the_parameters(pools, models):
    for found in pools(2).run(
        convert_ranks.gather_after_a_change, path=models("qwen3", tied=True), layout=PP2
    ):
        assert_same(found["after"], {name: each + 1 for name, each in found["before"].items()})


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_names_are_those_on_disk(models, kind):
    """Metadata is made of the config alone; layers follow each other, and nothing comes twice."""
    from rl_megatron_worker.convert import converter_for
    from transformers import AutoConfig

    path = models(kind, tied=True)
    config = AutoConfig.from_pretrained(path)
    converter = converter_for(config)
    mappings = converter.mappings(converter.architecture(config))
    exported = [each for each in mappings if not each.is_copy]
    named = [(n, shape) for each in exported for n, shape in each.sources.items()]
    # A tensor that stacks experts comes once for each of them.
    alone = [n for each in exported if not isinstance(each, StackedExpert) for n in each.sources]
    assert len(alone) == len(set(alone))
    assert (len(named) == len(dict(named))) == (kind != "gpt_oss")
    assert dict(named) == {name: tuple(t.shape) for name, t in stored(path).items()}


@pytest.mark.needs("rl-policy[all]")
@pytest.mark.vllm
def test_it_has_all_that_vllm_asks_of_a_source():
    base = pytest.importorskip("vllm.distributed.weight_transfer.base")
    asked = {name for name in dir(base.WeightSource) if not name.startswith("_")}
    assert all(hasattr(MegatronWeights, name) for name in asked)


@pytest.mark.slow_beyond(2, every=3)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("max_file_bytes", [20_000, 1 << 30], ids=["several files", "one file"])
@pytest.mark.promise_first(1)
def test_an_exported_directory_loads(pools, tmp_path, kind, max_file_bytes):
    path = build_tiny(tmp_path / "model", kind, tied=kind == "llama", dtype=torch.bfloat16)
    directory = tmp_path / "exported"
    directory.mkdir()
    pools(4).run(
        convert_ranks.export,
        path=path,
        layout=PP2 | (EP2 if kind == "qwen3_moe" else TP2),
        directory=str(directory),
        max_file_bytes=max_file_bytes,
    )
    files = sorted(file.name for file in directory.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (max_file_bytes > 20_000)
    original, exported = (AutoModelForCausalLM.from_pretrained(each) for each in (path, directory))
    assert exported.dtype == torch.float32
    assert_same(exported.state_dict(), original.float().state_dict())
    text = "".join(map(chr, range(64, 80)))
    tokens = AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
    assert tokens == build_tokenizer()(text)["input_ids"]


def test_files_are_planned_by_size():
    sizes = {"a": 3, "b": 2, "c": 9, "d": 1}
    groups = [[name] for name in sizes]
    files = plan_files(groups, sizes, max_file_bytes=5)
    assert list(files) == [f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)]
    assert list(files.values()) == [[["c"]], [["a"], ["b"]], [["d"]]]
    assert plan_files(groups, sizes, max_file_bytes=15) == {"model.safetensors": groups}
