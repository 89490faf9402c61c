"""The calls by which a worker's weights leave it, see `rl_interfaces.WeightSendingWorker`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.backend.transfer import GatheredSource, WeightTransfer

if TYPE_CHECKING:
    from rl_interfaces import Residency


class WeightCalls(ABC):
    """Streams, handles and broadcasts of the weights, for a worker on torch to inherit."""

    _residency: Residency
    _transfer: WeightTransfer

    @property
    @abstractmethod
    def weight_source(self) -> GatheredSource:
        """The weights as they leave this worker: whole, in the dtype of `precision`."""

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return `{name: (shape, wire dtype)}` of every tensor that is sent, in order."""
        metadata = self.weight_source.metadata()
        return {name: (tuple(shape), dtype) for name, dtype, shape in metadata}

    def open_refit(self, **options: Any) -> dict[str, Any] | None:
        """Return the address at which this rank's receivers find it, see `WeightTransfer.open`."""
        return self._transfer.open(**options)

    def send_weights(self, version: int) -> dict[str, float]:
        """Stream the weights to the receivers; return the seconds of each phase, and the bytes.

        Raises:
            RefitError: A receiver failed or did not answer in time.
            ResidencyError: The model is not on the device.
        """
        self._residency.require("send_weights")
        return self._transfer.send(version)

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Return name and bytes of every tensor as it is sent, and the device's free bytes."""
        self._residency.require("send_weights")
        return self._transfer.sizes()

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return `{device id: {name: handle}}`; the handles of the call before expire.

        `rl_refit.compat.handles.rebuild` makes a tensor of a handle, in another process.

        Raises:
            ValueError: There is no tensor of a name.
        """
        self._residency.require("send_weights")
        return self._transfer.export(keys)

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Meet `world_size - 1` inference ranks at an address of rank 0, which alone joins."""
        self._transfer.join(ip, port, world_size)

    def prepare_info_for_collective(self) -> dict[str, Any]:
        """Return what `prepare_refit_info` returns."""
        return self.prepare_refit_info()

    def broadcast_weights_for_collective(self) -> None:
        """Broadcast every tensor to the group of `init_collective`, in order."""
        self._residency.require("send_weights")
        self._transfer.broadcast()
