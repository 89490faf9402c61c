"""The weight-transfer engine: each of vLLM's workers is a receiver."""

# vLLM is not installed where this is checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rl_refit.adapters import is_adapter
from rl_refit.errors import RefitError
from rl_refit.receiver import RefitReceiver
from rl_refit.report import RefitReport
from rl_refit.resharding.exchange import ExchangeReport
from rl_refit.resharding.refit import SliceReceiver, is_invitation
from rl_refit.vllm.adapters import AdapterSlot
from rl_refit.vllm.reload import LayerwiseReload
from rl_refit.vllm.slices import SlicedModel
from rl_refit.vllm.staging import Room, StagedModel, find_room

# After its receiver was closed; what it still does is to give up its own load.
_ABANDON_S = 5.0


@dataclass
class RefitInitInfo(WeightTransferInitInfo):
    """How a worker connects to its sender.

    Attributes:
        address: The sender's `address`, or one per worker of this engine, by worker rank.
        rank_offset: Added to the worker's rank over all data-parallel replicas of this engine,
            so that the receivers of one sender have distinct ranks.
        timeout_s: Limit of all waits of one refit, in seconds.
    """

    address: dict[str, str | int] | list[dict[str, str | int]]
    rank_offset: int = 0
    timeout_s: float = 300.0


@dataclass
class RefitUpdateInfo(WeightTransferUpdateInfo):
    """Which version is sent."""

    version: int


class Staging(threading.Thread):
    """Receives a version in the background; a daemon, as no wait of it may keep the process alive.

    Args:
        receive: Receives and stages the version.
    """

    def __init__(self, receive: Callable[[], RefitReport]) -> None:
        super().__init__(name="rl-refit-staging", daemon=True)
        self._receive = receive
        self._report: RefitReport | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Receive; keep the report or the error."""
        try:
            self._report = self._receive()
        except BaseException as error:  # raised by `result`, in the thread that asks
            self._error = error

    def result(self) -> RefitReport | None:
        """Return the report, None while it still receives, or raise the error."""
        if self.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._report


class RefitWeightTransferEngine(WeightTransferEngine[RefitInitInfo, RefitUpdateInfo]):
    """One worker's receiver.

    Attributes:
        receiver: Knows which version is committed; None before `init_transfer_engine`.
        report: Of the last refit, as `RefitReport.as_metrics` gives it.
    """

    init_info_cls = RefitInitInfo
    update_info_cls = RefitUpdateInfo

    receiver: RefitReceiver | None = None
    report: dict[str, float] | None = None
    _reload: LayerwiseReload | None = None
    _slot: AdapterSlot | None = None
    # Layers that apply adapters, while a reload has the base's own in their place.
    _taken_out: list[tuple[torch.nn.Module, str, torch.nn.Module]] | None = None
    _staged: StagedModel | None = None
    _staging: Staging | None = None
    _sliced: SlicedModel | None = None
    _slices: SliceReceiver | None = None
    _exchanged: ExchangeReport | None = None

    def init_transfer_engine(self, init_info: RefitInitInfo) -> None:
        """Store the sender's address; the receiver connects when the first refit begins.

        Raises:
            ValueError: The sender compares live weights by name, which vLLM does not keep.
        """
        self.shutdown()
        self._timeout_s = init_info.timeout_s
        layout = self.parallel_config
        rank = layout.data_parallel_index * layout.world_size + layout.rank
        address = init_info.address
        if isinstance(address, list):
            address = address[rank]
        if address["verify"] == "weights":
            raise ValueError(
                'verify="weights" compares live weights by name, and vLLM fuses (qkv_proj, '
                'gate_up_proj), shards and repacks them: take verify="digest", and compare '
                "log-probabilities"
            )
        self._rank = init_info.rank_offset + rank
        self.receiver = RefitReceiver(
            address,
            self._rank,
            device=self.device,
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Process the sender's pending messages; the live weights stay valid until `receive`."""
        self.abandon_staging()
        if self.receiver is not None:
            self.receiver.catch_up()

    def update_weights(self, update_info: dict[str, int]) -> None:
        """Receive a version and load it."""
        # Overrides a method that synchronises an accelerator, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RefitUpdateInfo) -> None:
        """Begin a refit to the version, receive it and load it.

        Raises:
            StaleVersionError: It is not newer than the committed one; nothing changes.
            RefitError: The refit failed, or the sender's tensors leave out parameters of the model.
                The next complete refit heals the worker.
        """
        receiver = self.require_receiver()
        receiver.begin(update_info.version)
        self._exchanged = None
        try:
            # vLLM processes the weights in `check`, before this side reports `Done`: a failure of
            # its post-processing then fails the refit on both sides.
            report = receiver.receive(
                update_info.version,
                partial(self._load_received, update_info.version),
                load_keeps=False,
                check=self._complete_received,
            )
        except BaseException:
            self.abandon()
            raise
        self.report = report.as_metrics()
        self._report_slices()

    def find_room(self, *, only_host: bool) -> Room:
        """Return where a second set of weights can be held; see `rl_refit.vllm.staging`.

        For an engine that holds the base of its adapters: where new adapters can, which is always.
        """
        if self.holds_base():
            return Room(place="host")
        if self._staged is not None:
            return Room(place=self._staged.place)
        return find_room(self.model, self.vllm_config, self.device, only_host=only_host)

    def stage(self, version: int, place: str) -> None:
        """Start to receive a version beside the weights that serve, and return.

        `staged` says when it is complete; `receiver.commit` then exchanges the weights, and must be
        called between two forward passes.

        Args:
            version: Of the new weights.
            place: Of `find_room`.

        Raises:
            StaleVersionError: It is not newer than the committed one; nothing changes.
            RefitError: Another version is still being received.
        """
        receiver = self.require_receiver()
        if self._staging is not None and self._staging.is_alive():
            raise RefitError("another version is still being received: abandon it first")
        self.abandon()
        if self.holds_base():
            slot = self._require_slot()
            receiver.begin(version, swap=slot.swap)
            receive = partial(self._receive_adapters, receiver, slot, version)
        else:
            if self._staged is None:
                self._staged = StagedModel(self.model, place)
            receiver.begin(version, swap=self._staged.swap)
            receive = partial(self._receive_staged, receiver, self._staged, version)
        self._staging = Staging(receive)
        self._staging.start()

    def staged(self) -> bool:
        """Return whether the version of `stage` is complete, or raise why it has failed."""
        if self._staging is None:
            raise RefitError("no version is being received: stage was not called")
        report = self._staging.result()
        if report is not None:
            self.report = report.as_metrics()
            self._report_slices()
        return report is not None

    def abandon_staging(self) -> None:
        """Give up a version that is being received; the weights that serve stay."""
        if self._staging is not None and self._staging.is_alive():
            if self._slices is not None:
                self._slices.close()
            # The receiver connects again with the next refit.
            self.require_receiver().close()
            # The next load must not run beside it: vLLM's current config belongs to the process.
            self._staging.join(_ABANDON_S)

    def release_staging(self) -> None:
        """Free the memory of the second set of weights."""
        self.abandon_staging()
        self._staged = None

    def finish_weight_update(self) -> None:
        """Post-process what `load` has loaded; a sender's weights are post-processed already.

        Raises:
            RefitError: The model has parameters that were not loaded.
        """
        if self._reload is not None:
            try:
                self._complete()
            except BaseException:
                self.abandon()
                raise

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load tensors from another source; `finish_weight_update` completes the load."""
        with set_current_vllm_config(self.vllm_config):
            try:
                self._load(tensors)
            except BaseException:
                self.abandon()
                raise

    def abandon(self) -> None:
        """Give up an unfinished load; see `LayerwiseReload.abandon`."""
        if self._slot is not None:
            self._slot.abandon()
        if self._reload is not None:
            with set_current_vllm_config(self.vllm_config):
                self._reload.abandon()
        self._end_reload()

    def shutdown(self) -> None:
        """Close the connection to the sender."""
        self.abandon_staging()
        if self.receiver is not None:
            self.receiver.close()
        if self._slices is not None:
            self._slices.close()
        self._slices = self._sliced = None

    def require_receiver(self) -> RefitReceiver:
        """Return the receiver, or raise `RefitError` before `init_transfer_engine`."""
        if self.receiver is None:
            raise RefitError("init_weight_transfer_engine was not called")
        return self.receiver

    @torch.no_grad()
    def _receive_staged(
        self, receiver: RefitReceiver, staged: StagedModel, version: int
    ) -> RefitReport:
        """Receive a version into a twin of the model; runs in a thread of its own."""
        reload: LayerwiseReload | None = None
        self._exchanged = None

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            nonlocal reload
            with set_current_vllm_config(self.vllm_config):
                if is_invitation(tensors):
                    self._receive_slices(tensors, version, staged.model)
                    return
                if reload is None:
                    reload = LayerwiseReload(staged.model, self.model_config, self.device)
                reload.load(tensors)

        def check() -> None:
            load([])  # a plan without tensors: `complete` reports every parameter as missing
            assert reload is not None
            with set_current_vllm_config(self.vllm_config):
                self._load_slices(reload)
                reload.complete()
            staged.require_alike()

        try:
            return receiver.receive(version, load, load_keeps=False, check=check)
        except BaseException:
            if reload is not None:
                with set_current_vllm_config(self.vllm_config):
                    reload.abandon()
            raise

    def holds_base(self) -> bool:
        """Return whether the engine has the base that its sender has sent, and takes adapters."""
        return self.receiver is not None and self.receiver.held_base is not None

    def forget_base(self) -> None:
        """Ask for the base once more, as the engine has lost its weights."""
        if self.receiver is not None:
            self.receiver.forget_base()

    def start_adapters(self) -> None:
        """Serve an adapter of zeros, which refits replace.

        Raises:
            RefitError: The engine takes no adapters.
        """
        self._require_slot().swap()

    def restore_adapters(self) -> None:
        """Serve the adapter that was received last, after vLLM has dropped all."""
        if self._slot is not None:
            self._slot.swap()

    def _require_slot(self) -> AdapterSlot:
        if self.vllm_config.lora_config is None:
            raise RefitError(
                "the engine takes no adapters: start vLLM with enable_lora=True and max_lora_rank"
            )
        if self._slot is None:
            self._slot = AdapterSlot(self.model)
        return self._slot

    @torch.no_grad()
    def _receive_adapters(
        self, receiver: RefitReceiver, slot: AdapterSlot, version: int
    ) -> RefitReport:
        """Receive adapters beside those that serve; runs in a thread of its own."""

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            if receiver.gets_base:
                raise RefitError("the sender sends the base to an engine that serves and holds it")
            slot.load(tensors)

        try:
            return receiver.receive(version, load, load_keeps=False, check=slot.stage)
        except BaseException:
            slot.abandon()
            raise

    def _load_received(self, version: int, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load a bucket, or what is received in slices in its place."""
        if is_invitation(tensors):
            with set_current_vllm_config(self.vllm_config):
                self._receive_slices(tensors, version, self.model)
        else:
            self._load(tensors)

    def _complete_received(self) -> None:
        # Only here, where all of it is verified, do slices touch the weights that serve.
        if self._exchanged is not None:
            self._load_slices(self._begin_reload())
        self._complete()

    def _load_slices(self, reload: LayerwiseReload) -> None:
        """Load what was received in slices, if anything was."""
        if self._exchanged is not None:
            assert self._sliced is not None
            self._sliced.load(reload)

    def _receive_slices(
        self, tensors: list[tuple[str, torch.Tensor]], version: int, model: torch.nn.Module
    ) -> None:
        """Receive the slices to which a bucket invites, unless they are here, or sent again.

        Args:
            tensors: The bucket's.
            version: Of the refit.
            model: The one whose loader says what to receive, if that is not known yet.
        """
        if self._sliced is None or self._slices is None:
            self._sliced = SlicedModel(self.vllm_config)
            self._slices = SliceReceiver(self._rank, timeout_s=self._timeout_s)
        wanted = partial(self._sliced.wanted, model)
        self._exchanged = self._slices.receive(tensors, version, wanted) or self._exchanged

    def _report_slices(self) -> None:
        if self._exchanged is not None:
            assert self.report is not None
            # What the protocol itself has sent is the invitation.
            self.report["refit_bytes"] = self._exchanged.bytes_full
            self.report["refit_bytes_sent"] = self._exchanged.bytes_received

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        factors = [pair for pair in tensors if is_adapter(pair[0])]
        if factors:
            self._require_slot().load(factors)
        others = [pair for pair in tensors if not is_adapter(pair[0])]
        if others:
            self._begin_reload().load(others)

    def _begin_reload(self) -> LayerwiseReload:
        if self._reload is None:
            if self.vllm_config.lora_config is not None:
                self._taken_out = self._require_slot().take_out()
            self._reload = LayerwiseReload(self.model, self.model_config, self.device)
        return self._reload

    def _end_reload(self) -> None:
        self._reload = None
        if self._taken_out is not None:
            self._require_slot().put_back(self._taken_out)
            self._taken_out = None

    def _complete(self) -> None:
        if self._reload is not None or self.require_receiver().gets_base:
            # For a plan without tensors too: `complete` reports every parameter as missing.
            self._begin_reload().complete()
            self._end_reload()
        if self._slot is not None:
            # `finish_update` restores it, as vLLM drops all adapters before.
            self._slot.stage()
