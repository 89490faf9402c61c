"""The driver's side of refits: routes, the transaction, and the hand-over of shared devices.

The driver opens and commits a version; the weights themselves go from worker to engine.

    driver    open_refit | begin_update  update  send_weights  wait_for_update  commit_update
    workers   listen     |                       gather, send
    engines   connect    | refuse to sample      receive, load                  sample again

A refit that fails between `begin_update` and `commit_update` leaves the engines refusing to sample
until a full resend is committed. Engines that stage the weights sample all the time, but for the
exchange at `commit_update`, and keep the old version if the refit fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, runtime_checkable

from rl_refit.compat.handles import group_keys

from rl_policy.ray.failures import WorkerDiedError

if TYPE_CHECKING:
    from rl_policy.policy import Policy

logger = logging.getLogger(__name__)

CallT = TypeVar("CallT")

_GIB = 2**30
_RATE = "refit_gb_per_s"
# Of workers that report them.
_DROPPED = "refit_dropped"
_TRAFFIC = ("refit_bytes_sent", "refit_changed")


class RefittedEngines(Protocol[CallT]):
    """The calls of a refit on inference engines, such as `VllmGeneration`.

    `CallT` is the type of a call in flight, which `update` returns.
    """

    @property
    def num_receivers(self) -> int:
        """The number of processes that receive weights."""
        ...

    def init_transfer(self, address: Sequence[Mapping[str, object]]) -> None:
        """Connect each receiver to its sender's address."""
        ...

    def begin_update(self, version: int) -> None:
        """Open a transaction: nothing is sampled until it is committed."""
        ...

    def update(self, version: int) -> CallT:
        """Start to receive, and return without waiting."""
        ...

    def wait_for_update(self, call: CallT) -> object:
        """Wait until all weights are loaded, or raise the failure of the update."""
        ...

    def commit_update(self, version: int) -> None:
        """Sample from the loaded weights from now on."""
        ...


class StagingEngines(RefittedEngines[CallT], Protocol[CallT]):
    """Engines that can receive weights beside those that they sample from."""

    def begin_update(self, version: int, *, staging: str = "off", kv_cache: str = "drop") -> None:
        """Open a transaction, see `VllmGeneration.begin_update`."""
        ...

    def update_metrics(self) -> Mapping[str, float]:
        """Return `refit_pause_s` and `refit_staged` of the last update."""
        ...


class AdapterEngines(RefittedEngines[CallT], Protocol[CallT]):
    """Engines that apply adapters to weights that they hold."""

    def holds_base(self) -> bool:
        """Return whether all of them hold the sender's weights without adapters."""
        ...


class EngineMembership(Protocol):
    """Who of several engines lives and takes part in updates; one that dies is started anew."""

    @property
    def num_losses(self) -> int:
        """How many processes of engines are known to have died so far."""
        ...

    @property
    def num_replaced(self) -> int:
        """How often an engine was started anew."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether some engine samples."""
        ...

    @property
    def has_joined(self) -> bool:
        """Whether engines have been started anew that have not received weights yet."""
        ...

    @property
    def receivers(self) -> list[int] | None:
        """Ranks of the receivers of the update that has begun. None: all, as ever."""
        ...


@runtime_checkable
class ElasticEngines(Protocol):
    """Engines of which one that dies is started anew while the others go on."""

    @property
    def membership(self) -> EngineMembership | None:
        """Who lives and takes part. None: none of them is started anew."""
        ...

    def begin_catch_up(self, version: int) -> None:
        """Open a transaction on the engines that have joined; the others sample meanwhile.

        Args:
            version: The one that the others have.
        """
        ...


def membership_of(engines: object) -> EngineMembership | None:
    """Return the membership of engines, None if they are not `ElasticEngines`."""
    return engines.membership if isinstance(engines, ElasticEngines) else None


@runtime_checkable
class QuantizedEngines(Protocol):
    """Engines that may hold weights in 8 bits."""

    def quantized_tensors(self) -> Sequence[str]:
        """Return the tensors that have to be sent in block-FP8, see `rl_refit.block_fp8`."""
        ...


class SharedEngines(RefittedEngines[CallT], Protocol[CallT]):
    """Engines that share their devices with a policy."""

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        """Wake `weights`, `kv_cache` or, with None, both."""
        ...

    def finish_generation(self) -> bool:
        """Sleep."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitRoutes:
    """Which trainer rank sends to which receivers."""

    receivers_per_rank: tuple[int, ...]
    """Receivers of each trainer rank; ranks with none only take part in the all-gathers."""

    @classmethod
    def plan(cls, num_receivers: int, *, world_size: int, is_paired: bool) -> RefitRoutes:
        """Return routes from each rank to the receiver on its device, or else all from rank 0.

        Example: 2 receivers, 2 ranks, paired -> (1, 1); not paired -> (2, 0)

        Args:
            num_receivers: Receivers in all.
            world_size: Trainer ranks.
            is_paired: Whether receiver `i` shares the device of rank `i`.

        Raises:
            ValueError: There are no receivers.
        """
        if num_receivers < 1:
            raise ValueError(f"num_receivers={num_receivers} must be positive")
        if is_paired and num_receivers == world_size:
            return cls(receivers_per_rank=(1,) * world_size)
        # After the all-gathers every rank has the full tensors: one sender serves all receivers.
        return cls(receivers_per_rank=(num_receivers, *(0,) * (world_size - 1)))

    def addresses(
        self, of_ranks: Sequence[Mapping[str, object] | None]
    ) -> list[Mapping[str, object]]:
        """Return the sender's address for each receiver, in receiver order.

        Args:
            of_ranks: The address of each trainer rank; None if it has no receivers.
        """
        found: list[Mapping[str, object]] = []
        for address, count in zip(of_ranks, self.receivers_per_rank, strict=True):
            assert (address is None) == (count == 0), "a rank with receivers has an address"
            found += [address] * count if address is not None else []
        return found

    def merge_reports(self, reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return one report of a refit from those of all trainer ranks.

        Seconds are the maximum over the senders. Bytes are the model's, counted once; what was sent
        in their place, and the share that had changed, are those of the slowest sender. Receivers
        that were dropped are those of all senders.

        Args:
            reports: Of each trainer rank, see `rl_refit.RefitReport.as_metrics`.
        """
        senders = [
            report for report, count in zip(reports, self.receivers_per_rank, strict=True) if count
        ]
        slowest = max(senders, key=lambda report: report["refit_s"])
        seconds = {
            name: max(report[name] for report in senders)
            for name in slowest
            # The rate ends in `_s` too, but is no duration.
            if name.endswith("_s") and name != _RATE
        }
        dropped = [report[_DROPPED] for report in senders if _DROPPED in report]
        return {
            **seconds,
            **({_DROPPED: sum(dropped)} if dropped else {}),
            "refit_bytes": slowest["refit_bytes"],
            "refit_staged": min(report["refit_staged"] for report in senders),
            _RATE: slowest["refit_bytes"] / slowest["refit_s"] / 1e9,
            **{name: slowest[name] for name in _TRAFFIC if name in slowest},
            "refit_slowest_rank": slowest["refit_slowest_rank"],
        }


def group_for_ipc(
    answers: Sequence[tuple[Sequence[tuple[str, int]], float]], *, limit_gib: float | None
) -> list[list[str]]:
    """Return the names of the tensors in groups that fit a buffer, in order.

    Args:
        answers: Of each trainer rank: name and bytes of every tensor, and the device's free bytes.
        limit_gib: The size of the buffer in GiB. None: the smallest free memory of any rank.

    Raises:
        ValueError: The limit is not positive.
    """
    if limit_gib is not None and limit_gib <= 0:
        raise ValueError(f"_refit_buffer_size_gb={limit_gib} must be positive")
    # All ranks export the same group at a time, so that the fullest device sets the limit.
    free = min(free for _, free in answers)
    limit = free if limit_gib is None else limit_gib * _GIB
    return group_keys(answers[0][0], int(limit))


class WeightLink(Generic[CallT]):
    """The connection from a policy to inference engines; opened once, used after every step.

    Args:
        policy: The sender of the weights.
        engines: Their receivers.
        is_paired: Whether receiver `i` shares the device of the policy's rank `i`.
        transport: A name of the entry-point group `rl_refit.transports`.
        staging: Where engines receive weights while they sample; "off" for nowhere, which is all
            that engines other than `StagingEngines` can.
        kv_cache: What happens then to the cache of requests that run, see
            `VllmGeneration.begin_update`.
        adapters: "merged" into the weights that are sent, or "alone", for `AdapterEngines`: the
            weights that they belong to are sent once, and again to engines that lack them. For that
            engines pause, as nothing but adapters is staged.
        slices: Whether every rank sends what engines consume of its own shards, see
            `Policy.open_refit`.
        options: Further arguments of `rl_refit.RefitSender`.

    `QuantizedEngines` are sent the tensors that they hold in 8 bits in that format.
    """

    def __init__(
        self,
        policy: Policy,
        engines: RefittedEngines[CallT],
        *,
        is_paired: bool,
        transport: str,
        staging: str = "off",
        kv_cache: str = "drop",
        adapters: str = "merged",
        slices: bool = False,
        **options: object,
    ) -> None:
        self._policy = policy
        self._adapters = adapters
        self._engines = engines
        self._staging = staging
        self._kv_cache = kv_cache
        self._membership = membership_of(engines)
        if self._membership is not None and not is_paired:
            # An engine that dies does not keep the others from new weights.
            options = {"min_receivers": 1, **options}
        quantized = engines.quantized_tensors() if isinstance(engines, QuantizedEngines) else ()
        if quantized:
            options["quantized"] = quantized
        addresses = policy.open_refit(
            engines.num_receivers,
            is_paired=is_paired,
            transport=transport,
            adapters=adapters,
            slices=slices,
            **options,
        )
        engines.init_transfer(addresses)

    def refit(self, version: int, *, only_joined: bool = False) -> dict[str, float]:
        """Send the policy's weights to the engines as `version`; return `send_weights`' report.

        The version is committed once every receiver has loaded all of it. If this fails, the
        engines refuse to sample until a call succeeds; staging engines sample from the old version.
        If one of `ElasticEngines` dies meanwhile, the others receive the version again without it.

        Args:
            version: Of the weights.
            only_joined: Send it to engines alone that have joined, for `ElasticEngines`: the others
                have it, and sample meanwhile.

        Returns:
            The report, of which `refit_pause_s` are the seconds in which engines did not sample,
            and `refit_staged` is 1.0 if all of them staged the weights.

        Raises:
            RefitError: A sender or a receiver failed or timed out.
            ValueError: `version` is not newer than the engines' version.
            ResidencyError: The policy's model is not on the device; the engines are unchanged.
        """
        membership = self._membership
        if membership is None:
            return self._refit(version, only_joined=False)
        while True:
            num_losses = membership.num_losses
            try:
                return self._refit(version, only_joined=only_joined)
            except WorkerDiedError as death:
                # Bounded: each time there is one engine less.
                if membership.num_losses == num_losses or not membership.is_usable:
                    raise
                logger.warning("%s: version %d is sent without it", death.summary, version)
                if only_joined:
                    return {}

    def _refit(self, version: int, *, only_joined: bool) -> dict[str, float]:
        # Before the transaction opens, as engines would wait for a sender that never starts.
        self._policy.require_ready_to_send()
        begun_at = monotonic()
        adapters_only = self._adapters == "alone" and self._adapter_engines.holds_base()
        staging = self._staging if adapters_only or self._adapters == "merged" else "off"
        options = self._begin(version, staging, only_joined=only_joined)
        # Receivers first, without waiting for them: a send returns only once they have loaded all.
        receiving = self._engines.update(version)
        try:
            send = self._policy.send_adapters if adapters_only else self._policy.send_weights
            report = send(version, **options)
        except Exception as error:
            self._drain(receiving, error)
            raise
        # Raises what an engine reports after its last bucket, before the version is committed.
        self._engines.wait_for_update(receiving)
        self._engines.commit_update(version)
        if staging == "off" or only_joined:
            return {**report, "refit_pause_s": monotonic() - begun_at, "refit_staged": 0.0}
        return {**report, **self._staging_engines.update_metrics()}

    @property
    def _staging_engines(self) -> StagingEngines[CallT]:
        return cast("StagingEngines[CallT]", self._engines)

    @property
    def _adapter_engines(self) -> AdapterEngines[CallT]:
        return cast("AdapterEngines[CallT]", self._engines)

    def _begin(self, version: int, staging: str, *, only_joined: bool) -> dict[str, Any]:
        """Open the transaction; return arguments for the policy's `send_weights`."""
        if only_joined:
            cast("ElasticEngines", self._engines).begin_catch_up(version)
        elif staging == "off":
            self._engines.begin_update(version)
        else:
            self._staging_engines.begin_update(version, staging=staging, kv_cache=self._kv_cache)
        receivers = None if self._membership is None else self._membership.receivers
        return {} if receivers is None else {"receivers": receivers}

    def _drain(self, receiving: CallT, error: Exception) -> None:
        """Wait for the receivers of a failed refit, so that the engines can take the next call.

        Their own failure, if any, is added to `error` as a note. A death explains `error`, and is
        raised in its place.
        """
        try:
            self._engines.wait_for_update(receiving)
        except WorkerDiedError:
            raise
        except Exception as theirs:
            error.add_note(f"the engines: {type(theirs).__name__}: {theirs}")


@contextmanager
def engines_on_device(
    policy: Policy, engines: SharedEngines[CallT], link: WeightLink[CallT], *, version: int | None
) -> Iterator[dict[str, float] | None]:
    """Hand the device over to the engines, which sample inside, and back to the policy.

        policy   train, offload optimizer |              | send | offload model |        | reload
        engines  asleep                   | wake weights | load | wake cache    | sample | sleep

    The engines' weights wake before the refit, which loads them, and their cache after it, when the
    policy has freed its memory.

    Args:
        policy: Holds the device before and after.
        engines: Hold it inside.
        link: Sends the weights.
        version: Of the weights that are sent. None: no refit.

    Yields:
        The report of the refit, None if there was none.

    Raises:
        RefitError: The refit failed. The engines sleep and refuse to sample; the policy is
            unchanged. Enter again with the same version to repeat the refit, or call
            `policy.prepare_for_training` to continue without it.
        Exception: The engines could not wake, or the policy could not free its memory. The engines
            sleep. A note says if they have committed the version, which cannot be sent twice.
    """
    policy.offload_before_refit()
    report = None
    try:
        engines.prepare_for_generation(tags=["weights"])
        if version is not None:
            report = link.refit(version)
        # The cache takes the memory that the policy's model frees here.
        policy.offload_after_refit()
        engines.prepare_for_generation(tags=["kv_cache"])
    except Exception as error:
        _put_to_sleep(engines, error)
        if report is not None:
            error.add_note(
                f"the engines have taken version {version}: enter again with version=None, or, "
                "where their sleep drops the weights (sleep_level=2), with a newer version"
            )
        raise
    try:
        yield report
    finally:
        # Engines first: the device cannot hold both at once.
        engines.finish_generation()
        policy.prepare_for_lp_inference()


def _put_to_sleep(engines: SharedEngines[CallT], error: Exception) -> None:
    """Make engines free the device after `error`; if they cannot, add a note to it."""
    try:
        engines.finish_generation()
    except Exception as theirs:
        error.add_note(f"the engines do not sleep: {type(theirs).__name__}: {theirs}")
