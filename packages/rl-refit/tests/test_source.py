"""Sources: modules in every layout of DTensors against the same module on one process."""

import pytest
import source_ranks
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rl_refit import ModuleSource, TensorSource
from rl_refit.source import WeightMeta
from tolerances import SUMS
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

NAMES = [
    "gain",
    "embed.weight",
    *(
        f"layers.{index}.{name}"
        for index in (0, 1)
        for name in ("count", "up.weight", "up.bias", "down.weight")
    ),
]
# Weights of about 1 after a step of plain SGD.
CLOSE = {"rtol": 0, "atol": SUMS}


def gathered(tmp_path, world, layouts):
    """Return what each rank has seen."""
    results = str(tmp_path / "seen")
    arguments = (world, tmp_path / "store", layouts, results)
    # Forked, as each spawned process imports torch, which takes longer than the test.
    mp.start_processes(source_ranks.run, arguments, nprocs=world, start_method="fork")
    return [torch.load(f"{results}-{rank}", weights_only=False) for rank in range(world)]


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, ["fsdp", "tp"]),
        (4, ["fsdp+tp", "fsdp", "plain"]),
    ],
)
@pytest.mark.slow
def test_every_rank_gathers_the_tensors_of_one_process(tmp_path, world, layouts):
    ranks = gathered(tmp_path, world, layouts)
    model = source_ranks.build()
    before = source_ranks.read(ModuleSource(model))
    source_ranks.step(model)
    after = source_ranks.read(ModuleSource(model))
    assert sorted(before) == sorted(NAMES)  # the tied head is left out, and so is the cache
    for rank, seen in enumerate(ranks):
        assert list(seen) == layouts
        for layout in seen.values():
            assert [(n, t.dtype, tuple(t.shape)) for n, t in layout["after"].items()] == layout[
                "metadata"
            ]
            assert list(layout["before"]) == list(before)
            for name in before:
                assert torch.equal(layout["before"][name], before[name]), name
                torch.testing.assert_close(layout["after"][name], after[name], **CLOSE)
            for name, tensor in layout["after"].items():
                assert torch.equal(layout["narrow"][name], as_sent(tensor)), name
            assert list(layout["received"]) == (list(before) if rank == 0 else [])
            for name, tensor in layout["received"].items():
                assert torch.equal(tensor, layout["narrow"][name]), name


def as_sent(tensor):
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def test_a_converter_renames_splits_and_leaves_out():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up = nn.Linear(3, 8, bias=False)
            self.norm = nn.Parameter(torch.randn(3))
            self.steps = nn.Buffer(torch.tensor(7))

    def convert(name, tensor):
        if name == "steps":
            return []
        if name == "gate_up.weight":
            gate, up = tensor.chunk(2)
            return [("mlp.gate.weight", gate), ("mlp.up.weight", up)]
        return [("norm.weight", tensor)]

    module = Fused()
    source = ModuleSource(module, convert=convert, dtype=torch.bfloat16)
    assert source.metadata() == [
        ("norm.weight", torch.bfloat16, (3,)),
        ("mlp.gate.weight", torch.bfloat16, (4, 3)),
        ("mlp.up.weight", torch.bfloat16, (4, 3)),
    ]
    with torch.no_grad():
        module.gate_up.weight += 1
    got = source_ranks.read(source)
    weight = module.gate_up.weight.detach().bfloat16()
    assert torch.equal(got["mlp.gate.weight"], weight[:4])
    assert torch.equal(got["mlp.up.weight"], weight[4:])
    assert torch.equal(got["norm.weight"], module.norm.detach().bfloat16())


def test_two_tensors_of_one_name_are_refused():
    source = ModuleSource(nn.Linear(2, 2), convert=lambda name, tensor: [("same", tensor)])
    with pytest.raises(ValueError, match="a second tensor same, from bias"):
        source.metadata()


def test_replaced_parameters_and_extra_state():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return torch.zeros(1)

    module = Extra(2, 3)
    module.own_extra_state = nn.Parameter(torch.ones(2))
    module.inner = Extra(1, 1, bias=False)
    source = ModuleSource(module)
    module.weight = nn.Parameter(torch.ones(3, 2))
    names = [meta.name for meta in source.metadata()]
    assert names == ["weight", "bias", "own_extra_state", "inner.weight"]
    assert torch.equal(dict(source)["weight"], torch.ones(3, 2))
    assert not dict(source)["weight"].requires_grad


def test_names_are_without_the_wrappers_of_activation_checkpointing():
    module = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 3)))
    assert [meta.name for meta in ModuleSource(module).metadata()] == ["0.weight", "0.bias"]
    assert list(dict(ModuleSource(module))) == ["0.weight", "0.bias"]


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_dtensors_of_one_rank_are_gathered(one_rank, layout):
    model, plain = source_ranks.sharded(layout), source_ranks.build()
    # FSDP2 leaves the root's full parameters in the module, which the next step does not change.
    with torch.no_grad():
        model(torch.arange(7)[None])
    source = ModuleSource(model)
    for each in (model, plain):
        source_ranks.step(each)
    expected, got = source_ranks.read(ModuleSource(plain)), dict(source)
    assert list(got) == list(expected)
    assert not any(isinstance(tensor, DTensor) for tensor in got.values())
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name], **CLOSE)


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_shards_are_moved_to_the_device(one_rank, layout):
    source = ModuleSource(source_ranks.sharded(layout), device="meta")
    assert {tensor.device.type for _, tensor in source} == {"meta"}


def test_tensors_that_are_sharded_need_a_module(one_rank):
    module = source_ranks.sharded("fsdp")
    with pytest.raises(ValueError, match=r"gain is a DTensor.*ModuleSource"):
        TensorSource(module.named_parameters())


@pytest.mark.parametrize("kind", [ModuleSource, lambda module: TensorSource(module.state_dict())])
def test_groups_are_the_blocks(kind):
    source = kind(source_ranks.build())
    names = [meta.name for meta in source.metadata()]
    assert all(isinstance(meta, WeightMeta) for meta in source.metadata())
    assert source.held_names() is None
    groups = source.groups()
    assert [len(group) for group in groups] == [2, 4, 4]
    assert [name for group in groups for name in group] == names
    tensors = [tensor for _, each in source.iter_groups() for tensor in each]
    assert all(torch.equal(a, b) for a, (_, b) in zip(tensors, source, strict=True))
