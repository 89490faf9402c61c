"""A refit from the driver's side: it opens and commits a version, and moves no weights itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from rl_policy.policy import Policy

CallT = TypeVar("CallT")


class RefittedEngines(Protocol[CallT]):
    """What a refit asks of inference engines; `rl_policy.generation.vllm.VllmGeneration` has it."""

    @property
    def num_receivers(self) -> int:
        """The processes that receive weights."""
        ...

    def init_transfer(self, address: Sequence[Mapping[str, Any]]) -> None:
        """Learn, for each receiver, where its weights are going to come from."""
        ...

    def begin_update(self, version: int) -> None:
        """Open a transaction: nothing is sampled until it is committed."""
        ...

    def update(self, version: int) -> CallT:
        """Start to receive, without waiting for it."""
        ...

    def wait_for_update(self, call: CallT) -> object:
        """Wait until all weights are loaded, or raise what made it fail."""
        ...

    def commit_update(self, version: int) -> None:
        """Sample from the weights that arrived."""
        ...


class WeightLink:
    """The way of a policy's weights to inference engines; opened once, used after every step.

    Args:
        policy: Sends.
        engines: Receive.
        is_paired: Whether receiver `i` shares the device of the policy's rank `i`.
        transport: A name of the entry-point group `rl_refit.transports`.
        options: What else `rl_refit.RefitSender` takes.
    """

    def __init__(
        self,
        policy: Policy,
        engines: RefittedEngines[Any],
        *,
        is_paired: bool,
        transport: str,
        **options: Any,
    ) -> None:
        self._policy = policy
        self._engines = engines
        addresses = policy.open_refit(
            engines.num_receivers, is_paired=is_paired, transport=transport, **options
        )
        engines.init_transfer(addresses)

    def refit(self, version: int) -> dict[str, float]:
        """Give the engines the policy's weights as `version`; return what `send_weights` reports.

        The version counts once every receiver has loaded all of it. Where this fails, the engines
        refuse to sample until a call succeeds.

        Raises:
            RefitError: A sender or a receiver failed, or did not answer in time.
            ValueError: `version` is not newer than what the engines have.
            ResidencyError: The policy's model is not on the device; the engines are as they were.
        """
        self._policy.require_ready_to_send()
        self._engines.begin_update(version)
        receiving = self._engines.update(version)
        try:
            report = self._policy.send_weights(version)
        except Exception as error:
            self._outlast(receiving, error)
            raise
        self._engines.wait_for_update(receiving)
        self._engines.commit_update(version)
        return report

    def _outlast(self, receiving: Any, error: Exception) -> None:
        """Wait for the receivers of a refit that has failed; add to `error` what they say."""
        try:
            self._engines.wait_for_update(receiving)
        except Exception as theirs:
            error.add_note(f"the engines: {type(theirs).__name__}: {theirs}")
