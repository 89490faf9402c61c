"""Scoped monkey patches, and those that stand in for Transformer Engine and Apex."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import megatron.core.optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.transformer.moe import moe_utils

from rl_megatron_worker.compat.adam import GroupStepAdam

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from contextlib import AbstractContextManager

Patch = tuple[Any, str, Any]
"""Owner, attribute name, replacement. The attribute is looked up on the owner itself."""

_ABSENT = object()


class Patches:
    """A reference-counted set of patches, entered per thread and reentrant.

    Attributes are process-global: they stay replaced for all threads while any thread is inside.

    Args:
        patches: The replacements. A missing attribute is added, and removed afterwards.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches
        self._originals: list[Patch] = []
        self._lock = threading.Lock()
        self._num_threads = 0
        self._thread = threading.local()

    @property
    def entered(self) -> bool:
        """Whether this thread is inside."""
        return getattr(self._thread, "entered", False)

    @contextmanager
    def applied(self) -> Generator[None, None, None]:
        """Apply the patches inside."""
        if self.entered:
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            # Only the first thread saves the originals: a second one would save replacements.
            if self._num_threads == 0:
                for owner, name, replacement in self._patches:
                    self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
                    setattr(owner, name, replacement)
            self._num_threads += 1
        self._thread.entered = True

    def _leave(self) -> None:
        self._thread.entered = False
        with self._lock:
            self._num_threads -= 1
            # In reverse order, in case an attribute is patched twice.
            while self._num_threads == 0 and self._originals:
                owner, name, original = self._originals.pop()
                if original is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


def _missing_packages() -> list[Patch]:
    needed: list[Patch] = []
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        needed += [
            (megatron_optimizer, "Adam", GroupStepAdam),
            (megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),
            (distrib_optimizer, "Adam", GroupStepAdam),
            (distrib_optimizer, "HAVE_APEX_OR_TE", True),
            (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
        ]
    if not hasattr(moe_utils, "te_general_gemm"):
        # The MoE router tests it against None, and 0.16.1 leaves it unbound.
        needed.append((moe_utils, "te_general_gemm", None))
    return needed


_engine_patches = Patches(_missing_packages())


def engine_stand_ins() -> AbstractContextManager[None]:
    """Return the scope in which Megatron-core trains without Transformer Engine and Apex.

    `GroupStepAdam` replaces their FusedAdam, so that the distributed optimizer can save and load.
    An installed package is left alone.
    """
    return _engine_patches.applied()
