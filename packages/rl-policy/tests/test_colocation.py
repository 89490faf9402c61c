"""Who holds the device when, and who does after a refit has failed."""

from contextlib import nullcontext

import pytest
from rl_policy.colocation import engines_on_device
from rl_refit import RefitError


class Party:
    """Writes down the calls it gets, in a list that it shares; fails on those of `failing`."""

    def __init__(self, name, calls, failing=()):
        self._name, self._calls, self._failing = name, calls, failing

    def __getattr__(self, method):
        def call(*args, **kwargs):
            told = " ".join([method, *kwargs.get("tags", [])])
            if told in self._failing:
                raise RefitError(f"{self._name} cannot {told}")
            self._calls.append(f"{self._name} {told}")
            return {"refit_s": 0.5}

        return call


def enter(*, version, fails_with=None, policy_fails=(), link_fails=(), engines_fail=()):
    calls = []
    parties = [
        Party("policy", calls, policy_fails),
        Party("engines", calls, engines_fail),
        Party("link", calls, link_fails),
    ]
    fails = pytest.raises(RefitError, match=fails_with) if fails_with else nullcontext()
    with fails as raised, engines_on_device(*parties, version=version) as report:
        calls.append(f"sample, {report}")
    return calls, raised


@pytest.mark.parametrize("version", [3, None])
def test_the_device_changes_hands(version):
    sent = ["link refit"] if version else []
    calls, _ = enter(version=version)
    assert calls == [
        "policy offload_before_refit",
        "engines prepare_for_generation weights",
        *sent,
        "policy offload_after_refit",
        "engines prepare_for_generation kv_cache",
        f"sample, { ({'refit_s': 0.5} if version else None) }",
        "engines finish_generation",
        "policy prepare_for_lp_inference",
    ]


def test_after_a_failed_refit_engines_give_the_device_back():
    calls, raised = enter(version=3, fails_with="link cannot refit", link_fails=["refit"])
    assert not hasattr(raised.value, "__notes__")
    assert calls == [
        "policy offload_before_refit",
        "engines prepare_for_generation weights",
        "engines finish_generation",
    ]


def test_engines_that_cannot_sleep_do_not_hide_why_the_refit_failed():
    _, raised = enter(
        version=3,
        fails_with="link cannot refit",
        link_fails=["refit"],
        engines_fail=["finish_generation"],
    )
    (note,) = raised.value.__notes__
    assert note == "the engines do not sleep: RefitError: engines cannot finish_generation"


def test_engines_that_cannot_wake_for_a_refit_give_the_device_back():
    calls, _ = enter(
        version=3,
        fails_with="engines cannot prepare_for_generation weights",
        engines_fail=["prepare_for_generation weights"],
    )
    assert calls == ["policy offload_before_refit", "engines finish_generation"]


@pytest.mark.parametrize("version", [3, None])
@pytest.mark.parametrize(
    "failing",
    [
        {"policy_fails": ["offload_after_refit"]},
        {"engines_fail": ["prepare_for_generation kv_cache"]},
    ],
)
def test_what_fails_after_the_refit_says_that_the_version_is_there(version, failing):
    calls, raised = enter(version=version, fails_with="cannot", **failing)
    assert calls[-1] == "engines finish_generation"
    notes = getattr(raised.value, "__notes__", [])
    assert len(notes) == bool(version)
    assert all("have taken version 3" in note for note in notes)
