"""The checkpoints of a server, in a directory of its owner alone.

    STATE/lock, STATE/api_key
    STATE/checkpoints/MODEL/weights/NAME            with optimizer state
    STATE/checkpoints/MODEL/sampler_weights/NAME    without

A client knows them by `tinker://MODEL/weights/NAME`. Each is a directory that `peft` loads, and has
a `checkpoint.json` beside it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_policy.run.directory import keep_secret
from rl_policy.tinker.requests import RequestError

WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"
"""Checkpoints with optimizer state, and without."""
_PATH = re.compile(
    r"tinker://(?P<model>[A-Za-z0-9:_-]{1,200})/(?P<kind>weights|sampler_weights)/"
    r"(?P<name>[A-Za-z0-9_-][A-Za-z0-9._-]{0,127})"
)
_SUFFIX = ".checkpoint.json"
_OWNER_ONLY = 0o700
KEY_PREFIX = "tml-"
"""What the client requires of a key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A saved set of adapters."""

    model: str
    kind: str
    name: str
    base_model: str
    rank: int
    layers: list[str]
    created: float
    """Seconds since the epoch, as `expires`."""
    expires: float | None
    metadata: dict[str, str]

    @property
    def path(self) -> str:
        """The client's name of it."""
        return f"tinker://{self.model}/{self.kind}/{self.name}"


class CheckpointStore:
    """The checkpoints in a state directory, which one server uses at a time.

    Args:
        root: The directory; it is created, for its owner alone.

    Raises:
        ValueError: Others can read the directory, or another server uses it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.root.mkdir(mode=_OWNER_ONLY, parents=True, exist_ok=True)
        status = self.root.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ValueError(
                f"--state-dir {root} is open to other users (mode {status.st_mode & 0o777:o}): "
                f"chmod 700 it, or name another"
            )
        self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ValueError(f"--state-dir {root} is in use by another server") from None

    def close(self) -> None:
        """Let another server use the directory."""
        os.close(self._lock)

    def api_key(self) -> str:
        """Return the key of the directory, which is made at the first call."""
        return keep_secret(self.root / "api_key", lambda: KEY_PREFIX + secrets.token_urlsafe(32))

    def write(
        self,
        checkpoint: Checkpoint,
        save: Callable[[Path], None],
        *,
        overwrite: bool,
    ) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: What it is of.
            save: Writes the directory.
            overwrite: Whether it may replace one of the same name.

        Raises:
            RequestError: There is one of the same name, which has not expired.
        """
        path = self._directory(checkpoint.model, checkpoint.kind, checkpoint.name)
        beside = _beside(path)
        if _read(beside) is None:
            # What has expired, or was left by a server that was killed while it saved.
            self._remove(path)
        elif not overwrite:
            raise RequestError(
                f"{checkpoint.path} exists: choose another name, or pass overwrite=True"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path)
        # Last, and renamed: without it there is no checkpoint.
        partial = beside.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(checkpoint)))
        partial.replace(beside)

    def find(self, path: str) -> tuple[Checkpoint, Path]:
        """Return a checkpoint and its directory, by the client's name of it.

        Raises:
            RequestError: There is none, or it has expired.
        """
        parts = _PATH.fullmatch(path)
        if parts is None:
            raise RequestError(f"path={path!r} must be tinker://MODEL/weights/NAME")
        directory = self._directory(parts["model"], parts["kind"], parts["name"])
        checkpoint = _read(_beside(directory))
        if checkpoint is None:
            raise RequestError(f"{path} does not exist")
        return checkpoint, directory

    def all_of(self, model: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a model, or of all, oldest first."""
        found = [
            checkpoint
            for beside in self._besides()
            if (checkpoint := _read(beside)) and model in (None, checkpoint.model)
        ]
        return sorted(found, key=lambda each: each.created)

    def remove(self, path: str) -> None:
        """Remove a checkpoint.

        Raises:
            RequestError: There is none.
        """
        self._remove(self.find(path)[1])

    def remove_expired(self) -> None:
        """Remove the checkpoints whose time has passed."""
        for beside in self._besides():
            if _read(beside) is None and beside.exists():
                self._remove(beside.with_name(beside.name.removesuffix(_SUFFIX)))

    def _remove(self, directory: Path) -> None:
        _beside(directory).unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)

    def _directory(self, model: str, kind: str, name: str) -> Path:
        return self.root / "checkpoints" / model / kind / name

    def _besides(self) -> Iterator[Path]:
        return (self.root / "checkpoints").glob(f"*/*/*{_SUFFIX}")


def _beside(directory: Path) -> Path:
    return directory.with_name(directory.name + _SUFFIX)


def _read(beside: Path) -> Checkpoint | None:
    """Return a checkpoint; None if there is none, or its time has passed."""
    try:
        values: dict[str, Any] = json.loads(beside.read_text())
    except FileNotFoundError:
        return None
    checkpoint = Checkpoint(**values)
    if checkpoint.expires is not None and checkpoint.expires <= time.time():
        return None
    return checkpoint
