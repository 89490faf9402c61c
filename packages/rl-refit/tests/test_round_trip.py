import dataclasses
import gc
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S
from refit_pairs import Engine, make_sender, must, outcomes, refit, same, some_tensors
from rl_refit import (
    PlanMismatchError,
    RefitReceiver,
    RefitSender,
    TensorSource,
)

pytestmark = pytest.mark.promise

TRANSPORTS = ["shm", "golden", "collective", "chain"]
every_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def round_trip(tensors, transport="shm", num_receivers=1, refits=1, *, load_keeps=True, **options):
    with make_sender(tensors, transport, num_receivers, **options) as sender:
        engines = [Engine(sender.address, rank) for rank in range(num_receivers)]
        for engine in engines:
            engine.load_keeps = load_keeps
        for version in range(refits):
            must(refit(sender, engines, version))
        for engine in engines:
            engine.receiver.close()
    return engines


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.lists(st.integers(0, 60), max_size=2),
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
        ),
        max_size=10,
    ),
    st.integers(256, 8192),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_plan_arrives_bit_by_bit(entries, bucket_bytes, num_buffers, load_keeps):
    tensors = {
        f"layers.{layer}.w{index}": torch.randint(0, 100, shape).to(dtype)
        for index, (layer, shape, dtype) in enumerate(entries)
    }
    options = {"bucket_bytes": bucket_bytes, "num_buffers": num_buffers}
    (engine,) = round_trip(tensors, refits=2, load_keeps=load_keeps, **options)
    assert same(engine.weights, tensors)
    assert engine.order == list(tensors)


def test_no_load_is_needed_where_every_tensor_has_a_place():
    tensors = some_tensors()
    parameters = {name: torch.nn.Parameter(t.clone(), False) for name, t in tensors.items()}
    with make_sender(tensors, bucket_bytes=1024) as sender:
        receiver = RefitReceiver(sender.address, into=parameters, timeout_s=PATIENCE_S)
        receiver.begin(1)
        must(outcomes(lambda: sender.send(1), lambda: receiver.receive(1)))
        assert same(parameters, tensors)
        assert receiver._session.unpacker.scratch_bytes == 0
        receiver.close()
        del parameters["head.weight"]
        receiver = RefitReceiver(sender.address, into=parameters, timeout_s=PATIENCE_S)
        receiver.begin(1)
        sent, received = outcomes(lambda: sender.send(1), lambda: receiver.receive(1))
        assert all("no `load`, and head.weight" in str(error) for error in (sent, received))
        receiver.close()


def test_a_place_that_does_not_fit_is_refused():
    tensors = some_tensors()
    with make_sender(tensors) as sender:
        with pytest.raises(ValueError, match=r"into: steps is not contiguous"):
            Engine(sender.address, into={"steps": torch.zeros(7, 2)[:, 0]})
        engine = Engine(sender.address, into={"steps": torch.zeros(7), "more": torch.zeros(2)})
        for error in refit(sender, [engine], 1):
            assert isinstance(error, PlanMismatchError)
            assert "more float32[2] is missing" in str(error)
            assert "steps int64[7] is offered where steps float32[7] is expected" in str(error)
        engine.receiver.close()


def test_room_for_split_tensors_is_kept_between_refits_and_freed_at_the_end():
    tensors = {f"w{i}": torch.randn(3000 + i) for i in range(3)}
    with make_sender(tensors, bucket_bytes=1024) as sender:
        engine = Engine(sender.address)
        engine.load_keeps = False
        places = []
        engine.load = lambda pairs: places.extend(tensor.data_ptr() for _, tensor in pairs)
        for version in range(4):  # the rooms grow in the first two
            must(refit(sender, [engine], version))
        unpacker = engine.receiver._session.unpacker
        assert len(set(places[6:])) == 2
        assert 0 < unpacker.scratch_bytes <= 2 * 4 * 3002
        engine.receiver.close()
        assert unpacker.scratch_bytes == 0


def test_tied_tensors_are_sent_once():
    shared = torch.randn(8, 4)
    tensors = {
        "embed.weight": shared,
        "half": shared[:4],
        "turned": shared.T,
        "head.weight": shared,
    }
    source = TensorSource(tensors)
    assert [name for name, *_ in source.metadata()] == ["embed.weight", "half", "turned"]
    (engine,) = round_trip(tensors)
    del tensors["head.weight"]
    assert same(engine.weights, tensors)


def test_the_senders_buffer_size_is_everybodys():
    # A receiver is given nothing else than the address, and takes plan and buffers as offered.
    tensors = some_tensors()
    for bucket_bytes, num_buffers in [(256, 1), (5000, 2), (1 << 20, 3)]:
        options = {"bucket_bytes": bucket_bytes, "num_buffers": num_buffers}
        with make_sender(tensors, **options) as sender:
            engine = Engine(sender.address)
            must(refit(sender, [engine], 0))
            assert engine.receiver._session.plan.bucket_bytes == bucket_bytes // 256 * 256
            assert same(engine.weights, tensors)
            engine.receiver.close()


def test_no_tensors_at_all_is_a_refit_too():
    (engine,) = round_trip({}, refits=2)
    assert engine.weights == {}


def test_a_tensor_is_a_view_only_if_its_layer_is_complete():
    tensors = {f"layers.{i // 2}.w{i}": torch.full((64,), float(i)) for i in range(6)}
    kept = {}
    with make_sender(tensors, bucket_bytes=256, num_buffers=1) as sender:
        engine = Engine(sender.address)
        engine.load = lambda pairs: kept.update(pairs)
        must(refit(sender, [engine], 0))
        # No bucket holds a layer of two, so that a loader may keep every tensor.
        assert same(kept, tensors)
        engine.receiver.close()


def test_what_is_shared_cannot_be_mapped_for_writing():
    gc.collect()  # what errors of other tests still refer to
    tensors = some_tensors()
    with make_sender(tensors) as sender:
        engine = Engine(sender.address)
        must(refit(sender, [engine], 0))
        maps = Path("/proc/self/maps").read_text().splitlines()
        modes = [line.split()[1] for line in maps if "memfd:rl-refit" in line]
        assert sorted(modes) == ["r--s", "rw-s"]
        descriptor = sender._connections.side._descriptor
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 256)
        engine.receiver.close()


def test_the_report_adds_up():
    tensors = some_tensors()
    with make_sender(tensors, num_receivers=2) as sender:
        engines = [Engine(sender.address, rank) for rank in (4, 7)]
        sent, *received = results = refit(sender, engines, 5)
        must(results)
        for engine in engines:
            engine.receiver.close()
    assert sent.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert sent.slowest_rank in (4, 7)
    assert sent.version == 5
    for report in (sent, *received):
        metrics = report.as_metrics()
        assert {"refit_s", "refit_bytes", "refit_gb_per_s", "refit_load_s"} <= metrics.keys()
        phases = ("gather", "pack", "wire", "join", "resume")
        assert sum(metrics[f"refit_{phase}_s"] for phase in phases) <= report.seconds
        assert metrics["refit_gb_per_s"] == report.bytes / report.seconds / 1e9


def test_without_keeping_only_split_tensors_are_copied():
    tensors = {f"layers.{i // 2}.w{i}": torch.full((64,), float(i)) for i in range(6)}
    # Each begins in the bucket in which the one before it ends.
    tensors |= {f"large.w{i}": torch.randn(900 - 90 * i) for i in range(4)}
    seen = {}
    with make_sender(tensors, bucket_bytes=1024, num_buffers=2) as sender:
        engine = Engine(sender.address)
        receiver = engine.receiver

        def load(pairs):
            buffers = receiver._session.side.buffers
            start = buffers[0].data_ptr()
            inside = range(start, start + sum(len(buffer) for buffer in buffers))
            seen.update({name: tensor.data_ptr() in inside for name, tensor in pairs})
            engine.load(pairs)

        def receive(version):
            receiver.begin(version)
            return receiver.receive(version, load, load_keeps=False)

        for version in range(2):
            must(outcomes(lambda v=version: sender.send(v), lambda v=version: receive(v)))
        receiver.close()
    assert same({name: engine.weights[name] for name in tensors}, tensors)
    assert seen == {name: "large" not in name for name in tensors}


def test_the_bucket_size_follows_the_model_if_none_is_given():
    with make_sender({"a": torch.ones(3)}, bucket_bytes=None) as sender:
        assert sender.plan.bucket_bytes == 8 << 20
    matrices = {f"w{i}": torch.empty(1 << 20, 10, dtype=torch.uint8) for i in range(16)}
    with make_sender(matrices, bucket_bytes=None) as sender:
        assert sender.plan.bucket_bytes == 20 << 20
    with make_sender({"a": torch.empty(50 << 20, dtype=torch.uint8)}, bucket_bytes=None) as sender:
        assert len(sender.plan.buckets) == 1


def test_a_source_of_vllms_kind_is_accepted():
    @dataclasses.dataclass(frozen=True)
    class ParamMeta:
        name: str
        dtype: torch.dtype
        shape: tuple[int, ...]

    tensors = some_tensors()

    class Source:
        def metadata(self):
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]

        def __iter__(self):
            return iter(tensors.items())

    with RefitSender(Source(), timeout_s=PATIENCE_S) as sender:
        engine = Engine(sender.address)
        must(refit(sender, [engine], 1))
        assert same(engine.weights, tensors)
        engine.receiver.close()
