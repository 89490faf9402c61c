"""The sender's half of the pipeline: a loop that fills buckets and announces them.

It takes the next tensor from its source before it waits for a free buffer, so that a gather, the
copy into one buffer and the receivers' load of the other overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from rl_refit.deadline import Deadline
from rl_refit.digest import DIGESTS, RunningDigest, bytes_of
from rl_refit.errors import RefitError
from rl_refit.messages import AllLoaded, End, Filled
from rl_refit.pieces import PieceViews, Run, copy_all
from rl_refit.plan import Bucket, RefitPlan, TensorSpec
from rl_refit.receivers import Receivers
from rl_refit.report import Stopwatch
from rl_refit.transports.base import SendingSide

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class OutboundStream:
    """Fills buckets from a source, announces them, and waits until they are loaded."""

    def __init__(
        self,
        plan: RefitPlan,
        side: SendingSide,
        views: PieceViews,
        receivers: Receivers,
        *,
        version: int,
        verify: bool,
        deadline: Deadline,
        watch: Stopwatch,
    ) -> None:
        self._plan = plan
        self._side = side
        self._views = views
        self._receivers = receivers
        self._version = version
        self._verify = verify
        self._deadline = deadline
        self._watch = watch
        self._bytes: torch.Tensor | None = None

    def run(self, tensors: NamedTensors) -> None:
        """Send every bucket; returns when all receivers have loaded all."""
        watch = self._watch
        for bucket in self._plan.buckets:
            digest = self.fill(bucket, tensors)
            with watch.phase("wire"):
                self._publish(bucket)
                self.announce(bucket, digest)
        check_exhausted(tensors)
        with watch.phase("resume"):
            self._receivers.tell(End(self._version, len(self._plan.buckets)))
            self._receivers.wait_done()
            self._receivers.tell(AllLoaded(self._version))

    def _publish(self, bucket: Bucket) -> None:
        try:
            self._side.publish(bucket.index, bucket.nbytes, self._deadline)
        except Exception as error:
            self._receivers.hear_out()
            label = self._plan.label(bucket)
            told = f"the bucket cannot be published: {error!r}"
            raise RefitError(told, bucket=bucket.index, tensor=label) from error

    def announce(self, bucket: Bucket, digest: int) -> None:
        """Tell the receivers that a bucket may be read."""
        slot = bucket.index % len(self._side.buffers)
        self._receivers.tell(Filled(self._version, bucket.index, slot, bucket.nbytes, digest))

    def fill(self, bucket: Bucket, tensors: NamedTensors) -> int:
        """Copy a bucket's tensors into its buffer; return its digest, or 0 unverified."""
        buffers = self._side.buffers
        buffer = buffers[bucket.index % len(buffers)][: bucket.nbytes]
        running: RunningDigest | None = None
        for run in self._views.of(bucket):
            with self._watch.phase("gather"):
                taken = self._take(run, tensors)
            if run.pieces[0] is bucket.pieces[0]:
                running = self._make_room(bucket, buffer)
            with self._watch.phase("pack"):
                copy_all(run.views, taken)
            if running is not None:
                running.advance(run.end)
        return self._finish_digest(bucket, buffer, running)

    def _make_room(self, bucket: Bucket, buffer: torch.Tensor) -> RunningDigest | None:
        """Wait until the bucket's buffer may be filled; return its digest, if it is to have one."""
        with self._watch.phase("wire"):
            before = bucket.index - len(self._side.buffers)
            self._receivers.wait_loaded(self._plan, before)
        zero(buffer, bucket.gaps)
        if self._verify and self._side.digest == "xxh3":
            return RunningDigest(buffer, position=bucket.index)
        return None

    def _finish_digest(
        self, bucket: Bucket, buffer: torch.Tensor, running: RunningDigest | None
    ) -> int:
        if not self._verify:
            return 0
        if running is not None:
            digest = running.finish()
            self._watch.add("verify", running.seconds)
            return digest
        with self._watch.phase("verify"):
            return DIGESTS[self._side.digest](buffer, position=bucket.index)

    def _take(self, run: Run, tensors: NamedTensors) -> list[torch.Tensor]:
        """Return what a run is filled with: the source's next tensors, or a part of one."""
        first = run.pieces[0]
        if first.whole:
            return [take_tensor(self._plan.specs[piece.tensor], tensors) for piece in run.pieces]
        if first.start == 0:
            self._bytes = bytes_of(take_tensor(self._plan.specs[first.tensor], tensors))
        assert self._bytes is not None
        part = self._bytes[first.start : first.start + first.size]
        if first.start + first.size == len(self._bytes):
            self._bytes = None
        return [part]


def take_tensor(spec: TensorSpec, tensors: NamedTensors) -> torch.Tensor:
    """Return the next tensor of a source, held against what its metadata promised."""
    entry = next(tensors, None)
    if entry is None:
        raise RefitError("the source ends before it", tensor=spec.name)
    name, tensor = entry
    if name != spec.name or tensor.dtype != spec.dtype or tensor.shape != spec.shape:
        given = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        raise RefitError(f"the source yields {given} where {spec} is planned", tensor=spec.name)
    return tensor.detach() if tensor.requires_grad else tensor


def zero(buffer: torch.Tensor, gaps: Iterable[tuple[int, int]]) -> None:
    """Set the `[start, end)` ranges of a buffer to zero."""
    # numpy takes a fraction of the time, and there may be thousands.
    data = buffer.numpy() if buffer.device.type == "cpu" else buffer
    for start, end in gaps:
        data[start:end] = 0


def check_exhausted(tensors: NamedTensors) -> None:
    """Hold a source against having more tensors than its metadata named."""
    extra = next(tensors, None)
    if extra is not None:
        raise RefitError("the source yields a tensor that is not planned", tensor=extra[0])
