import itertools
import pickle

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_refit import RefitPlan, TensorSpec
from rl_refit.buffers import RUN_BYTES, group_runs
from rl_refit.plan import ALIGNMENT, WirePlan, block_of, differences, layer_of

pytestmark = pytest.mark.promise

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]
SHAPES = st.lists(st.integers(0, 40), max_size=2).map(tuple)
NAMES = st.sampled_from(["embed.weight", "head.weight", "norm"]) | st.builds(
    "layers.{}.{}".format,
    st.integers(0, 5),
    st.sampled_from(["q", "k.weight", "mlp.gate.weight", "mlp.up.weight", "mlp.0.a", "mlp.0.b"]),
)


@st.composite
def metadata(draw):
    names = draw(st.lists(NAMES, unique=True, max_size=14))
    return [(name, draw(st.sampled_from(DTYPES)), draw(SHAPES)) for name in names]


BUCKETS = st.integers(256, 20_000)


@given(metadata(), BUCKETS)
def test_every_byte_has_one_place_and_the_order_is_kept(tensors, bucket_bytes):
    plan = RefitPlan.of(tensors, bucket_bytes)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    pieces = [piece for bucket in plan.buckets for piece in bucket.pieces]
    for index, spec in enumerate(plan.specs):
        own = [piece for piece in pieces if piece.tensor == index]
        assert [piece.start for piece in own] == [
            0,
            *itertools.accumulate(piece.size for piece in own[:-1]),
        ]
        assert sum(piece.size for piece in own) == spec.nbytes
        assert own
    assert [piece.tensor for piece in pieces] == sorted(piece.tensor for piece in pieces)


@given(metadata(), BUCKETS)
def test_pieces_are_aligned_do_not_overlap_and_fit(tensors, bucket_bytes):
    plan = RefitPlan.of(tensors, bucket_bytes)
    assert plan.largest_bucket <= plan.bucket_bytes <= bucket_bytes
    for bucket in plan.buckets:
        assert bucket.nbytes % ALIGNMENT == 0
        assert all(piece.offset % ALIGNMENT == 0 for piece in bucket.pieces)
        runs = [(piece.offset, piece.offset + piece.size) for piece in bucket.pieces]
        runs = sorted(run for run in [*runs, *bucket.gaps] if run[0] < run[1])
        starts, ends = zip(*runs, strict=True) if runs else ((), ())
        assert (*starts, bucket.nbytes) == (0, *ends)


@given(metadata(), BUCKETS)
def test_a_tensor_that_fits_is_not_split_nor_a_module_that_fits(tensors, bucket_bytes):
    plan = RefitPlan.of(tensors, bucket_bytes)
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            if not piece.is_full:
                assert plan.specs[piece.tensor].nbytes > plan.bucket_bytes
    for depth in range(1, 5):
        # Neighbours below one path within a layer: a layer, a module of it, or a tensor.
        paths = [
            (
                layer_of(spec.name),
                ".".join(spec.name.split(".")[: layer_of(spec.name).count(".") + depth]),
            )
            for spec in plan.specs
        ]
        for path, group in itertools.groupby(range(len(paths)), key=paths.__getitem__):
            members = set(group)
            size = sum(-(-plan.specs[i].nbytes // ALIGNMENT) * ALIGNMENT for i in members)
            homes = {b.index for b in plan.buckets for p in b.pieces if p.tensor in members}
            if size <= plan.bucket_bytes:
                assert len(homes) == 1, path


def test_what_an_engine_fuses_stays_together_if_its_layer_does_not():
    shapes = {
        "self_attn.q": 256,
        "self_attn.k": 256,
        "mlp.gate": 1024,
        "mlp.up": 1024,
        "mlp.down": 1024,
    }
    tensors = [
        (f"layers.{layer}.{name}.weight", torch.uint8, (size,))
        for layer in range(2)
        for name, size in shapes.items()
    ]
    plan = RefitPlan.of(tensors, 2304)
    packed = [[piece.tensor for piece in bucket.pieces] for bucket in plan.buckets]
    assert packed == [[0, 1], [2, 3], [4, 5, 6], [7, 8], [9]]


@given(metadata(), BUCKETS)
def test_a_piece_has_its_layer_only_if_its_bucket_holds_all_of_it(tensors, bucket_bytes):
    plan = RefitPlan.of(tensors, bucket_bytes)
    homes = {}
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            homes.setdefault(layer_of(plan.specs[piece.tensor].name), set()).add(bucket.index)
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            own = homes[layer_of(plan.specs[piece.tensor].name)]
            assert piece.has_layer == (own == {bucket.index})


SIZES = st.sampled_from([0, 300, RUN_BYTES // 3, RUN_BYTES // 2, RUN_BYTES + 5])


@given(st.lists(SIZES, max_size=20), st.sampled_from([RUN_BYTES // 4, RUN_BYTES, 8 * RUN_BYTES]))
def test_runs_are_short_and_a_part_is_one_of_its_own(sizes, bucket_bytes):
    tensors = [(f"w{i}", torch.uint8, (size,)) for i, size in enumerate(sizes)]
    for bucket in RefitPlan.of(tensors, bucket_bytes).buckets:
        runs = group_runs(bucket.pieces)
        assert tuple(itertools.chain(*runs)) == bucket.pieces
        for run in runs:
            assert len(run) == 1 or all(piece.is_full for piece in run)
            assert len(run) == 1 or run[-1].offset + run[-1].size - run[0].offset <= RUN_BYTES
        for run, following in itertools.pairwise(runs):
            end = following[0].offset + following[0].size
            if run[-1].is_full and following[0].is_full:
                assert end - run[0].offset > RUN_BYTES, "the two are one"


@given(metadata(), BUCKETS)
def test_the_encoded_plan_gives_the_same_plan(tensors, bucket_bytes):
    plan = RefitPlan.of(tensors, bucket_bytes)
    encoded = msgspec.msgpack.encode(plan.to_wire())
    assert RefitPlan.from_wire(msgspec.msgpack.decode(encoded, type=WirePlan)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


@given(metadata().filter(bool), BUCKETS, st.data())
def test_whatever_changes_what_is_sent_changes_the_hash(tensors, bucket_bytes, data):
    plan = RefitPlan.of(tensors, bucket_bytes)
    index = data.draw(st.integers(0, len(tensors) - 1))
    name, dtype, shape = tensors[index]
    other_dtype = next(candidate for candidate in DTYPES if candidate != dtype)
    changed = data.draw(
        st.sampled_from(
            [(name + "x", dtype, shape), (name, other_dtype, shape), (name, dtype, (*shape, 2))]
        )
    )
    others = [*tensors[:index], changed, *tensors[index + 1 :]]
    assert RefitPlan.of(others, bucket_bytes).hash != plan.hash
    assert RefitPlan.of(tensors, bucket_bytes + 256).hash != plan.hash
    assert RefitPlan.of(tensors[:-1], bucket_bytes).hash != plan.hash


def test_a_plan_that_was_changed_on_the_wire_is_refused():
    wire = RefitPlan.of([("a", torch.float32, (2, 3))], 4096).to_wire()
    wire.tensors[0].shape = (3, 2)
    with pytest.raises(ValueError, match="hash"):
        RefitPlan.from_wire(wire)


def test_layers_stay_together_as_in_the_example():
    tensors = [
        ("embed.weight", torch.float32, (64,)),
        ("layers.0.a", torch.float32, (64,)),
        ("layers.0.b", torch.float32, (64,)),
        ("layers.1.a", torch.float32, (64,)),
        ("layers.1.b", torch.float32, (65,)),
    ]
    plan = RefitPlan.of(tensors, 1024)
    packed = [[piece.tensor for piece in bucket.pieces] for bucket in plan.buckets]
    assert packed == [[0, 1, 2], [3, 4]]
    assert plan.buckets[1].gaps == [(256 + 260, 768)]
    assert "5 tensors, 1284 bytes, 2 buckets" in str(plan)


@pytest.mark.parametrize(
    ("name", "layer", "block"),
    [
        ("model.layers.3.mlp.experts.5.up.weight", "model.layers.3", "model.layers.3."),
        ("transformer.h.13.attn.bias", "transformer.h.13", "transformer.h.13."),
        ("lm_head.weight", "lm_head", ""),
        ("scale", "scale", ""),
    ],
)
def test_the_layer_and_the_block_of_a_name(name, layer, block):
    assert (layer_of(name), block_of(name)) == (layer, block)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match="a appears twice"):
        RefitPlan.of([("a", torch.float32, ()), ("a", torch.float32, ())])
    with pytest.raises(ValueError, match="bucket_bytes=255"):
        RefitPlan.of([], 255)
    with pytest.raises(ValueError, match="shape"):
        RefitPlan.of([("a", torch.float32, (-1,))])


def test_every_difference_is_named():
    def spec(name, *shape):
        return TensorSpec(name, torch.float32, shape)

    found = differences([spec("a", 1), spec("b", 2)], [spec("b", 3), spec("c", 1)])
    assert [line.split()[0] for line in found] == ["a", "c", "b"]
    assert "missing" in found[0]
    assert "unexpected" in found[1]
    assert "[3]" in found[2]
    assert "[2]" in found[2]
