"""The worker on a CUDA device that computes nothing, against `fake_cuda_limits.toml`.

Numbers are maxima: a person edits the list, see `rl_interfaces.testing.fake_cuda.limits`. Some
layouts are measured by default, every one with `PARITY=all`.
"""

import os
from importlib.metadata import version
from pathlib import Path

import pytest
from parity_checks import LAYOUTS
from rl_interfaces.testing.fake_cuda import (
    problems,
    read_limits,
    run_on_fake_cuda,
    why_unavailable,
)

_TESTS = Path(__file__).parent
_LIMITS = read_limits(_TESTS / "fake_cuda_limits.toml")
_CASES = ["dp2_packed", "dp2_experts", "tp2_sp", "pp2_virtual", "cp2_packed", "ep2"]
_CASES += ["dp2_sinks", "cp2_linear"]
_NUM_STEPS = 2
# Of four calls that move the model, whatever its size: copies under way are waited for together.
_WAITS_OF_MOVES = 18
# The scalars of a float16 loss scale are moved by themselves.
_MORE_WAITS_OF_MOVES = {"dp2_fp16": 10}
# Their waits are held by the list alone. Stages exchange the shape of every micro-batch. Without
# Transformer Engine an MoE layer asks how many tokens go to each expert.
_WITHOUT_AIM = {"pp2", "pp2_unlike", "pp2_virtual", "tp2_pp2", "dp2_experts", "ep2"}
_WITHOUT_AIM |= {"dp2_sinks", "cp2_linear"}

# Megatron-core 0.19 rotates the sequences of a micro-batch one after the other where Transformer
# Engine does not: in two rows of "dp2" a layer has 192 launches in place of 138.
_IS_OF_LIST = version("megatron-core").startswith("0.16.")
_REASON = why_unavailable() if _IS_OF_LIST else "the list is that of megatron-core 0.16"
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def cases_to_measure():
    return list(_LIMITS) if os.environ.get("PARITY") == "all" else _CASES


@pytest.fixture(scope="module")
def measured():
    """The numbers of all cases, from one process."""
    cases = cases_to_measure()
    return run_on_fake_cuda("fake_cuda_cases:measure", path=[_TESTS], cases=cases)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_to_measure())
def test_a_layout_is_within_the_list(measured, case):
    found = problems(
        case,
        measured[case],
        _LIMITS,
        num_steps=_NUM_STEPS,
        most_moving_waits=_WAITS_OF_MOVES + _MORE_WAITS_OF_MOVES.get(case, 0),
        has_aim=case not in _WITHOUT_AIM,
    )
    assert found == []


def test_the_list_has_every_layout_of_the_parity_table():
    assert LAYOUTS.keys() <= _LIMITS.keys()
