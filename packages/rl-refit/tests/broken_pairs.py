"""Transports with their two ends, each of which breaks one rule of the conformance kit."""

import os
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import torch
from rl_refit import (
    PoisonedError,
    RefitError,
    RefitReceiver,
    RefitTimeoutError,
    StaleVersionError,
    TensorSource,
)
from rl_refit.protocol import State
from rl_refit.testing import DrillSender, RefitPair


def commit_anyway(receiver, version):
    """Commit a version whatever the state is."""
    receiver._weights.committed = version
    receiver._weights.state = State.READY


class Changed:
    """A source whose values are changed on their way."""

    def __init__(self, source, change):
        self.source = source
        self.change = change

    def metadata(self):
        return self.source.metadata()

    def __iter__(self):
        return ((name, self.change(tensor)) for name, tensor in self.source)


class Broken(RefitPair):
    """A pair over shared memory, of which a subclass breaks one thing."""

    sender_class = DrillSender
    receiver_class = RefitReceiver

    def __init__(self):
        super().__init__("shm")

    def source(self, weights):
        return TensorSource(weights) if isinstance(weights, dict) else weights

    def open_sender(self, weights, *, num_receivers=1, **options):
        options = {"bucket_bytes": 16 << 10, "timeout_s": 20.0, **options}
        return self.sender_class(self.source(weights), "shm", num_receivers, **options)

    def open_receiver(self, address, rank=0, **options):
        return self.receiver_class(address, rank, **{"timeout_s": 20.0, **options})


class LosesNaNs(Broken):
    def source(self, weights):
        def change(tensor):
            return tensor.nan_to_num() if tensor.dtype.is_floating_point else tensor

        return Changed(super().source(weights), change)


class ForgetsTheFourthReceiver(Broken):
    class receiver_class(RefitReceiver):
        def receive(self, version, load=None, **options):
            def spoil(pairs):
                spoilt = self._rank == 3 and version == 2
                load([(name, tensor * 0) for name, tensor in pairs] if spoilt else pairs)

            return super().receive(version, spoil, **options)


class SendsTheOldAgain(Broken):
    class sender_class(DrillSender):
        kept = ()

        def send(self, version):
            source = self._source
            if version == 2 and not self.kept:
                self.kept = tuple((name, tensor.clone()) for name, tensor in source)
            if version == 3:
                self._source = Kept(source, self.kept)
            try:
                return super().send(version)
            finally:
                self._source = source


class Kept:
    def __init__(self, source, pairs):
        self.metadata = source.metadata
        self.pairs = pairs

    def __iter__(self):
        return iter(self.pairs)


class TakesNoSmallBuffers(Broken):
    def open_sender(self, weights, **options):
        size = max(1024, options.pop("bucket_bytes", 16 << 10))
        return super().open_sender(weights, bucket_bytes=size, **options)


class SendsTiedTwice(Broken):
    def source(self, weights):
        return Untied(weights) if isinstance(weights, dict) else weights


class Untied:
    def __init__(self, tensors):
        self.tensors = tensors

    def metadata(self):
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self):
        return iter(self.tensors.items())


class IgnoresInto(Broken):
    def open_receiver(self, address, rank=0, *, into=None, **options):
        return super().open_receiver(address, rank, **options)


class NeedsReceivers(Broken):
    class sender_class(DrillSender):
        def commit(self, version):
            if self._num_receivers == 0:
                raise RefitError("there are no receivers")
            super().commit(version)


class LeavesFiles(Broken):
    """Each end leaves a file, which is not removed if its owner is killed."""

    def open_sender(self, weights, **options):
        tempfile.mkstemp()
        return super().open_sender(weights, **options)

    def open_receiver(self, address, rank=0, **options):
        tempfile.mkstemp()
        return super().open_receiver(address, rank, **options)


class CommitsWhatFailed(Broken):
    class receiver_class(RefitReceiver):
        def receive(self, version, load=None, **options):
            try:
                return super().receive(version, load, **options)
            except RefitError:
                commit_anyway(self, version)
                raise


class HangsWhereOthersFail(Broken):
    class receiver_class(RefitReceiver):
        def receive(self, version, load=None, **options):
            try:
                return super().receive(version, load, **options)
            except RefitError:
                threading.Event().wait()


class DiesWhereOthersFail(Broken):
    class receiver_class(RefitReceiver):
        def receive(self, version, load=None, **options):
            try:
                return super().receive(version, load, **options)
            except RefitError:
                os._exit(1)


class LeavesSharedMemory(Broken):
    def open_sender(self, weights, **options):
        sender = super().open_sender(weights, **options)
        _, path = tempfile.mkstemp(prefix="rl-refit-test-", dir="/dev/shm")
        Path(path).write_bytes(bytes(4096))
        sender.kept = torch.from_file(path, shared=True, size=4096, dtype=torch.uint8)
        return sender


class CommitsByItself(Broken):
    class receiver_class(RefitReceiver):
        def receive(self, version, load=None, **options):
            report = super().receive(version, load, **options)
            commit_anyway(self, version)
            return report


class CommitsWhatIsNotThere(Broken):
    class receiver_class(RefitReceiver):
        def commit(self, version):
            if self._weights.state is State.POISONED:
                super().commit(version)
            commit_anyway(self, version)


class GoesBackToOldVersions(Broken):
    class receiver_class(RefitReceiver):
        def begin(self, version):
            try:
                super().begin(version)
            except StaleVersionError:
                self._weights.begun, self._weights.state = version, State.IN_PROGRESS


class ForgetsAnotherVersion(Broken):
    class receiver_class(RefitReceiver):
        def receive(self, version, load=None, **options):
            try:
                return super().receive(version, load, **options)
            except RefitError as error:
                if "was begun" in str(error):
                    self._weights.state = State.EMPTY
                raise


class LoadsWhatIsNotExpected(Broken):
    def open_receiver(self, address, rank=0, *, expected=None, **options):
        return super().open_receiver(address, rank, **options)


class CommitsAfterAFailure(Broken):
    class receiver_class(RefitReceiver):
        def commit(self, version):
            try:
                super().commit(version)
            except PoisonedError as error:
                if "ZeroDivisionError" not in str(error):
                    raise
                commit_anyway(self, version)


class DoesNotNameTheWait(Broken):
    class receiver_class(RefitReceiver):
        def receive(self, version, load=None, **options):
            try:
                return super().receive(version, load, **options)
            except RefitTimeoutError as error:
                raise RefitError(str(error)) from error


class LetsEverybodyIn(Broken):
    def open_sender(self, weights, **options):
        sender = super().open_sender(weights, **options)
        self.token = sender.address["token"]
        return sender

    def open_receiver(self, address, rank=0, **options):
        return super().open_receiver({**address, "token": self.token}, rank, **options)


class KeepsTheOldReceiver(Broken):
    class sender_class(DrillSender):
        def _admit_newcomer(self):
            raise RefitError("there is one of this rank")


class BlindTo(Broken):
    """Goes on as if nothing had happened where a fault of one kind does."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    @contextmanager
    def tamper(self, sender, fault, *, timeout_s):
        if type(fault).__name__ == self.kind:
            yield
        else:
            with super().tamper(sender, fault, timeout_s=timeout_s):
                yield


class Unverified(Broken):
    """Digests are not compared."""

    def open_sender(self, weights, **options):
        return super().open_sender(weights, verify="none", **options)


class SendsEverything(Broken):
    def open_sender(self, weights, *, delta=False, **options):
        return super().open_sender(weights, **options)


class WaitsForAll(Broken):
    def open_sender(self, weights, *, min_receivers=None, **options):
        return super().open_sender(weights, **options)


class CommitsForOne(Broken):
    def open_sender(self, weights, *, min_receivers=None, **options):
        least = None if min_receivers is None else 1
        return super().open_sender(weights, min_receivers=least, **options)


class LosesWeightsWithTheConnection(Broken):
    class receiver_class(RefitReceiver):
        def _disconnect(self):
            if self._weights.state is State.READY:
                self._weights.poison("the sender is gone")
            super()._disconnect()


class OverwritesWhatIsServed(Broken):
    class receiver_class(RefitReceiver):
        def receive(self, version, load=None, **options):
            def load_and_swap(pairs):
                load(pairs)
                if self._swap is not None:
                    self._swap()

            return super().receive(version, load_and_swap, **options)


class RefusesWhileItStages(Broken):
    class receiver_class(RefitReceiver):
        def require_ready(self):
            if self._weights.is_updating:
                raise RefitError("a refit has begun")
            return super().require_ready()


class SwapsAtEveryCommit(Broken):
    class receiver_class(RefitReceiver):
        kept = None

        def begin(self, version, *, swap=None):
            self.kept = swap
            super().begin(version, swap=swap)

        def commit(self, version):
            was_committed = self._weights.is_committed(version)
            super().commit(version)
            if was_committed:
                self.kept()


class PoisonsTheOldVersion(Broken):
    class receiver_class(RefitReceiver):
        def receive(self, version, load=None, **options):
            try:
                return super().receive(version, load, **options)
            except RefitError:
                self._weights.state = State.POISONED
                raise


class CommitsWhatFailedToSwap(Broken):
    class receiver_class(RefitReceiver):
        def commit(self, version):
            try:
                super().commit(version)
            except ZeroDivisionError:
                commit_anyway(self, version)
                raise
