"""What is remembered of operators on FakeTensors is what torch infers anew."""

import pytest
import torch
from rl_interfaces.backend.fake import shapes
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_aten = torch.ops.aten
# An operator, the arguments after the tensors, and whether it is remembered.
CALLS = {
    "new": (_aten.mul.Tensor, 2, (), True),
    "scalar": (_aten.mul.Tensor, 1, (2.5,), True),
    "view": (_aten.view.default, 1, ([6, 4],), True),
    "view with an offset": (_aten.slice.Tensor, 1, (0, 1, 3), True),
    "unsafe view": (_aten._unsafe_view.default, 1, ([24],), True),
    "in place": (_aten.add_.Tensor, 2, (), True),
    "several views": (_aten.split.Tensor, 1, (2,), True),
    "several new": (_aten.topk.default, 1, (2,), True),
    "nothing": (_aten._foreach_mul_.Scalar, [2], (2.0,), True),
    "other memory format": (_aten.t.default, 1, (), True),
    "description in place": (_aten.t_.default, 1, (), False),
    "storage size": (_aten.as_strided.default, 1, ([2, 2], [2, 1]), False),
}


def fake(mode, *shape, dtype=torch.float32):
    return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), "cuda:0")


def arguments_of(mode, num_tensors, rest):
    if isinstance(num_tensors, list):
        return ([fake(mode, 4, 6) for _ in range(num_tensors[0])], *rest)
    return (*(fake(mode, 4, 6) for _ in range(num_tensors)), *rest)


def described(out, args):
    """Return all that there is to say about outputs, by the arguments that share their memory."""
    if out is None:
        return None
    if isinstance(out, (list, tuple)):
        return type(out), [described(each, args) for each in out]
    storage = out.untyped_storage()._cdata
    shares = [
        place
        for place, each in enumerate(args)
        if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata == storage
    ]
    is_same = [place for place in shares if args[place] is out]
    meta = (out.shape, out.stride(), out.storage_offset(), out.dtype, out.device)
    return *meta, out.untyped_storage().nbytes(), shares, is_same


@pytest.fixture
def mode(monkeypatch):
    monkeypatch.setattr(shapes, "_recipes", {})
    return FakeTensorMode()


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_gives_what_the_first_one_gave(mode, name):
    func, num_tensors, rest, is_remembered = CALLS[name]
    found = []
    for _ in range(2):
        args = arguments_of(mode, num_tensors, rest)
        found.append(described(shapes.infer(mode, func, args, {}), args))
    args = arguments_of(mode, num_tensors, rest)
    with mode:
        expected = described(func(*args), args)
    assert found == [expected] * 2
    assert bool([each for each in shapes._recipes.values() if each]) == is_remembered


def test_what_shapes_depend_on_is_told_apart(mode):
    def infer(func, *args, **kwargs):
        return shapes.infer(mode, func, args, kwargs)

    whole = fake(mode, 4, 6, dtype=torch.int64)
    for _ in range(2):
        assert infer(_aten.add.Tensor, whole, 1).dtype == torch.int64
        assert infer(_aten.add.Tensor, whole, 1.0).dtype == torch.float32
        assert infer(_aten.add.Tensor, whole, True).dtype == torch.int64
        assert infer(_aten.sum.dim_IntList, whole, [0]).shape == (6,)
        assert infer(_aten.sum.dim_IntList, whole, [0], True).shape == (1, 6)
        assert infer(_aten._to_copy.default, whole, dtype=torch.float16).dtype == torch.float16
        assert infer(_aten._to_copy.default, whole, device="cpu").device.type == "cpu"
        assert infer(_aten.mul.Tensor, infer(_aten.t.default, whole), 2).stride() == (1, 6)
        assert infer(_aten.mul.Tensor, fake(mode, 6, 4, dtype=torch.int64), 2).stride() == (4, 1)


def test_memory_that_inputs_share_is_looked_at_each_time(mode):
    """Of two inputs in one memory nobody can say which one an output is a view of."""
    for _ in range(2):
        whole, other = fake(mode, 4, 6), fake(mode, 4, 6)
        assert shapes.infer(mode, _aten.add_.Tensor, (whole, whole), {}) is whole
        assert shapes.infer(mode, _aten.add_.Tensor, (whole, other), {}) is whole


def test_an_error_is_raised_each_time(mode):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broadcast"):
            shapes.infer(mode, _aten.add.Tensor, (fake(mode, 4, 6), fake(mode, 4, 5)), {})
