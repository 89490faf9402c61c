"""The policy: one object that trains, scores, generates and saves over all ranks.

A call is checked and sharded by the `Dispatcher`, run on every rank by the `RayWorkerGroup`, and
its results are gathered. The `Residency` mirrors what is on the devices, so that a call in the
wrong state fails on the driver, before any rank waits in a collective.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rl_batched_data import BatchedDataDict
from rl_interfaces import (
    AdapterSavingWorker,
    AdapterSendingWorker,
    ColocatablePolicyInterface,
    GenerationInterface,
    MultiAdapterWorker,
    Residency,
    ResidencyState,
    RowScoringWorker,
    SplitTrainingWorker,
    TopkLogitsWorker,
    resolve_policy_config,
)
from rl_interfaces.backend.generation import SamplingConfig, resolve_pad_id

from rl_policy.adapters import AdapterSets
from rl_policy.backends import TrainingBackend, check_generation_backend
from rl_policy.config.policy import absolute_if_directory
from rl_policy.dispatch import Dispatcher, gather_generations, gather_scores, merge_train_results
from rl_policy.ray.cluster import bundles_per_node
from rl_policy.ray.sharding import NamedSharding
from rl_policy.ray.worker_group import RayWorkerGroup
from rl_policy.refit import RefitRoutes, group_for_ipc

if TYPE_CHECKING:
    import ray
    from rl_batched_data.sharding import ShardPlan
    from rl_interfaces import (
        Cluster,
        DeviceHandles,
        GenerationDatumSpec,
        GenerationOutputSpec,
        GpuInfo,
        LogprobOutputSpec,
        LossFunction,
        OptimizerStepOutputSpec,
        PolicyConfig,
        ReferenceLogprobOutputSpec,
        RefitInfo,
        ScoreOutputSpec,
        TopkLogitsOutputSpec,
        TrainOutputSpec,
        WorkerTrainOutputSpec,
    )
    from transformers import PreTrainedTokenizerBase

PathLike = str | os.PathLike[str]
"""A path in a file system that every rank sees."""

# For the start of the processes, before ranks wait for one another for up to `policy.timeout_s`.
_START_MARGIN_S = 120.0
# A rank that times out by itself reports why, which the driver should receive.
_REPORT_MARGIN_S = 10.0


class Policy(ColocatablePolicyInterface, GenerationInterface):
    """A language model on all ranks of a cluster, with the calls of an RL algorithm.

    The backend is the one whose section `<name>_cfg` the config enables. An invalid configuration
    is refused before an actor starts.

    Example:
        cluster = RayVirtualCluster(bundle_ct_per_node_list=[2])
        policy = Policy(cluster, {"model_name": "my-model", "dtensor_cfg": {"enabled": True}, ...},
                        tokenizer)
        policy.train(batch, NLLLoss())["loss"]  -> tensor([2.31])

    Args:
        cluster: Where the ranks run; the policy does not shut it down.
        config: A `PolicyConfig`; missing keys take their defaults.
        tokenizer: The model's tokenizer.
        name_prefix: Prefix of the ranks' names in errors and in their output.
        workers_per_node: How many bundles of each node to use. None: all.
        init_optimizer: Whether to train; without an optimizer the policy scores and generates.
        weights_path: Weights of `save_checkpoint` to start from, instead of the model's own.
        optimizer_path: The optimizer state of the same `save_checkpoint`.
        init_reference_model: Whether to keep a frozen copy for reference log-probabilities.

    Raises:
        ValueError: An argument or a config value is not possible; names key and numbers.
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
        # First, as `__del__` reads it even if the constructor fails.
        self.worker_group: RayWorkerGroup | None = None
        self.config = with_absolute_paths(resolve_policy_config(config))
        check_generation_backend(self.config)
        self._backend = TrainingBackend.of_config(self.config)
        weights = _existing("weights_path", weights_path)
        optimizer = _existing("optimizer_path", optimizer_path)
        if optimizer is not None and not init_optimizer:
            raise ValueError(f"optimizer_path={optimizer!r} contradicts init_optimizer=False")
        per_node = bundles_per_node(cluster, workers_per_node)
        layout = self._backend.worker_class.validate_config(
            self.config,
            world_size=cluster.world_size() if per_node is None else sum(per_node),
            init_optimizer=init_optimizer,
        )
        self.tokenizer = tokenizer
        self._has_optimizer = init_optimizer
        self._is_save_pending = False
        self._residency = Residency(has_optimizer=init_optimizer)
        self.data_parallel = layout.data_parallel
        self._dispatcher = Dispatcher(self.config, data_parallel=layout.data_parallel)
        self._routes: RefitRoutes | None = None
        self.worker_group = RayWorkerGroup(
            cluster,
            self._backend.worker_class,
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

    # Training

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> TrainOutputSpec:
        """Take an optimizer step per global batch of `data`, the last on the remaining rows.

        Args:
            data: See `PolicyInterface.train`. Any number of rows, or of groups of rows if the loss
                has `rows_per_group`.
            loss_fn: See `LossFunction`; it is pickled to the ranks.
            eval_mode: Loss and metrics only: no parameter changes, and no optimizer is needed.
            gbs: Samples per optimizer step, instead of `policy.train_global_batch_size`.
            mbs: Samples per forward per rank, instead of `policy.train_micro_batch_size`.

        Returns:
            Loss and gradient norm of each step, and the metrics, see `TrainOutputSpec`.

        Raises:
            ValueError: The batch lacks a key, or sizes do not divide; names both.
            ResidencyError: The policy is not in a state to train.
        """
        if not eval_mode and not self._has_optimizer:
            raise ValueError("train() needs an optimizer, and init_optimizer was False")
        self._residency.require("train(eval_mode=True)" if eval_mode else "train")
        plans, size = self._dispatcher.plan_training(data, loss_fn, gbs=gbs, mbs=mbs)
        # `gbs` is passed even if it is the config's: ranks must step by what was sharded here.
        results = self._group.run_sharded(
            "train", data, plans, loss_fn=loss_fn, eval_mode=eval_mode, gbs=size, mbs=mbs
        )
        return _train_output(results, data, plans)

    # Training by separate calls

    def forward_backward(
        self, data: BatchedDataDict, loss_fn: LossFunction, mbs: int | None = None
    ) -> TrainOutputSpec:
        """Add the gradients of a loss over all rows of `data` to those that are pending.

        Any number of these calls and one `optimizer_step` do what one `train` does with all of
        their rows as a single global batch, see `rl_interfaces.SplitTrainingWorker`. Between them
        the policy scores, generates, evaluates, sends weights and saves; `train`,
        `load_checkpoint` and the moves that leave `training` raise `ResidencyError`.

        Example:
            policy.forward_backward(first, NLLLoss())["loss"]  -> tensor([2.31])
            policy.forward_backward(second, NLLLoss())["loss"] -> tensor([2.27])
            policy.optimizer_step()  -> {"grad_norm": 1.2, "stepped": True, "lr": 0.001}

        Args:
            data: See `PolicyInterface.train`. Any number of rows, or of groups of rows if the loss
                has `rows_per_group`.
            loss_fn: A sum divided by the count of its `loss_type`, which all calls before a step
                share; it is pickled to the ranks.
            mbs: Samples per forward per rank, instead of `policy.train_micro_batch_size`.

        Returns:
            Like `train` in eval mode: the loss over the rows of this call, `[1]`, and its metrics.

        Raises:
            NotImplementedError: The backend trains in `train` alone.
            ValueError: The batch lacks a key, sizes do not divide, or the loss cannot be added.
            ResidencyError: The policy is not in a state to train.
        """
        self._require_split_training("forward_backward")
        self._residency.require("forward_backward")
        plans = self._dispatcher.plan_backward(data, loss_fn, mbs=mbs)
        results = self._group.run_sharded("forward_backward", data, plans, loss_fn=loss_fn, mbs=mbs)
        self._residency.has_gradients = True
        return _train_output(results, data, plans)

    def optimizer_step(self) -> OptimizerStepOutputSpec:
        """Step with the pending gradients and clear them; the schedule advances once.

        Gradients that are not finite change nothing: `stepped` is False then.

        Raises:
            NotImplementedError: The backend trains in `train` alone.
            ResidencyError: No gradients are pending.
        """
        self._require_split_training("optimizer_step")
        self._residency.require("optimizer_step")
        # First: if ranks have dropped them after a failure, they say so, and there are none.
        self._residency.has_gradients = False
        return self._group.run_all("optimizer_step")[0]

    def zero_grad(self) -> None:
        """Drop the pending gradients of `forward_backward`, if there are any.

        Raises:
            NotImplementedError: The backend trains in `train` alone.
        """
        self._require_split_training("zero_grad")
        self._group.run_all("zero_grad")
        self._residency.has_gradients = False

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of `forward_backward` are pending."""
        return self._residency.has_gradients

    def _require_split_training(self, call: str) -> None:
        self._backend.require(SplitTrainingWorker, lack="train in separate calls")
        if not self._has_optimizer:
            raise ValueError(f"{call}() needs an optimizer, and init_optimizer was False")

    @cached_property
    def adapter_sets(self) -> AdapterSets:
        """The sets of adapters that the policy trains on one model.

        Raises:
            NotImplementedError: The backend trains one set alone.
        """
        self._require_split_training("adapter_sets")
        self._backend.require(MultiAdapterWorker, lack="train several sets of adapters")
        return AdapterSets(
            self._group,
            self._dispatcher,
            self._residency,
            config=self.config,
            tokenizer=self.tokenizer,
        )

    # Scoring

    def get_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], *, temperature: float | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return the log-probability of every token of any number of rows.

        See `PolicyInterface.get_logprobs`.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any number of rows.
            temperature: Divides the logits. None: `policy.generation.temperature`, for tokens that
                were sampled. A supervised loss needs 1.
        """
        return self._score("get_logprobs", data, **_given(temperature=temperature))

    def get_reference_policy_logprobs(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        *,
        temperature: float | None = None,
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return the same under the frozen reference, see `ReferenceLogprobOutputSpec`.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any number of rows.
            micro_batch_size: Rows per forward per rank, instead of `policy.logprob_batch_size`.
            temperature: See `get_logprobs`.
        """
        return self._score(
            "get_reference_policy_logprobs",
            data,
            micro_batch_size=micro_batch_size,
            **_given(temperature=temperature),
        )

    def get_topk_logits(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        k: int,
        micro_batch_size: int | None = None,
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """Return the `k` largest logits of each position, see `TopkLogitsOutputSpec`.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any number of rows.
            k: How many; at most the vocabulary size.
            micro_batch_size: Rows per forward per rank, instead of `policy.logprob_batch_size`.

        Raises:
            NotImplementedError: The backend gives no logits.
        """
        self._backend.require(TopkLogitsWorker, lack="give logits")
        return self._score("get_topk_logits", data, micro_batch_size=micro_batch_size, k=k)

    def score(
        self, data: BatchedDataDict[GenerationDatumSpec], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ScoreOutputSpec]:
        """Return the scores of a reward or value model, `policy.head`, see `ScoreOutputSpec`.

        Args:
            data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any number of rows.
            micro_batch_size: Rows per forward per rank, instead of `policy.logprob_batch_size`.

        Raises:
            NotImplementedError: The backend runs no reward and value models.
        """
        self._backend.require(RowScoringWorker, lack="run reward and value models")
        return self._score("score", data, micro_batch_size=micro_batch_size)

    def _score(
        self,
        method: str,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        **arguments: object,
    ) -> BatchedDataDict:
        self._residency.require(method)
        plans, order = self._dispatcher.plan_scoring(data, micro_batch_size=micro_batch_size)
        parts = self._group.run_sharded(
            method, data, plans, micro_batch_size=micro_batch_size, **arguments
        )
        return gather_scores(parts, width=data["input_ids"].shape[1], order=order)

    # Generation

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a completion per row, in the caller's order, see `GenerationOutputSpec`.

        Args:
            data: The prompts, see `GenerationDatumSpec`; any number of rows.
            greedy: Take the most likely token every time, whatever the configuration says.
        """
        sampling = SamplingConfig.from_policy_config(self.config)
        if sampling is None:
            raise ValueError("policy.generation is not set: the policy does not generate")
        self._residency.require("generate")
        # transformers defines a tokenizer's token ids by `__getattr__`, which has no types.
        pad_token_id = resolve_pad_id(sampling, self.tokenizer)  # pyright: ignore[reportArgumentType]
        plans = self._dispatcher.plan_prompts(data)
        parts = self._group.run_sharded("generate", data, plans, greedy=greedy)
        return gather_generations(parts, pad_token_id=pad_token_id)

    def prepare_for_generation(self, *args: object, **kwargs: object) -> bool:
        """Bring the model onto the device if it is offloaded; return True."""
        if self._residency.state is ResidencyState.OFFLOADED:
            self.prepare_for_lp_inference()
        return True

    def finish_generation(self, *args: object, **kwargs: object) -> bool:
        """Return True: `generate` frees its cache before it returns."""
        return True

    # Batches

    def keeping_batches(self) -> AbstractContextManager[None]:
        """Return a context in which each column of a batch is sent to the ranks' nodes once.

        Scoring, reference scoring and training of the same rows then share their columns, and a
        call sends those that are new. What was sent is freed when the context ends. A tensor that
        torch changes in place is sent anew; other ways of changing one, such as through a numpy
        array of the same memory, are not noticed.

        Example:
            with policy.keeping_batches():
                batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
                policy.train(batch, loss_fn)  # sends `prev_logprobs` alone
        """
        return self._group.keeping_batches()

    # Residency

    def prepare_for_training(self, *args: object, **kwargs: object) -> None:
        """Bring model, gradients and optimizer state onto the device."""
        self._move("prepare_for_training")

    def finish_training(self, *args: object, **kwargs: object) -> None:
        """Do nothing: the next `prepare_for_...` call moves the state that its phase needs."""

    def prepare_for_lp_inference(self, *args: object, **kwargs: object) -> None:
        """Bring the model onto the device and the optimizer state off it."""
        self._move("prepare_for_lp_inference")

    def offload_before_refit(self) -> None:
        """Keep the model on the device and move the optimizer state off it."""
        self._move("offload_before_refit")

    def offload_after_refit(self) -> None:
        """Move everything off the device."""
        self._move("offload_after_refit")

    def _move(self, call: str) -> None:
        self._residency.require(call)
        self._group.run_all(call)
        self._residency.enter(call)

    # Checkpoints, allowed in any residency state

    def save_checkpoint(
        self,
        weights_path: PathLike,
        optimizer_path: PathLike | None = None,
        tokenizer_path: PathLike | None = None,
    ) -> None:
        """Write the weights, and the optimizer and the tokenizer if their paths are given.

        With `async_checkpoint` in the backend's section the write goes on in the background. The
        next save or load, `finish_checkpoint` or `shutdown` waits for it and raises its failure.

        Raises:
            ValueError: `optimizer_path` is given and there is no optimizer.
        """
        self._require_optimizer_for(optimizer_path)
        self._group.run_all(
            "save_checkpoint",
            weights_path=_absolute(weights_path),
            optimizer_path=_absolute(optimizer_path),
            tokenizer_path=_absolute(tokenizer_path),
        )
        section = self.config[f"{self._backend.name}_cfg"]
        self._is_save_pending = section.get("async_checkpoint", False)

    def keep_random_state(self) -> bool:
        """Remember the random state for `restore_random_state`; return whether the backend can."""
        names = ("keep_random_state", "restore_random_state")
        if not all(hasattr(self._backend.worker_class, name) for name in names):
            return False
        self._group.run_all("keep_random_state")
        return True

    def restore_random_state(self) -> None:
        """Return to the random state that was kept last: what was sampled since is forgotten."""
        self._group.run_all("restore_random_state")

    def load_checkpoint(
        self, weights_path: PathLike, optimizer_path: PathLike | None = None
    ) -> None:
        """Load a checkpoint of `save_checkpoint`.

        Raises:
            ValueError: A path does not exist, or `optimizer_path` is given without an optimizer.
            ResidencyError: Gradients of `forward_backward` are pending.
        """
        self._residency.require("load_checkpoint")
        self._require_optimizer_for(optimizer_path)
        self._group.run_all(
            "load_checkpoint",
            weights_path=_existing("weights_path", weights_path),
            optimizer_path=_existing("optimizer_path", optimizer_path),
        )

    def finish_checkpoint(self) -> None:
        """Wait until the last save is on disk.

        Raises:
            RuntimeError: It could not be written.
            TimeoutError: It takes longer than `policy.timeout_s`.
        """
        if self._is_save_pending:
            call = self._group.submit_all("finish_checkpoint")
            self._group.wait(call, timeout_s=self.config["timeout_s"] + _REPORT_MARGIN_S)
            self._is_save_pending = False

    def save_hf_checkpoint(self, path: PathLike) -> None:
        """Write a directory that `AutoModelForCausalLM.from_pretrained` loads."""
        self._group.run_all("save_hf_checkpoint", path=_absolute(path))

    @property
    def has_adapters(self) -> bool:
        """Whether low-rank adapters are trained instead of the model's own weights."""
        section = self.config.get("dtensor_cfg", {})
        return bool(section.get("enabled") and section["lora"]["enabled"])

    def save_adapters(self, path: PathLike) -> None:
        """Write a directory that `peft.PeftModel.from_pretrained` loads onto the model.

        Raises:
            NotImplementedError: The backend trains no adapters.
            ValueError: The policy trains none.
        """
        self._backend.require(AdapterSavingWorker, lack="train adapters")
        if not self.has_adapters:
            raise ValueError("save_adapters() needs policy.dtensor_cfg.lora.enabled=True")
        self._group.run_all("save_adapters", path=_absolute(path))

    def _require_optimizer_for(self, optimizer_path: PathLike | None) -> None:
        if optimizer_path is not None and not self._has_optimizer:
            raise ValueError(f"optimizer_path={optimizer_path!r}, and init_optimizer was False")

    # Weights, streamed from worker to engine

    def open_refit(
        self,
        num_receivers: int,
        *,
        is_paired: bool = False,
        transport: str = "shm",
        adapters: str = "merged",
        slices: bool = False,
        **options: object,
    ) -> list[Mapping[str, object]]:
        """Open a sender on each rank with receivers; return each receiver's address to connect to.

        An address is a secret: whoever has it can read the weights.

        Args:
            num_receivers: Ranks of the inference engines.
            is_paired: Whether receiver `i` shares the device of rank `i`, its sender then.
            transport: A name of the entry-point group `rl_refit.transports`.
            adapters: "merged" into the weights, or "alone": `send_weights` then sends the weights
                without them as well, and `send_adapters` nothing else.
            slices: Send from every rank what the receivers consume of its own shards, and gather
                nothing; `transport`, "shm" or "chain", then only invites them.
            options: Further arguments of `rl_refit.RefitSender`, such as `bucket_bytes`, `verify`;
                with `slices` of `rl_refit.resharding.ReshardSender`, such as `delta`; and
                `quantized`, the tensors that are sent in block-FP8.

        Raises:
            ValueError: The transport does not reach receivers on the ranks' own GPUs, or the policy
                has no adapters that can be sent alone.
            NotImplementedError: The backend does not send weights, or adapters alone.
        """
        self._backend.require_sending()
        if adapters != "merged":
            self._backend.require(AdapterSendingWorker, lack="send adapters alone")
            options["adapters"] = adapters
        if slices:
            # All ranks send to all receivers, which get one address.
            is_paired, options["slices"] = False, True
        if is_paired and transport == "collective" and self._is_on_gpu:
            raise ValueError(
                "transport='collective' with is_paired=True: NCCL refuses two ranks on one GPU, "
                "use transport='cuda_ipc'"
            )
        self._routes = RefitRoutes.plan(
            num_receivers, world_size=self._group.world_size, is_paired=is_paired
        )
        addresses = self._group.run_all(
            "open_refit",
            receivers_per_rank=list(self._routes.receivers_per_rank),
            transport=transport,
            **options,
        )
        return self._routes.addresses(addresses)

    def send_weights(
        self, version: int, *, receivers: Sequence[int] | None = None
    ) -> dict[str, float]:
        """Stream the weights to the receivers of `open_refit`, which receive at the same time.

        Args:
            version: Of the weights.
            receivers: Ranks of the receivers that take part. None: all.

        Returns:
            `refit_s`, `refit_bytes`, `refit_gb_per_s`, `refit_slowest_rank`, and the seconds of
            each phase, see `rl_refit.RefitReport`. The phases overlap.

        Raises:
            RefitError: A receiver failed or did not answer in time. Call again, for all of them.
            ResidencyError: The model is not on the device.
            RuntimeError: `open_refit` was not called.
            ValueError: `receivers` of a policy whose ranks each send to their own.
        """
        return self._send("send_weights", version, receivers)

    def send_adapters(
        self, version: int, *, receivers: Sequence[int] | None = None
    ) -> dict[str, float]:
        """Stream the adapters alone to receivers that hold the weights they belong to.

        Args:
            version: Of the weights.
            receivers: See `send_weights`.

        Returns:
            See `send_weights`; `refit_bytes` are of weights and adapters, `refit_bytes_sent` of
            the adapters.

        Raises:
            RefitError: A receiver failed, did not answer in time, or does not hold the weights:
                call `send_weights`.
            ResidencyError: The model is not on the device.
            RuntimeError: `open_refit` was not called.
        """
        return self._send("send_adapters", version, receivers)

    def _send(self, method: str, version: int, receivers: Sequence[int] | None) -> dict[str, float]:
        self.require_ready_to_send()
        if self._routes is None:
            raise RuntimeError(f"{method} needs receivers: call open_refit first")
        # A rank whose receiver fails still takes part in the other ranks' gathers, which may take
        # longer than the usual few seconds of grace: those would kill a healthy group.
        options = {} if receivers is None else {"receivers": list(receivers)}
        if options and sum(map(bool, self._routes.receivers_per_rank)) > 1:
            raise ValueError(
                f"receivers={options['receivers']} of several senders: with is_paired=True every "
                "rank sends to its own receiver, and all take part"
            )
        call = self._group.submit_all(method, version, **options)
        reports = self._group.wait(call, grace_s=self.config["timeout_s"])
        return self._routes.merge_reports(reports)

    def require_ready_to_send(self) -> None:
        """Raise the errors that `send_weights` would raise, before a receiver waits for it.

        Raises:
            NotImplementedError: The backend does not send weights.
            ResidencyError: The model is not on the device.
        """
        self._backend.require_sending()
        self._residency.require("send_weights")

    # Weights, by the documented calls: the driver names each group of tensors

    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[None]]:
        """Make rank 0 join a group with the inference ranks; the futures are not awaited.

        `RayVirtualCluster.get_master_address_and_port` returns an address and a port for it.
        """
        self._backend.require_sending()
        return self._group.start_all("init_collective", ip, port, world_size)

    def prepare_refit_info(self) -> RefitInfo | None:
        """Return `{name: (shape, wire dtype)}` of every tensor that is sent, in order."""
        self._backend.require_sending()
        return self._group.run_all("prepare_refit_info")[0]

    def prepare_info_for_collective(self) -> RefitInfo:
        """Return what `prepare_refit_info` returns; its older name."""
        self._backend.require_sending()
        return self._group.run_all("prepare_info_for_collective")[0]

    def prepare_weights_for_ipc(self, _refit_buffer_size_gb: int | None = None) -> list[list[str]]:
        """Return the names of all tensors, grouped so that each group fits a buffer.

        Args:
            _refit_buffer_size_gb: The buffer in GiB. None: the smallest free memory of any rank.
        """
        self.require_ready_to_send()
        answers = self._group.run_all("prepare_weights_for_ipc")
        return group_for_ipc(answers, limit_gib=_refit_buffer_size_gb)

    def get_weights_ipc_handles(self, keys: list[str]) -> DeviceHandles:
        """Return `{device id: {name: handle}}` of one group; earlier handles become invalid."""
        self.require_ready_to_send()
        answers = self._group.run_all("get_weights_ipc_handles", keys)
        return {device: handles for answer in answers for device, handles in answer.items()}

    def broadcast_weights_for_collective(self) -> list[ray.ObjectRef[None]]:
        """Broadcast every tensor, in order; the futures are not awaited."""
        self.require_ready_to_send()
        return self._group.start_all("broadcast_weights_for_collective")

    # Information and the end

    @property
    def _is_on_gpu(self) -> bool:
        return any(info["local_device_id"] is not None for info in self.get_gpu_info())

    def get_gpu_info(self) -> list[GpuInfo]:
        """Return rank, device and memory figures of every rank."""
        return self._group.run_all("get_gpu_info")

    def peak_memory_gib(self) -> float:
        """Return the most memory in GiB that a rank has had allocated since it started.

        It is that of the rank's device; of its process, where it has no device.
        """
        return max(self._group.peak_memory()) / 2**30

    def start_gpu_profiling(self) -> None:
        """Open a profiling range on every rank."""
        self._group.run_all("start_gpu_profiling")

    def stop_gpu_profiling(self) -> None:
        """Close the profiling range on every rank."""
        self._group.run_all("stop_gpu_profiling")

    def shutdown(self) -> bool:
        """End every process of the policy; True if all of them ended in order.

        It waits for a save in the background. Idempotent. The cluster stays up.

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

    # Kept here, as the interpreter clears the names of modules before the last objects.
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __del__(self) -> None:
        """Shut down, unless the interpreter exits, which ends the processes by itself."""
        if not self._is_finalizing():
            self.shutdown()

    @property
    def _group(self) -> RayWorkerGroup:
        assert self.worker_group is not None, "the constructor has started the ranks"
        return self.worker_group


def _train_output(
    results: Sequence[WorkerTrainOutputSpec], data: BatchedDataDict, plans: Sequence[ShardPlan]
) -> TrainOutputSpec:
    output = merge_train_results(results)
    if all("rows" in result for result in results):
        rows = [result["rows"] for result in results if "rows" in result]
        order = [row for plan in plans for row in plan.rows]
        output["rows"] = gather_scores(rows, width=data["input_ids"].shape[1], order=order)
    return output


def with_absolute_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved config with absolute paths, as ranks run in another working directory."""
    paths = {
        "profile_dir": os.path.abspath(config["profile_dir"]),
        "model_name": absolute_if_directory(config["model_name"]),
    }
    lora = config["dtensor_cfg"]["lora"]
    if lora.get("adapter_path"):
        lora = lora | {"adapter_path": os.path.abspath(lora["adapter_path"])}
    return config | paths | {"dtensor_cfg": config["dtensor_cfg"] | {"lora": lora}}


def _given(**arguments: object) -> dict[str, Any]:
    """Return the arguments that are set: a worker of another backend may not have the others."""
    return {name: value for name, value in arguments.items() if value is not None}


def _absolute(path: PathLike | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def _existing(name: str, path: PathLike | None) -> str | None:
    """Return the absolute `path`, or raise a `ValueError` that names it if it does not exist."""
    if path is not None and not os.path.exists(path):
        raise ValueError(f"{name}={os.fspath(path)!r} does not exist")
    return _absolute(path)
