"""The process group that a check runs on, and agreement of its ranks on each verdict.

Verdicts travel over a gloo group of their own. The worker under test may leave its collectives
half-way, and a message on its own groups could then be matched with the wrong call.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from rl_interfaces.backend.runtime.ports import ReservedPort
from rl_interfaces.backend.runtime.ranks import RankEnvironment, init_process_group

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This rank, and a process group that carries verdicts only."""

    rank: int
    world_size: int
    verdicts: dist.ProcessGroup

    def any(self, condition: bool) -> bool:
        """Return whether `condition` is true on any rank. Collective."""
        return any(self._gather(condition))

    def all(self, condition: bool) -> bool:
        """Return whether `condition` is true on every rank. Collective."""
        return all(self._gather(condition))

    def _gather(self, condition: bool) -> list[bool]:
        # After destroy_process_group the gather would return without communicating.
        if not dist.is_initialized():
            raise RuntimeError("the process group is gone: a worker has destroyed it")
        gathered = [condition] * self.world_size
        dist.all_gather_object(gathered, condition, group=self.verdicts)
        return gathered


@contextmanager
def joined_ranks(*, timeout_s: float) -> Iterator[Ranks]:
    """Join the process group unless the caller has; as a single rank without torchrun's variables.

    The group outlives each worker, so that the rules can build several workers in a row.
    """
    with ExitStack() as leaving:
        leaving.enter_context(_one_rank_unless_launched())
        environment = RankEnvironment.from_environment()
        if init_process_group(environment, timeout_s=timeout_s):
            leaving.callback(_leave)
        yield Ranks(
            rank=environment.rank,
            world_size=environment.world_size,
            verdicts=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)),
        )


def _leave() -> None:
    # A worker that breaks a rule may have destroyed it already.
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _one_rank_unless_launched() -> Iterator[None]:
    if "RANK" in os.environ:
        yield
        return
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with ReservedPort() as port:
        added = {**alone, "MASTER_PORT": str(port.number)}
        kept = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            yield
        finally:
            for name, value in kept.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value
