"""The devices that a policy runs on."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Cluster(Protocol):
    """A reserved set of bundles, one per rank, on one or more nodes."""

    def world_size(self) -> int:
        """Return the number of bundles, which is the number of ranks."""
        ...

    def get_placement_groups(self) -> list[Any]:
        """Return the Ray placement groups that hold the bundles, in node order."""
        ...

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Return the address of rank 0's node and a port that is free there.

        For additional process groups, such as that of `init_collective`. The policy's own ranks
        rendezvous at a port that rank 0 reserves itself.
        """
        ...

    def shutdown(self) -> None:
        """Release the bundles. Idempotent."""
        ...
