"""What stands in for Transformer Engine and Apex where neither is installed, on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import megatron.core.optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.transformer.moe import moe_utils

from rl_megatron_worker.compat.adam import GroupStepAdam
from rl_megatron_worker.compat.patches import Patch, Patches

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def _needed() -> list[Patch]:
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
        # The router of a mixture of experts asks whether it is None, and 0.16.1 leaves it unbound.
        needed.append((moe_utils, "te_general_gemm", None))
    return needed


_patches = Patches(_needed())


def engine_stand_ins() -> AbstractContextManager[None]:
    """Return the scope in which Megatron-core trains without Transformer Engine and Apex.

    It takes our Adam for theirs, with which its distributed optimizer can save and load. Where one
    of them is installed, the scope leaves it alone.
    """
    return _patches.applied()
