"""The calls that hand the weights to inference engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_policy import backends, weight_transfer
from rl_policy.policy_parts import PolicyParts

if TYPE_CHECKING:
    from collections.abc import Mapping

    import ray


class WeightCalls(PolicyParts):
    """Weights on their way out: streamed, as handles, or over a group."""

    def open_refit(
        self,
        num_receivers: int,
        *,
        is_paired: bool = False,
        transport: str = "shm",
        **options: Any,
    ) -> list[Mapping[str, Any]]:
        """Return, for each receiver, the address at which it finds its sender.

        An address is for that receiver alone: whoever has it can read the weights.

        Args:
            num_receivers: Ranks of the inference engines.
            is_paired: Whether receiver `i` shares the device of rank `i`, which then sends to it.
            transport: A name of the entry-point group `rl_refit.transports`.
            options: What else `rl_refit.RefitSender` takes, `bucket_bytes` and `verify` for two.
        """
        self._require_sending()
        self._receivers = weight_transfer.receivers_per_rank(
            num_receivers, world_size=self._group.world_size, is_paired=is_paired
        )
        addresses = self._group.run_all(
            "open_refit", receivers_per_rank=self._receivers, transport=transport, **options
        )
        return weight_transfer.address_per_receiver(addresses, self._receivers)

    def send_weights(self, version: int) -> dict[str, float]:
        """Stream the weights to the receivers of `open_refit`, which receive at the same time.

        Returns:
            `refit_s`, `refit_bytes`, `refit_gb_per_s`, `refit_slowest_rank`, and the seconds of
            each phase, see `rl_refit.RefitReport`. The phases overlap.

        Raises:
            RefitError: A receiver failed or did not answer in time. Call again, for all of them.
            ResidencyError: The model is not on the device.
        """
        self.require_ready_to_send()
        # A rank whose receiver fails still takes part in the others' gathers.
        call = self._group.submit_all("send_weights", version)
        reports = self._group.wait(call, grace_s=self.config["timeout_s"])
        return weight_transfer.merge_reports(reports, self._receivers)

    def require_ready_to_send(self) -> None:
        """Raise what `send_weights` would before it begins, that is before a receiver waits for it.

        Raises:
            NotImplementedError: The backend has no weights to send.
            ResidencyError: The model is not on the device.
        """
        self._require_sending()
        self._residency.require("send_weights")

    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef]:
        """Let rank 0 meet `world_size - 1` inference ranks; the futures are not waited for.

        Args:
            ip: Address of rank 0's node, see `RayVirtualCluster.get_master_address_and_port`.
            port: A port that is free there.
            world_size: The inference ranks plus one.
        """
        self._require_sending()
        return self._group.submit_all("init_collective", ip, port, world_size).refs

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Return `{name: (shape, wire dtype)}` of every tensor that is sent, in order."""
        self._require_sending()
        return self._group.run_all("prepare_refit_info")[0]

    def prepare_weights_for_ipc(self, _refit_buffer_size_gb: int | None = None) -> list[list[str]]:
        """Return the names of all tensors, grouped so that each group fits a buffer.

        Args:
            _refit_buffer_size_gb: The buffer in GiB. None: the smallest free memory of any rank.
        """
        self.require_ready_to_send()
        answers = self._group.run_all("prepare_weights_for_ipc")
        return weight_transfer.group_for_ipc(answers, limit_gib=_refit_buffer_size_gb)

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """Return `{device id: {name: handle}}` of one group; those of the call before expire."""
        self.require_ready_to_send()
        answers = self._group.run_all("get_weights_ipc_handles", keys)
        return {device: handles for answer in answers for device, handles in answer.items()}

    def prepare_info_for_collective(self) -> dict[str, Any]:
        """Return what `prepare_refit_info` returns; its older name."""
        self._require_sending()
        return self._group.run_all("prepare_info_for_collective")[0]

    def broadcast_weights_for_collective(self) -> list[ray.ObjectRef]:
        """Broadcast every tensor, in order; the futures are not waited for."""
        self.require_ready_to_send()
        return self._group.submit_all("broadcast_weights_for_collective").refs

    def _require_sending(self) -> None:
        backends.require_sending(self._backend, self._worker_class)
