"""The training engine: one rank's model on FSDP2 and DTensor, and the optimizer over it."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from rl_interfaces import ResidencyState
from rl_interfaces.backend.checkpoint.checkpointer import FileWriters, TensorFormat
from rl_interfaces.backend.checkpoint.hf_files import saved_dtype, write_config
from rl_interfaces.backend.checkpoint.optimizer_state import TrainState
from rl_interfaces.backend.components import ReferenceCopy, move_optimizer_state
from rl_interfaces.backend.engine import EngineInfo, HfExport, Scored, module_mode
from rl_interfaces.backend.fake import computes_values
from rl_interfaces.backend.host_memory import OffloadBuffers
from rl_interfaces.backend.torch_optim import build_scheduler
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from rl_dtensor_worker.config import EngineConfig, load_model_config
from rl_dtensor_worker.forward import (
    Decoding,
    Forward,
    Output,
    ValueForward,
    forward_of_head,
)
from rl_dtensor_worker.layout import ParallelContext, check_same_media
from rl_dtensor_worker.model.build import build_model, empty_model
from rl_dtensor_worker.model.dropout import disable_dropout, dropout_restored
from rl_dtensor_worker.model.lora import (
    adapters_disabled,
    adapters_of,
    check_adapter_config,
    save_adapter_config,
)
from rl_dtensor_worker.model.rotary import longest_sequence
from rl_dtensor_worker.optim import (
    DTensorOptimizer,
    LossScaler,
    build_optimizer,
)
from rl_dtensor_worker.parallel.fsdp import (
    abandon_pass,
    is_sharded,
    local_tensor,
    reshard_after_backward,
    reshard_model,
    unshard_fsdp2_model,
)
from rl_dtensor_worker.parallel.mesh import Meshes, choose_sharding
from rl_dtensor_worker.parallel.plans import refusing_shards
from rl_dtensor_worker.parallel.styles import TensorParallel
from rl_dtensor_worker.preflight import plan_layout
from rl_dtensor_worker.startup import (
    check_causality,
    check_gradients,
    check_layout,
    check_modes,
    keep_apart,
)
from rl_dtensor_worker.weights import (
    AdapterWeights,
    ModelWeights,
    persistent_state,
    trained_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from rl_interfaces.backend.engine import LossOfOutput, ScoreFunction
    from rl_interfaces.backend.generation import Decoder
    from rl_interfaces.backend.runtime import RankEnvironment
    from rl_interfaces.backend.steps import MicroBatch, Step
    from transformers import PreTrainedTokenizerBase

_CPU = torch.device("cpu")
_TOKEN_CALLS = ("get_logprobs", "get_reference_policy_logprobs", "get_topk_logits", "generate")
# Where each state has the model, and the optimizer state with the gradients.
_MODEL_ON_DEVICE = (ResidencyState.TRAINING, ResidencyState.INFERENCE, ResidencyState.REFITTING)


class DTensorEngine:
    """One rank of any transformers model: a `rl_interfaces.backend.engine.Engine`.

    FSDP2 shards the parameters, replicated as often as the config says. Tensor and sequence
    parallelism shard each layer, context parallelism shards each sequence.

    Args:
        config: A resolved policy config.
        environment: This rank; the process group exists already.
        tokenizer: The model's tokenizer.
        init_optimizer: Whether the engine trains.

    Raises:
        ValueError: The config, the parallel layout and the model do not fit each other.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        environment: RankEnvironment,
        tokenizer: PreTrainedTokenizerBase,
        init_optimizer: bool,
    ) -> None:
        self.config = EngineConfig.from_policy_config(
            config, world_size=environment.world_size, init_optimizer=init_optimizer
        )
        self._device = environment.device
        self._model_buffers = OffloadBuffers()
        self._optimizer_buffers = OffloadBuffers()
        with ExitStack() as leaving:
            self._loaded_config = load_model_config(self.config)
            self._saved_dtype = saved_dtype(self.config.model_name, self._loaded_config)
            model = empty_model(self.config)
            self._sharding = choose_sharding(
                self.config.layout,
                replicas=self.config.replicas,
                num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            )
            self.meshes = Meshes.of(
                self.config.layout,
                replicas=self._sharding.replicas,
                device_type=self._device.type,
            )
            leaving.callback(self.meshes.leave)
            self.parallel = self._parallel_context()
            self.model = build_model(
                model,
                self.config,
                meshes=self.meshes,
                tensor_parallel=self.parallel.tensor_parallel,
                is_small=self._sharding.is_small,
                device=self._device,
            )
            self.optimizer = self._build_optimizer()
            self.forward = self._build_forward(cast("int | None", tokenizer.pad_token_id))
            self._decoding = self._build_decoding()
            self.info = self._describe()
            self.checkpoint = self._checkpoint_format()
            self.model.train(init_optimizer)
            self._leaving = leaving.pop_all()

    plan_layout = staticmethod(plan_layout)

    # Forward and backward

    def run(self, step: Step, score: ScoreFunction) -> list[Scored]:
        """See `Engine.run`."""
        return [score(batch, self._output(batch)) for batch in step.micro_batches(self._device)]

    def run_backward(
        self, step: Step, loss: LossOfOutput, *, accumulate: bool = False
    ) -> list[Scored]:
        """See `Engine.run_backward`; each backward pass reduces and adds its gradients."""
        assert self.optimizer is not None, "the residency state has an optimizer"
        found: list[Scored] = []
        last = len(step.spans) - 1
        for index, batch in enumerate(step.micro_batches(self._device)):
            if self._sharding.is_small and is_sharded(self.model):
                # The weights are the same in all micro-batches of a step: gathered once.
                reshard_after_backward(self.model, enabled=index == last)
            value, scored = loss(batch, self._output(batch))
            # Each micro-batch's graph is freed before the next one's forward.
            with self.parallel.mixing.recomputing():
                (value * self.optimizer.scaler.scale).backward()
            found.append(scored)
        return found

    @contextmanager
    def mode(self, *, training: bool) -> Generator[None, None, None]:
        """See `Engine.mode`; on exit the parameters are sharded."""
        with module_mode([self.model], training=training):
            try:
                yield
            except BaseException:
                abandon_pass(self.model)
                raise
            finally:
                reshard_model(self.model)
                if self.parallel.tensor_parallel is not None:
                    self.parallel.tensor_parallel.forget_input()

    @contextmanager
    def decoders(self) -> Generator[Callable[[Mapping[str, object]], Decoder], None, None]:
        """See `Engine.decoders`.

        Parameters are unsharded inside, so that ranks may generate different numbers of tokens.
        """
        assert self._decoding is not None, "EngineInfo.lacks has refused the call"
        with unshard_fsdp2_model(self.model), self.parallel.unsharded_sequences():
            yield self._decoding.open

    def _output(self, batch: MicroBatch) -> Output:
        return Output(forward=self.forward, micro_batch=batch)

    # Residency

    def place(self, state: ResidencyState) -> None:
        """See `Engine.place`; with FSDP's CPU offload, parameters and optimizer state stay."""
        is_training = state is ResidencyState.TRAINING
        model_device = self._device if state in _MODEL_ON_DEVICE else _CPU
        if self.optimizer is not None:
            optimizer = self.optimizer.state.optimizer
            if not is_training:
                optimizer.zero_grad(set_to_none=True)
            on_device = is_training and not self.config.cpu_offload
            move_optimizer_state(
                optimizer, self._device if on_device else _CPU, self._optimizer_buffers
            )
        if self.config.cpu_offload:
            move_buffers(self.model, model_device)
        else:
            move_model(self.model, model_device, self._model_buffers)
        if state is not ResidencyState.REFITTING:
            self.model.train(is_training)
        if not is_training:
            free_cached_memory(self._device)

    # Weights

    def local_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Engine.local_parameters`; the key of a shard ends in its mesh coordinates."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield f"{name}{_shard_suffix(parameter)}", local_tensor(parameter)

    def keep_reference(self) -> Callable[[], AbstractContextManager[None]] | None:
        """See `Engine.keep_reference`.

        With new adapters it is the model without them, and takes no copy. Adapters that were loaded
        are copied, as the model starts with them.
        """
        adapters = self.config.adapters
        if adapters is not None and self.config.head != "language_model":
            return None
        if adapters is not None and adapters.adapter_path is None:
            return lambda: adapters_disabled(self.model)
        if adapters is None:
            reference = ReferenceCopy(self._local_state, dtypes=self._dtypes_in_forward())
        else:
            # What is frozen is the same in the reference.
            reference = ReferenceCopy(self._local_adapters)

        @contextmanager
        def swapped_in() -> Generator[None, None, None]:
            # Parameters that a forward has left unsharded would outlast the swap.
            reshard_model(self.model)
            with reference.swapped_in():
                try:
                    yield
                finally:
                    reshard_model(self.model)

        return swapped_in

    def weight_source(self, dtype: torch.dtype) -> ModelWeights:
        """See `Engine.weight_source`; adapters are merged."""
        return ModelWeights(
            self.model, wire_dtype=dtype, group=self.meshes.shards, device=self._device
        )

    def adapter_sources(self, dtype: torch.dtype) -> tuple[ModelWeights, AdapterWeights]:
        """Return the weights without adapters, and the adapters, both in `dtype`.

        Raises:
            ValueError: There are no adapters, or an engine could not apply them apart.
        """
        base = ModelWeights(
            self.model,
            wire_dtype=dtype,
            group=self.meshes.shards,
            device=self._device,
            merges=False,
        )
        adapters = AdapterWeights(
            base, self.model, wire_dtype=dtype, group=self.meshes.shards, device=self._device
        )
        return base, adapters

    def export(self) -> HfExport:
        """See `Engine.export`; names are those of the checkpoint that was loaded."""
        device = next(self.model.parameters()).device
        source = ModelWeights(
            self.model, wire_dtype=self._saved_dtype, group=self.meshes.shards, device=device
        )
        return HfExport(
            write_config=self._write_config,
            source=source,
            groups=source.converted_together(),
        )

    def close(self) -> None:
        """See `Engine.close`."""
        self._leaving.close()

    # Construction

    def _parallel_context(self) -> ParallelContext:
        layout, tp, cp = self.config.layout, None, None
        if layout.tensor_parallel > 1:
            tp = TensorParallel(self.meshes.tp, sequence_parallel=self.config.sequence_parallel)
        if layout.context_parallel > 1:
            cp = self.meshes.data["cp"].get_group()
        return ParallelContext(
            tensor_parallel=tp, context_group=cp, shares_prefixes=self.config.share_prefixes
        )

    def _build_optimizer(self) -> DTensorOptimizer | None:
        if self.config.optimizer is None:
            return None
        optimizer = build_optimizer(self.model, self.config.optimizer)
        scaler = LossScaler(self.config.compute_dtype)
        state = TrainState(
            optimizer=optimizer,
            scheduler=build_scheduler(optimizer, self.config.scheduler),
            scaler=scaler,
        )
        sums = self.meshes.replicas["dp_replicate"].size() > 1 and not is_sharded(self.model)
        return DTensorOptimizer(
            self.model,
            state,
            scaler=scaler,
            max_grad_norm=self.config.max_grad_norm,
            group=self.meshes.replicas["dp_replicate"].get_group() if sums else None,
        )

    def _build_forward(self, pad_token_id: int | None) -> Forward | ValueForward:
        # Both probe the model with forward passes, which leave no trace.
        devices = [self._device] if self._device.type == "cuda" else []
        with (
            refusing_shards(self.model, self.parallel.tensor_parallel),
            self.mode(training=False),
            torch.no_grad(),
            torch.random.fork_rng(devices=devices),
        ):
            forward = forward_of_head(
                self.model, self.config, parallel=self.parallel, pad_token_id=pad_token_id
            )
            if computes_values():
                self._check_model(forward)
            packed = self.config.planned_by == "sequence_packing"
            features = self.parallel.features(packed=packed)
            score = forward.logprobs if isinstance(forward, Forward) else forward.values
            options = {"compute_dtype": self.config.compute_dtype, "device": self._device}

            def check() -> None:
                for feature in features:
                    check_layout(
                        self.model, score, parallel=self.parallel, feature=feature, **options
                    )
                if self.optimizer is not None and self.parallel.shards_sequences:
                    check_gradients(self.model, score, parallel=self.parallel, **options)

            if features:
                keep_apart(self.model, check, self.parallel, self.config.compute_dtype)
        return forward

    def _check_model(self, forward: Forward | ValueForward) -> None:
        """Raise if the model computes what its use would not expect. Collective."""
        drops = self.config.adapters is not None and self.config.adapters.lora_dropout > 0
        if self.optimizer is not None and not (self.config.model_dropout or drops):
            with self.parallel.unsharded_sequences():
                check_modes(
                    self.model,
                    lambda training: self.mode(training=training),
                    compute_dtype=self.config.compute_dtype,
                )
        if isinstance(forward, Forward):
            check_causality(
                self.model,
                forward.logprobs,
                parallel=self.parallel,
                compute_dtype=self.config.compute_dtype,
                device=self._device,
            )

    def _build_decoding(self) -> Decoding | None:
        if not isinstance(self.forward, Forward):
            return None
        return Decoding(self.forward, compute_dtype=self.config.compute_dtype)

    def _describe(self) -> EngineInfo:
        head, text_config = self.config.head, self.model.config.get_text_config()
        lacks: dict[str, str] = {"score": f"it needs policy.head='reward' or 'value', got {head!r}"}
        if head != "language_model":
            reason = f"it needs policy.head='language_model', got {head!r}"
            lacks = dict.fromkeys(_TOKEN_CALLS, reason)
            lacks["logprobs"] = (
                f"policy.head={head!r} gives scores: use a loss whose input_type is "
                "LossInput.LOGITS, which gets them in place of logits"
            )
        data_group = self.meshes.data["dp"].get_group()
        return EngineInfo(
            device=self._device,
            data_group=data_group,
            vocab_size=text_config.vocab_size,
            wire_dtype=self.config.compute_dtype,
            max_sequence_length=longest_sequence(self.model),
            packing=self.parallel.concatenation(),
            lacks=lacks,
            check_steps=partial(check_same_media, group=data_group, device=self._device),
        )

    def _checkpoint_format(self) -> TensorFormat:
        has_adapters = self.config.adapters is not None

        def files() -> FileWriters:
            text = self.model.config.to_json_string()
            writers: FileWriters = {"config.json": lambda path: path.write_text(text)}
            if has_adapters:
                writers["adapter_config.json"] = lambda path: save_adapter_config(
                    self.model, path.parent
                )
            return writers

        def check(path: Path) -> None:
            check_adapter_config(self.model, path, what="weights_path")

        return TensorFormat(
            model=self.model,
            training=None if self.optimizer is None else self.optimizer.state,
            weights=lambda: trained_state(self.model),
            files=files,
            check=check if has_adapters else None,
        )

    def _local_state(self) -> list[torch.Tensor]:
        return [local_tensor(tensor) for tensor in persistent_state(self.model).values()]

    def _local_adapters(self) -> list[torch.Tensor]:
        trained = adapters_of(dict(self.model.named_parameters()))
        return [local_tensor(tensor) for tensor in trained.values()]

    def _dtypes_in_forward(self) -> list[torch.dtype]:
        """Return what each tensor of `_local_state` is cast to in a forward.

        FSDP casts the parameters, so that one that was rounded before gives the same bits.
        """
        return [
            self.config.compute_dtype
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            else tensor.dtype
            for tensor in persistent_state(self.model).values()
        ]

    def _write_config(self, directory: Path) -> None:
        loaded = copy.deepcopy(self._loaded_config)
        # The rates that this worker has set to 0 belong to the model all the same.
        rates = {} if self.config.model_dropout else disable_dropout(loaded, head=self.config.head)
        with dropout_restored(self.model.config, rates):
            write_config(self.model.config, directory, dtype=self._saved_dtype, model=self.model)


def move_model(model: nn.Module, device: torch.device, buffers: OffloadBuffers) -> None:
    """Move parameters and buffers to `device`, and back again from the same host memory."""
    # So that the parameters which are registered are the shards.
    reshard_model(model)
    tensors = [*model.parameters(), *model.buffers()]
    if all(each.device == device for each in tensors):
        return
    moved = {
        id(tensor): copy
        for tensor, copy in zip(tensors, buffers.moved(tensors, device), strict=True)
    }
    # As `nn.Module.to`, by which FSDP notices that its shards have moved.
    model._apply(lambda tensor: moved[id(tensor)])


def move_buffers(model: nn.Module, device: str | torch.device) -> nn.Module:
    """Move the buffers, which FSDP does not manage, and return the model."""
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return model


def free_cached_memory(device: torch.device) -> None:
    """Return the allocator's cached memory to the GPU; do nothing on the CPU.

    A call of the worker leaves no tensor in a cycle, so that there is nothing to collect first: a
    full collection takes 0.3 s, more than all else in a step of a small model.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _shard_suffix(parameter: torch.Tensor) -> str:
    """Return the coordinates along the axes that shard a parameter. Example: `[1, 0]`."""
    if not isinstance(parameter, DTensor):
        return ""
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    sharded = [
        place
        for place, placement in zip(coordinate, parameter.placements, strict=True)
        if not isinstance(placement, Replicate)
    ]
    return str(sharded) if sharded else ""
