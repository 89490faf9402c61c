"""The policy: one object that trains, scores, generates and saves over all ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rl_batched_data import BatchedDataDict
from rl_interfaces import (
    ColocatablePolicyInterface,
    GenerationInterface,
    Residency,
    ResidencyState,
    resolve_policy_config,
)

from rl_policy import backends, dispatch
from rl_policy.checkpoint_calls import CheckpointCalls
from rl_policy.named_sharding import NamedSharding
from rl_policy.policy_inputs import (
    PathLike,
    bundles_per_node,
    check_generation_backend,
    existing,
    with_absolute_paths,
)
from rl_policy.scoring_calls import ScoringCalls
from rl_policy.weight_calls import WeightCalls
from rl_policy.worker_group import RayWorkerGroup

if TYPE_CHECKING:
    from rl_interfaces import (
        Cluster,
        GenerationDatumSpec,
        GenerationOutputSpec,
        LossFunction,
        PolicyConfig,
    )
    from transformers import PreTrainedTokenizerBase

# Room for the processes to start in, besides what the ranks may wait for one another.
_START_MARGIN_S = 120.0


class Policy(
    ScoringCalls,
    CheckpointCalls,
    WeightCalls,
    ColocatablePolicyInterface,
    GenerationInterface,
):
    """A language model on all ranks of a cluster, behind the calls of an RL algorithm.

    The backend is the one whose section `<name>_cfg` the config enables. Everything that can be
    known to be wrong is refused before an actor starts.

    Example:
        cluster = RayVirtualCluster(bundle_ct_per_node_list=[2])
        policy = Policy(cluster, {"model_name": "my-model", "dtensor_cfg": {"enabled": True}, ...},
                        tokenizer)
        policy.train(batch, NLLLoss())["loss"]  -> tensor([2.31])

    Args:
        cluster: Where the ranks run; the policy does not shut it down.
        config: A `PolicyConfig`; what is left out takes its default.
        tokenizer: The model's tokenizer.
        name_prefix: Names the ranks in errors and in what they print.
        workers_per_node: How many bundles of each node to use. None: all.
        init_optimizer: Whether to train; without an optimizer the policy scores and generates.
        weights_path: Weights of `save_checkpoint` to start from, instead of the model's own.
        optimizer_path: The optimizer state that belongs to them.
        init_reference_model: Whether to keep a frozen copy for reference log-probabilities.

    Raises:
        ValueError: What was passed cannot be done; the message names key and numbers.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: PolicyConfig,
        tokenizer: PreTrainedTokenizerBase,
        name_prefix: str = "lm_policy",
        workers_per_node: int | list[int] | None = None,
        init_optimizer: bool = True,
        weights_path: PathLike | None = None,
        optimizer_path: PathLike | None = None,
        init_reference_model: bool = True,
    ) -> None:
        self.worker_group: RayWorkerGroup | None = None
        self.config = with_absolute_paths(resolve_policy_config(config))
        check_generation_backend(self.config)
        self._backend = backends.enabled_backend(self.config)
        self._worker_class = worker_class = backends.load(self._backend)
        weights = existing("weights_path", weights_path)
        optimizer = existing("optimizer_path", optimizer_path)
        if optimizer is not None and not init_optimizer:
            raise ValueError(f"optimizer_path={optimizer!r} contradicts init_optimizer=False")
        per_node = bundles_per_node(cluster, workers_per_node)
        layout = worker_class.validate_config(
            self.config,
            world_size=cluster.world_size() if per_node is None else sum(per_node),
            init_optimizer=init_optimizer,
        )
        self.tokenizer = tokenizer
        self._has_optimizer = init_optimizer
        self._may_be_saving = False
        self._residency = Residency(has_optimizer=init_optimizer)
        self._data_parallel = layout.data_parallel
        self._receivers: list[int] = []
        self.worker_group = RayWorkerGroup(
            cluster,
            worker_class,
            (self.config, tokenizer),
            {
                "weights_path": weights,
                "optimizer_path": optimizer,
                "init_optimizer": init_optimizer,
                "init_reference_model": init_reference_model,
            },
            sharding=NamedSharding.from_layout(layout),
            name=name_prefix,
            workers_per_node=per_node,
            start_timeout_s=self.config["timeout_s"] + _START_MARGIN_S,
        )

    # Training and generation

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Take an optimizer step per global batch of `data`, the last on what is left.

        Args:
            data: See `PolicyInterface.train`. Any number of rows.
            loss_fn: See `LossFunction`; it is pickled to the ranks.
            eval_mode: Loss and metrics only: no parameter changes, and no optimizer is needed.
            gbs: Samples per optimizer step, instead of `policy.train_global_batch_size`.
            mbs: Samples per forward per rank, instead of `policy.train_micro_batch_size`.

        Returns:
            `loss` (float32 `[steps]`), `grad_norm` (float32 `[steps]`, None in eval mode), and
            `all_mb_metrics` (`{name: [value per micro-batch]}`, rank by rank).

        Raises:
            ValueError: The batch lacks a key, or numbers do not fit; names both.
            ResidencyError: The policy is not in a state to train.
        """
        if not eval_mode and not self._has_optimizer:
            raise ValueError("train() needs an optimizer, and init_optimizer was False")
        self._residency.require("train(eval_mode=True)" if eval_mode else "train")
        size = self._global_batch_size(gbs)
        dispatch.check_train_batch(data, loss_fn, **self._limits())
        shards = dispatch.shard_for_training(
            data,
            data_parallel=self._data_parallel,
            gbs=size,
            micro_batching=self._micro_batching("train_mb_tokens", mbs=mbs),
        )
        results = self._group.run_sharded(
            "train", shards, loss_fn=loss_fn, eval_mode=eval_mode, gbs=size, mbs=mbs
        )
        return dispatch.merge_train_results(results)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a completion per row, in the caller's order, see `GenerationOutputSpec`.

        Args:
            data: The prompts, see `GenerationDatumSpec`; any number of rows.
            greedy: Take the most likely token every time, whatever the configuration says.
        """
        if "generation" not in self.config:
            raise ValueError("policy.generation is not set: the policy does not generate")
        self._residency.require("generate")
        pad_token_id = self._output_pad_token_id()
        dispatch.check_prompts(data, **self._limits())
        shards = dispatch.shard_in_order(data, data_parallel=self._data_parallel)
        parts = self._group.run_sharded("generate", shards, greedy=greedy)
        return dispatch.gather_generations(parts, pad_token_id=pad_token_id)

    # Residency

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Bring the model onto the device if it is not there; True when it is."""
        if self._residency.state is ResidencyState.OFFLOADED:
            self.prepare_for_lp_inference()
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Return True: what generation alone needs is freed when `generate` returns."""
        return True

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring model, gradients and optimizer state onto the device."""
        self._move("prepare_for_training")

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Accept that no step follows for now; the next `prepare_for_...` moves what it needs."""

    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """Bring the model onto the device and the optimizer state off it."""
        self._move("prepare_for_lp_inference")

    def offload_before_refit(self) -> None:
        """Keep the model on the device and move the optimizer state off it."""
        self._move("offload_before_refit")

    def offload_after_refit(self) -> None:
        """Move everything off the device."""
        self._move("offload_after_refit")

    # Information and the end

    def get_gpu_info(self) -> list[dict[str, Any]]:
        """Return rank, device and memory figures of every rank."""
        return self._group.run_all("get_gpu_info")

    def start_gpu_profiling(self) -> None:
        """Open a profiling range on every rank."""
        self._group.run_all("start_gpu_profiling")

    def stop_gpu_profiling(self) -> None:
        """Close the profiling range on every rank."""
        self._group.run_all("stop_gpu_profiling")

    def shutdown(self) -> bool:
        """End every process of the policy; True when all of them ended in order.

        A save in the background is waited for. Calling it twice is fine. The cluster is left as it
        is.

        Raises:
            RuntimeError: The last save could not be written; all processes have ended.
            TimeoutError: It takes longer than `policy.timeout_s`; all processes have ended.
        """
        if self.worker_group is None:
            return True
        try:
            if not self.worker_group.has_ended:
                self.finish_checkpoint()
        finally:
            ended_in_order = self.worker_group.shutdown()
        return ended_in_order

    def __del__(self) -> None:
        """Shut down, unless the interpreter is going away and takes the processes with it."""
        if not sys.is_finalizing():
            self.shutdown()

    # Inside

    def _move(self, call: str) -> None:
        self._group.run_all(call)
        self._residency.enter(call)

    def _global_batch_size(self, gbs: int | None) -> int:
        name = "policy.train_global_batch_size" if gbs is None else "gbs"
        size = self.config["train_global_batch_size"] if gbs is None else gbs
        dispatch.check_global_batch_size(size, data_parallel=self._data_parallel, name=name)
        return size

    def _output_pad_token_id(self) -> int:
        candidates: list[Any] = [
            self.config["generation"].get("pad_token_id"),
            self.tokenizer.pad_token_id,
            self.tokenizer.eos_token_id,
        ]
        for candidate in candidates:
            if candidate is not None:
                return candidate
        raise ValueError("policy.generation.pad_token_id is not set, and the tokenizer has none")
