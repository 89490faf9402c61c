"""New weights for an engine: received beside those that it samples from, in place, or by name.

    find_room   begin_update   update                      commit_update
                | staged:      received beside, sampling   exchanged between two steps
                | in place:    loaded, nothing sampled     sampled from
                | by name:     update_from_collective or update_from_handles, tensor by tensor

`update` has a `RefitReceiver` in each of vLLM's workers, `rl_refit`'s plug-in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rl_refit.vllm import (
    KvCache,
    abandon,
    abandon_staging,
    commit,
    find_room,
    finish_update,
    flip,
    holds_base,
    is_staged,
    last_report,
    on_workers,
    release_staging,
    stage,
    start_update,
)

from rl_policy.generation.state import EngineState, EngineStateError
from rl_policy.generation.vllm.engine.running import RequestLoop
from rl_policy.generation.vllm.engine.turns import EngineThread, in_turn
from rl_policy.generation.vllm.engine.worker_calls import (
    VllmWorker,
    join_group,
    load_from_group,
    load_from_handles,
)

if TYPE_CHECKING:
    from rl_interfaces import DeviceHandles, RefitInfo

    from rl_policy.generation.vllm.config import EngineConfig

ArgumentT = TypeVar("ArgumentT")

_POLL_S = 0.01
"""Between two looks at a staged update, each of which takes a turn between two steps."""


@dataclass(kw_only=True, slots=True)
class UpdateTimes:
    """How an update goes."""

    staged: bool = False
    """Whether the engine samples while it receives."""
    begun_at: float = field(default_factory=time.perf_counter)
    """When the engine stopped to sample."""
    pause_s: float = 0.0
    """Seconds until it sampled again."""


class EngineUpdates:
    """The calls by which one engine gets weights, each in a turn of its thread.

    Args:
        llm: vLLM's `LLM`.
        config: How the engine runs.
        thread: The engine's.
        requests: What it samples.
        state: Of the engine.
        first_receiver: Rank of its first worker among the receivers of all engines.
    """

    def __init__(
        self,
        llm: Any,
        *,
        config: EngineConfig,
        thread: EngineThread,
        requests: RequestLoop,
        state: EngineState,
        first_receiver: int,
    ) -> None:
        self._llm = llm
        self._config = config
        self._thread = thread
        self._requests = requests
        self._state = state
        self._first_receiver = first_receiver
        self._times = UpdateTimes()
        self._kv_cache: KvCache = "drop"
        self._loaded: set[str] = set()

    def abandon(self) -> None:
        """Drop what has been received for an update, as the engine sleeps; in its thread."""
        if not self._state.is_committed:
            self._on_workers(abandon)
        if self._times.staged:
            # A sleeping engine gives its memory away.
            self._on_workers(release_staging)

    @in_turn
    def init_transfer(self, addresses: Sequence[Mapping[str, object]], *, timeout_s: float) -> None:
        """Set the senders of the engine's receivers.

        Args:
            addresses: The sender's address for each receiver of every engine.
            timeout_s: Limit of each wait of a refit, in seconds.
        """
        last = self._first_receiver + self._config.tensor_parallel_size
        info = {
            "address": [dict(address) for address in addresses[self._first_receiver : last]],
            "rank_offset": self._first_receiver,
            "timeout_s": timeout_s,
        }
        self._on_workers("init_weight_transfer_engine", info)

    @in_turn
    def find_room(self, *, only_host: bool) -> tuple[str | None, str]:
        """Return where a second set of weights can be held, or None and why nowhere."""
        return find_room(self._llm, only_host=only_host)

    @in_turn
    def holds_base(self) -> bool:
        """Return whether every worker holds its sender's weights without adapters."""
        return all(self._on_workers(holds_base))

    def begin_update(
        self, version: int, *, place: str | None = None, kv_cache: KvCache = "drop"
    ) -> None:
        """Open a refit to `version`.

        Args:
            version: Of the new weights.
            place: Of `find_room`: where they are received, beside those that are sampled from. They
                are exchanged at the commit. None: nothing is sampled until the commit.
            kv_cache: What becomes of running requests at a staged commit, see `rl_refit.vllm.flip`.

        Raises:
            ValueError: `version` is not newer than the committed one.
            EngineStateError: The weights are asleep, or requests do not end.
        """
        if place is not None:
            self._begin_staged(version, place, kv_cache)
            return
        # Requests that run would be sampled from a mixture of weights.
        deadline = time.monotonic() + self._config.generate_timeout_s
        with self._requests.holding():
            while not self._begin_if_idle(version):
                if not self._requests.wait_idle(deadline - time.monotonic()):
                    raise EngineStateError(
                        f"begin_update({version}): requests have not ended in time"
                    )

    @in_turn
    def _begin_staged(self, version: int, place: str, kv_cache: KvCache) -> None:
        self._require_labels(kv_cache)
        self._state.begin_update(version, staged=True)
        self._kv_cache, self._times = kv_cache, UpdateTimes(staged=True)
        self._loaded.clear()
        with self._losing_weights_on_error(version):
            # Of a driver that begins anew instead of committing.
            self._on_workers(abandon_staging)
            stage(self._llm, version, place=place)

    @in_turn
    def _begin_if_idle(self, version: int) -> bool:
        if not self._requests.is_idle:
            return False
        self._begin(version)
        return True

    def _begin(self, version: int) -> None:
        self._state.begin_update(version)
        self._times = UpdateTimes(staged=False)
        self._loaded.clear()
        with self._losing_weights_on_error(version):
            self._on_workers(start_update)

    def _require_labels(self, kv_cache: KvCache) -> None:
        scheduler = self._llm.llm_engine.vllm_config.scheduler_config
        if kv_cache == "keep" and scheduler.async_scheduling:
            raise ValueError(
                'kv_cache="keep" needs generation.vllm_cfg.engine_kwargs.async_scheduling=False: '
                "otherwise vLLM labels the tokens of one step with the version of the next"
            )

    def update(self, version: int) -> list[dict[str, float]]:
        """Receive every tensor, while the sender sends; return a report per receiver.

        Unless the update is staged, the weights are overwritten meanwhile.
        """
        if not self._times.staged:
            return self._update_in_place(version)
        # Each receiver ends at its own time limit, and so does this.
        while (reports := self._poll_staged(version)) is None:
            time.sleep(_POLL_S)
        return reports

    @in_turn
    def _poll_staged(self, version: int) -> list[dict[str, float]] | None:
        self._state.require_update("update", version)
        with self._losing_weights_on_error(version):
            if not is_staged(self._llm):
                return None
            reports = self._on_workers(last_report)
        self._state.receive()
        return reports

    @in_turn
    def _update_in_place(self, version: int) -> list[dict[str, float]]:
        self._state.require_update("update", version)
        with self._losing_weights_on_error(version):
            self._on_workers("update_weights", {"version": version})
            finish_update(self._llm, version)
            reports = self._on_workers(last_report)
        self._state.receive()
        return reports

    @in_turn
    def init_collective(self, ip: str, port: int, world_size: int, *, timeout_s: float) -> None:
        """Join the group of the trainer, whose rank 0 listens at the address."""
        first_rank = 1 + self._first_receiver
        self._on_workers(join_group, ip, port, world_size, first_rank, timeout_s)

    @in_turn
    def update_from_collective(self, info: RefitInfo) -> None:
        """Receive and load every tensor of `info`, while the trainer broadcasts."""
        self._load_by_name(load_from_group, info, names=info, expected=info)

    @in_turn
    def update_from_handles(self, handles: DeviceHandles, expected: Collection[str]) -> None:
        """Load one group of tensors; the update is complete once all of `expected` are loaded."""
        names = {name for group in handles.values() for name in group}
        self._load_by_name(load_from_handles, handles, names=names, expected=expected)

    def update_metrics(self) -> dict[str, float]:
        """Return how the last update went.

        Returns:
            `refit_pause_s`, seconds in which the engine could not sample, and `refit_staged`, 1.0
            if it was staged.
        """
        return {
            "refit_pause_s": self._times.pause_s,
            "refit_staged": float(self._times.staged),
        }

    @in_turn
    def commit_update(self, version: int) -> None:
        """Sample from the loaded weights from now on. Idempotent.

        Whatever can fail in a refit is part of the update: if one of several engines fails, none is
        committed, and the same version can be sent again.
        """
        if self._state.has_committed(version):
            return
        self._state.require_commit(version)
        if self._times.staged:
            self._times.begun_at = time.perf_counter()
            self._state.start_swap()
        with self._losing_weights_on_error(version):
            if self._times.staged:
                flip(self._llm, version, kv_cache=self._kv_cache)
            # Tensors that were loaded by name have passed no receiver, which could commit them.
            elif not self._loaded:
                self._on_workers(commit, version)
        self._state.commit()
        self._requests.wake_clients()
        self._times.pause_s = time.perf_counter() - self._times.begun_at

    def _load_by_name(
        self,
        load_tensors: Callable[[VllmWorker, ArgumentT], None],
        argument: ArgumentT,
        *,
        names: Collection[str],
        expected: Collection[str],
    ) -> None:
        version = self._state.incoming
        self._state.require_update("update_weights", version)
        with self._losing_weights_on_error(version):
            self._on_workers(load_tensors, argument)
            self._loaded.update(names)
            if self._loaded.issuperset(expected):
                finish_update(self._llm, version)
                self._state.receive()

    def _on_workers(self, call: str | Callable[..., object], *args: object) -> list[Any]:
        return on_workers(self._llm, call, *args)

    @contextmanager
    def _losing_weights_on_error(self, version: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # an interrupted load has overwritten some weights as well
            self._state.lose(f"the refit to version {version} failed ({error})")
            raise
