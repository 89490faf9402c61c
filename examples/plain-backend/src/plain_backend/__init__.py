"""A training backend in plain torch: data-parallel copies of a small model."""

from plain_backend.model import PairModel
from plain_backend.worker import PlainWorker

__all__ = ["PairModel", "PlainWorker"]
