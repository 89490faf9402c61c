"""The whole life of a worker on a device: it scores, trains, refits, offloads, and comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict

    from rl_interfaces.backend.fake.device import FakeDevice, Figures
    from rl_interfaces.loss import LossFunction


def run_life(
    device: FakeDevice,
    worker: Any,
    *,
    batch: BatchedDataDict,
    prompts: BatchedDataDict,
    loss: LossFunction,
    scored: BatchedDataDict | None = None,
    shorter: BatchedDataDict | None = None,
) -> dict[str, Figures]:
    """Take a worker through all its states and calls; return the figures of each.

    Args:
        device: From `fake_cuda`, in whose context the worker was built.
        worker: A `PolicyWorker` with an optimizer, and a reference unless it has none.
        batch: What `train_again` takes.
        prompts: What `generate` takes.
        loss: Of `train`.
        scored: What `get_logprobs` takes; None: `batch`.
        shorter: What the other calls of `train` take, such as one step; None: `batch`.

    Returns:
        In the order of the calls. `train` is the first, which makes the optimizer's state, and
        `train_again` the second.

    Raises:
        AssertionError: A gathered weight is not on the device.
    """
    rows = batch if scored is None else scored
    few = batch if shorter is None else shorter

    def gather() -> None:
        for name, tensor in worker.weight_source:
            assert tensor.device.type == "cuda", f"{name} was gathered on {tensor.device}"

    calls: dict[str, Callable[[], object]] = {
        "logprobs": lambda: worker.get_logprobs(rows),
        "train": lambda: worker.train(few, loss),
        "train_again": lambda: worker.train(batch, loss),
        "reference": lambda: worker.get_reference_policy_logprobs(rows),
        "offload_before_refit": worker.offload_before_refit,
        "gather": gather,
        "offload_after_refit": worker.offload_after_refit,
        "prepare_for_lp_inference": worker.prepare_for_lp_inference,
        "logprobs_after_reload": lambda: worker.get_logprobs(rows),
        "prepare_for_training": worker.prepare_for_training,
        "train_after_reload": lambda: worker.train(few, loss),
        "generate": lambda: worker.generate(prompts),
    }
    found: dict[str, Figures] = {}
    for name, call in calls.items():
        with device.phase() as found[name]:
            call()
            if name == "offload_after_refit":
                found[name].left = device.allocated()
    return found
