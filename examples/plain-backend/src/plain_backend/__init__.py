"""A training backend in plain torch: data-parallel copies of a small model."""

from plain_backend.engine import PlainEngine, PlainWorker
from plain_backend.model import PairModel

__all__ = ["PairModel", "PlainEngine", "PlainWorker"]
