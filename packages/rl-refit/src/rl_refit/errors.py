"""The errors of a refit. All of them can be pickled, to be passed between processes."""

from __future__ import annotations


class RefitError(RuntimeError):
    """A refit failed; no version was committed.

    Attributes:
        reason: The message without the prefix that names rank, bucket and tensor.
        rank: The receiver's rank; None if the error is not about a single receiver.
        bucket: Index of the bucket in the plan.
        tensor: Name of the tensor, or of the bucket's first and last one.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        bucket: int | None = None,
        tensor: str | None = None,
    ) -> None:
        where = [
            f"{label} {value}"
            for label, value in (("receiver", rank), ("bucket", bucket), ("tensor", tensor))
            if value is not None
        ]
        super().__init__(f"{', '.join(where)}: {message}" if where else message)
        self.reason = message
        self.rank = rank
        self.bucket = bucket
        self.tensor = tensor


class PlanMismatchError(RefitError):
    """The two sides disagree on the tensors or on their packing."""


class VerificationError(RefitError):
    """The received bytes, or the live weights after loading, differ from what was sent."""


class RefitTimeoutError(RefitError):
    """The other side did not answer within the time limit."""


class AuthenticationError(RefitError):
    """The other side could not prove that it knows the token."""


class StaleVersionError(RefitError):
    """The version is not newer than the committed one."""


class RefitInProgress(RefitError):
    """A refit has begun and is not committed yet."""


class PoisonedError(RefitError):
    """The last refit failed: the weights are undefined until a complete one succeeds."""
