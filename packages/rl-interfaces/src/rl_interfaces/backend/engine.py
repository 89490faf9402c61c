"""The protocol of a training backend: an engine, which `EngineWorker` turns into a `PolicyWorker`.

An engine holds one rank's model and optimizer and runs micro-batches through them. What does not
depend on the backend is implemented once in this package: batch checks, optimizer steps, counts and
metrics, scoring, the reference model, residency, generation, checkpoints and weight transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import nn

from rl_interfaces.backend.steps import Concatenation, MicroBatch, Step

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict
    from transformers import PreTrainedTokenizerBase

    from rl_interfaces.backend.checkpoint.checkpointer import CheckpointFormat
    from rl_interfaces.backend.generation import Decoder
    from rl_interfaces.backend.runtime import RankEnvironment
    from rl_interfaces.backend.transfer import GatheredSource
    from rl_interfaces.config.types import ResolvedConfig
    from rl_interfaces.residency import ResidencyState
    from rl_interfaces.worker import ParallelLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The compute dtype by the value of `policy.precision`."""

Tensors = dict[str, torch.Tensor]
Metrics = dict[str, float | torch.Tensor]
"""The metrics of one micro-batch: numbers, or tensors of one element.

Tensors are read at the end of a call, all at once (`rl_interfaces.backend.steps.read_numbers`).
"""


def _all_ranks() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "an engine is built in a process group"
    return group


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """The properties of an engine that the worker reads; constant after construction."""

    device: torch.device
    vocab_size: int
    data_group: dist.ProcessGroup = field(default_factory=_all_ranks)
    """The data-parallel ranks, including this one; all ranks by default."""
    wire_dtype: torch.dtype = torch.float32
    """The dtype in which floating-point weights are sent to an inference engine."""
    max_sequence_length: int | None = None
    """The model's maximum sequence length in tokens; None: unlimited."""
    packing: Concatenation = field(default_factory=Concatenation)
    """The alignment that the parallel layout requires of packed rows."""
    lacks: Mapping[str, str] = field(default_factory=dict[str, str])
    """Unsupported calls, `{call: reason}`: they raise a `ValueError` with the reason.

    The key `logprobs` refuses losses whose input is log-probabilities.
    """
    check_steps: Callable[[Sequence[Step]], None] | None = None
    """Raises on every rank if the engine cannot run the steps of a call. Called before the first of
    them changes anything; collective. None: it runs any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The result of a score or loss function on one micro-batch."""

    tensors: Tensors = field(default_factory=dict[str, torch.Tensor])
    metrics: Metrics = field(default_factory=dict[str, float | torch.Tensor])


class ForwardOutput(Protocol):
    """The output of one forward pass, in the caller's row layout; may be computed lazily.

    `rl_interfaces.backend.components.LogitsOutput` implements it for a model that returns logits.
    """

    def logprobs(self, *, temperature: float = 1.0) -> torch.Tensor:
        """Return each token's log-probability, `[batch, seq]` float32; 0 at 0 and at padding.

        Args:
            temperature: Divides the logits.
        """
        ...

    def logits(self, *, temperature: float = 1.0, sharded: bool = False) -> torch.Tensor:
        """Return the logits, `[batch, seq, vocab]` float32.

        `logits[:, t]` predict token `t + 1`. The backward pass of a loss of them, which is the
        same on all tensor-parallel ranks, gives each rank the gradients of its own parameters.

        Args:
            temperature: Divides the logits. Scores of a reward or value model are not divided.
            sharded: A tensor-parallel engine returns a `DTensor` of that global shape, sharded
                along the last dim over a one-dimensional mesh of the tensor-parallel ranks (shards
                as `torch.chunk` makes them), see `LossFunction.accepts_sharded_logits`. False, or
                an engine whose vocabulary is not sharded: a plain tensor.
        """
        ...

    def topk_logits(self, k: int) -> Tensors:
        """Return `topk_logits` and `topk_indices`, `[batch, seq, k]`; 0 at padding.

        They are of the model itself, without a temperature.
        """
        ...


ScoreFunction = Callable[[MicroBatch, ForwardOutput], Scored]
LossOfOutput = Callable[[MicroBatch, ForwardOutput], tuple[torch.Tensor, Scored]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStep:
    """The outcome of one optimizer step."""

    grad_norm: torch.Tensor
    """0-d float32: the 2-norm over all ranks, before clipping."""
    stepped: bool
    """False if the gradients were not finite or were discarded: no parameter changed."""


class EngineOptimizer(Protocol):
    """The optimizer and its schedule."""

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        ...

    def step(self, *, discard: bool, divisor: float = 1.0) -> OptimizerStep:
        """Clip, step if the gradients are finite, and clear them. Collective.

        Args:
            discard: Compute the norm and clear the gradients, without a step.
            divisor: Divides the gradients, before their norm is computed.
        """
        ...

    def clear_gradients(self) -> None:
        """Drop all gradients; the loss scale stays as it is."""
        ...

    def advance_schedule(self) -> None:
        """Step the learning-rate schedule; called once per `train` or `optimizer_step` call."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HfExport:
    """The source of a directory that transformers' `from_pretrained` loads."""

    write_config: Callable[[Path], None]
    """Writes the config files into a directory; called on rank 0 only."""
    source: GatheredSource
    """The weights in the dtype of the model that was loaded, under the names of its checkpoint."""
    groups: Sequence[Sequence[str]] | None = None
    """Names that are gathered together and share a file; None: each tensor by itself."""


class Engine(Protocol):
    """One rank of a training backend. Every method is called on every rank.

    The constructor runs after the default process group has been initialised. Ranks of one
    data-parallel rank (tensor-, context- and pipeline-parallel ones) receive the same calls and
    return the same values.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        *,
        environment: RankEnvironment,
        tokenizer: PreTrainedTokenizerBase,
        init_optimizer: bool,
    ) -> None: ...

    @classmethod
    def plan_layout(
        cls, config: ResolvedConfig, *, world_size: int, init_optimizer: bool
    ) -> ParallelLayout:
        """Check the backend's part of a config and return its layout, before any rank starts.

        Raises:
            ValueError: The config cannot be run; the message names keys and numbers.
        """
        ...

    @property
    def info(self) -> EngineInfo:
        """The properties that the worker reads."""
        ...

    @property
    def model(self) -> object:
        """This rank's module or modules, available to users as `worker.model`."""
        ...

    @property
    def optimizer(self) -> EngineOptimizer | None:
        """None if the engine was built without one."""
        ...

    @property
    def checkpoint(self) -> CheckpointFormat:
        """The format of saves and loads."""
        ...

    def run(self, step: Step, score: ScoreFunction) -> list[Scored]:
        """Return `score`'s result for each micro-batch of `step`, without gradients.

        An exception in `score` is raised on every rank that runs the pass with this one.
        """
        ...

    def run_backward(
        self, step: Step, loss: LossOfOutput, *, accumulate: bool = False
    ) -> list[Scored]:
        """Like `run`, and accumulate the gradients of the sum of all losses.

        Args:
            step: The micro-batches.
            loss: Returns a micro-batch's share of the loss, 0-d, already divided by a count.
            accumulate: Whether calls may precede this one or follow it before the optimizer steps:
                the gradients are then of the sum over all of them. False: the optimizer steps next,
                and an engine may reduce gradients during the last backward pass.
        """
        ...

    def mode(self, *, training: bool) -> AbstractContextManager[None]:
        """Run the body in train or eval mode; on exit restore the mode and free cached memory.

        If the body raises, the gradients are cleared.
        """
        ...

    def place(self, state: ResidencyState) -> None:
        """Move model, gradients and optimizer state as `state` requires, and set the mode.

        On the CPU only the mode changes.
        """
        ...

    def local_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a key and this rank's shard of every trainable parameter.

        A key is the parameter's name, with a suffix `[...]` that identifies the shard: equal on
        two ranks if and only if they hold the same values.
        """
        ...

    def keep_reference(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Copy the current weights; return a context in which the model has them.

        The context restores the policy's weights bit for bit on exit. None: this engine has no
        reference. `rl_interfaces.backend.components.ReferenceCopy` implements it for any engine.
        """
        ...

    def weight_source(self, dtype: torch.dtype) -> GatheredSource:
        """Return the full weights in `dtype`, in the order in which inference engines load them."""
        ...

    def decoders(self) -> AbstractContextManager[Callable[[BatchedDataDict], Decoder]]:
        """Prepare the model for generation; the context's value opens a decoder for some rows."""
        ...

    def export(self) -> HfExport:
        """Return the source of `save_hf_checkpoint`."""
        ...

    def close(self) -> None:
        """Release groups, handles and hooks. Not collective; may be called again."""
        ...


@contextmanager
def module_mode(modules: Sequence[nn.Module], *, training: bool) -> Generator[None, None, None]:
    """Run the body with `modules` in train or eval mode; restore the mode of each."""
    # To set a mode costs more than to look: each assignment goes through `nn.Module.__setattr__`.
    others = [
        module for module in modules if any(each.training != training for each in module.modules())
    ]
    before = [module.training for module in others]
    for module in others:
        module.train(training)
    try:
        yield
    finally:
        for module, was_training in zip(others, before, strict=True):
            module.train(was_training)
