"""The worker on a CUDA device that computes nothing, against `fake_cuda_limits.toml`.

Numbers are maxima: a person edits the list, see `rl_interfaces.testing.fake_cuda.limits`. Some
layouts are measured by default, every one with `PARITY=all`.
"""

import os
from pathlib import Path

import pytest
from parity_layouts import LAYOUTS
from rl_interfaces.testing.fake_cuda import (
    exceeded,
    problems,
    read_limits,
    run_on_fake_cuda,
    why_unavailable,
)

_TESTS = Path(__file__).parent
_LIMITS = read_limits(_TESTS / "fake_cuda_limits.toml")
_CASES = ["dp2_packed", "dp2_lora", "dp2_cpu_offload", "tp2_sp_packed", "cp2_packed", "hybrid"]
_NUM_STEPS = 2
# Of four calls that move the model, whatever its size: copies under way are waited for together.
_WAITS_OF_MOVES = 5
# Their waits are held by the list alone: FSDP itself waits for the gradients of each layer.
_WITHOUT_AIM = {"dp2_cpu_offload"}

pytestmark = [
    pytest.mark.needs("rl-dtensor-worker[lora]"),
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]


def cases_to_measure():
    return list(_LIMITS) if os.environ.get("PARITY") == "all" else _CASES


@pytest.fixture(scope="module")
def measured():
    """The numbers of all cases, and what a life with planted bugs gives, from one process."""
    cases = cases_to_measure()
    return run_on_fake_cuda("fake_cuda_cases:measure", path=[_TESTS], cases=cases)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_to_measure())
def test_a_layout_is_within_the_list(measured, case):
    found = problems(
        case,
        measured["numbers"][case],
        _LIMITS,
        num_steps=_NUM_STEPS,
        most_moving_waits=_WAITS_OF_MOVES,
        has_aim=case not in _WITHOUT_AIM,
    )
    assert found == []


def test_the_list_has_every_layout_of_the_parity_table():
    assert LAYOUTS.keys() <= _LIMITS.keys()


@pytest.mark.slow
def test_planted_bugs_are_found(measured):
    found = measured["planted"]
    assert "cpu" in found["mixture"]
    assert "cuda" in found["mixture"]
    numbers, maxima = found["numbers"], _LIMITS["dp2"]
    lines = exceeded("dp2", numbers, _LIMITS)
    for named in ("offloaded_bytes", "syncs_per_layer", "launches_per_layer", "peak_bytes"):
        assert any(named in line for line in lines), (named, lines)
    # The bugs are in one life. To these two the others add less.
    assert numbers["launches_per_layer"] > maxima["launches_per_layer"] + 10
    assert numbers["peak_bytes"]["logprobs"] > 2 * maxima["peak_bytes"]["logprobs"]
