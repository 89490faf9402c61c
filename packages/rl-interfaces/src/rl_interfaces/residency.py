"""The residency state machine: which of a worker's tensors are on the device.

A worker starts in `training` when it has an optimizer, else in `inference`:

    call                          allowed in                        leads to
    prepare_for_training          any                               training
    prepare_for_lp_inference      any                               inference
    offload_before_refit          any                               refitting
    offload_after_refit           any                               offloaded
    train                         training (eval: also inference)   same
    get_logprobs, generate, ...   training, inference, refitting    same
    sending weights               training, inference, refitting    same
    checkpoints, information      any                               same
"""

from __future__ import annotations

from enum import Enum


class ResidencyState(Enum):
    """What is on the device."""

    TRAINING = "training"
    """Model, gradients and optimizer state; train mode."""
    INFERENCE = "inference"
    """The model; optimizer state on the CPU; eval mode."""
    REFITTING = "refitting"
    """The model; optimizer state on the CPU."""
    OFFLOADED = "offloaded"
    """Nothing."""


class ResidencyError(RuntimeError):
    """A call is not allowed in the current state."""


_TRAIN = frozenset({ResidencyState.TRAINING})
_EVALUATE = frozenset({ResidencyState.TRAINING, ResidencyState.INFERENCE})
_ON_DEVICE = frozenset(set(ResidencyState) - {ResidencyState.OFFLOADED})

_ALLOWED = {
    "train": (_TRAIN, "prepare_for_training()"),
    "train(eval_mode=True)": (_EVALUATE, "prepare_for_training() or prepare_for_lp_inference()"),
    "get_logprobs": (_ON_DEVICE, "prepare_for_lp_inference()"),
    "get_reference_policy_logprobs": (_ON_DEVICE, "prepare_for_lp_inference()"),
    "generate": (_ON_DEVICE, "prepare_for_lp_inference()"),
    "get_topk_logits": (_ON_DEVICE, "prepare_for_lp_inference()"),
    "score": (_ON_DEVICE, "prepare_for_lp_inference()"),
    "send_weights": (_ON_DEVICE, "offload_before_refit()"),
}
_LEADS_TO = {
    "prepare_for_training": ResidencyState.TRAINING,
    "prepare_for_lp_inference": ResidencyState.INFERENCE,
    "offload_before_refit": ResidencyState.REFITTING,
    "offload_after_refit": ResidencyState.OFFLOADED,
}


class Residency:
    """The residency state of one worker, with the transitions of the table above."""

    def __init__(self, *, has_optimizer: bool) -> None:
        self.state = ResidencyState.TRAINING if has_optimizer else ResidencyState.INFERENCE

    def require(self, call: str) -> None:
        """Raise `ResidencyError`, naming the state and the way out, unless `call` is allowed."""
        allowed, way_out = _ALLOWED[call]
        if self.state not in allowed:
            raise ResidencyError(
                f"{call} is not allowed while the worker is {self.state.value!r}: "
                f"call {way_out} first"
            )

    def enter(self, call: str) -> ResidencyState:
        """Record that `call` has moved its tensors, and return the new state."""
        self.state = _LEADS_TO[call]
        return self.state
