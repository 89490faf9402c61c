"""Several sets of adapters on a policy's model: `Policy.adapter_sets`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rl_batched_data import BatchedDataDict
from rl_interfaces.backend.generation import SamplingConfig, resolve_pad_id

from rl_policy.dispatch import gather_generations

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from rl_interfaces import (
        AdamOptions,
        GenerationDatumSpec,
        GenerationOutputSpec,
        OptimizerStepOutputSpec,
        Residency,
        SamplingOptions,
    )
    from transformers import PreTrainedTokenizerBase

    from rl_policy.dispatch import Dispatcher
    from rl_policy.ray.worker_group import RayWorkerGroup


class AdapterSets:
    """The sets of adapters of one policy, see `rl_interfaces.MultiAdapterWorker`.

    One set is in the model, and the policy's calls are under it: `forward_backward`, `train` in
    eval mode, `get_logprobs`. Pending gradients and optimizer state are each set's own.

    Example:
        sets = policy.adapter_sets
        sets.add("a", rank=8, seed=1)
        sets.use("a")
        policy.forward_backward(batch, loss)
        sets.step({"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0,
                   "max_grad_norm": None})
    """

    def __init__(
        self,
        group: RayWorkerGroup,
        dispatcher: Dispatcher,
        residency: Residency,
        *,
        config: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._group = group
        self._dispatcher = dispatcher
        self._residency = residency
        self._config = config
        self._tokenizer = tokenizer
        self._current: str | None = None
        # Sets whose gradients are pending, less the one in the model: `residency` has that.
        self._with_gradients: set[str | None] = set()

    def add(
        self, name: str, *, rank: int, seed: int, layers: Sequence[str] = ("attention", "mlp")
    ) -> None:
        """Add a set of initial adapters; it is not in the model yet.

        Args:
            name: A new name.
            rank: At most `policy.dtensor_cfg.lora.r`.
            seed: Of the random half of the adapters; the other half is zero.
            layers: Kinds of layers, `attention` and `mlp`.

        Raises:
            ValueError: The name is taken, or the set does not fit the model.
        """
        self._group.run_all("add_adapters", name, rank=rank, seed=seed, layers=list(layers))

    def use(self, name: str | None) -> None:
        """Put a set into the model; None: the model without adapters.

        Raises:
            ValueError: There is no set of that name.
        """
        if name == self._current:
            return
        self._group.run_all("use_adapters", name)
        self._note(name)

    def copy(self, name: str) -> None:
        """Add a set with the adapters in the model, without their gradients and optimizer state.

        Raises:
            ValueError: The name is taken, or the model has no set.
        """
        self._group.run_all("copy_adapters", name)

    def remove(self, name: str) -> None:
        """Drop a set, with its gradients.

        Raises:
            ValueError: There is no set of that name.
        """
        self._group.run_all("remove_adapters", name)
        if name == self._current:
            self._note(None)
        self._with_gradients.discard(name)

    def save(self, path: str | os.PathLike[str], *, with_optimizer: bool) -> None:
        """Write the set in the model into a directory that `peft` loads.

        Raises:
            ValueError: The model has no set, or no save has written what is at the path.
        """
        self._group.run_all(
            "save_adapter_set", os.path.abspath(path), with_optimizer=with_optimizer
        )

    def load(self, name: str, path: str | os.PathLike[str], *, with_optimizer: bool) -> None:
        """Add the set that `save` has written; it is not in the model yet.

        Raises:
            ValueError: The name is taken, or the directory does not fit the model.
        """
        self._group.run_all(
            "load_adapter_set", name, os.path.abspath(path), with_optimizer=with_optimizer
        )

    def step(self, options: AdamOptions) -> OptimizerStepOutputSpec:
        """Take an AdamW step along the gradient of the sum over all rows of the pending calls.

        Raises:
            ResidencyError: No gradients are pending.
        """
        self._residency.require("optimizer_step")
        # First: if ranks have dropped them after a failure, they say so, and there are none.
        self._residency.has_gradients = False
        return self._group.run_all("adam_step", options)[0]

    def sample(
        self, data: BatchedDataDict[GenerationDatumSpec], options: SamplingOptions
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a completion per row, in the caller's order, with sampling parameters of the call.

        Raises:
            ValueError: A prompt leaves no room for a token.
        """
        sampling = SamplingConfig.from_policy_config(self._config)
        if sampling is None:
            raise ValueError("policy.generation is not set: the policy does not generate")
        self._residency.require("generate")
        plans = self._dispatcher.plan_prompts(data)
        parts = self._group.run_sharded("sample", data, plans, options=options)
        return gather_generations(parts, pad_token_id=resolve_pad_id(sampling, self._tokenizer))

    def _note(self, name: str | None) -> None:
        """Follow the ranks, which have put another set into the model."""
        if self._residency.has_gradients:
            self._with_gradients.add(self._current)
        self._residency.has_gradients = name in self._with_gradients
        self._with_gradients.discard(name)
        self._current = name
