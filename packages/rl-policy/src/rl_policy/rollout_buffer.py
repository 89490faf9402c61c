"""Groups of completions between samplers and a trainer that do not wait for one another.

    open() --> sampled in any order --> put(id, rows, version) --> take() --> finish(version)
     ids       engines, environments     complete                  trained    the next may open

A group is the completions of one problem; its id is the problem's position in the run's stream, so
that every problem is trained on once, however often its completions are thrown away.

Staleness is counted in versions of the weights, which here are optimizer steps of the trainer: a
group of version v that is trained when the trainer is at version t has the staleness t - v. It is
bounded at the start and not at the end. A group that is opened at version v waits at most for those
that were opened before it, and as no more than

    capacity = groups_per_take * (1 + max_staleness // versions_per_take)

are open at a time, those are taken within max_staleness versions. Weights that are behind the
trainer's when they sample a group have used up some of max_staleness already: `open` then counts
with what is left of it. With max_staleness = 0 a group is opened only when the one before it has
been trained on: the synchronous algorithm. Only a group that others overtake, as it takes longer,
can become too old. With `wait` none does: each group that is open has a last take, after which it
would be too old, and a take is refused that would leave more groups for the takes up to some later
one than those take. What is open always fits, so that the trainer waits for nothing but sampling.

The buffer is a plain object of one thread: it neither waits nor samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
from rl_batched_data import BatchedDataDict
from safetensors import safe_open
from safetensors.torch import save_file

__all__ = ["BufferCounts", "RolloutBuffer", "RolloutGroup", "TooOld"]

TooOld: TypeAlias = Literal["drop", "rescore", "wait"]
"""What becomes of a group whose staleness is over the bound; with `wait`, that of no group is."""

_FORMAT = "1"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """The completions of one problem."""

    id: int
    """The problem's position in the run's stream."""
    version: int
    """Version of the weights that sampled its oldest token."""
    rows: BatchedDataDict[dict[str, torch.Tensor]]
    """A row per completion; tensors alone."""
    is_too_old: bool = False
    """Whether its staleness is over the bound: its old log-probabilities are to be those of the
    trainer's present weights, as the sampler's are too far from them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferCounts:
    """What a buffer holds, and what it has seen since the run began.

    At any time `opened = num_trained + taken + complete + in_flight + reopened`: nothing is lost.
    """

    opened: int
    """Problems that were opened, each counted once."""
    in_flight: int
    """Groups that are being sampled."""
    complete: int
    """Groups that wait to be taken."""
    taken: int
    """Groups that are trained on now."""
    reopened: int
    """Groups that wait to be sampled anew, as they were dropped or their sampler died."""
    num_trained: int
    """Groups that were trained on."""
    num_dropped: int
    """Times that a complete group was too old and was thrown away; with `wait` only after a
    checkpoint was loaded with less staleness than it was saved with."""
    num_rescored: int
    """Groups that were too old and were taken all the same."""


class RolloutBuffer:
    """Keeps the order, the bound of staleness and the account of asynchronous rollouts.

    Args:
        groups_per_take: Groups that the trainer takes at a time.
        max_staleness: Most versions between the oldest token of a group and the trainer's weights
            when the group is taken.
        versions_per_take: Versions, that is optimizer steps, by which a take advances the trainer.
        too_old: `drop`: a group over the bound is sampled anew. `rescore`: it is taken, with
            `is_too_old`, which problems need that always take longer than the bound allows.
            `wait`: no group becomes too old, as others are not taken before it where it then would.

    Raises:
        ValueError: A number is out of its range; names it and its value.

    Example, one group per take and a staleness of at most one step:
        buffer = RolloutBuffer(groups_per_take=1, max_staleness=1)
        buffer.open()                -> [0, 1]     both by the weights of version 0
        buffer.put(1, rows, version=0)
        buffer.take()                -> [group 1]  it was complete first
        buffer.finish(version=1)
        buffer.open()                -> [2]
    """

    def __init__(
        self,
        *,
        groups_per_take: int,
        max_staleness: int,
        versions_per_take: int = 1,
        too_old: TooOld = "drop",
    ) -> None:
        for name, value in (
            ("groups_per_take", groups_per_take),
            ("versions_per_take", versions_per_take),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness} must not be negative")
        if too_old not in get_args(TooOld):
            raise ValueError(f"too_old={too_old!r} must be 'drop', 'rescore' or 'wait'")
        self.groups_per_take = groups_per_take
        self.max_staleness = max_staleness
        self.versions_per_take = versions_per_take
        self._too_old: TooOld = too_old
        self._version = 0
        self._next_id = 0
        self._reopened: set[int] = set()
        # With the version of the weights that they were opened for.
        self._in_flight: dict[int, int] = {}
        self._complete: dict[int, RolloutGroup] = {}
        self._taken: set[int] = set()
        self._num_trained = self._num_dropped = self._num_rescored = 0

    @property
    def version(self) -> int:
        """The trainer's version of the weights."""
        return self._version

    @property
    def capacity(self) -> int:
        """Most groups that are open at a time, if the trainer's present weights sample them."""
        return self._capacity(lag=0)

    @property
    def in_flight(self) -> list[int]:
        """The ids of the groups that are being sampled, ascending."""
        return sorted(self._in_flight)

    @property
    def counts(self) -> BufferCounts:
        """What is where, and what has been."""
        return BufferCounts(
            opened=self._next_id,
            in_flight=len(self._in_flight),
            complete=len(self._complete),
            taken=len(self._taken),
            reopened=len(self._reopened),
            num_trained=self._num_trained,
            num_dropped=self._num_dropped,
            num_rescored=self._num_rescored,
        )

    @property
    def is_ready(self) -> bool:
        """Whether a take would find its groups."""
        return not self._taken and bool(self._next_ids())

    @property
    def waits_for_oldest(self) -> bool:
        """Whether enough groups are complete, and older ones have to be trained on first."""
        has_enough = len(self._complete) >= self.groups_per_take
        return has_enough and not self._taken and not self._next_ids()

    def open(self, limit: int | None = None, *, version: int | None = None) -> list[int]:
        """Return the ids of groups that may be sampled now, ascending: those to sample anew first.

        Example, 4 groups and one version per take, a staleness of at most 2, the trainer at version
        5 and 8 groups open: 4 ids for weights of version 5, none for those of version 4.

        Args:
            limit: Most groups to open. None: as many as the capacity allows.
            version: That of the weights that will sample them. None: the trainer's.

        Raises:
            ValueError: The version is from the future.
        """
        lag = 0 if version is None else self._version - version
        if lag < 0:
            raise ValueError(
                f"weights of version {version} cannot sample while the trainer is at version "
                f"{self._version}"
            )
        num_held = len(self._in_flight) + len(self._complete) + len(self._taken)
        room = self._capacity(lag=lag) - num_held
        if limit is not None:
            room = min(room, limit)
        ids = sorted(self._reopened)[: max(room, 0)]
        self._reopened.difference_update(ids)
        num_new = max(0, room - len(ids) - len(self._reopened))
        ids.extend(range(self._next_id, self._next_id + num_new))
        self._next_id += num_new
        self._in_flight |= dict.fromkeys(ids, self._version - lag)
        return ids

    def put(self, id: int, rows: BatchedDataDict[dict[str, torch.Tensor]], *, version: int) -> None:
        """Add a complete group.

        Args:
            id: One that `open` has returned.
            rows: A row per completion; tensors alone.
            version: That of the weights that sampled its oldest token.

        Raises:
            ValueError: The group is not being sampled, its version is from the future or from
                before it was opened, or a column is no tensor.
        """
        if id not in self._in_flight:
            raise ValueError(f"group {id} is {self._where(id)}: it is not being sampled")
        if version > self._version:
            raise ValueError(
                f"group {id} was sampled by weights of version {version}, and the trainer is at "
                f"version {self._version}"
            )
        if version < self._in_flight[id]:
            raise ValueError(
                f"group {id} was sampled by weights of version {version}, and was opened for "
                f"version {self._in_flight[id]}"
            )
        for key, column in rows.items():
            if not isinstance(column, torch.Tensor):
                raise ValueError(
                    f"column {key!r} of group {id} is a {type(column).__name__}: a checkpoint "
                    "holds tensors"
                )
        del self._in_flight[id]
        self._complete[id] = RolloutGroup(id=id, version=version, rows=rows)

    def reopen(self, ids: Iterable[int]) -> None:
        """Sample groups anew that are in flight, as what sampled them has died.

        Raises:
            ValueError: One is not being sampled.
        """
        ids = list(ids)
        for id in ids:
            if id not in self._in_flight:
                raise ValueError(f"group {id} is {self._where(id)}: it is not being sampled")
        for id in ids:
            self._in_flight.pop(id, None)
        self._reopened.update(ids)

    def discard_where(self, is_useless: Callable[[RolloutGroup], bool]) -> None:
        """Sample complete groups anew of which `is_useless` says so."""
        ids = [id for id, group in self._complete.items() if is_useless(group)]
        for id in ids:
            del self._complete[id]
        self._reopened.update(ids)

    def take(self) -> list[RolloutGroup]:
        """Return the oldest complete groups for a step of the trainer.

        The oldest are those of the lowest ids, and with `too_old="wait"` of the oldest weights.
        Groups that have become too old are dropped and opened anew, or are marked, see `too_old`.

        Returns:
            `groups_per_take` groups; none if fewer are complete and not too old, or if they have to
            wait for older ones: sample on.

        Raises:
            RuntimeError: What was taken before is not finished.
        """
        if self._taken:
            raise RuntimeError(f"the groups {sorted(self._taken)} are taken and not finished")
        for id in self._ids_to_drop():
            del self._complete[id]
            self._reopened.add(id)
            self._num_dropped += 1
        ids = self._next_ids()
        groups = [self._marked(self._complete.pop(id)) for id in ids]
        self._num_rescored += sum(group.is_too_old for group in groups)
        self._taken.update(ids)
        return groups

    def give_back(self, groups: Iterable[RolloutGroup]) -> None:
        """Undo a take whose groups cannot be trained on.

        Raises:
            ValueError: One is not taken.
        """
        for group in groups:
            if group.id not in self._taken:
                raise ValueError(f"group {group.id} is {self._where(group.id)}: it is not taken")
            self._taken.remove(group.id)
            self._complete[group.id] = group
            self._num_rescored -= group.is_too_old

    def finish(self, *, version: int) -> None:
        """Count what was taken as trained, by which the weights have got a version.

        Raises:
            ValueError: The version is not newer than the one before.
            RuntimeError: Nothing is taken.
        """
        if not self._taken:
            raise RuntimeError("no groups are taken")
        if version <= self._version:
            raise ValueError(f"version={version} is not newer than {self._version}")
        self._version = version
        self._num_trained += len(self._taken)
        self._taken.clear()

    def save(self, path: Path) -> None:
        """Write the buffer to a safetensors file, for `load`.

        Raises:
            RuntimeError: Groups are taken: whether they are trained on is not known yet.
        """
        if self._taken:
            raise RuntimeError(f"the groups {sorted(self._taken)} are taken and not finished")
        content = {
            "version": self._version,
            "next_id": self._next_id,
            # What is in flight is lost with its process.
            "reopened": sorted(self._reopened | self._in_flight.keys()),
            "complete": {
                id: {"version": group.version, "columns": list(group.rows)}
                for id, group in self._complete.items()
            },
            "num_trained": self._num_trained,
            "num_dropped": self._num_dropped,
            "num_rescored": self._num_rescored,
        }
        tensors = {
            # Columns may be views of one batch, which the format refuses.
            f"{id}/{key}": column.clone(memory_format=torch.contiguous_format)
            for id, group in self._complete.items()
            for key, column in group.rows.items()
        }
        metadata = {"format": _FORMAT, "buffer": json.dumps(content)}
        save_file(tensors, path, metadata=metadata)

    def load(self, path: Path) -> None:
        """Continue from a file that `save` wrote; what was in flight is sampled anew.

        Raises:
            ValueError: The file is not one of a buffer.
            RuntimeError: This buffer has opened groups already.
        """
        if self._next_id:
            raise RuntimeError(f"the buffer has opened {self._next_id} groups: load into a new one")
        with safe_open(path, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            if metadata.get("format") != _FORMAT or "buffer" not in metadata:
                raise ValueError(f"{path} is no file of a RolloutBuffer of format {_FORMAT}")
            content = json.loads(metadata["buffer"])
            self._complete = {
                int(id): RolloutGroup(
                    id=int(id),
                    version=int(group["version"]),
                    rows=BatchedDataDict(
                        {key: file.get_tensor(f"{id}/{key}") for key in group["columns"]}
                    ),
                )
                for id, group in content["complete"].items()
            }
        self._version = int(content["version"])
        self._next_id = int(content["next_id"])
        self._reopened = set(content["reopened"])
        self._num_trained = int(content["num_trained"])
        self._num_dropped = int(content["num_dropped"])
        self._num_rescored = int(content["num_rescored"])

    def _capacity(self, *, lag: int) -> int:
        return max(0, self.groups_per_take * (1 + self._takes_left(self._version - lag)))

    def _takes_left(self, version: int) -> int:
        """Return after how many takes one still takes a group in time; negative: none does."""
        return (self.max_staleness - (self._version - version)) // self.versions_per_take

    def _versions(self) -> dict[int, int]:
        """Return the versions of the groups that are open, the oldest first, by their ids.

        That of a group in flight is of the weights it was opened for: it is no older.
        """
        complete = {id: group.version for id, group in self._complete.items()}
        versions = self._in_flight | complete
        return dict(sorted(versions.items(), key=lambda item: (item[1], item[0])))

    def _next_ids(self) -> list[int]:
        """Return what is taken next; nothing if too little is complete or has to wait."""
        if len(self._complete) < self.groups_per_take:
            return []
        if self._too_old != "wait":
            return sorted(self._complete)[: self.groups_per_take]
        versions = self._versions()
        ids = [id for id in versions if id in self._complete][: self.groups_per_take]
        later = [version for id, version in versions.items() if id not in ids]
        is_in_time = all(
            1 + place // self.groups_per_take <= self._takes_left(version)
            for place, version in enumerate(later)
        )
        return ids if is_in_time else []

    def _ids_to_drop(self) -> list[int]:
        if self._too_old == "rescore":
            return []
        if self._too_old == "drop":
            return [id for id, group in self._complete.items() if self._is_too_old(group)]
        late, place = [], 0
        for id, version in self._versions().items():
            if place // self.groups_per_take <= self._takes_left(version):
                place += 1
            else:
                late.append(id)
        # Nothing is late, but after a checkpoint of a run with another bound.
        return [id for id in late if id in self._complete]

    def _is_too_old(self, group: RolloutGroup) -> bool:
        return self._version - group.version > self.max_staleness

    def _marked(self, group: RolloutGroup) -> RolloutGroup:
        if not self._is_too_old(group):
            return group
        return RolloutGroup(id=group.id, version=group.version, rows=group.rows, is_too_old=True)

    def _where(self, id: int) -> str:
        if id in self._complete:
            return "complete"
        if id in self._taken:
            return "taken"
        if id in self._reopened:
            return "to be opened anew"
        return "trained on" if 0 <= id < self._next_id else "unknown"
