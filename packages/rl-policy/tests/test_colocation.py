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
            if method in self._failing:
                raise RefitError(f"{self._name} cannot {method}")
            self._calls.append(" ".join([self._name, method, *kwargs.get("tags", [])]))
            return {"refit_s": 0.5}

        return call


def enter(*, version, link_fails=(), engines_fail=()):
    calls = []
    parties = [
        Party("policy", calls),
        Party("engines", calls, engines_fail),
        Party("link", calls, link_fails),
    ]
    fails = pytest.raises(RefitError, match="link cannot refit") if link_fails else nullcontext()
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
    calls, _ = enter(version=3, link_fails=["refit"])
    assert calls == [
        "policy offload_before_refit",
        "engines prepare_for_generation weights",
        "engines finish_generation",
    ]


def test_engines_that_cannot_sleep_do_not_hide_why_the_refit_failed():
    _, raised = enter(version=3, link_fails=["refit"], engines_fail=["finish_generation"])
    (note,) = raised.value.__notes__
    assert note == "the engines do not sleep: RefitError: engines cannot finish_generation"
