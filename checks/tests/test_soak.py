"""What the soak says of a run: growth, kills, differences. The runs themselves are its own."""

import os
from multiprocessing.shared_memory import SharedMemory

import pytest

from checks.soak.__main__ import VICTIMS, differences, kills_of
from checks.soak.levels import Record, growth_of, left_in, mapped_files, shared_files


def series(at_step):
    """Return a level over 2,000 steps."""
    return [(step, at_step(step)) for step in range(10, 2001, 10)]


def test_a_level_that_rises_in_the_warm_up_alone_does_not_grow():
    growth = growth_of("rank 0 memory MiB", series(lambda step: min(step, 100) + 400.0), 2000)
    assert (growth.first, growth.last) == (500.0, 500.0)
    assert abs(growth.slope) < 1e-9
    assert not growth.is_excessive


@pytest.mark.parametrize(
    ("name", "at_step"),
    [
        # 13 MiB in 2,000 steps.
        ("gcs_server memory MiB", lambda step: 47 + step * 6.5 / 1000),
        ("engine 0 memory MiB", lambda step: 700 + step * 5 / 1000),
        ("driver descriptors", lambda step: 35 + step // 500),
        ("shared memory files", lambda step: 2 + step // 800),
    ],
)
def test_a_leak_is_found(name, at_step):
    growth = growth_of(name, series(at_step), 2000)
    assert growth.is_excessive
    assert growth.slope > 0
    assert "GROWS" in str(growth)


def test_a_level_that_wavers_or_falls_does_not_grow():
    wavering = growth_of("driver memory MiB", series(lambda step: 450 + step % 30 / 10), 2000)
    assert not wavering.is_excessive
    falling = growth_of("driver descriptors", series(lambda step: 40 - step // 400), 2000)
    assert not falling.is_excessive


def test_a_level_of_a_part_of_the_run_is_not_judged():
    assert growth_of("rank 1 threads", [(10, 1.0), (20, 2.0)], 2000) is None
    record = Record()
    for step in range(0, 101, 10):
        record.add(
            step, {"driver threads": 3.0, **({"engine 0 threads": 1.0} if step < 50 else {})}
        )
    assert [growth.name for growth in record.growths()] == ["driver threads"]


def test_every_victim_is_killed_once_in_so_many_steps():
    kills = kills_of(2000, every=200)
    assert [kill.step // 200 for kill in kills] == list(range(1, 10))
    assert {kill.victim for kill in kills} == set(VICTIMS)
    assert kills == kills_of(2000, every=200)
    assert kills_of(100, every=200) == []


def test_the_first_difference_is_named():
    rows = [{"step": 0, "loss": None}, {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    assert differences(rows, [dict(row) for row in rows]) == []
    assert differences(rows, rows[:2]) == ["the killed run has 2 rows of metrics, the other 3"]
    other = [rows[0], {"step": 1, "loss": 0.75}, {"step": 2, "loss": 1.0}]
    assert differences(rows, other) == [
        "the killed run differs first in step 1: loss 0.5 became 0.75"
    ]


def test_shared_memory_belongs_to_who_maps_it():
    segment = SharedMemory(create=True, size=4096)
    try:
        assert segment.name in shared_files()
        assert segment.name in mapped_files([os.getpid()])
        assert segment.name not in mapped_files([os.getppid()])
    finally:
        segment.close()
        segment.unlink()
    assert segment.name not in shared_files()


def test_logs_and_what_is_compiled_are_not_left(tmp_path):
    for name in ("ray", "torchinductor_me", "vllm_dist_1", "rl-refit-1"):
        (tmp_path / name).mkdir()
    assert left_in(tmp_path) == ["rl-refit-1", "vllm_dist_1"]
