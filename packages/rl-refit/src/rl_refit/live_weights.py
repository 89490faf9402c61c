"""What was received, remembered as digests, to be compared with what the engine holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rl_refit.digest import tensor_digest
from rl_refit.errors import VerificationError
from rl_refit.plan import TensorSpec
from rl_refit.report import Stopwatch
from rl_refit.stream import Load


class LiveWeights:
    """The digests of the tensors that were handed to `load`.

    Attributes:
        checked: Whether the live weights were compared, and are equal.
    """

    def __init__(self) -> None:
        self._digests: dict[str, tuple[TensorSpec, int, str]] = {}
        self.checked = False

    def remember(self, load: Load, watch: Stopwatch) -> Load:
        """Return `load`, which also takes the digest of what it is given."""

        def remember_and_load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            with watch.phase("verify"):
                for name, tensor in tensors:
                    spec = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
                    self._digests[name] = (spec, tensor_digest(tensor), tensor.device.type)
            load(tensors)

        return remember_and_load

    def check(self, tensors: Iterable[tuple[str, torch.Tensor]], *, rank: int) -> None:
        """Hold every live tensor against what was received under its name.

        Raises:
            VerificationError: One is missing, unexpected, or differs in dtype, shape or a bit.
        """
        missing = dict(self._digests)
        for name, tensor in tensors:
            if name not in self._digests:
                raise VerificationError("it is live and was not received", rank=rank, tensor=name)
            missing.pop(name, None)
            spec, digest, device = self._digests[name]
            live = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
            if live != spec:
                raise VerificationError(f"{live} is live, {spec} came", rank=rank, tensor=name)
            # The two kinds of digest are not comparable.
            if tensor_digest(tensor.to(device)) != digest:
                raise VerificationError("its live values differ", rank=rank, tensor=name)
        for name in missing:
            raise VerificationError("it was received and is not live", rank=rank, tensor=name)
        self.checked = True
