"""Who sends to whom, what a report holds, and who holds the device, after a failure too."""

from contextlib import nullcontext

import pytest
from rl_policy.ray.failures import WorkerDiedError
from rl_policy.refit import RefitRoutes, WeightLink, engines_on_device, group_for_ipc
from rl_refit import RefitError

pytestmark = pytest.mark.promise

GIB = 2**30


class Party:
    """Writes down the calls it gets, in a list that it shares; fails on those of `failing`."""

    membership = None

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


@pytest.mark.parametrize(
    ("num_receivers", "world_size", "is_paired", "expected"),
    [
        (2, 2, True, [1, 1]),
        (2, 2, False, [2, 0]),
        (1, 2, True, [1, 0]),
        (3, 2, True, [3, 0]),
        (1, 1, False, [1]),
    ],
)
def test_who_sends_to_whom(num_receivers, world_size, is_paired, expected):
    routes = RefitRoutes.plan(num_receivers, world_size=world_size, is_paired=is_paired)
    assert list(routes.receivers_per_rank) == expected
    addresses = [{"endpoint": str(rank)} if count else None for rank, count in enumerate(expected)]
    found = routes.addresses(addresses)
    assert len(found) == num_receivers
    if expected == [1, 1]:
        assert [address["endpoint"] for address in found] == ["0", "1"]


def test_nobody_to_send_to_is_an_error():
    with pytest.raises(ValueError, match="num_receivers=0"):
        RefitRoutes.plan(0, world_size=2, is_paired=False)


def report(seconds, load, slowest=None, staged=1.0, **traffic):
    numbers = {"refit_s": seconds, "refit_load_s": load, "refit_bytes": 8e9, "refit_gb_per_s": 0.0}
    numbers |= {"refit_staged": staged, **traffic}
    return numbers if slowest is None else numbers | {"refit_slowest_rank": slowest}


def test_a_report_is_that_of_the_slowest_sender():
    merged = RefitRoutes(receivers_per_rank=(1, 1)).merge_reports(
        [report(2.0, 1.5, 0), report(4.0, 1.0, 1, staged=0.0)]
    )
    assert merged == {
        "refit_s": 4.0,
        "refit_load_s": 1.5,
        "refit_bytes": 8e9,
        "refit_gb_per_s": 2.0,
        # Not by every receiver.
        "refit_staged": 0.0,
        "refit_slowest_rank": 1,
    }


def test_a_report_has_what_was_sent_and_had_changed_where_it_is_known():
    routes = RefitRoutes(receivers_per_rank=(1, 1))
    sent = {"refit_bytes_sent": 1e8, "refit_changed": 0.01}
    more = {"refit_bytes_sent": 8e9}
    merged = routes.merge_reports([report(2.0, 1.5, 0, **more), report(4.0, 1.0, 1, **sent)])
    assert (merged["refit_bytes_sent"], merged["refit_changed"]) == (1e8, 0.01)
    merged = routes.merge_reports([report(9.0, 1.5, 0, **more), report(4.0, 1.0, 1, **sent)])
    assert merged["refit_bytes_sent"] == 8e9
    assert "refit_changed" not in merged


def test_a_report_counts_the_receivers_that_any_sender_has_dropped():
    routes = RefitRoutes(receivers_per_rank=(2, 2, 0))
    reports = [report(2.0, 1.5, 0, refit_dropped=dropped) for dropped in (1, 2, 5)]
    assert routes.merge_reports(reports)["refit_dropped"] == 3
    assert "refit_dropped" not in routes.merge_reports([report(2.0, 1.5, 0)] * 3)


def test_ranks_that_only_gather_do_not_count():
    merged = RefitRoutes(receivers_per_rank=(2, 0)).merge_reports(
        [report(2.0, 1.5, 1), report(9.0, 0.0)]
    )
    assert (merged["refit_s"], merged["refit_slowest_rank"]) == (2.0, 1)


def test_groups_fit_the_buffer_or_the_smallest_memory():
    sizes = [("a", GIB), ("b", GIB // 2), ("c", 3 * GIB), ("d", 1)]
    answers = [(sizes, 8.0 * GIB), (sizes, 1.5 * GIB)]
    by_memory = group_for_ipc(answers, limit_gib=None)
    assert by_memory == [["a", "b"], ["c"], ["d"]]
    assert group_for_ipc(answers, limit_gib=1) == [["a"], ["b"], ["c"], ["d"]]
    assert group_for_ipc(answers, limit_gib=100) == [["a", "b", "c", "d"]]
    with pytest.raises(ValueError, match="_refit_buffer_size_gb=0"):
        group_for_ipc(answers, limit_gib=0)


class FailingEngines:
    """Receive nothing, and say why when they are waited for."""

    num_receivers, membership = 1, None

    def __init__(self, failure):
        self._failure = failure

    def wait_for_update(self, call):
        raise self._failure

    def __getattr__(self, method):
        return lambda *args: None


def refit_into(engines):
    policy = Party("policy", [], failing=["send_weights"])
    WeightLink(policy, engines, is_paired=True, transport="shm").refit(1)


def test_a_death_behind_a_failed_refit_is_raised():
    death = WorkerDiedError("rank 0 of vllm died during update", reason="killed", details="")
    with pytest.raises(WorkerDiedError, match="rank 0 of vllm") as raised:
        refit_into(FailingEngines(death))
    assert isinstance(raised.value.__context__, RefitError)


def test_any_other_failure_of_engines_is_a_note_of_the_senders():
    with pytest.raises(RefitError, match="policy cannot send_weights") as raised:
        refit_into(FailingEngines(RefitError("timed out")))
    assert raised.value.__notes__ == ["the engines: RefitError: timed out"]


class Members:
    """Who lives of `DyingEngines`."""

    num_replaced, is_usable, has_joined = 0, True, True

    def __init__(self):
        self.num_losses, self.receivers = 0, None


class DyingEngines:
    """Lose an engine in each of the first updates."""

    num_receivers = 3

    def __init__(self, deaths, calls):
        self.membership, self._deaths, self._calls = Members(), deaths, calls

    def init_transfer(self, address):
        pass

    def begin_update(self, version):
        self._calls.append(f"begin {version}")

    def begin_catch_up(self, version):
        self.membership.receivers = [2]
        self._calls.append(f"catch up {version}")

    def update(self, version):
        return version

    def wait_for_update(self, call):
        if self.membership.num_losses < self._deaths:
            self.membership.num_losses += 1
            self.membership.receivers = list(range(3 - self.membership.num_losses))
            raise WorkerDiedError("an engine died", reason="killed", details="")

    def commit_update(self, version):
        self._calls.append(f"commit {version}")


class Sender:
    def __init__(self, calls):
        self._calls = calls

    def open_refit(self, num_receivers, **options):
        self._calls.append(f"open, min_receivers={options.get('min_receivers')}")
        return [{}] * num_receivers

    def require_ready_to_send(self):
        pass

    def send_weights(self, version, **options):
        self._calls.append(f"send {version} to {options.get('receivers')}")
        return {"refit_s": 0.5}


def test_engines_need_no_base_class_to_go_on_without_one_that_dies():
    calls = []
    link = WeightLink(Sender(calls), DyingEngines(2, calls), is_paired=False, transport="shm")
    link.refit(4)
    assert calls == [
        "open, min_receivers=1",
        *("begin 4", "send 4 to None"),
        *("begin 4", "send 4 to [0, 1]"),
        *("begin 4", "send 4 to [0]", "commit 4"),
    ]


def test_engines_that_have_joined_catch_up_alone():
    calls = []
    link = WeightLink(Sender(calls), DyingEngines(0, calls), is_paired=False, transport="shm")
    assert link.refit(4, only_joined=True)["refit_staged"] == 0
    assert calls[1:] == ["catch up 4", "send 4 to [2]", "commit 4"]
