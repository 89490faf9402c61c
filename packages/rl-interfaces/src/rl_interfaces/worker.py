"""The worker protocol: the calls that a policy makes on one rank, and the contract's version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, Protocol, TypeGuard, cast, runtime_checkable

from typing_extensions import TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from rl_batched_data import BatchedDataDict

    from rl_interfaces.generation import (
        GenerationDatumSpec,
        GenerationOutputSpec,
        SamplingOptions,
    )
    from rl_interfaces.loss import LossFunction
    from rl_interfaces.policy import (
        LogprobOutputSpec,
        ReferenceLogprobOutputSpec,
        ScoreOutputSpec,
        TopkLogitsOutputSpec,
    )
    from rl_interfaces.weights import DeviceHandles, RefitInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """How a backend lays out its ranks: pipeline outermost, tensor innermost.

    Example, 8 ranks as data_parallel=2, context_parallel=2, tensor_parallel=2:
        rank 5 = data 1, context 0, tensor 1
    """

    data_parallel: int
    pipeline_parallel: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return (
            self.pipeline_parallel
            * self.data_parallel
            * self.context_parallel
            * self.tensor_parallel
        )


class WorkerTrainOutputSpec(TypedDict):
    """What `train` did on one rank; `rl_interfaces.TrainOutputSpec` is what the policy makes of it.

    Example, data-parallel rank 0 of two, one step, two micro-batches of its own:
        global_loss = [0.72], grad_norm = [1.31], rank = 0
        all_mb_metrics = {"lr": [1e-3, 1e-3], "skipped_steps": [0], ...}
    """

    global_loss: torch.Tensor
    """`[steps]` float32 on the CPU: the loss of each global batch, the same on every rank."""
    grad_norm: torch.Tensor | None
    """`[steps]` float32 on the CPU: the 2-norm before clipping; None in eval mode."""
    rank: int
    """This worker's global rank."""
    all_mb_metrics: dict[str, list[float]]
    """One value per micro-batch of this rank. `skipped_steps` has one per call: the number of
    skipped steps, from data-parallel rank 0 only, and absent in eval mode."""
    rows: NotRequired[BatchedDataDict]
    """What a loss with `returns_rows` has returned of this rank's rows, on the CPU."""


class OptimizerStepOutputSpec(TypedDict):
    """What `optimizer_step` did, the same on every rank.

    Example: {"grad_norm": 1.31, "stepped": True, "lr": 1e-3}
    """

    grad_norm: float
    """The 2-norm before clipping, of the gradients of the mean over all calls."""
    stepped: bool
    """False if the gradients were not finite or no sample was valid: no parameter has changed."""
    lr: float
    """The learning rate of the step."""


class GpuInfo(TypedDict):
    """Rank, device and memory figures of a worker's process. Memory is in MiB, 0 on the CPU."""

    rank: int
    """Global rank."""
    world_size: int
    """The number of ranks."""
    local_rank: int
    """Rank among those of this machine."""
    local_device_id: int | None
    """Index of the GPU among those that the process sees; None on the CPU."""
    global_device_id: str
    """What `report_device_id` returns."""
    device_count: int
    """The number of GPUs that the process sees."""
    device_name: str
    """As the driver names the GPU, or `cpu`."""
    memory_allocated_mb: float
    """Held by tensors."""
    memory_reserved_mb: float
    """Held by torch's caching allocator."""
    peak_memory_allocated_mb: float
    """The most since the start, or since `reset_peak_memory_stats`."""
    peak_memory_reserved_mb: float
    """The most since the start, or since `reset_peak_memory_stats`."""
    env_vars: dict[str, str | None]
    """Variables that place the process, None where they are not set."""
    parameter_sample: dict[str, list[float]]
    """The first values of one parameter's local shard; empty while it is off the device."""


@runtime_checkable
class PolicyWorker(Protocol):
    """One rank of a training backend: a plain class, run by Ray, torchrun or multiprocessing.

    The process is described by torchrun's environment variables (`RANK`, `WORLD_SIZE`,
    `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`). A worker joins the default process group unless the
    process already has, and destroys it only if it created it. Every call is made on every rank.
    A backend registers its class in the entry-point group `rl_policy.workers` under a name, and is
    chosen by the config section `<name>_cfg` whose `enabled` is true.

    The constructor takes `(config, tokenizer, weights_path=None, optimizer_path=None,
    init_optimizer=True, init_reference_model=True, **kwargs)`. The class attribute
    `contract_version` declares the contract version it implements, see `CONTRACT_VERSION`. The
    conformance kit `rl_interfaces.testing` checks everything that is documented here.
    """

    @staticmethod
    def validate_config(
        config: Mapping[str, object], *, world_size: int, init_optimizer: bool = True
    ) -> ParallelLayout:
        """Return the layout of `world_size` ranks, before any of them starts.

        Raises:
            ValueError: The config cannot be run; the message names keys and numbers.
        """
        ...

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> WorkerTrainOutputSpec:
        """Take an optimizer step per global batch; `data` is this rank's shard.

        A step whose gradients are not finite changes neither weights nor optimizer state. Its norm
        is returned unchanged, and a warning is logged.

        Args:
            data: This rank's rows. Ranks may hold different numbers of rows.
            loss_fn: See `LossFunction`.
            eval_mode: Loss and metrics only: no parameter changes, and no optimizer is needed.
            gbs: Samples per optimizer step over all data-parallel ranks, for this call.
            mbs: Samples per forward on this rank, for this call.

        Returns:
            Loss and gradient norm of each step, and the metrics, see `WorkerTrainOutputSpec`.
        """
        ...

    def get_logprobs(
        self,
        data: BatchedDataDict,
        micro_batch_size: int | None = None,
        *,
        temperature: float | None = None,
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return `logprobs`, `[batch, seq]` float32 on the CPU, of this rank's rows.

        `temperature` divides the logits. None: `policy.generation.temperature`.
        """
        ...

    def get_reference_policy_logprobs(
        self,
        data: BatchedDataDict,
        micro_batch_size: int | None = None,
        *,
        temperature: float | None = None,
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return `reference_logprobs`, `[batch, seq]` float32 on the CPU, of this rank's rows."""
        ...

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a completion for each of this rank's rows."""
        ...

    def prepare_for_training(self, *args: object, **kwargs: object) -> None:
        """Enter the state `training`."""
        ...

    def prepare_for_lp_inference(self) -> None:
        """Enter the state `inference`."""
        ...

    def offload_before_refit(self) -> None:
        """Enter the state `refitting`."""
        ...

    def offload_after_refit(self) -> None:
        """Enter the state `offloaded`."""
        ...

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        """Write the weights, and optimizer and tokenizer if a path is given. Collective."""
        ...

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Load what `save_checkpoint` wrote. Collective."""
        ...

    def save_hf_checkpoint(self, path: str) -> None:
        """Write a directory that transformers' `from_pretrained` loads. Collective."""
        ...

    def is_alive(self) -> bool:
        """Return True."""
        ...

    def get_gpu_info(self) -> GpuInfo:
        """Return rank, device and memory figures of this process."""
        ...

    def report_device_id(self) -> str:
        """Return an id that two processes share if they share the device."""
        ...

    def start_gpu_profiling(self) -> None:
        """Open a profiling range."""
        ...

    def stop_gpu_profiling(self) -> None:
        """Close the profiling range."""
        ...

    def shutdown(self) -> None:
        """Free the worker's memory, and destroy the process group if the worker created it."""
        ...


@runtime_checkable
class TopkLogitsWorker(Protocol):
    """Optional: a worker whose model can be a distillation teacher."""

    def get_topk_logits(
        self, data: BatchedDataDict, k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """Return the `k` largest logits of each position of this rank's rows."""
        ...


@runtime_checkable
class RowScoringWorker(Protocol):
    """Optional: a worker whose model can be a reward or a value model."""

    def score(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict[ScoreOutputSpec]:
        """Return the scores of this rank's rows."""
        ...


@runtime_checkable
class SplitTrainingWorker(Protocol):
    """Optional: a worker whose `train` is also available as separate calls.

    Any number of `forward_backward` calls and one `optimizer_step` do what one `train` does with
    the rows of all of them as a single global batch: gradients are divided by the counts of all
    calls together, then clipped. Between the calls the worker scores, generates, evaluates and
    saves; a checkpoint does not hold the pending gradients. `train`, `load_checkpoint` and the
    moves that leave `training` raise `ResidencyError` while gradients are pending. A call that
    fails in the middle of a forward or backward pass drops them.

    Example, three valid tokens of loss 1, 2 and 3, and then one of loss 6:
        forward_backward(three)["global_loss"] = [2.0]
        forward_backward(one)["global_loss"]   = [6.0]
        optimizer_step() steps along the gradient of the mean, (1 + 2 + 3 + 6) / 4 = 3.0
    """

    def forward_backward(
        self, data: BatchedDataDict, loss_fn: LossFunction, mbs: int | None = None
    ) -> WorkerTrainOutputSpec:
        """Add the gradients of a loss to those that are pending; `data` is this rank's shard.

        The loss is a sum divided by the count of its `loss_type`, which is the same for all calls
        before an `optimizer_step`. A worker may call it once more with other counts, to
        check that.

        Args:
            data: This rank's rows; ranks may hold different numbers of rows.
            loss_fn: See `LossFunction`.
            mbs: Samples per forward on this rank, for this call.

        Returns:
            Like `train` in eval mode: the loss over the rows of this call, `[1]`, and its metrics.

        Raises:
            ValueError: The loss has another `loss_type` than that of the pending gradients, or is
                not a sum divided by the count of its `loss_type`.
        """
        ...

    def optimizer_step(self) -> OptimizerStepOutputSpec:
        """Step with the pending gradients and clear them; the schedule advances once.

        Gradients that are not finite, if only of one call, change neither weights nor optimizer
        state: the step is skipped, and a warning logged.

        Raises:
            ResidencyError: No gradients are pending.
        """
        ...

    def zero_grad(self) -> None:
        """Drop the pending gradients, if there are any."""
        ...


class AdamOptions(TypedDict):
    """The settings of one AdamW step, in place of those of `policy.optimizer`."""

    lr: float
    """Learning rate."""
    betas: tuple[float, float]
    """Decay of the running means of the gradient and of its square, in [0, 1)."""
    eps: float
    """Added to the root of the second mean."""
    weight_decay: float
    """Decoupled: a step multiplies the parameters by `1 - lr * weight_decay` first."""
    max_grad_norm: float | None
    """Largest 2-norm of all gradients; None leaves them as they are."""


@runtime_checkable
class MultiAdapterWorker(Protocol):
    """Optional: a worker that trains several sets of adapters on one model.

    One set is in the model: scoring, generation and `forward_backward` are under it, and pending
    gradients are its own. `use_adapters` puts another one there. Each has its optimizer state.
    Every call is collective.

    Example:
        add_adapters("a", rank=8, seed=1, layers=["attention", "mlp"]); the same for "b"
        use_adapters("a"); forward_backward(...)
        use_adapters("b"); forward_backward(...); adam_step(...)
        use_adapters("a"); adam_step(...)   -> as if "b" did not exist
    """

    def add_adapters(self, name: str, *, rank: int, seed: int, layers: list[str]) -> None:
        """Add a set of initial adapters.

        Args:
            name: A new name.
            rank: At most that of the model's adapters.
            seed: Of the random half of the adapters; the other half is zero.
            layers: Kinds of layers, `attention` and `mlp`.
        """
        ...

    def use_adapters(self, name: str | None) -> None:
        """Put a set into the model; None: the model without adapters."""
        ...

    def copy_adapters(self, name: str) -> None:
        """Add a set with the adapters that are in the model, to sample with."""
        ...

    def remove_adapters(self, name: str) -> None:
        """Drop a set."""
        ...

    def save_adapter_set(self, path: str, *, with_optimizer: bool) -> None:
        """Write the set in the model into a new directory that `peft` loads."""
        ...

    def load_adapter_set(self, name: str, path: str, *, with_optimizer: bool) -> None:
        """Add the set that `save_adapter_set` has written."""
        ...

    def adam_step(self, options: AdamOptions) -> OptimizerStepOutputSpec:
        """Step with the pending gradients of the sum, not the mean, over all calls' rows.

        `forward_backward` calls had a loss of `LossType.SEQUENCE_LEVEL`: the sum is over its rows.
        """
        ...

    def sample(
        self, data: BatchedDataDict[GenerationDatumSpec], options: SamplingOptions
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Like `generate`, with sampling parameters of the call."""
        ...


@runtime_checkable
class AdapterSavingWorker(Protocol):
    """Optional: a worker that trains low-rank adapters."""

    def save_adapters(self, path: str) -> None:
        """Write a directory that `peft.PeftModel.from_pretrained` loads. Collective."""
        ...


@runtime_checkable
class AdapterSendingWorker(Protocol):
    """Optional: a worker that sends adapters apart from the weights that they belong to.

    Its `open_refit` takes `adapters="alone"`. `send_weights` then sends the weights without
    adapters, and the adapters.
    """

    def send_adapters(
        self, version: int, *, receivers: Sequence[int] | None = None
    ) -> dict[str, float]:
        """Stream the adapters to receivers that hold those weights, like `send_weights`."""
        ...


@runtime_checkable
class WeightSendingWorker(Protocol):
    """Optional: a worker that sends its weights to inference engines."""

    def prepare_refit_info(self) -> RefitInfo:
        """Return `{name: (shape, wire dtype)}` of every tensor that is sent, in order.

        The names are those of the parameters in what `save_hf_checkpoint` writes.
        """
        ...

    def open_refit(
        self, *, receivers_per_rank: list[int], transport: str, **options: object
    ) -> Mapping[str, str | int] | None:
        """Return the address that this rank's receivers connect to, None if it has no receivers.

        Args:
            receivers_per_rank: How many receivers each trainer rank sends to.
            transport: The transport, see `rl_refit.transports`.
            options: Further arguments of `rl_refit.RefitSender`.
        """
        ...

    def send_weights(
        self, version: int, *, receivers: Sequence[int] | None = None
    ) -> dict[str, float]:
        """Stream the weights; return the numbers of `rl_refit.RefitReport`. Collective.

        A rank whose receiver fails still takes part in the all-gathers.

        Args:
            version: Of the weights.
            receivers: The ranks of those that take part, see `rl_refit.RefitSender.send`. Given
                only where engines of several have been lost, or have joined.
        """
        ...

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Return name and wire bytes of every tensor, and the device's free bytes."""
        ...

    def get_weights_ipc_handles(self, keys: list[str]) -> DeviceHandles:
        """Return `{device id: {name: handle}}` of `keys`. Collective.

        Handles of an earlier call become invalid.
        """
        ...

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Join a group with `world_size - 1` inference ranks; only trainer rank 0 joins."""
        ...

    def prepare_info_for_collective(self) -> RefitInfo:
        """Return what `prepare_refit_info` returns."""
        ...

    def broadcast_weights_for_collective(self) -> None:
        """Broadcast every tensor to that group, in order. Collective."""
        ...


CONTRACT_VERSION = (1, 0)
"""Major and minor. A minor version adds calls or keys; a major version changes existing
ones."""


class ContractVersionError(ImportError, ValueError):
    """A backend implements a contract version that this rl-interfaces does not support.

    An ImportError because installing another version fixes it, and a ValueError because the config
    names the backend.
    """


def check_contract_version(backend: type, *, owner: str) -> None:
    """Raise unless `backend.contract_version` is compatible with `CONTRACT_VERSION`.

    Compatible: equal major versions, and a minor version that is not newer.

    Args:
        backend: A worker or an inference engine.
        owner: The package that provides it, for the message.

    Raises:
        ContractVersionError: The message names both versions, the package and what to upgrade.
    """
    theirs: object = getattr(backend, "contract_version", None)
    if not _is_version(theirs):
        raise ContractVersionError(
            f"{backend.__name__} of {owner} does not say which contract it was written for: "
            f"contract_version is {theirs!r}, where this rl-interfaces has {CONTRACT_VERSION}. "
            f"Upgrade {owner}, or give the class the version that it keeps"
        )
    if theirs[0] != CONTRACT_VERSION[0] or theirs[1] > CONTRACT_VERSION[1]:
        ours = _dotted(CONTRACT_VERSION)
        upgrade = "rl-interfaces" if theirs > CONTRACT_VERSION else owner
        raise ContractVersionError(
            f"{backend.__name__} of {owner} was written for version {_dotted(theirs)} of the "
            f"contract, and this rl-interfaces has version {ours}. Upgrade {upgrade}"
        )


def _is_version(value: object) -> TypeGuard[tuple[int, int]]:
    if not isinstance(value, tuple):
        return False
    parts = cast("tuple[object, ...]", value)
    return len(parts) == len(CONTRACT_VERSION) and all(type(part) is int for part in parts)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)
