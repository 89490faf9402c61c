"""For `verify="weights"`: digests of what arrived, to compare with the engine's live parameters."""

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
    """The pieces of one tensor as `(start, size, digest)`, and the device they were digested on."""

    spec: TensorSpec
    device: torch.device
    pieces: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])


class LiveWeights:
    """The digests of everything that arrived in one refit.

    Args:
        watch: Counts the time of digests as "verify".

    Attributes:
        checked: Whether the live parameters were compared, and are equal.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._received: dict[str, _Received] = {}
        self._watch = watch
        self.checked = False

    def observe(self, spec: TensorSpec, start: int, piece: torch.Tensor) -> None:
        """Digest a tensor, or the part of it that begins at byte `start`."""
        with self._watch.phase("verify"):
            received = self._received.setdefault(spec.name, _Received(spec, piece.device))
            received.pieces.append((start, piece.nbytes, tensor_digest(piece)))

    def check(self, tensors: Iterable[tuple[str, torch.Tensor]], *, rank: int) -> None:
        """Compare every live tensor with what was received under its name.

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
                raise VerificationError(
                    f"{live} is live, {received.spec} was received", rank=rank, tensor=name
                )
            # On the device of the received piece: the CPU's digest and the GPU's are two functions.
            data = bytes_of(tensor.detach().to(received.device))
            for start, size, digest in received.pieces:
                if tensor_digest(data[start : start + size]) != digest:
                    raise VerificationError("its live values differ", rank=rank, tensor=name)
        for name in missing:
            raise VerificationError("it was received and is not live", rank=rank, tensor=name)
        self.checked = True
