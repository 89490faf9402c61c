"""A weight-transfer engine for vLLM: `LLM(..., weight_transfer_config={"backend": "rl_refit"})`.

vLLM imports `register` as a plug-in. Each of its workers is then a receiver:

    llm.init_weight_transfer_engine({"init_info": {"address": sender.address}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": 3}})  # while sender.send(3) runs
    llm.finish_weight_update("3")
    sender.commit(3)
    llm.collective_rpc(require_ready)  # [3, ...], one per worker

Weights go through vLLM's own layerwise reload, never straight into live parameters. Run with vLLM
0.32.
"""

# vLLM is no dependency of the checks.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rl_refit.errors import RefitError
from rl_refit.receiver import RefitReceiver

BACKEND = "rl_refit"


@dataclass
class RefitInitInfo(WeightTransferInitInfo):
    """Where a worker finds its sender.

    Attributes:
        address: The sender's `address`, or one for each worker of this engine, by worker rank.
        rank_offset: Added to the worker's rank over all data-parallel replicas of this engine,
            so that the receivers of one sender have distinct ranks.
        timeout_s: The most seconds that a refit may wait.
    """

    address: dict[str, Any] | list[dict[str, Any]]
    rank_offset: int = 0
    timeout_s: float = 300.0


@dataclass
class RefitUpdateInfo(WeightTransferUpdateInfo):
    """Which version is sent."""

    version: int


class RefitWeightTransferEngine(WeightTransferEngine[RefitInitInfo, RefitUpdateInfo]):
    """One worker's receiver.

    Attributes:
        receiver: Knows which version is committed; None before `init_transfer_engine`.
        report: Of the last refit, as `RefitReport.as_metrics` gives it.
    """

    init_info_cls = RefitInitInfo
    update_info_cls = RefitUpdateInfo

    receiver: RefitReceiver | None = None
    report: dict[str, float] | None = None
    _reloading = False
    _layers: Sequence[Any] = ()

    def init_transfer_engine(self, init_info: RefitInitInfo) -> None:
        """Take the sender's address. The connection is made when it first sends.

        Raises:
            ValueError: The sender wants live weights compared by name, which vLLM does not have.
        """
        self.shutdown()
        layout = self.parallel_config
        rank = layout.data_parallel_index * layout.world_size + layout.rank
        address = init_info.address
        if isinstance(address, list):
            address = address[rank]
        if address["verify"] == "weights":
            raise ValueError(
                'verify="weights" compares live weights by name, and vLLM fuses (qkv_proj, '
                'gate_up_proj), shards and repacks them: take verify="digest", and compare '
                "log-probabilities"
            )
        self.receiver = RefitReceiver(
            address,
            init_info.rank_offset + rank,
            device=self.device,
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Listen to the sender; the version is not known, and the live weights are still good."""
        if self.receiver is not None:
            self.receiver.catch_up()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a version and load it."""
        # The inherited one synchronises an accelerator, and a CPU has none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RefitUpdateInfo) -> None:
        """Begin a refit to the version and load all of it.

        Raises:
            StaleVersionError: It is not newer than the committed one; nothing changes.
            RefitError: The refit failed, or the sender has not sent all that the model is made of.
                The next full one heals the worker.
        """
        receiver = self._require_receiver()
        receiver.begin(update_info.version)
        try:
            report = receiver.receive(
                update_info.version, self._load, load_keeps=False, check=self._complete
            )
        except BaseException:
            self.abandon()
            raise
        self.report = report.as_metrics()

    def finish_weight_update(self) -> None:
        """Let vLLM process what was loaded with `load`; what a sender sent is processed already.

        Raises:
            RefitError: What came is not all that the model is made of.
        """
        if self._reloading:
            try:
                self._complete()
            except BaseException:
                self.abandon()
                raise

    def abandon(self) -> None:
        """Give up what is being loaded, where something is: incomplete layers keep what they had.

        The model is then made of old weights and new, all of them real tensors, which can be put to
        sleep and loaded anew. vLLM alone goes on with a layer that is being loaded, and would take
        the old tensors for half of those to come.
        """
        if not self._reloading:
            return
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        self._reloading = False

    def shutdown(self) -> None:
        """Close the connection to the sender."""
        if self.receiver is not None:
            self.receiver.close()

    def _require_receiver(self) -> RefitReceiver:
        if self.receiver is None:
            raise RefitError("init_weight_transfer_engine was not called")
        return self.receiver

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Hand one bucket's tensors to vLLM's loader."""
        if not self._reloading:
            if self.device.type == "cpu":
                _pack_experts_anew(self.model)
            initialize_layerwise_reload(self.model)
            self._layers = [get_layerwise_info(layer) for layer in self.model.modules()]
            self._reloading = True
        self.model.load_weights(iter(tensors))
        _own_what_is_kept(self._layers, tensors)

    def _complete(self) -> None:
        """Let vLLM process what has come; raise if that is not all."""
        self._require_all()
        tied = _tied_layers(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in tied:
            layer.quant_method.process_weights_after_loading(layer)
        if self.device.type == "cuda":
            # What fails on the device fails here, before the sender hears that all is loaded.
            torch.cuda.current_stream(self.device).synchronize()
        self._reloading = False

    def _require_all(self) -> None:
        """Raise unless each parameter has got all its parts.

        vLLM itself takes a layer that has got some for one with padding, and fills it up with what
        the memory holds; one that has got none keeps its old weights.
        """
        if self.model_config.quantization is not None:
            return  # vLLM makes the scales itself, or has them from elsewhere
        # A model of images and text may say it of the whole alone.
        configs = (self.model_config.hf_config, self.model_config.hf_text_config)
        ties = any(getattr(config, "tie_word_embeddings", False) for config in configs)
        missing = _missing_parts(self.model, without=ParallelLMHead if ties else ())
        if missing:
            told = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            count = f"{len(missing)} of vLLM's parameters"
            raise RefitError(f"the sender's tensors leave out parts of {count}: {told}")


def _own_what_is_kept(layers: Sequence[Any], tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Copy what the loader keeps until a layer is complete, as the buffer will be filled again.

    Attention layers and layers with padding keep their tensors to the very end, though all of
    them have come.

    Args:
        layers: What vLLM notes about each layer.
        tensors: A bucket's.
    """
    lent = {tensor.untyped_storage().data_ptr() for _, tensor in tensors}
    for layer in layers:
        for _, call in layer.loaded_weights:
            for name, value in call.arguments.items():
                is_tensor = isinstance(value, torch.Tensor) and value.device.type != "meta"
                if is_tensor and value.untyped_storage().data_ptr() in lent:
                    call.arguments[name] = value.clone()


def _missing_parts(model: torch.nn.Module, *, without: type | tuple[()]) -> list[str]:
    """Return the parameters that lack tensors, by vLLM's name, with what they lack.

    Looked at are the layers that vLLM has not completed by the number of elements. Attention is
    left out, which has scales of its own alone, and so are layers of the class `without`.
    """
    missing: list[str] = []
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer) or isinstance(layer, without):
            continue
        for name, _ in layer.named_parameters(recurse=False):
            loads = [call.arguments for loaded, call in info.loaded_weights if loaded == name]
            lacks = _missing_shards(layer, loads) if loads else ["all"]
            if lacks:
                missing.append(f"{prefix}.{name} ({', '.join(lacks)})")
    return missing


def _missing_shards(layer: Any, loads: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which of the tensors that vLLM puts into one parameter have not come."""
    if "expert_id" in loads[0]:
        shards = {load["shard_id"] for load in loads}
        if shards <= {"w1", "w3"} and layer.moe_config.is_act_and_mul:
            shards = {"w1", "w3"}
        if any(load["loaded_weight"].dim() == 3 for load in loads):
            wanted = {(shard,) for shard in shards}
            found = {(load["shard_id"],) for load in loads}
        else:
            count = layer.moe_config.num_logical_experts
            wanted = {(shard, f"expert {index}") for shard in shards for index in range(count)}
            found = {(load["shard_id"], f"expert {load['expert_id']}") for load in loads}
        return sorted(" of ".join(part) for part in wanted - found)
    found = {load.get("loaded_shard_id") for load in loads}
    if None in found or not isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear):
        return []
    parts = {part for shard in found for part in (shard if isinstance(shard, tuple) else (shard,))}
    is_qkv = isinstance(layer, QKVParallelLinear)
    wanted = ("q", "k", "v") if is_qkv else range(len(layer.output_sizes))
    return [f"shard {part}" for part in wanted if part not in parts]


def _tied_layers(model: torch.nn.Module) -> list[Any]:
    """Return the output layers that got no weight of their own in this reload.

    What they have is the embedding's, which has come under its own name. On the CPU vLLM multiplies
    with a copy in a layout of the kernel's, which a reload makes anew for the embedding alone.
    """
    return [
        layer
        for layer in model.modules()
        if isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod)
        and get_layerwise_info(layer).can_load()
        and not get_layerwise_info(layer).load_numel
    ]


def _pack_experts_anew(model: torch.nn.Module) -> None:
    """Let experts on the CPU be processed in every reload as when they were first loaded.

    vLLM puts their weights into the layout of the CPU's kernel only while there is no kernel yet,
    and in a reload would hand that kernel the weights as they came.
    """
    # Of no use to a GPU, whose workers need not be able to import it.
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if isinstance(getattr(kernel, "fused_experts", None), CPUUnquantizedExperts):
            method.process_weights_after_loading = partial(_process_without_kernel, method)


def _process_without_kernel(method: Any, layer: torch.nn.Module) -> None:
    method.moe_kernel = None
    type(method).process_weights_after_loading(method, layer)


def register() -> None:
    """Make the engine known to vLLM; called by it in every process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, RefitWeightTransferEngine)


def require_ready(worker: Any) -> int:
    """Return a worker's committed version: `llm.collective_rpc(require_ready)`.

    Raises:
        PoisonedError: Its last refit failed.
        RefitInProgress: A refit is not committed yet.
    """
    return _receiver_of(worker).require_ready()


def commit(worker: Any, version: int) -> int:
    """Commit a worker's loaded version: `llm.collective_rpc(commit, args=(3,))`."""
    receiver = _receiver_of(worker)
    receiver.commit(version)
    return receiver.require_ready()


def load(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load tensors that came another way, between `start_` and `finish_weight_update`.

    Raises:
        RefitError: No update is open, so that nothing would end what is loaded.
    """
    if not worker._weight_update_active:
        raise RefitError("load was called outside start_weight_update and finish_weight_update")
    engine = worker.weight_transfer_engine
    with set_current_vllm_config(worker.vllm_config):
        try:
            engine._load(tensors)
        except BaseException:
            engine.abandon()
            raise


def abandon(worker: Any) -> None:
    """Give up what is being loaded, where something is: see `RefitWeightTransferEngine.abandon`."""
    if worker.weight_transfer_engine is not None:
        with set_current_vllm_config(worker.vllm_config):
            worker.weight_transfer_engine.abandon()


def last_report(worker: Any) -> dict[str, float] | None:
    """Return the metrics of a worker's last refit."""
    return worker.weight_transfer_engine.report


def init_info(address: dict[str, Any], *, rank_offset: int = 0) -> dict[str, Any]:
    """Return the argument of `LLM.init_weight_transfer_engine`."""
    return {"init_info": asdict(RefitInitInfo(address, rank_offset))}


def _receiver_of(worker: Any) -> RefitReceiver:
    return worker.weight_transfer_engine._require_receiver()
