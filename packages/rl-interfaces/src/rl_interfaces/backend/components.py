"""Ready-made parts of an engine: plain logits, a replicated optimizer, a reference copy."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rl_batched_data import token_scores

from rl_interfaces.backend.checkpoint.optimizer_state import TrainState
from rl_interfaces.backend.engine import OptimizerStep
from rl_interfaces.backend.host_memory import HostCopies, OffloadBuffers
from rl_interfaces.backend.steps import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsOutput:
    """A `ForwardOutput` of a model that returns full logits of padded rows."""

    raw: torch.Tensor
    """`[batch, seq, vocab]`, any float, without temperature; `raw[:, t]` predict token `t + 1`."""
    micro_batch: MicroBatch

    def logprobs(self, *, temperature: float = 1.0) -> torch.Tensor:
        """See `ForwardOutput.logprobs`."""
        tokens = self.micro_batch.rows["input_ids"]
        scores = token_scores(self.raw, tokens, temperature=temperature)
        return scores.logprobs.where(self._is_token, 0.0)

    def logits(self, *, temperature: float = 1.0, sharded: bool = False) -> torch.Tensor:
        """See `ForwardOutput.logits`; no rank has a shard of the vocabulary."""
        return self.raw.float() / temperature

    def topk_logits(self, k: int) -> dict[str, torch.Tensor]:
        """See `ForwardOutput.topk_logits`."""
        values, indices = self.logits().topk(k, dim=-1)
        is_token = self._is_token[..., None]
        return {
            "topk_logits": values.where(is_token, 0.0),
            "topk_indices": indices.where(is_token, 0),
        }

    @property
    def _is_token(self) -> torch.Tensor:
        rows = self.micro_batch.rows
        columns = torch.arange(rows["input_ids"].shape[1], device=self.raw.device)
        return columns < rows["input_lengths"][:, None]


# torch's own for float16. Megatron-core starts at 2 ** 32, which would skip dozens of steps.
FIRST_LOSS_SCALE = 2.0**16
STEPS_BEFORE_GROWTH = 2000


def move_optimizer_state(
    optimizer: torch.optim.Optimizer, device: torch.device, buffers: OffloadBuffers
) -> None:
    """Move the state tensors to `device`; the 0-d counters stay where the optimizer put them.

    Args:
        optimizer: Any optimizer whose state are tensors.
        device: The GPU, or the CPU.
        buffers: Hold the state while it is on the CPU; for nothing but this state.
    """
    held = [
        (state, key)
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim
    ]
    moved = buffers.moved([state[key] for state, key in held], device)
    for (state, key), value in zip(held, moved, strict=True):
        state[key] = value


class ReplicatedOptimizer:
    """An `EngineOptimizer` that all-reduces gradients over the data-parallel ranks.

    Args:
        parameters: The trainable parameters, replicated on every rank of `group`.
        state: Their optimizer and its schedule.
        max_grad_norm: Largest 2-norm of all gradients; None: no clipping.
        group: The data-parallel ranks.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        state: TrainState,
        *,
        max_grad_norm: float | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.state = state
        self._parameters = list(parameters)
        self._max_norm = max_grad_norm or float("inf")
        self._group = group

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return self.state.optimizer.param_groups[0]["lr"]

    def step(self, *, discard: bool, divisor: float = 1.0) -> OptimizerStep:
        """See `EngineOptimizer.step`."""
        for parameter in self._parameters:
            if parameter.grad is None:
                # Unused on this rank's rows, but the other ranks take part in the all-reduce.
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self._group)
            if divisor != 1.0:
                parameter.grad.div_(divisor)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        stepped = bool(norm.isfinite()) and not discard
        if stepped:
            self.state.optimizer.step()
        self.clear_gradients()
        return OptimizerStep(grad_norm=norm.float(), stepped=stepped)

    def clear_gradients(self) -> None:
        """See `EngineOptimizer.clear_gradients`."""
        self.state.optimizer.zero_grad(set_to_none=True)

    def advance_schedule(self) -> None:
        """See `EngineOptimizer.advance_schedule`."""
        self.state.scheduler.step()


LocalTensors = Callable[[], Sequence[torch.Tensor]]


class ReferenceCopy:
    """A CPU copy of this rank's shards of the model, as they were at construction.

    A second CPU buffer holds the policy's shards while the reference is swapped in. Both are
    allocated once, in pinned memory if the model is on a GPU. Values are copied into the model's
    own tensors, so that views of them, data-parallel buffers among them, remain valid.

    Args:
        local_tensors: Returns this rank's shards of every parameter and persistent buffer, in a
            fixed order. Called at every swap.
        dtypes: What the reference of each shard is kept in, to save host memory where the model
            computes in it. None: the shard's own.
    """

    def __init__(
        self, local_tensors: LocalTensors, *, dtypes: Sequence[torch.dtype] | None = None
    ) -> None:
        self._local_tensors = local_tensors
        live = local_tensors()
        self._reference = HostCopies(live, dtypes=dtypes)
        self._reference.read(live)
        self._policy: HostCopies | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory; those for the policy are allocated by the first swap."""
        return sum(copies.num_bytes for copies in (self._reference, self._policy) if copies)

    @contextmanager
    def swapped_in(self) -> Generator[None, None, None]:
        """Run the body with the reference weights; the policy's are restored bit for bit."""
        live = self._local_tensors()
        if self._policy is None:
            self._policy = HostCopies(live)
        self._policy.read(live)
        self._reference.write(live)
        try:
            yield
        finally:
            self._policy.write(self._local_tensors())
