"""What was received, remembered as digests, to be compared with what the engine holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from rl_refit.digest import bytes_of, tensor_digest
from rl_refit.errors import VerificationError
from rl_refit.plan import TensorSpec
from rl_refit.report import Stopwatch


@dataclass(slots=True)
class _Received:
    """The runs of one tensor, as first byte, length and digest, and where they were taken."""

    spec: TensorSpec
    device: torch.device
    runs: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])


class LiveWeights:
    """The digests of all that came.

    Attributes:
        checked: Whether the live weights were compared, and are equal.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._received: dict[str, _Received] = {}
        self._watch = watch
        self.checked = False

    def remember(self, spec: TensorSpec, start: int, run: torch.Tensor) -> None:
        """Take the digest of a tensor, or of a part of it that begins at that byte."""
        with self._watch.phase("verify"):
            received = self._received.setdefault(spec.name, _Received(spec, run.device))
            received.runs.append((start, run.nbytes, tensor_digest(run)))

    def check(self, tensors: Iterable[tuple[str, torch.Tensor]], *, rank: int) -> None:
        """Hold every live tensor against what was received under its name.

        Raises:
            VerificationError: One is missing, unexpected, or differs in dtype, shape or a bit.
        """
        missing = dict(self._received)
        for name, tensor in tensors:
            if name not in self._received:
                raise VerificationError("it is live and was not received", rank=rank, tensor=name)
            missing.pop(name, None)
            received = self._received[name]
            live = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
            if live != received.spec:
                told = f"{live} is live, {received.spec} came"
                raise VerificationError(told, rank=rank, tensor=name)
            # The two kinds of digest are not comparable.
            data = bytes_of(tensor.detach().to(received.device))
            for start, size, digest in received.runs:
                if tensor_digest(data[start : start + size]) != digest:
                    raise VerificationError("its live values differ", rank=rank, tensor=name)
        for name in missing:
            raise VerificationError("it was received and is not live", rank=rank, tensor=name)
        self.checked = True
