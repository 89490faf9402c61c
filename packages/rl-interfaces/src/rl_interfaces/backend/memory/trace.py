"""Run a worker's calls on a device that allocates nothing, and record what they would allocate."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from rl_batched_data import BatchedDataDict
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rl_interfaces.backend.fake import FakeDevice, fake_cpu
from rl_interfaces.loss import LossInput, LossType

if TYPE_CHECKING:
    from rl_interfaces.loss import LossFunction

# Places are counted from both ends of the model, two layers each; others are between these.
_NAMED = 2
_BEFORE, _AFTER, _STEP = "before", "after", "optimizer step"


@runtime_checkable
class MemoryTracedWorker(Protocol):
    """Optional: a worker class whose calls run on a `fake_cpu`, so that its memory can be planned.

    A subclass of `EngineWorker` whose `model` is one module.
    """

    @staticmethod
    def repeated_layers(model: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated layers of a model, in order."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """What is traced.

    Attributes:
        policy: A resolved policy config, whose `model_name` is a stand-in.
        world_size: Ranks of the job.
        rank: The rank that is traced. The first has the largest shards.
        has_optimizer: Whether the worker trains.
        has_cuda_kernels: See `fake_cpu`.
        training_rows: This rank's rows of one optimizer step, two micro-batches if it has as many;
            None: it does not train.
        scored_rows: The rows of one micro-batch of a scoring call.
        prompts: What the worker itself completes; None: engines do, or nobody.
        is_sending: Whether weights are gathered for engines.
        gbs: Samples of the traced step, over all ranks.
    """

    policy: Mapping[str, Any]
    world_size: int
    rank: int = 0
    has_optimizer: bool
    has_cuda_kernels: bool
    training_rows: BatchedDataDict[Any] | None
    scored_rows: BatchedDataDict[Any] | None
    prompts: BatchedDataDict[Any] | None = None
    is_sending: bool = False
    gbs: int | None = None


@dataclass(slots=True)
class PhaseTrace:
    """One call.

    Attributes:
        peaks: The most bytes at one time, by place.
        before: The bytes before it.
        after: The bytes after it.
    """

    peaks: dict[str, int] = field(default_factory=dict)
    before: int = 0
    after: int = 0

    @property
    def peak(self) -> int:
        """The most bytes at any place."""
        return max(self.peaks.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTrace:
    """All calls of one worker.

    Attributes:
        phases: By name, in their order: `load`, `score`, `train`, `gather`, `generate`. `score` is
            without optimizer state, as nothing has been trained yet.
        model_bytes: Of parameters and buffers on this rank.
        optimizer_bytes: Of the optimizer's state on this rank.
        weights: Name, dtype and shape of each weight that is sent.
    """

    phases: dict[str, PhaseTrace]
    model_bytes: int
    optimizer_bytes: int
    weights: list[tuple[str, str, tuple[int, ...]]]


class _MeanLoss:
    """A loss of what the head gives: log-probabilities, or scores in place of logits."""

    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, *, of_scores: bool) -> None:
        self.input_type = LossInput.LOGITS if of_scores else LossInput.LOGPROBS

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = data["sample_mask"]
        if self.input_type is LossInput.LOGITS:
            loss = next_token_logits.float().mean() * rows.sum() / global_valid_seqs
        else:
            targets = data["token_mask"] * rows[:, None]
            loss = -(next_token_logits * targets).sum() / global_valid_toks
        return loss, {"num_valid_samples": rows.sum()}


def trace_worker(worker_class: Any, request: TraceRequest, *, tokenizer: Any) -> WorkerTrace:
    """Return what the calls of a worker would allocate.

    The process should be one of its own, without a GPU: see `fake_cpu`.

    Args:
        worker_class: A `MemoryTracedWorker`.
        request: What is traced.
        tokenizer: See `TokenIds`.
    """
    with fake_cpu(
        rank=request.rank,
        world_size=request.world_size,
        has_cuda_kernels=request.has_cuda_kernels,
    ) as device:
        recorder = _Recorder(device)
        with recorder.phase("load"):
            worker = worker_class(
                dict(request.policy),
                tokenizer,
                init_optimizer=request.has_optimizer,
                # A copy on the host, which takes nothing of a device.
                init_reference_model=False,
            )
        try:
            return _trace_calls(worker, request, recorder)
        finally:
            worker.shutdown()


def _trace_calls(worker: Any, request: TraceRequest, recorder: _Recorder) -> WorkerTrace:
    of_scores = request.policy["head"] != "language_model"
    weights = [
        (name, str(dtype).removeprefix("torch."), tuple(shape))
        for name, dtype, shape in worker.weight_source.metadata()
    ]
    model_bytes = recorder.device.live_bytes
    with recorder.places_of(worker):
        if request.scored_rows is not None:
            with recorder.phase("score"):
                score = worker.score if of_scores else worker.get_logprobs
                score(_received(request.scored_rows))
        if request.training_rows is not None:
            _train(worker, request, recorder, loss=_MeanLoss(of_scores=of_scores))
        optimizer_bytes = recorder.device.live_bytes - model_bytes
    if request.is_sending:
        with recorder.phase("gather"):
            _gather(worker.weight_source)
    if request.prompts is not None:
        with recorder.phase("generate"):
            worker.generate(_received(request.prompts))
    return WorkerTrace(
        phases=recorder.phases,
        model_bytes=model_bytes,
        optimizer_bytes=optimizer_bytes,
        weights=weights,
    )


def _received(rows: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Return rows as a worker has them during a call: a copy, which ends with it."""
    return rows.writable()


def _train(worker: Any, request: TraceRequest, recorder: _Recorder, *, loss: LossFunction) -> None:
    assert request.training_rows is not None, "the caller has seen them"
    with recorder.phase("train") as phase:
        worker.train(_received(request.training_rows), loss, gbs=request.gbs)
    # The state is made by the first step, and stays: in every other step it is there before.
    state = phase.after - phase.before
    for place in phase.peaks:
        if place != _STEP:
            phase.peaks[place] += state


def _gather(source: Iterable[tuple[str, torch.Tensor]]) -> None:
    for _ in source:
        pass


class _Recorder:
    """Records the peak between two places of a pass."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.phases: dict[str, PhaseTrace] = {}
        self._phase: PhaseTrace | None = None
        self._place = _BEFORE
        self._pass = 0
        self._is_backward = False

    @contextmanager
    def phase(self, name: str) -> Generator[PhaseTrace, None, None]:
        """Record the body as one call."""
        device = self.device
        phase = self.phases[name] = self._phase = PhaseTrace(before=device.live_bytes)
        device.reset_peak()
        self._place, self._pass, self._is_backward = _BEFORE, 0, False
        try:
            yield phase
        finally:
            self._enter(_AFTER)
            phase.after = device.live_bytes
            self._phase = None

    @contextmanager
    def places_of(self, worker: Any) -> Generator[None, None, None]:
        """Watch a worker's layers and the optimizer inside."""
        layers = worker.repeated_layers(worker.model)
        handles = [worker.model.register_forward_pre_hook(self._begin_pass)]
        for index, layer in enumerate(layers):
            name, is_last = place_name(index, len(layers)), index == len(layers) - 1
            handles.append(layer.register_forward_pre_hook(self._forward_hook(name)))
            handles.append(layer.register_forward_hook(self._backward_hook(name, is_last=is_last)))
        handles.append(register_optimizer_step_pre_hook(lambda *_: self._enter(_STEP)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, place: str) -> None:
        """Count what has been allocated since the last place to that one."""
        if self._phase is not None:
            peaks = self._phase.peaks
            peaks[self._place] = max(peaks.get(self._place, 0), self.device.peak_bytes)
            self.device.reset_peak()
        self._place = place

    def _begin_pass(self, *_: object) -> None:
        self._pass += 1
        self._is_backward = False
        self._enter(f"pass {self._pass}, {_BEFORE} the layers")

    def _forward_hook(self, name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            # Within a backward pass activations are computed again.
            if not self._is_backward:
                self._enter(f"pass {self._pass}, forward of {name}")

        return enter

    def _backward_hook(self, name: str, *, is_last: bool) -> Callable[..., None]:
        def enter(_: torch.Tensor) -> None:
            self._is_backward = True
            self._enter(f"pass {self._pass}, backward of {name}")

        def watch(_module: nn.Module, _inputs: object, output: object) -> None:
            if self._is_backward:
                return
            for tensor in _tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(enter)
            if is_last:
                self._enter(f"pass {self._pass}, head")

        return watch


def place_name(index: int, num_layers: int) -> str:
    """Return the name of a layer, counted from the nearer end.

    Example, six layers: first, second, a middle one, a middle one, last but one, last
    """
    from_end = num_layers - 1 - index
    if index < _NAMED:
        return ("the first layer", "the second layer")[index]
    if from_end < _NAMED:
        return ("the last layer", "the last layer but one")[from_end]
    return "a middle layer"


def _tensors_of(output: object) -> Iterable[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        return [each for each in output if isinstance(each, torch.Tensor)]
    return []
