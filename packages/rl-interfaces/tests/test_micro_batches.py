from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rl_batched_data import BatchedDataDict
from rl_interfaces.backend.steps import (
    Concatenation,
    Step,
    fixed_steps,
    plan_spans,
    plan_steps,
    steps_of,
)

pytestmark = pytest.mark.needs("rl-interfaces[backend]")

_ROWS = st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any)


@given(rows=_ROWS, size=st.integers(1, 9))
def test_spans_cover_each_row_once_with_equal_counts(rows, size):
    plans = [plan_spans(rows, rank=rank, size=size) for rank in range(len(rows))]
    assert len({len(plan) for plan in plans}) == 1
    for plan, count in zip(plans, rows, strict=True):
        assert [row for start, end in plan for row in range(start, end)] == list(range(count))
        assert all(end - start <= size for start, end in plan)
    assert any(all(start < end for start, end in plan) for plan in plans)


@given(rows=_ROWS, local=st.integers(1, 12), size=st.integers(1, 6))
def test_steps_cover_each_row_once_and_keep_ranks_in_step(rows, local, size):
    plans = [
        plan_steps(rows, rank=rank, local_batch_size=local, micro_batch_size=size)
        for rank in range(len(rows))
    ]
    assert len({tuple(len(step) for step in plan) for plan in plans}) == 1
    for plan, count in zip(plans, rows, strict=True):
        covered = [row for step in plan for start, end in step for row in range(start, end)]
        assert covered == list(range(count))
        assert all(step[-1][1] - step[0][0] <= local for step in plan)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, [[(0, 1), (1, 2)], [(2, 3)]]), (1, [[(0, 1), (1, 2)], [(2, 2)]])],
)
def test_the_documented_example(rank, expected):
    assert plan_steps([3, 2], rank=rank, local_batch_size=2, micro_batch_size=1) == expected


def test_passes_that_complete_a_planned_step_are_as_short_as_can_be():
    batch = BatchedDataDict(
        input_ids=torch.ones(3, 40, dtype=torch.int64), input_lengths=torch.tensor([30, 40, 20])
    )
    (rows,), _ = batch.shard_by_batch_size(
        1, sequence_packing_args={"max_tokens_per_microbatch": 50}
    )
    step = Step(
        rows=rows,
        start=0,
        spans=[(low, high) for low, high in rows.micro_batch_indices[0]],
        concatenation=Concatenation(sequence_multiple=4, total_multiple=4),
    )
    first, second, third, fourth = step.micro_batches(torch.device("cpu"), num_passes=4)
    assert [each.packed.total_length for each in (first, second)] == [40, 52]
    for idle in (third, fourth):
        assert (idle.span, idle.packed.total_length) == ((3, 3), 4)
    # `policy.sequence_packing.sequence_length_round`.
    wider = replace(step, concatenation=step.concatenation.rounded(6))
    packed = [each.packed.total_length for each in wider.micro_batches(torch.device("cpu"))]
    assert packed == [48, 60]


def test_a_stand_in_is_a_full_group_of_masked_rows():
    rows = BatchedDataDict(
        input_ids=torch.ones(4, 3, dtype=torch.int64),
        input_lengths=torch.tensor([3, 3, 2, 2]),
        sample_mask=torch.ones(4),
    )
    (step,) = fixed_steps(
        rows,
        [4, 8],
        rank=0,
        local_batch_size=8,
        micro_batch_size=2,
        concatenation=Concatenation(),
        rows_per_group=2,
    )
    sizes = [
        micro.rows["sample_mask"].tolist() for micro in step.micro_batches(torch.device("cpu"))
    ]
    assert sizes == [[1, 1], [1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("rows", "sizes", "message"),
    [
        (4, {"given": 3}, r"micro-batch size \[3\]: not multiples of rows_per_group=2"),
        (4, {"given": None}, r"micro-batch size \[1\]: not multiples of rows_per_group=2"),
        (3, {"given": 2}, r"rows of the ranks \[3\]: not multiples of rows_per_group=2"),
    ],
)
def test_sizes_that_split_a_group_are_refused(tmp_path, rows, sizes, message):
    batch = BatchedDataDict(
        input_ids=torch.ones(rows, 3, dtype=torch.int64), input_lengths=torch.full((rows,), 3)
    )
    with one_rank(tmp_path), pytest.raises(ValueError, match=message):
        paired_steps(batch, **sizes)


def test_a_plan_that_splits_a_group_is_refused(tmp_path):
    batch = BatchedDataDict(
        input_ids=torch.ones(4, 3, dtype=torch.int64), input_lengths=torch.full((4,), 3)
    )
    arguments = {"sequence_packing_args": {"max_tokens_per_microbatch": 9}}
    ((splits,), _), ((keeps,), _) = (
        batch.shard_by_batch_size(1, rows_per_group=size, **arguments) for size in (1, 2)
    )
    with one_rank(tmp_path):
        (step,) = paired_steps(keeps, given=None)
        assert list(step.spans) == [(0, 2), (2, 4)]
        with pytest.raises(ValueError, match="plan splits groups of rows_per_group=2 rows"):
            paired_steps(splits, given=None)


@contextmanager
def one_rank(folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/one", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def paired_steps(batch, *, given):
    return steps_of(
        batch,
        given=given,
        default=1,
        planned_by=None,
        concatenation=Concatenation(),
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        rows_per_group=2,
    )
