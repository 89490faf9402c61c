"""Proves a transport of weights: that every bit arrives, and that no fault goes unnoticed.

As pytest tests, here for a transport that is registered as `mine`:

    from rl_interfaces.testing.transports import TransportConformance
    from rl_refit.drills import RefitPair

    class TestMine(TransportConformance):
        pair = RefitPair("mine")

Or as a plain call, `check_transport(RefitPair("mine"))`, which raises with a list of what failed.
Nothing of a trainer or an engine is needed. torch is imported when the first rule is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from unittest import SkipTest

from rl_interfaces.testing.report import check_each, require_assertions

if TYPE_CHECKING:
    import torch

RULES = {
    "round_trips": (
        "every_kind_of_tensor_arrives_bit_by_bit",
        "every_receiver_gets_every_bit",
        "new_values_arrive_with_every_version",
        "any_size_and_number_of_buffers_will_do",
        "tied_tensors_are_sent_once",
        "tensors_with_a_place_of_their_own_are_copied_there",
        "senders_with_receivers_and_without_work_side_by_side",
        "nothing_is_left_behind",
    ),
    "versions": (
        "a_version_counts_from_its_commit_on",
        "what_was_not_sent_is_not_committed",
        "a_stale_version_changes_nothing",
        "a_sender_of_another_version_is_refused",
        "tensors_that_the_engine_does_not_expect_are_refused",
        "a_load_that_fails_stops_all_until_a_full_resend",
        "who_does_not_come_is_waited_for_as_long_as_said",
        "a_wrong_token_gets_nothing",
        "a_new_receiver_takes_the_place_of_the_old_one",
    ),
    "faults": (
        "a_dropped_bucket_is_found",
        "a_duplicated_bucket_is_found",
        "a_reordered_bucket_is_found",
        "a_bucket_announced_too_short_is_found",
        "a_bucket_cut_off_in_memory_is_found",
        "a_flipped_bit_is_found",
        "swapped_rows_are_found",
        "a_plan_that_was_changed_on_the_way_is_found",
        "another_plan_than_was_agreed_upon_is_found",
    ),
    "kills": (
        "a_killed_sender_takes_nobody_along",
        "a_killed_receiver_takes_nobody_along",
    ),
}
"""The rules, by the module `transports_<group>` that has a function of the name for each."""


class Spec(Protocol):
    """What a plan says of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype on the wire."""
        ...


class Piece(Protocol):
    """A run of bytes of one tensor in a bucket."""

    @property
    def tensor(self) -> int:
        """Index of the tensor in the plan's `specs`."""
        ...

    @property
    def offset(self) -> int:
        """Where it lies in the bucket, in bytes."""
        ...

    @property
    def size(self) -> int:
        """Its bytes."""
        ...


class Bucket(Protocol):
    """What is sent at once."""

    @property
    def index(self) -> int:
        """Its place in the order of sending."""
        ...

    @property
    def nbytes(self) -> int:
        """Its bytes, gaps included."""
        ...

    @property
    def pieces(self) -> Sequence[Piece]:
        """What lies in it."""
        ...


class Plan(Protocol):
    """What is sent, in which order and where it lies."""

    @property
    def specs(self) -> Sequence[Spec]:
        """The tensors."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in the order of sending."""
        ...


class Source(Protocol):
    """The tensors of a model, see `rl_interfaces.WeightSource`."""

    def metadata(self) -> Sequence[tuple[str, torch.dtype, Sequence[int]]]:
        """Return name, dtype and shape of every tensor."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor."""
        ...


class Sender(Protocol):
    """The trainer's end."""

    @property
    def plan(self) -> Plan:
        """What it sends."""
        ...

    @property
    def address(self) -> Mapping[str, Any]:
        """All that a receiver needs, with a `token` of hexadecimal digits."""
        ...

    def send(self, version: int) -> Any:
        """Send every tensor; return when every receiver has loaded all of them."""
        ...

    def commit(self, version: int) -> None:
        """Tell the receivers that the version counts."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Receiver(Protocol):
    """The engine's end."""

    @property
    def version(self) -> int | None:
        """The committed version."""
        ...

    def begin(self, version: int) -> None:
        """Open a refit."""
        ...

    def receive(
        self, version: int, load: Callable[[list[tuple[str, torch.Tensor]]], object]
    ) -> Any:
        """Hand every tensor to `load`; return when every receiver of the sender has."""
        ...

    def commit(self, version: int) -> None:
        """Make the loaded version the committed one."""
        ...

    def require_ready(self) -> int:
        """Return the committed version, or raise where the weights are not whole."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Errors(Protocol):
    """The errors of a refit; all are subclasses of `RefitError`. A module will do."""

    RefitError: type[Exception]
    PlanMismatchError: type[Exception]
    StaleVersionError: type[Exception]
    RefitTimeoutError: type[Exception]
    RefitInProgress: type[Exception]
    AuthenticationError: type[Exception]
    PoisonedError: type[Exception]


@dataclass(frozen=True, slots=True)
class Notice:
    """What a receiver is told when a bucket may be read."""

    bucket: int
    nbytes: int
    digest: int


class Fault:
    """What goes wrong between a sender and its receivers; this one is that nothing does."""

    def announce(self, notice: Notice) -> Iterable[Notice]:
        """Return what is told in place of `notice`."""
        return [notice]

    def spoil(self, bucket: int, data: torch.Tensor) -> None:
        """Change a bucket's bytes (`[nbytes]`, uint8) in place, after their digest was taken."""

    def offer(self, plan: dict[str, Any]) -> None:
        """Change the plan that is offered: `tensors`, `[name, dtype, shape]` each, and more."""

    def begin(self, plan_hash: str) -> str:
        """Return the hash that is told at the beginning of a refit."""
        return plan_hash


class Pair(Protocol):
    """Makes senders and receivers over one transport, and lets them fail.

    `rl_refit.drills.RefitPair` is one for every transport that is registered there. Processes are
    given a pickled one, where `is_for_processes`.
    """

    errors: Errors
    is_for_processes: bool
    """Whether the two ends may be in unlike processes, so that one of them can be killed."""

    def open_sender(
        self,
        weights: Mapping[str, torch.Tensor] | Source,
        *,
        num_receivers: int = 1,
        bucket_bytes: int = 16 << 10,
        num_buffers: int = 2,
        timeout_s: float = 20.0,
    ) -> Sender:
        """Return a sender; one with `num_receivers=0` only goes through its weights."""
        ...

    def open_receiver(
        self,
        address: Mapping[str, Any],
        rank: int = 0,
        *,
        timeout_s: float = 20.0,
        expected: Sequence[tuple[str, torch.dtype, Sequence[int]]] | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> Receiver:
        """Return a receiver: of `expected` tensors alone, those of `into` to be overwritten."""
        ...

    def tamper(
        self, sender: Sender, fault: Fault, *, timeout_s: float
    ) -> AbstractContextManager[object]:
        """Let `fault` happen to a sender within a block, where it waits `timeout_s` at most."""
        ...


def rule_names(groups: Iterable[str] = tuple(RULES)) -> list[str]:
    """Return the names of the rules of some groups, all by default."""
    return [name for group in groups for name in RULES[group]]


def check_rule(name: str, pair: Pair, *, num_cases: int = 20) -> None:
    """Hold one rule against a transport.

    Args:
        name: One of `rule_names()`.
        pair: The transport.
        num_cases: Random cases of each fault and each kill.

    Raises:
        AssertionError: The rule is broken; the message says how.
        SkipTest: The pair lacks what the rule is about; the message names it.
        RuntimeError: Python runs without assertions.
    """
    require_assertions()
    (group,) = (group for group, names in RULES.items() if name in names)
    if group == "kills" and not pair.is_for_processes:
        raise SkipTest("is_for_processes is false: nobody can be killed alone")
    module = import_module(f"rl_interfaces.testing.transports_{group}")
    getattr(module, name)(pair, num_cases)


def check_transport(
    pair: Pair, *, num_cases: int = 20, groups: Iterable[str] = tuple(RULES)
) -> list[str]:
    """Hold the rules of some groups against a transport; return what was skipped, a line each.

    Raises:
        AssertionError: Rules are broken; the message has a line for each.
    """
    return check_each(
        rule_names(groups),
        lambda name: check_rule(name, pair, num_cases=num_cases),
        subject="the transport",
    )


class TransportConformance:
    """Tests for pytest, one per rule: subclass it as `Test...` and give it a `pair`.

    Attributes:
        pair: The transport.
        num_cases: Random cases of each fault and each kill.
        groups: The rules to hold it against, keys of `RULES`.
    """

    pair: Pair
    num_cases: int = 20
    groups: Sequence[str] = tuple(RULES)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make a test of every rule; called by pytest."""
        metafunc.parametrize("rule", rule_names(self.groups))

    def test_conforms(self, rule: str, record_property: Callable[[str, object], None]) -> None:
        """Hold one rule against the transport."""
        record_property("conformance", rule)
        check_rule(rule, self.pair, num_cases=self.num_cases)
