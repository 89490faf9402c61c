"""Build the pretrained model: sharded, on the device, each rank reading its own slices."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rl_interfaces.backend.checkpoint.hf_files import (
    SafetensorsFiles,
    auto_class,
    check_finite,
    find_checkpoint,
    take,
)
from rl_interfaces.backend.runtime import failing_together, first_rank_first
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from rl_dtensor_worker.attention import has_soft_cap, use_soft_cap
from rl_dtensor_worker.config import load_model_config
from rl_dtensor_worker.model.convert import Conversion, plan_conversions
from rl_dtensor_worker.model.dropout import disable_dropout, keep_routers_in_eval_mode
from rl_dtensor_worker.model.lora import (
    fill_adapters,
    inject_adapters,
    without_adapters,
)
from rl_dtensor_worker.model.quantized import quantized_files, take_quantization
from rl_dtensor_worker.model.recompute import enable_checkpointing
from rl_dtensor_worker.model.rotary import fix_rotary_length
from rl_dtensor_worker.parallel.fsdp import local_tensor, owned_indices, shard_model
from rl_dtensor_worker.parallel.plans import apply_plan, check_plan, plan_of
from rl_dtensor_worker.parallel.structure import decoder_layers
from rl_dtensor_worker.preflight import check_causal, check_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from rl_dtensor_worker.config import EngineConfig
    from rl_dtensor_worker.parallel.mesh import Meshes
    from rl_dtensor_worker.parallel.styles import TensorParallel


logger = logging.getLogger(__name__)

# Names of the score layer of transformers' reward and value models.
_SCORE_LAYERS = ("score", "classifier")
_ATTENTION_KEY = "policy.dtensor_cfg.attn_implementation"
# Attributes of transformers' model classes.
_ATTENTION_FLAGS = {
    "sdpa": "_supports_sdpa",
    "flex_attention": "_supports_flex_attn",
    "flash": "_supports_flash_attn",
}
# Decays and masks that a module multiplies with its activations, by model type. transformers builds
# them in the dtype of the model, and here that is the dtype of the optimizer's weights.
_ACTIVATION_BUFFERS = {
    "minimax": frozenset(["slope_rate", "query_decay", "key_decay", "diagonal_decay"]),
    "openai-gpt": frozenset(["bias"]),
}


def empty_model(
    config: EngineConfig, model_config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """Return the unsharded model on the meta device.

    Trained parameters are in float32, frozen ones in the compute dtype.

    Args:
        config: The worker's config.
        model_config: The model's transformers config, which is changed; None: that of its files.

    Raises:
        ValueError: The model cannot be read, or the parallel sizes do not fit it.
    """
    model_config = load_model_config(config) if model_config is None else model_config
    check_causal(model_config, config)
    check_attention(model_config, config)
    take_quantization(model_config, config.model_name)
    if not config.model_dropout:
        disable_dropout(model_config, head=config.head)
    check_sizes(
        model_config,
        tensor_parallel_size=config.layout.tensor_parallel,
        has_custom_plan=config.custom_parallel_plan is not None,
    )
    dtype = torch.float32 if config.adapters is None else config.compute_dtype
    chosen = _library_attention(model_config, config)
    options = {} if chosen is None else {"attn_implementation": chosen}
    try:
        with torch.device("meta"):
            model = auto_class(config.head, model_config).from_config(
                model_config, dtype=dtype, trust_remote_code=config.trust_remote_code, **options
            )
    except ImportError as error:
        # The kernels of an attention are packages of their own.
        if chosen is None:
            raise
        raise ValueError(f"{_ATTENTION_KEY}={chosen!r} is not available: {error}") from error
    if chosen is None:
        use_soft_cap(model)
    if not config.model_dropout:
        keep_routers_in_eval_mode(model)
    return model


def _library_attention(model_config: PreTrainedConfig, config: EngineConfig) -> str | None:
    """Return the attention that transformers is asked for; None for its default."""
    chosen = config.attn_implementation
    # Of models whose scores are capped the class may lack it; `use_soft_cap` has one that caps.
    return None if chosen == "sdpa" and has_soft_cap(model_config) else chosen


def check_modules(config: EngineConfig) -> None:
    """Raise unless adapters and tensor parallelism fit the modules of the model.

    Builds the model on the meta device; no file of weights is read.

    Raises:
        ValueError: An entry of `target_modules` matches no layer, or the model has no usable plan.
    """
    # Kernels of the attention need to be installed only where the ranks run.
    model = empty_model(replace(config, attn_implementation=None))
    _add_adapters(model, config)
    size = config.layout.tensor_parallel
    if size > 1:
        plan = plan_of(model, custom=config.custom_parallel_plan, size=size)
        check_plan(model, plan, sequence_parallel=config.sequence_parallel)


def _add_adapters(model: PreTrainedModel, config: EngineConfig) -> None:
    if config.adapters is None:
        return
    has_value_layer = config.head != "language_model"
    inject_adapters(
        model,
        config.adapters,
        model_name=config.model_name,
        head=config.head,
        value_layer=value_layer_name(model) if has_value_layer else None,
    )


def check_attention(model_config: PreTrainedConfig, config: EngineConfig) -> None:
    """Raise unless the model's class supports `attn_implementation`.

    Raises:
        ValueError: It does not; the message names key and class.
    """
    chosen = _library_attention(model_config, config)
    mapping = auto_class(config.head, model_config)._model_mapping
    # The class of a remote model is not known before its code is loaded.
    if chosen is None or type(model_config) not in mapping:
        return
    model_class = mapping[type(model_config)]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    flag = _ATTENTION_FLAGS.get("flash" if chosen.startswith("flash") else chosen)
    if flag is not None and not getattr(model_class, flag, False):
        supported = [name for name, each in _ATTENTION_FLAGS.items() if getattr(model_class, each)]
        raise ValueError(
            f"{_ATTENTION_KEY}={chosen!r} is not supported by {model_class.__name__}, which has "
            f"{['eager', *supported]}"
        )


def build_model(
    model: PreTrainedModel,
    config: EngineConfig,
    *,
    meshes: Meshes,
    tensor_parallel: TensorParallel | None,
    is_small: bool,
    device: torch.device,
) -> PreTrainedModel:
    """Return the pretrained model, sharded over `meshes` and in eval mode.

    Each rank reads its own shards from the checkpoint.

    Args:
        model: The `empty_model` of `config`, which is sharded and filled in place.
        config: The worker's config.
        meshes: Of all ranks.
        tensor_parallel: The ranks that shard each layer; None without tensor parallelism.
        is_small: See `ShardingChoice.is_small`.
        device: Where the shards are.

    Raises:
        ValueError: The checkpoint does not fit the model.
    """
    loader = ModelLoader(model, config)
    _add_adapters(model, config)
    if config.activation_checkpointing:
        enable_checkpointing(model)
    # Tensor parallelism first: FSDP shards the local shards, and wraps what adapters have added.
    if tensor_parallel is not None:
        plan = plan_of(model, custom=config.custom_parallel_plan, size=tensor_parallel.size)
        apply_plan(model, plan, tensor_parallel)
    if needs_fsdp(model, config, meshes=meshes, is_small=is_small):
        shard_model(
            model,
            None if is_small else fsdp_units(model),
            mesh=meshes.fsdp,
            compute_dtype=config.compute_dtype,
            cpu_offload=config.cpu_offload,
        )
    model.to_empty(device="cpu" if config.cpu_offload else device)
    # `to_empty` has given tied parameters memory of their own.
    model.tie_weights(recompute_mapping=False)
    loader.fill(model, device=device)
    fix_rotary_length(model, config.max_total_sequence_length)
    cast_buffers_in_forward(model, config.compute_dtype)
    if config.adapters is not None:
        fill_adapters(model, config.adapters, seed=config.seed)
    return model.eval()


def cast_buffers_in_forward(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let modules read the buffers that meet activations in `dtype`, as FSDP casts parameters only.

    Between forwards they are in float32, for an export.
    """
    names = _ACTIVATION_BUFFERS.get(model.config.model_type, frozenset())
    for module in model.modules():
        found = [name for name, _ in module.named_buffers(recurse=False) if name in names]
        if found:
            _cast_in_forward(module, found, dtype)


def _cast_in_forward(module: nn.Module, names: list[str], dtype: torch.dtype) -> None:
    kept: dict[str, torch.Tensor | None] = {}

    def cast(module: nn.Module, _: object) -> None:
        kept.update((name, module._buffers[name]) for name in names)
        module._buffers.update((name, module.get_buffer(name).to(dtype)) for name in names)

    def restore(module: nn.Module, *_: object) -> None:
        module._buffers.update(kept)

    module.register_forward_pre_hook(cast)
    module.register_forward_hook(restore, always_call=True)


def needs_fsdp(model: nn.Module, config: EngineConfig, *, meshes: Meshes, is_small: bool) -> bool:
    """Return whether FSDP has something to shard, cast or offload.

    Where it has not, a single rank's model, or a small one that all ranks have a copy of, stays as
    it is, without the copies that FSDP would make. The optimizer then sums its gradients. Those of
    a large model FSDP sums layer by layer, during the backward pass.
    """
    casts = any(parameter.dtype != config.compute_dtype for parameter in model.parameters())
    is_whole = meshes.shards.size() == 1 and (is_small or dist.get_world_size() == 1)
    return casts or config.cpu_offload or not is_whole


def find_value_layer(model: PreTrainedModel, *, pad_token_id: int | None) -> nn.Linear:
    """Return the score layer of a reward or value model.

    Args:
        model: The model. Its config gets a padding token if it has none: transformers' sequence
            classifiers require one, even though their own pooled scores are not used.
        pad_token_id: The tokenizer's.

    Raises:
        ValueError: There is none, or it has more than one output.
    """
    text_config = model.config.get_text_config()
    if text_config.pad_token_id is None:
        text_config.pad_token_id = pad_token_id or 0
    layer = model.get_submodule(value_layer_name(model))
    assert isinstance(layer, nn.Linear)
    return layer


def value_layer_name(model: PreTrainedModel) -> str:
    """Return the name of the score layer of a reward or value model.

    Raises:
        ValueError: There is none, or it has more than one output.
    """
    for name in _SCORE_LAYERS:
        layer = getattr(model, name, None)
        if isinstance(layer, nn.Linear) and layer.weight.shape[0] == 1:
            return name
    raise ValueError(
        f"policy.head: {type(model).__name__} has no linear layer with one output named "
        f"{' or '.join(_SCORE_LAYERS)}"
    )


def fsdp_units(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that FSDP gathers each for itself; it gathers the rest at once.

    They are the repeated blocks and, unless it is tied to the head, the embedding: in one buffer
    with the head it would take twice the memory, from the first layer to the last.
    """
    layers = list(decoder_layers(model).values())
    embedding = model.get_input_embeddings()
    configs = (model.config, model.config.get_text_config())
    if any(getattr(config, "tie_word_embeddings", False) for config in configs):
        return layers
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    if any(id(parameter) in inside for parameter in embedding.parameters()):
        return layers
    return [embedding, *layers]


class ModelLoader:
    """Loads the checkpoint `policy.model_name` into the shards of a model. Collective.

    Args:
        model: The model as transformers builds it, unsharded and on the meta device. Weights that
            its config ties but the checkpoint holds with different values are untied here.
        config: The worker's config.

    Raises:
        ValueError: The checkpoint lacks tensors of the model, has them in other shapes, or is not
            in safetensors while adapters are enabled.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self._buffers = initial_buffers(model)
        paths = first_rank_first(lambda: find_checkpoint(config.model_name, model.config))
        self._pretrained: PreTrainedModel | None = None
        self._files: SafetensorsFiles | None = None
        self._new: set[str] = set()
        self._seed = config.seed
        quantization = take_quantization(load_model_config(config), config.model_name)
        if not paths[0].endswith(".safetensors"):
            if quantization is not None:
                raise ValueError(
                    f"policy.model_name={config.model_name!r} is quantised, which needs a "
                    f"checkpoint in safetensors, and it has {paths[0]!r}"
                )
            if config.adapters is not None:
                raise ValueError(
                    "policy.dtensor_cfg.lora.enabled=True needs a checkpoint in safetensors, and "
                    f"policy.model_name={config.model_name!r} has {paths[0]!r}"
                )
            self._pretrained = _load_on_first_rank(model, config, paths[0])
            return
        with failing_together():
            self._files = (
                SafetensorsFiles(paths)
                if quantization is None
                else quantized_files(paths, quantization)
            )
            score = _score_tensors(model, config)
            self._conversions = plan_conversions(
                model, self._files, config.model_name, may_lack=score
            )
            untie_different_weights(model, self._conversions, self._files)
            self._new = score - {each.name for each in self._conversions}
        if self._new:
            logger.warning(
                "%s has no score layer (%s): it starts at random, by policy.seed=%d",
                config.model_name,
                ", ".join(sorted(self._new)),
                config.seed,
            )

    def fill(self, model: PreTrainedModel, *, device: torch.device) -> None:
        """Fill every parameter and buffer of the sharded `model`, in place. Collective."""
        for name, buffer in model.named_buffers(remove_duplicate=False):
            buffer.data = self._buffers[name].to(device)
        if self._files is None:
            _broadcast_weights(model, self._pretrained)
            self._pretrained = None
            return
        with failing_together(), self._files:
            state = without_adapters(model.state_dict())
            for conversion in self._conversions:
                conversion.fill(model, state, self._files)
            for name in sorted(self._new):
                _initialise(state[name], model, seed=self._seed)


def _score_tensors(model: PreTrainedModel, config: EngineConfig) -> set[str]:
    """Return the names of the score layer's tensors; empty for a language model.

    A reward or value model may start from a language model, which has none.
    """
    if config.head == "language_model":
        return set()
    name = value_layer_name(model)
    return {f"{name}.{each}" for each, _ in model.get_submodule(name).named_parameters()}


@torch.no_grad()
def _initialise(tensor: torch.Tensor, model: PreTrainedModel, *, seed: int) -> None:
    """Fill a score layer's tensor as transformers does: normal weights, and no bias.

    Args:
        tensor: The weight or the bias, which may be sharded.
        model: Whose config has the standard deviation.
        seed: The same on all ranks.
    """
    full = torch.zeros(tensor.shape)
    if full.ndim > 1:
        std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
        full.normal_(std=std, generator=torch.Generator().manual_seed(seed))
    local_tensor(tensor).copy_(take(full, owned_indices(tensor)))


def untie_different_weights(
    model: PreTrainedModel, conversions: list[Conversion], files: SafetensorsFiles
) -> None:
    """Untie weights that the config ties but the files hold with different values, and warn.

    As `from_pretrained` does. If the values are equal, the second copy is not read.
    """
    by_name = {each.name: each for each in conversions if each.converter is None}
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in by_name or source not in by_name:
            continue
        if files.equal(by_name[target].only_source(), by_name[source].only_source()):
            conversions.remove(by_name[target])
            continue
        logger.warning(
            "the model's config ties %s to %s, but the checkpoint holds different values for "
            "them: they are not tied",
            target,
            source,
        )
        module_name, _, attribute = target.rpartition(".")
        tied = model.get_parameter(target)
        setattr(model.get_submodule(module_name), attribute, type(tied)(torch.empty_like(tied)))
        del model.all_tied_weights_keys[target]


def initial_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return every buffer as the model initialises it, on the CPU.

    Checkpoints do not hold all of them: rotary frequencies, for example, are not persistent.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
    return {n: buffer.clone() for n, buffer in model.named_buffers(remove_duplicate=False)}


def _load_on_first_rank(
    model: PreTrainedModel, config: EngineConfig, path: str
) -> PreTrainedModel | None:
    """Return the unsharded model on the first rank, None on the others. Collective."""
    if dist.get_rank() == 0:
        logger.warning(
            "%s is not a safetensors file: the first rank loads the full model in float32 and "
            "sends the others their shards",
            path,
        )
    with failing_together():
        if dist.get_rank() > 0:
            return None
        pretrained = auto_class(config.head, model.config).from_pretrained(
            config.model_name,
            config=model.config,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
        )
        for name, parameter in pretrained.named_parameters():
            check_finite(name, parameter.detach(), where=path)
        return pretrained


def _broadcast_weights(model: PreTrainedModel, pretrained: PreTrainedModel | None) -> None:
    """Fill `model`'s shards from the first rank's `pretrained`. Collective."""
    set_model_state_dict(
        model,
        {} if pretrained is None else pretrained.state_dict(),
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
