import dataclasses
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_interfaces import (
    AdapterSavingWorker,
    Cluster,
    LossFunction,
    LossInput,
    LossType,
    ParallelLayout,
    PolicyWorker,
    RowScoringWorker,
    SplitTrainingPolicy,
    SplitTrainingWorker,
    TopkLogitsWorker,
    WeightReceiver,
    WeightSource,
)

pytestmark = pytest.mark.promise

SIZES = st.integers(min_value=1, max_value=64)


@given(data=SIZES, pipeline=SIZES, context=SIZES, tensor=SIZES)
def test_the_world_is_every_combination_of_axes(data, pipeline, context, tensor):
    layout = ParallelLayout(
        data_parallel=data,
        pipeline_parallel=pipeline,
        context_parallel=context,
        tensor_parallel=tensor,
    )
    assert layout.world_size == data * pipeline * context * tensor


def test_a_layout_is_data_parallel_unless_it_says_otherwise():
    assert ParallelLayout(data_parallel=3).world_size == 3


def test_a_layout_is_a_value():
    layout = ParallelLayout(data_parallel=2, tensor_parallel=2)
    assert layout == ParallelLayout(data_parallel=2, tensor_parallel=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.data_parallel = 4


class Loss:
    loss_type = LossType.TOKEN_LEVEL

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        return next_token_logits, {"num_valid_samples": 1}


def test_a_loss_is_told_by_its_type_and_its_call():
    assert isinstance(Loss(), LossFunction)
    assert not isinstance(lambda *arguments: None, LossFunction)
    assert {member.value for member in LossInput} == {"logits", "logprobs"}


@pytest.mark.parametrize(
    "protocol",
    [
        AdapterSavingWorker,
        Cluster,
        PolicyWorker,
        RowScoringWorker,
        SplitTrainingPolicy,
        SplitTrainingWorker,
        TopkLogitsWorker,
        WeightReceiver,
        WeightSource,
    ],
)
def test_a_class_with_every_method_of_a_protocol_is_one(protocol):
    methods = {
        name: staticmethod(lambda: None)
        for name, _ in inspect.getmembers(protocol, inspect.isfunction)
        if not name.startswith("_") or name == "__iter__"
    }
    assert methods
    assert isinstance(type("Complete", (), methods)(), protocol)
    for missing in methods:
        rest = {name: method for name, method in methods.items() if name != missing}
        assert not isinstance(type("Partial", (), rest)(), protocol), missing
