"""Where `ray.init` looks for a Ray that runs, and whether one answers there.

Without Ray, whose import takes longer than all of it.
"""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

_CONNECT_LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RayAddress:
    """The address of a Ray that `ray.init` would join.

    Attributes:
        value: `HOST:PORT`, with `ray://` before it for Ray's client, or `auto`.
        source: Where it comes from: `RAY_ADDRESS`, or the path of the file of `ray start`.
    """

    value: str
    source: str

    def __str__(self) -> str:
        """Return it as a setting."""
        return f"{self.source}={self.value}"


def find_running_ray() -> RayAddress | None:
    """Return the Ray that `ray.init` would join; None if it would start one."""
    value = os.environ.get("RAY_ADDRESS", "")
    if value == "local":
        return None
    if value not in ("", "auto"):
        return RayAddress(value=value, source="RAY_ADDRESS")
    path = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "ray_current_cluster")
    if path.exists():
        return RayAddress(value=path.read_text(encoding="utf-8").strip(), source=str(path))
    # Ray looks among the processes of this machine.
    return RayAddress(value=value, source="RAY_ADDRESS") if value else None


def check_running_ray() -> None:
    """Raise `ValueError` if `ray.init` would join a Ray at an address that nobody answers at.

    Ray itself would go on trying for a quarter of an hour.
    """
    address = find_running_ray()
    if address is None or address.value == "auto":
        return
    host, _, port = address.value.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"{address} is no address: RAY_ADDRESS=HOST:PORT names the Ray to join, and "
            "RAY_ADDRESS=local starts one on this machine"
        )
    try:
        place = (host.strip("[]"), int(port))
        socket.create_connection(place, timeout=_CONNECT_LIMIT_S).close()
    # A port above 65535 is an OverflowError.
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"{address} cannot be reached within {_CONNECT_LIMIT_S:.0f} s ({error}): start that "
            "Ray, or set RAY_ADDRESS=local for one of this machine alone"
        ) from None
