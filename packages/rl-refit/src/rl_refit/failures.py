"""An error on its way to the other side, and back into an error."""

from __future__ import annotations

from typing import NoReturn

from rl_refit import errors
from rl_refit.errors import RefitError
from rl_refit.messages import Failure

_KINDS: dict[str, type[RefitError]] = {
    kind.__name__: kind
    for kind in (
        errors.PlanMismatchError,
        errors.VerificationError,
        errors.RefitTimeoutError,
        errors.StaleVersionError,
    )
}


def failure_of(error: BaseException, *, rank: int | None = None) -> Failure:
    """Return what is told to the other side about an error."""
    if isinstance(error, RefitError):
        known = error.rank if error.rank is not None else rank
        return Failure(type(error).__name__, error.reason, known, error.bucket, error.tensor)
    return Failure(RefitError.__name__, repr(error), rank, None, None)


def raise_failure(failure: Failure, *, origin: str) -> NoReturn:
    """Raise what the other side has reported."""
    kind = _KINDS.get(failure.kind, RefitError)
    raise kind(
        f"{origin} reports: {failure.reason}",
        rank=failure.rank,
        bucket=failure.bucket,
        tensor=failure.tensor,
    )
