"""Boxes, layouts, plans and digests of a resharding; needs no process but this one."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from rl_refit.errors import PlanMismatchError
from rl_refit.plan import TensorSpec
from rl_refit.resharding import Box, ParallelLayout, Placed, imbalance, local_shards, plan_pieces
from rl_refit.resharding.consumers import record
from rl_refit.resharding.digest import add_digests, shard_digest
from rl_refit.resharding.planner import MOST_ROUND_BYTES
from rl_refit.resharding.views import NoSlicesError, slices_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore


def specs(layers=4, experts=4, width=16):
    kind = torch.bfloat16
    found = [TensorSpec("model.embed_tokens.weight", kind, (40, width))]
    for layer in range(layers):
        path = f"model.layers.{layer}"
        found += [
            TensorSpec(f"{path}.input_layernorm.weight", kind, (width,)),
            TensorSpec(f"{path}.self_attn.q_proj.weight", kind, (3 * width, width)),
            TensorSpec(f"{path}.self_attn.o_proj.weight", kind, (width, 3 * width)),
        ]
        for expert in range(experts):
            shape = (2 * width, width)
            found.append(TensorSpec(f"{path}.mlp.experts.{expert}.up_proj.weight", kind, shape))
    return found


LAYOUTS = st.builds(
    ParallelLayout,
    tp=st.sampled_from([1, 2, 4]),
    fsdp=st.sampled_from([1, 2, 3, 5]),
    pp=st.sampled_from([1, 2, 3]),
    replicas=st.sampled_from([4, 8]),
    ep=st.sampled_from([1, 2, 4]),
)


@given(LAYOUTS, st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_every_wanted_element_is_sent_once_by_one_that_holds_it(trainer, tp, engines):
    tensors = specs()
    engine = ParallelLayout(tp=tp, ep=tp, replicas=engines, first_rank=trainer.num_ranks)
    held, wanted = trainer.place(tensors), engine.place(tensors)
    plan = plan_pieces(tensors, held, wanted, round_bytes=2048)
    assert plan.peak_bytes() <= 2048
    holders = {}
    for each in held:
        holders.setdefault(each.name, []).append(each)
    counts = {}
    for index in range(len(plan.pieces)):
        name, box = tensors[int(plan.pieces.tensor[index])].name, plan.box(index)
        sender = int(plan.pieces.sender[index])
        assert any(sender in h.ranks and h.box.contains(box) for h in holders[name])
        key = name, int(plan.pieces.receiver[index])
        shape = next(t.shape for t in tensors if t.name == name)
        box.view_of(counts.setdefault(key, torch.zeros(shape, dtype=torch.int64))).add_(1)
    expected = {}
    for each in wanted:
        shape = next(t.shape for t in tensors if t.name == each.name)
        for rank in each.ranks:
            full = expected.setdefault((each.name, rank), torch.zeros(shape, dtype=torch.int64))
            each.box.view_of(full).add_(1)
    assert counts.keys() == expected.keys()
    assert all(torch.equal(counts[key], expected[key]) for key in counts)


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_replicas_share_the_load(replicas):
    tensors = [TensorSpec(f"layers.{i}.weight", torch.float32, (512, 512)) for i in range(8)]
    trainer = ParallelLayout(replicas=replicas)
    plan = plan_pieces(
        tensors, trainer.place(tensors), ParallelLayout(first_rank=replicas).place(tensors)
    )
    assert imbalance(plan.sent()) <= 1.05


def test_what_nobody_holds_is_refused():
    tensors = [TensorSpec("w", torch.float32, (4, 2))]
    held = [Placed("w", Box((0, 0), (3, 2)), (0,))]
    with pytest.raises(PlanMismatchError, match=r"tensor w: rank 1 wants 8 elements .* hold 6"):
        plan_pieces(tensors, held, [Placed("w", Box.full((4, 2)), (1,))])
    held.append(Placed("w", Box((2, 0), (2, 2)), (2,)))
    with pytest.raises(PlanMismatchError, match="10 elements of 8 in distinct boxes"):
        plan_pieces(tensors, held, [Placed("w", Box.full((4, 2)), (1,))])


DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.bool]


@given(st.integers(0, 7), st.integers(0, 5), st.sampled_from(DTYPES))
def test_digests_of_shards_add_up(row, column, dtype):
    full = (torch.randn(7, 5, generator=torch.Generator().manual_seed(row)) * 9).to(dtype)
    boxes = [
        Box((r, c), (rows, columns))
        for r, rows in ((0, row), (row, 7 - row))
        for c, columns in ((0, column), (column, 5 - column))
    ]
    parts = [shard_digest(box.view_of(full), "w", box) for box in boxes]
    assert add_digests(parts) == shard_digest(full, "w", Box.full((7, 5)))


def test_a_digest_is_the_sum_of_products_of_odd_keys():
    data = torch.randn(600, 500).bfloat16()
    ones = torch.zeros(600, 500, dtype=torch.int16)
    total = shard_digest(data, "w", Box.full((600, 500)))
    flipped = data.clone()
    flipped.view(torch.int16)[17, 23] ^= 1
    ones[17, 23] = 1
    key = shard_digest(ones, "w", Box.full((600, 500)))
    assert key % 2 == 1
    sign = 1 if int(flipped.view(torch.int16)[17, 23]) & 1 else -1
    changed = shard_digest(flipped, "w", Box.full((600, 500)))
    assert np.uint64((changed - total) % 2**64) == np.uint64((sign * key) % 2**64)
    swapped = data[[1, 0, *range(2, 600)]]
    assert shard_digest(swapped, "w", Box.full((600, 500))) != total
    assert shard_digest(data, "v", Box.full((600, 500))) != total


def loaded(load, sources, targets):
    """Return what the recorded slices write, and what the loader itself writes."""
    mine = {name: torch.zeros_like(tensor) for name, tensor in targets.items()}
    found = record(load, [(n, t.dtype, tuple(t.shape)) for n, t in sources.items()], targets)
    assert all(not tensor.any() for tensor in targets.values())
    for each in found.slices:
        each.want(mine).data.copy_(each.box.view_of(sources[each.name]))
    load(iter(sources.items()))
    return found, mine


def test_recorded_slices_write_what_the_loader_writes():
    targets = {
        "qkv": torch.zeros(12, 6),
        "w13": torch.zeros(2, 8, 6),
        "turned": torch.zeros(6, 5),
        "rotary": torch.zeros(8, 3),
        "flat": torch.zeros(24),
        "gain": torch.zeros(6),
    }

    def load_experts(weight):
        gate, up = weight.chunk(2, dim=1)
        targets["w13"][1][:4].copy_(gate[3].contiguous())
        targets["w13"][1, 4:].copy_(up[3])

    def load_rotary(weight):
        targets["rotary"].copy_(weight.view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3))

    loaders = {
        "q": lambda weight: targets["qkv"].narrow(0, 0, 4).copy_(weight.narrow(0, 4, 4)),
        "k": lambda weight: targets["qkv"][4:8].copy_(weight.to(torch.float64)[2:6]),
        "experts": load_experts,
        "turned": lambda weight: targets["turned"].copy_(weight.t()),
        "rotary": load_rotary,
        "flat": lambda weight: targets["flat"].copy_(weight.flatten()),
        "gain": lambda weight: targets["gain"].copy_(weight + 1),
        "unread": lambda weight: None,
    }

    def load(pairs):
        for name, weight in pairs:
            loaders[name](weight)

    shapes = {"q": (8, 6), "k": (8, 6), "experts": (4, 8, 6), "turned": (5, 6)}
    shapes |= {"rotary": (8, 3), "flat": (4, 6), "gain": (6,), "unread": (2,)}
    sources = {name: torch.randint(9, shape).float() for name, shape in shapes.items()}
    found, mine = loaded(load, sources, targets)
    assert list(found.full) == ["gain"]
    assert "aten.add" in found.full["gain"]
    assert found.unused == ("unread",)
    boxes = {each.name: each.box for each in found.slices}
    assert boxes["q"] == Box((4, 0), (4, 6))
    for name in targets.keys() - {"gain"}:
        assert torch.equal(mine[name], targets[name]), name


def overwrite(p, q, a, b):
    p.copy_(a)
    p[1:].copy_(b[1:])


def zero_a_row(p, q, a, b):
    p.copy_(a)
    p[1].fill_(0)


def double(p, q, a, b):
    p.copy_(a)
    p.mul_(2)


def derive(p, q, a, b):
    p.copy_(a)
    q.copy_(p.t())


def narrow_first(p, q, a, b):
    p.copy_(a.to(torch.bfloat16))


def round_first(p, q, a, b):
    p.copy_(a.to(torch.int32))


def take_bits(p, q, a, b):
    p.view(torch.int32).copy_(a.to(torch.int32))


def take_bytes(p, q, a, b):
    p.view(torch.uint8)[1:].copy_(a.view(torch.uint8)[1:])


def broadcast(p, q, a, b):
    p.copy_(a[:1].to(torch.float64))


def broadcast_one(p, q, a, b):
    p.copy_(a[0, 0].to(torch.float64))


def negate(p, q, a, b):
    p.copy_(torch._neg_view(a))


def concatenate(p, q, a, b):
    torch.cat([a[:1], a[1:]], out=p)


def copy_many(p, q, a, b):
    torch._foreach_copy_([p], [a])


REFUSED = [overwrite, zero_a_row, double, derive, narrow_first, round_first, take_bits, take_bytes]
REFUSED += [broadcast, broadcast_one, negate, concatenate, copy_many]


@pytest.mark.parametrize("take", REFUSED, ids=lambda take: take.__name__)
def test_what_slices_cannot_reproduce_is_to_be_sent_in_full(take):
    targets = {"p": torch.zeros(2, 3), "q": torch.zeros(3, 2)}
    metadata = [("a", torch.float32, (2, 3)), ("b", torch.float32, (2, 3))]
    found = record(lambda pairs: take(**targets, **dict(pairs)), metadata, targets)
    assert not found.slices
    assert "a" in found.full
    assert not any(tensor.any() for tensor in targets.values())


@pytest.mark.parametrize("is_inference", [False, True])
def test_views_and_wider_copies_are_slices(is_inference):
    targets = {"p": torch.zeros(6).half(), "q": torch.zeros(1, 3).to(torch.float8_e4m3fn)}
    both = torch.zeros(5, 3)
    targets |= {"top": both[:2], "bottom": both[2:]}

    def load(pairs):
        given = dict(pairs)
        targets["p"].zero_()
        targets["p"].copy_(given["a"].float().t().reshape(6))
        targets["q"].view(torch.uint8).copy_(given["b"].view(torch.uint8)[1:])
        targets["top"].copy_(given["c"][:2])
        targets["bottom"].copy_(given["c"][1:4])

    sources = {
        "a": torch.randn(2, 3).bfloat16(),
        "b": torch.randn(2, 3).to(torch.float8_e4m3fn),
        "c": torch.randn(4, 3),
    }
    metadata = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sources.items()]
    with torch.inference_mode(is_inference):
        found = record(load, metadata, targets)
    assert not found.full
    for each in found.slices:
        each.want(targets).data.copy_(each.box.view_of(sources[each.name]))
    mine = {name: tensor.clone() for name, tensor in targets.items()}
    load(iter(sources.items()))
    assert all(torch.equal(mine[name].float(), targets[name].float()) for name in mine)
    assert all(tensor.float().any() for tensor in mine.values())


def test_a_loader_that_cannot_be_recorded_is_refused():
    parameter = torch.nn.Parameter(torch.ones(2))
    metadata = [("a", torch.float32, (2,))]

    def branch(pairs):
        if dict(pairs)["a"].sum() > 0:
            parameter.data.zero_()

    with pytest.raises(ValueError, match="cannot go on without the values of a"):
        record(branch, metadata, {"p": parameter})

    def replace(pairs):
        parameter.data = torch.zeros(2)

    with pytest.raises(ValueError, match="gives p another storage"):
        record(replace, metadata, {"p": parameter})
    assert parameter.data.eq(1).all()


@given(st.data())
def test_boxes_of_a_view_are_its_elements(data):
    full = torch.arange(4 * 6 * 3).view(4, 6, 3)
    view = full
    for _ in range(3):
        step = data.draw(st.integers(0, 4))
        dim = data.draw(st.integers(0, view.ndim - 1))
        size = view.shape[dim]
        if step == 0:
            start = data.draw(st.integers(0, size - 1))
            view = view.narrow(dim, start, data.draw(st.integers(1, size - start)))
        elif step == 1:
            view = view.transpose(dim, data.draw(st.integers(0, view.ndim - 1)))
        elif step == 2 and size % 2 == 0:
            view = view.unflatten(dim, (2, size // 2))
        elif step == 3 and view.is_contiguous():
            view = view.flatten()
        elif step == 4:
            rows = [slice(None)] * view.ndim
            rows[dim] = slice(data.draw(st.integers(0, size - 1)), None, 2)
            view = view[tuple(rows)]
    target = torch.full(view.shape, -1)
    where = (view.storage_offset(), view.stride())
    try:
        boxes = slices_of(view.shape, where, (0, target.stride()), tuple(full.shape))
    except NoSlicesError:
        assume(False)
    for box, offset, strides in boxes:
        target.as_strided(box.shape, strides, offset).copy_(box.view_of(full))
    assert torch.equal(target, view)


def test_rows_that_are_held_twice_do_not_make_up_for_a_gap():
    tensors = [TensorSpec("w", torch.float32, (6, 2))]
    held = [Placed("w", Box((start, 0), (3, 2)), (start,)) for start in (0, 1)]
    with pytest.raises(PlanMismatchError, match=r"wants 12 elements .* hold 12, some twice"):
        plan_pieces(tensors, held, [Placed("w", Box.full((6, 2)), (2,))])


def test_a_strided_shard_that_is_no_box_is_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
        local = torch.zeros(2, 3)
        good = [_StridedShard(0, split_factor=2), Shard(0)]
        bad = [Shard(0), _StridedShard(0, split_factor=2)]
        one, other = (
            DTensor.from_local(local, mesh, each, shape=(8, 3), stride=(3, 1), run_check=False)
            for each in (good, bad)
        )
        assert local_shards({"w": one})["w"].box == Box((0, 0), (2, 3))
        with pytest.raises(ValueError, match="of dim 0 that are not consecutive"):
            local_shards({"w": other})
    finally:
        dist.destroy_process_group()


def test_by_default_a_round_has_room_for_a_row_of_stacked_experts():
    spec = TensorSpec("layers.0.experts.gate_up_proj", torch.float32, (8, 28672, 4096))
    held = [Placed(spec.name, Box.full(spec.shape), (0,))]
    wanted = [Placed(spec.name, Box.full(spec.shape), (1,))]
    plan = plan_pieces([spec], held, wanted)
    assert plan.round_bytes == 28672 * 4096 * 4 > MOST_ROUND_BYTES
    assert plan.pieces.round.tolist() == list(range(8))


def test_parameters_that_slices_and_zeros_do_not_fill_come_in_full():
    targets = {name: torch.zeros(4, 3) for name in ("padded", "ones", "gap", "shared", "full")}
    sources = {name: torch.randn(2, 3) for name in ("p", "o", "g", "s1", "s2", "s3", "h")}

    def load(pairs):
        found = dict(pairs)
        targets["padded"][:2].copy_(found["p"])
        targets["padded"][2:].zero_()
        targets["ones"][:2].copy_(found["o"])
        targets["ones"][2:].fill_(1)
        targets["gap"][1:3].copy_(found["g"])
        # One half by what is computed, so that the other half does not come alone either; nor does
        # what else is made of that.
        targets["shared"][:2].copy_(found["s1"])
        targets["shared"][2:].copy_(found["s2"] * 2)
        targets["full"][:1].copy_(found["s1"][:1])
        targets["full"][1:3].copy_(found["s3"])
        targets["full"][3:].copy_(found["h"][:1])

    metadata = [(n, t.dtype, tuple(t.shape)) for n, t in sources.items()]
    found = record(load, metadata, targets)
    assert found.full.keys() == {"s2"}
    assert found.partial == ("ones", "gap", "shared")
    complete = found.of_complete_parameters()
    assert {each.name for each in complete.slices} == {"p"}
    assert complete.full.keys() == {"o", "g", "s1", "s2", "s3", "h"}
    assert complete.full["s2"] == found.full["s2"]


def test_zeros_that_are_copied_fill_and_other_constants_do_not():
    targets = {"zeros": torch.ones(4), "values": torch.ones(4)}

    def load(pairs):
        found = dict(pairs)
        for name, constant in (("zeros", torch.zeros(2)), ("values", torch.arange(2.0))):
            targets[name][:2].copy_(found[name])
            targets[name][2:].copy_(constant)

    found = record(load, [(name, torch.float32, (2,)) for name in targets], targets)
    assert found.partial == ("values",)
