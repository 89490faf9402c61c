"""What a training backend brings: an engine, of which `EngineWorker` makes a `PolicyWorker`.

An engine holds one rank's model and optimizer and runs micro-batches through them. Everything that
is the same for every backend is written once beside it: checks of batches, optimizer steps, counts
and metrics, scoring, the reference, residency, generation, checkpoints, weight sending.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from rl_interfaces.backend.steps import Concatenation, MicroBatch, Step

if TYPE_CHECKING:
    from rl_interfaces.backend.checkpoint.checkpointer import CheckpointFormat
    from rl_interfaces.backend.generation import Decoder
    from rl_interfaces.backend.transfer import GatheredSource
    from rl_interfaces.residency import ResidencyState

Tensors = dict[str, torch.Tensor]
Metrics = dict[str, Any]
"""Numbers of one micro-batch by name: what JSON can hold, as other stages receive them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What the worker has to know of an engine; fixed once it is built."""

    device: torch.device
    data_group: dist.ProcessGroup
    """The data-parallel ranks, this one among them."""
    vocab_size: int
    wire_dtype: torch.dtype = torch.float32
    """The dtype of floating-point weights on their way to an inference engine."""
    max_sequence_length: int | None = None
    """The most tokens of a row that the model takes; None: any number."""
    packing: Concatenation = field(default_factory=Concatenation)
    """What the parallel layout asks of packed rows."""
    lacks: Mapping[str, str] = field(default_factory=dict[str, str])
    """Calls that this engine cannot serve, each with the reason: they are refused by name.

    `logprobs` is the one that a loss of log-probabilities makes.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What a function of a micro-batch's output returns."""

    tensors: Tensors = field(default_factory=dict[str, torch.Tensor])
    metrics: Metrics = field(default_factory=dict[str, Any])


class ForwardOutput(Protocol):
    """The output of one forward pass, in the caller's rows. May be computed when it is asked for.

    `rl_interfaces.backend.components.LogitsOutput` makes one of plain logits.
    """

    def logprobs(self) -> torch.Tensor:
        """Return each token's log-probability, `[batch, seq]` float32; 0 at 0 and at padding."""
        ...

    def logits(self, *, sharded: bool = False) -> torch.Tensor:
        """Return the logits with temperature, `[batch, seq, vocab]` float32.

        `logits[:, t]` predict token `t + 1`. The backward pass of a loss of them, which is the
        same on all tensor-parallel ranks, gives each rank the gradients of its own parameters.

        Args:
            sharded: A tensor-parallel engine returns a `DTensor` of that global shape, sharded
                along the last dim over a one-dimensional mesh of the tensor-parallel ranks (shards
                as `torch.chunk` makes them), see `LossFunction.accepts_sharded_logits`. False, or
                an engine whose vocabulary is not sharded: a plain tensor.
        """
        ...

    def topk_logits(self, k: int) -> Tensors:
        """Return `topk_logits` and `topk_indices`, `[batch, seq, k]`; 0 at padding."""
        ...


ScoreFunction = Callable[[MicroBatch, ForwardOutput], Scored]
LossOfOutput = Callable[[MicroBatch, ForwardOutput], tuple[torch.Tensor, Scored]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStep:
    """What became of one optimizer step."""

    grad_norm: torch.Tensor
    """0-d float32: the 2-norm over all ranks, before clipping."""
    stepped: bool
    """False where the gradients are not finite, or a step was not wanted: nothing changed."""


class EngineOptimizer(Protocol):
    """The optimizer and its schedule."""

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        ...

    def step(self, *, discard: bool) -> OptimizerStep:
        """Step where the gradients are finite, and clear them. Collective.

        Args:
            discard: Leave everything as it is, whatever the gradients are; their norm is returned
                all the same.
        """
        ...

    def advance_schedule(self) -> None:
        """End a `train` call: the learning-rate schedule takes one step."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HfExport:
    """How the weights are exported as a directory that `from_pretrained` loads."""

    write_config: Callable[[Path], None]
    """Writes everything but the weights and the tokenizer; called on the first rank alone."""
    source: GatheredSource
    """The weights in float32 under the names of the model."""
    convert: Callable[[Tensors], Tensors] | None = None
    """Turns a group of gathered tensors into those of the checkpoint; None: they are the same."""
    groups: Sequence[Sequence[str]] | None = None
    """Names that are converted together and go into one file; None: each tensor by itself."""


class Engine(Protocol):
    """One rank of a training backend. Every method is called on every rank.

    Ranks that hold the same rows (tensor-, context- and pipeline-parallel ones) get the same calls
    and return the same values.
    """

    info: EngineInfo
    model: Any
    """The module or modules of this rank; the worker shows them as `worker.model`."""
    optimizer: EngineOptimizer | None
    """None where the engine was built without one."""
    checkpoint: CheckpointFormat

    def run(self, step: Step, score: ScoreFunction) -> list[Scored]:
        """Return what `score` gives for each micro-batch of `step`, without gradients.

        An exception of `score` is raised on every rank that runs the pass with this one.
        """
        ...

    def run_backward(self, step: Step, loss: LossOfOutput) -> list[Scored]:
        """Like `run`, and accumulate the gradients of the sum of all losses.

        `loss` returns a micro-batch's share of the loss, 0-d, already divided by the global count.
        """
        ...

    def mode(self, *, training: bool) -> AbstractContextManager[None]:
        """Run the body in train or eval mode; restore the mode, and free what a pass has left.

        Where the body raises, no gradients are left.
        """
        ...

    def place(self, state: ResidencyState) -> None:
        """Move model, gradients and optimizer state to where `state` has them, and set the mode.

        Where the device is the CPU nothing moves.
        """
        ...

    def local_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a key and this rank's shard of every trainable parameter.

        A key is the parameter's name, followed by `[...]` where that tells shards apart: ranks that
        hold the same values have the same key.
        """
        ...

    def keep_reference(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Keep the model as it is now; return the context in which the model has these weights.

        On exit the model has its own weights again, bit for bit. None: no reference can be kept.
        `rl_interfaces.backend.components.ReferenceCopy` serves any engine.
        """
        ...

    def weight_source(self, dtype: torch.dtype) -> GatheredSource:
        """Return the full weights in `dtype`, in the order in which engines load them."""
        ...

    def decoders(self) -> AbstractContextManager[Callable[[Mapping[str, Any]], Decoder]]:
        """Prepare the model for generation; give what opens a decoder for some rows."""
        ...

    def export(self) -> HfExport:
        """Return how the weights are exported."""
        ...

    def close(self) -> None:
        """Release groups, handles and hooks. Not collective; may be called again."""
        ...


@contextmanager
def module_mode(modules: Sequence[nn.Module], *, training: bool) -> Generator[None, None, None]:
    """Run the body with `modules` in train or eval mode; restore each one's own."""
    before = [module.training for module in modules]
    for module in modules:
        module.train(training)
    try:
        yield
    finally:
        for module, was_training in zip(modules, before, strict=True):
            module.train(was_training)
