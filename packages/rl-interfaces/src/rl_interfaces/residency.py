"""The residency state machine: which of a worker's tensors are on the device.

A worker starts in `training` when it has an optimizer, else in `inference`:

    call                          allowed in                        leads to
    prepare_for_training          any                               training
    prepare_for_lp_inference      any                               inference
    offload_before_refit          any                               refitting
    offload_after_refit           any                               offloaded
    train                         training (eval: also inference)   same
    forward_backward              training                          same, with gradients
    optimizer_step                with gradients                    same, without gradients
    zero_grad                     any                               same, without gradients
    get_logprobs, generate, ...   training, inference, refitting    same
    sending weights               training, inference, refitting    same
    checkpoints, information      any                               same

While the gradients of `forward_backward` wait for their `optimizer_step`, what would change or lose
them is refused: `train` (except in eval mode), `load_checkpoint` and the moves that leave
`training`.
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
_ANY = frozenset(ResidencyState)

_ALLOWED = {
    "train": (_TRAIN, "prepare_for_training()"),
    "train(eval_mode=True)": (_EVALUATE, "prepare_for_training() or prepare_for_lp_inference()"),
    "forward_backward": (_TRAIN, "prepare_for_training()"),
    "optimizer_step": (_ANY, ""),
    "load_checkpoint": (_ANY, ""),
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
_REFUSED_WITH_GRADIENTS = frozenset({"train", "load_checkpoint", *_LEADS_TO}) - {
    "prepare_for_training"
}


class Residency:
    """The residency state of one worker, with the transitions of the table above.

    `has_gradients` is whether gradients of `forward_backward` are pending. The worker sets it.
    """

    def __init__(self, *, has_optimizer: bool) -> None:
        self.state = ResidencyState.TRAINING if has_optimizer else ResidencyState.INFERENCE
        self.has_gradients = False

    def require(self, call: str) -> None:
        """Raise `ResidencyError`, naming the state and the way out, unless `call` is allowed."""
        if call == "optimizer_step" and not self.has_gradients:
            raise ResidencyError("optimizer_step needs gradients: call forward_backward() first")
        if call in _REFUSED_WITH_GRADIENTS and self.has_gradients:
            raise ResidencyError(
                f"{call} is not allowed while gradients of forward_backward are pending: "
                "call optimizer_step() or zero_grad() first"
            )
        allowed, way_out = (_ANY, "") if call in _LEADS_TO else _ALLOWED[call]
        if self.state not in allowed:
            raise ResidencyError(
                f"{call} is not allowed while the worker is {self.state.value!r}: "
                f"call {way_out} first"
            )

    def enter(self, call: str) -> ResidencyState:
        """Record that `call` has moved its tensors, and return the new state."""
        self.state = _LEADS_TO[call]
        return self.state
