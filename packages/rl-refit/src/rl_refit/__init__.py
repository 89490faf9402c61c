"""Hand a trainer's weights to an inference engine: planned, pipelined, verified, transactional."""

from rl_refit.errors import (
    AuthenticationError,
    PlanMismatchError,
    PoisonedError,
    RefitError,
    RefitInProgress,
    RefitTimeoutError,
    StaleVersionError,
    VerificationError,
)
from rl_refit.plan import RefitPlan, TensorSpec, layer_of
from rl_refit.receiver import RefitReceiver
from rl_refit.report import RefitReport
from rl_refit.sender import RefitSender
from rl_refit.source import ModuleSource, TensorSource

__all__ = [
    "AuthenticationError",
    "ModuleSource",
    "PlanMismatchError",
    "PoisonedError",
    "RefitError",
    "RefitInProgress",
    "RefitPlan",
    "RefitReceiver",
    "RefitReport",
    "RefitSender",
    "RefitTimeoutError",
    "StaleVersionError",
    "TensorSource",
    "TensorSpec",
    "VerificationError",
    "layer_of",
]
