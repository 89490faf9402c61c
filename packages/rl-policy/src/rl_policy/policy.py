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
    RowScoringWorker,
    TopkLogitsWorker,
    resolve_policy_config,
)

from rl_policy import backends, dispatch, weight_transfer
from rl_policy.named_sharding import NamedSharding
from rl_policy.policy_inputs import (
    PathLike,
    absolute,
    bundles_per_node,
    check_generation_backend,
    existing,
    with_absolute_paths,
)
from rl_policy.worker_group import RayWorkerGroup

if TYPE_CHECKING:
    from collections.abc import Mapping

    import ray
    from rl_interfaces import (
        Cluster,
        GenerationDatumSpec,
        GenerationOutputSpec,
        LogprobOutputSpec,
        LossFunction,
        PolicyConfig,
        ReferenceLogprobOutputSpec,
        ScoreOutputSpec,
        TopkLogitsOutputSpec,
    )
    from transformers import PreTrainedTokenizerBase

# Room for the processes to start in, besides what the ranks may wait for one another.
_START_MARGIN_S = 120.0


class Policy(ColocatablePolicyInterface, GenerationInterface):
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

    # Training and scoring

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

    def get_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec]
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return the log-probability of every token, see `LogprobOutputSpec`.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any number of rows.
        """
        return self._score("get_logprobs", data)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return the same under the frozen reference, see `ReferenceLogprobOutputSpec`.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any number of rows.
            micro_batch_size: Rows per forward per rank, instead of `policy.logprob_batch_size`.
        """
        return self._score("get_reference_policy_logprobs", data, micro_batch_size=micro_batch_size)

    def get_topk_logits(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        k: int,
        micro_batch_size: int | None = None,
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """Return the `k` largest logits of each position, see `TopkLogitsOutputSpec`.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any number of rows.
            k: How many; at most the vocabulary.
            micro_batch_size: Rows per forward per rank, instead of `policy.logprob_batch_size`.

        Raises:
            NotImplementedError: The backend gives no logits.
        """
        self._require(TopkLogitsWorker, lack="give logits")
        return self._score("get_topk_logits", data, micro_batch_size=micro_batch_size, k=k)

    def score(
        self, data: BatchedDataDict[GenerationDatumSpec], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ScoreOutputSpec]:
        """Return what a reward or value model, `policy.head`, says of each row.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any number of rows.
            micro_batch_size: Rows per forward per rank, instead of `policy.logprob_batch_size`.

        Raises:
            NotImplementedError: The backend runs no reward and value models.
        """
        self._require(RowScoringWorker, lack="run reward and value models")
        return self._score("score", data, micro_batch_size=micro_batch_size)

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

    # Checkpoints

    def save_checkpoint(
        self,
        weights_path: PathLike,
        optimizer_path: PathLike | None = None,
        tokenizer_path: PathLike | None = None,
    ) -> None:
        """Write the weights, and the optimizer and the tokenizer where a path is given.

        Raises:
            ValueError: `optimizer_path` is given and there is no optimizer.
        """
        if optimizer_path is not None and not self._has_optimizer:
            raise ValueError(f"optimizer_path={optimizer_path!r}, and init_optimizer was False")
        self._group.run_all(
            "save_checkpoint",
            weights_path=absolute(weights_path),
            optimizer_path=absolute(optimizer_path),
            tokenizer_path=absolute(tokenizer_path),
        )

    def load_checkpoint(
        self, weights_path: PathLike, optimizer_path: PathLike | None = None
    ) -> None:
        """Read what `save_checkpoint` wrote.

        Raises:
            ValueError: A path does not exist, or `optimizer_path` is given without an optimizer.
        """
        if optimizer_path is not None and not self._has_optimizer:
            raise ValueError(f"optimizer_path={optimizer_path!r}, and init_optimizer was False")
        self._group.run_all(
            "load_checkpoint",
            weights_path=existing("weights_path", weights_path),
            optimizer_path=existing("optimizer_path", optimizer_path),
        )

    def save_hf_checkpoint(self, path: PathLike) -> None:
        """Write a directory that `AutoModelForCausalLM.from_pretrained` loads."""
        self._group.run_all("save_hf_checkpoint", path=absolute(path))

    # Weight transfer

    def open_refit(
        self,
        num_receivers: int,
        *,
        is_paired: bool = False,
        transport: str = "shm",
        **options: Any,
    ) -> list[Mapping[str, Any]]:
        """Return, for each receiver, the address at which it finds its sender.

        An address is for that receiver alone: whoever has it can read the weights.

        Args:
            num_receivers: Ranks of the inference engines.
            is_paired: Whether receiver `i` shares the device of rank `i`, which then sends to it.
            transport: A name of the entry-point group `rl_refit.transports`.
            options: What else `rl_refit.RefitSender` takes, `bucket_bytes` and `verify` for two.
        """
        self._require_sending()
        self._receivers = weight_transfer.receivers_per_rank(
            num_receivers, world_size=self._group.world_size, is_paired=is_paired
        )
        addresses = self._group.run_all(
            "open_refit", receivers_per_rank=self._receivers, transport=transport, **options
        )
        return weight_transfer.address_per_receiver(addresses, self._receivers)

    def send_weights(self, version: int) -> dict[str, float]:
        """Stream the weights to the receivers of `open_refit`, which receive at the same time.

        Returns:
            `refit_s`, `refit_bytes`, `refit_gb_per_s`, `refit_slowest_rank`, and the seconds of
            each phase, see `rl_refit.RefitReport`. The phases overlap.

        Raises:
            RefitError: A receiver failed or did not answer in time. Call again, for all of them.
            ResidencyError: The model is not on the device.
        """
        self._require_sending()
        self._residency.require("send_weights")
        # A rank whose receiver fails still takes part in the others' gathers.
        call = self._group.submit_all("send_weights", version)
        reports = self._group.wait(call, grace_s=self.config["timeout_s"])
        return weight_transfer.merge_reports(reports, self._receivers)

    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef]:
        """Let rank 0 meet `world_size - 1` inference ranks; the futures are not waited for.

        Args:
            ip: Address of rank 0's node, see `RayVirtualCluster.get_master_address_and_port`.
            port: A port that is free there.
            world_size: The inference ranks plus one.
        """
        self._require_sending()
        return self._group.submit_all("init_collective", ip, port, world_size).refs

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Return `{name: (shape, wire dtype)}` of every tensor that is sent, in order."""
        self._require_sending()
        return self._group.run_all("prepare_refit_info")[0]

    def prepare_weights_for_ipc(self, _refit_buffer_size_gb: int | None = None) -> list[list[str]]:
        """Return the names of all tensors, grouped so that each group fits a buffer.

        Args:
            _refit_buffer_size_gb: The buffer in GiB. None: the smallest free memory of any rank.
        """
        self._require_sending()
        self._residency.require("send_weights")
        answers = self._group.run_all("prepare_weights_for_ipc")
        return weight_transfer.group_for_ipc(answers, limit_gib=_refit_buffer_size_gb)

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """Return `{device id: {name: handle}}` of one group; those of the call before expire."""
        self._require_sending()
        self._residency.require("send_weights")
        answers = self._group.run_all("get_weights_ipc_handles", keys)
        return {device: handles for answer in answers for device, handles in answer.items()}

    def prepare_info_for_collective(self) -> dict[str, Any]:
        """Return what `prepare_refit_info` returns; its older name."""
        self._require_sending()
        return self._group.run_all("prepare_info_for_collective")[0]

    def broadcast_weights_for_collective(self) -> list[ray.ObjectRef]:
        """Broadcast every tensor, in order; the futures are not waited for."""
        self._require_sending()
        self._residency.require("send_weights")
        return self._group.submit_all("broadcast_weights_for_collective").refs

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

        Calling it twice is fine. The cluster is left as it is.
        """
        return self.worker_group is None or self.worker_group.shutdown()

    def __del__(self) -> None:
        """Shut down, unless the interpreter is going away and takes the processes with it."""
        if not sys.is_finalizing():
            self.shutdown()

    @property
    def _group(self) -> RayWorkerGroup:
        assert self.worker_group is not None
        return self.worker_group

    def _require(self, capability: type, *, lack: str) -> None:
        backends.require(self._backend, self._worker_class, capability, lack=lack)

    def _require_sending(self) -> None:
        backends.require_sending(self._backend, self._worker_class)

    def _score(
        self,
        method: str,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        **arguments: Any,
    ) -> BatchedDataDict[Any]:
        self._residency.require(method)
        planned = self._micro_batching("logprob_mb_tokens", micro_batch_size=micro_batch_size)
        dispatch.check_batch(data, **self._limits())
        shards, order = dispatch.shard_for_scoring(
            data, data_parallel=self._data_parallel, micro_batching=planned
        )
        parts = self._group.run_sharded(
            method, shards, micro_batch_size=micro_batch_size, **arguments
        )
        return dispatch.gather_scores(parts, width=data["input_ids"].shape[1], order=order)

    def _micro_batching(self, budget: str, **sizes: int | None) -> dispatch.MicroBatching | None:
        planned = dispatch.MicroBatching.of(self.config, budget)
        for name, size in sizes.items():
            if planned is not None:
                planned.refuse_size(name, size)
        return planned

    def _move(self, call: str) -> None:
        self._group.run_all(call)
        self._residency.enter(call)

    def _global_batch_size(self, gbs: int | None) -> int:
        name = "policy.train_global_batch_size" if gbs is None else "gbs"
        size = self.config["train_global_batch_size"] if gbs is None else gbs
        dispatch.check_global_batch_size(size, data_parallel=self._data_parallel, name=name)
        return size

    def _limits(self) -> dict[str, Any]:
        return {
            "pad_token_id": self.tokenizer.pad_token_id,
            "max_length": self.config.get("max_total_sequence_length"),
        }

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
