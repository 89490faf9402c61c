"""The policy interfaces: the calls that an RL algorithm makes on the model it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NotRequired, Protocol, runtime_checkable

from typing_extensions import TypedDict

if TYPE_CHECKING:
    import ray
    import torch
    from ray.util.placement_group import PlacementGroup
    from rl_batched_data import BatchedDataDict

    from rl_interfaces.generation import GenerationDatumSpec
    from rl_interfaces.loss import LossFunction
    from rl_interfaces.weights import DeviceHandles, RefitInfo
    from rl_interfaces.worker import OptimizerStepOutputSpec


class LogprobOutputSpec(TypedDict):
    """Token log-probabilities under the policy.

    Example, rows of 3 and 2 tokens, where p(6 | 5) = 0.5, p(7 | 5, 6) = 0.25, p(9 | 8) = 0.8:
        input_ids     = [[5, 6, 7], [8, 9, 0]]
        input_lengths = [3, 2]
        logprobs      = [[0.0, -0.6931, -1.3863], [0.0, -0.2231, 0.0]]   float32 [2, 3]
    """

    logprobs: torch.Tensor
    """`[batch, seq]` float32 on the CPU; position 0 and padding are 0."""
    routed_experts: NotRequired[torch.Tensor]
    """`[batch, seq, layers with experts, experts per token]` int16: the experts that each token
    took, for `train`. With router replay, unless `data` has them already."""


class ReferenceLogprobOutputSpec(TypedDict):
    """Token log-probabilities under the frozen reference copy of the policy.

    Example, the same rows after training has moved p(6 | 5) from 0.4 to 0.5 and nothing else:
        logprobs           = [[0.0, -0.6931, -1.3863], [0.0, -0.2231, 0.0]]   float32 [2, 3]
        reference_logprobs = [[0.0, -0.9163, -1.3863], [0.0, -0.2231, 0.0]]   float32 [2, 3]
    """

    reference_logprobs: torch.Tensor
    """`[batch, seq]` float32 on the CPU; position 0 and padding are 0."""


class TopkLogitsOutputSpec(TypedDict):
    """The largest logits of each position, as the target of a distillation.

    Example, rows of 3 and 2 tokens, a vocabulary of 4 and k=2; the last token of a row has
    next-token logits too:
        input_ids    = [[3, 1, 2], [1, 0, 0]], input_lengths = [3, 2]
        topk_logits  = [[[2.0, 0.5], [1.0, 0.1], [3.0, 2.0]], [[0.3, 0.2], [1.5, 1.0], [0.0, 0.0]]]
        topk_indices = [[[1, 2], [2, 0], [3, 1]], [[0, 2], [3, 1], [0, 0]]]   int64 [2, 3, 2]
    """

    topk_logits: torch.Tensor
    """`[batch, seq, k]` float32 on the CPU, largest first, of the model itself, without a
    temperature. `topk_logits[t]` predict token `t + 1`. Padding is 0."""
    topk_indices: torch.Tensor
    """`[batch, seq, k]` int64 on the CPU: the token ids of `topk_logits`. Padding is 0."""


class ScoreOutputSpec(TypedDict):
    """Scores of a reward model or a value model.

    Example, rows of 3 and 2 tokens:
        reward model: scores = [0.7, -1.2]                         float32 [2]
        value model:  scores = [[0.1, 0.4, 0.7], [0.2, 0.3, 0.0]]  float32 [2, 3]
    """

    scores: torch.Tensor
    """Float32 on the CPU: `[batch]`, at the last token of each row, or `[batch, seq]` with zero
    padding."""


class TrainOutputSpec(TypedDict):
    """What `train` did, one entry per optimizer step or per micro-batch.

    Example, two steps of two micro-batches each, on one rank:
        loss           = [0.72, 0.65]                                       float32 [2]
        grad_norm      = [1.31, 1.18]                                       float32 [2]
        all_mb_metrics = {"lr": [1e-3, 1e-3, 1e-3, 1e-3], "skipped_steps": [0], ...}
    """

    loss: torch.Tensor
    """`[steps]` float32 on the CPU: the loss of each global batch."""
    grad_norm: torch.Tensor | None
    """`[steps]` float32 on the CPU: the 2-norm before clipping; None in eval mode."""
    all_mb_metrics: dict[str, list[float]]
    """One value per micro-batch, rank by rank."""
    rows: NotRequired[BatchedDataDict]
    """What a loss with `returns_rows` has returned of each row, in the caller's order."""


class PolicyInterface(ABC):
    """A language model that is trained by reinforcement learning."""

    @abstractmethod
    def get_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec]
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return the log-probability of every token of `data`, see `LogprobOutputSpec`.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec]
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return the log-probabilities under the reference model, see `ReferenceLogprobOutputSpec`.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`.
        """

    @abstractmethod
    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> TrainOutputSpec:
        """Take an optimizer step per global batch of `data`.

        Args:
            data: `input_ids` `[batch, seq]`, `input_lengths` `[batch]`, `sample_mask` `[batch]`,
                `token_mask` `[batch, seq]` where the loss is token-level, and what the loss reads.
            loss_fn: See `LossFunction`.

        Returns:
            Loss and gradient norm of each step, and the metrics, see `TrainOutputSpec`.
        """

    @abstractmethod
    def prepare_for_training(self, *args: object, **kwargs: object) -> None:
        """Bring model, gradients and optimizer state onto the device."""

    @abstractmethod
    def finish_training(self, *args: object, **kwargs: object) -> None:
        """Mark the end of a training phase."""

    @abstractmethod
    def save_checkpoint(self, *args: object, **kwargs: object) -> None:
        """Write the weights, and optionally optimizer state and tokenizer, to disk."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Stop all processes of the policy; True if all of them exited cleanly."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that sends its weights to an inference engine, colocated or on other devices."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[None]]:
        """Join the process group for weight broadcasts; returns futures without waiting for them.

        Args:
            ip: Address of the group's store.
            port: Port of the group's store.
            world_size: The number of inference ranks, plus one for the sender.
        """

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Keep the model on the device and move the optimizer state off it."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Move everything off the device."""

    @abstractmethod
    def prepare_refit_info(self) -> RefitInfo | None:
        """Return `{name: (shape, wire dtype)}` of every tensor that a refit sends."""

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: object, **kwargs: object) -> list[list[str]]:
        """Return the names of the tensors, grouped so that each group fits the transfer buffer."""

    @abstractmethod
    def get_weights_ipc_handles(self, keys: list[str]) -> DeviceHandles:
        """Return `{device id: {name: handle}}` of one group of tensors.

        Args:
            keys: One group of `prepare_weights_for_ipc`.
        """

    @abstractmethod
    def prepare_info_for_collective(self) -> RefitInfo:
        """Return what `prepare_refit_info` returns; its older name."""

    @abstractmethod
    def broadcast_weights_for_collective(self) -> list[ray.ObjectRef[None]]:
        """Broadcast every tensor over the group; returns futures without waiting for them."""


@runtime_checkable
class SplitTrainingPolicy(Protocol):
    """Optional: a policy whose `train` is also available as separate calls.

    See `SplitTrainingWorker` for what the calls add up to and what is refused between them.
    """

    def forward_backward(
        self, data: BatchedDataDict, loss_fn: LossFunction, mbs: int | None = None
    ) -> TrainOutputSpec:
        """Add the gradients of a loss to those that are pending.

        Args:
            data: See `PolicyInterface.train`; any number of rows.
            loss_fn: See `LossFunction`.
            mbs: Samples per forward per rank, for this call.

        Returns:
            Like `train` in eval mode: the loss over the rows of this call, `[1]`, and its metrics.
        """
        ...

    def optimizer_step(self) -> OptimizerStepOutputSpec:
        """Step with the pending gradients and clear them."""
        ...

    def zero_grad(self) -> None:
        """Drop the pending gradients, if there are any."""
        ...


@runtime_checkable
class Cluster(Protocol):
    """A reserved set of bundles, one per rank, on one or more nodes."""

    def world_size(self) -> int:
        """Return the number of bundles, which is the number of ranks."""
        ...

    def get_placement_groups(self) -> list[PlacementGroup]:
        """Return the Ray placement groups that hold the bundles, in node order."""
        ...

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Return the address of rank 0's node and a port that is free there.

        For additional process groups, such as that of `init_collective`. The policy's own ranks
        rendezvous at a port that rank 0 reserves itself.
        """
        ...

    def shutdown(self) -> None:
        """Release the bundles. Idempotent."""
        ...
