"""This rank's parameters by their global names, loaded from a Hugging Face checkpoint.

Each rank reads the slices of its own shards only.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from rl_interfaces.backend.checkpoint.hf_files import SafetensorsFiles, find_checkpoint
from rl_interfaces.backend.runtime import failing_together, first_rank_first

from rl_megatron_worker.model.build import unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch import nn
    from transformers import PreTrainedConfig

    from rl_megatron_worker.convert import Mapping

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_PLACE = re.compile(r"^decoder\.layers\.\d+\.|^[^.]+\.(?:final_layernorm\.)?")
# Old checkpoints store the rotary frequencies, which follow from the config.
_NOT_READ = re.compile(r"\.rotary_emb\.inv_freq$")
# Their configs do not say whether the files have such layers.
_WITH_NEXT_TOKENS_APART = ("qwen3_next",)
_MAX_NAMED = 5


def held_parameters(chunks: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return this rank's parameters by global name: layers and experts counted over all ranks.

    So are the biases of routers, which no gradient reaches.

    Args:
        chunks: This rank's `GPTModel`s, wrapped or not.
    """
    held: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        model = unwrapped(chunk)
        biases = [each for each in model.named_buffers() if each[0].endswith(".expert_bias")]
        for name, parameter in (*model.named_parameters(), *biases):
            held[_global_name(name, model)] = parameter
    return held


def place_of(name: str) -> str:
    """Return the prefix of a global name that determines its pipeline stage.

    Example: "decoder.layers.3.mlp.router.weight" -> "decoder.layers.3."
    """
    match = _PLACE.match(name)
    assert match is not None, name
    return match.group()


def load_weights(
    chunks: Sequence[nn.Module],
    mappings: Sequence[Mapping],
    hf_config: PreTrainedConfig,
    *,
    model_name: str,
) -> None:
    """Fill this rank's parameters from the checkpoint of a Hugging Face model. Collective.

    Parameters are read one at a time, only the slices of this rank's shards. Values are cast to the
    parameter's dtype.

    Args:
        chunks: This rank's `GPTModel`s, wrapped or not.
        mappings: The mappings of all ranks' parameters.
        hf_config: The model's config.
        model_name: `policy.model_name`: a directory, or a model name on the hub.

    Raises:
        ValueError: Tensors of the checkpoint are missing, unexpected, or of another shape.
    """
    paths = first_rank_first(lambda: find_checkpoint(model_name, hf_config))
    held = held_parameters(chunks)
    with failing_together():
        if not all(path.endswith(".safetensors") for path in paths):
            raise ValueError(f"policy.model_name={model_name!r} has no safetensors files")
        files = SafetensorsFiles(paths)
        _check_tensors(mappings, files, hf_config, model_name)
    _check_parameters(mappings, held)
    with failing_together(), files:
        _fill(held, mappings, files)


@torch.no_grad()
def _fill(
    held: dict[str, torch.Tensor], mappings: Iterable[Mapping], files: SafetensorsFiles
) -> None:
    def read(name: str, *, dim: int, start: int, stop: int) -> torch.Tensor:
        indices = [torch.arange(size) for size in files.shape(name)]
        indices[dim] = indices[dim][start:stop]
        return files.read(name, indices)

    by_name = {name: mapping for mapping in mappings for name in mapping.names}
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "expt_tp"])
    for name, parameter in held.items():
        mapping = by_name[name]
        group = groups.tp if mapping.expert is None else groups.expt_tp
        mapping.fill(parameter, read, rank=group.rank(), size=group.size())


def _check_parameters(mappings: Sequence[Mapping], held: dict[str, torch.Tensor]) -> None:
    """Raise `ValueError` if mappings and parameters of all ranks do not match. Collective."""
    known = {name for mapping in mappings for name in mapping.names}
    with failing_together():
        if unmapped := sorted(held.keys() - known):
            raise ValueError(
                f"the model's converter has no mapping for {len(unmapped)} of its parameters, "
                f"first {unmapped[:_MAX_NAMED]}"
            )
    # Each rank holds some of the parameters: a mapping is fulfilled if any rank has it.
    is_held = [any(name in held for name in mapping.names) for mapping in mappings]
    device = next(iter(held.values())).device
    flags = torch.tensor(is_held, dtype=torch.uint8, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    nowhere = [
        mapping.names[0]
        for mapping, flag in zip(mappings, flags.tolist(), strict=True)
        if not flag and not mapping.is_copy
    ]
    if nowhere:
        raise ValueError(
            f"the model's converter maps {len(nowhere)} parameters that the model does not have, "
            f"first {nowhere[:_MAX_NAMED]}"
        )


def _check_tensors(
    mappings: Sequence[Mapping],
    files: SafetensorsFiles,
    hf_config: PreTrainedConfig,
    model_name: str,
) -> None:
    """Raise `ValueError` if names or shapes of the files' tensors do not match the model."""
    expected = {name: shape for mapping in mappings for name, shape in mapping.sources.items()}
    found = {name for name in files.names if not _NOT_READ.search(name)}
    found -= _next_token_layers(found, hf_config, model_name)
    for mapping in mappings:
        if mapping.tied_name in found:
            _check_copy(mapping, files, model_name)
            found.discard(mapping.tied_name)
    missing, unexpected = sorted(expected.keys() - found), sorted(found - expected.keys())
    if missing or unexpected:
        raise ValueError(
            f"policy.model_name={model_name!r}: its files lack {len(missing)} tensors of the model "
            f"that its config describes, first {missing[:_MAX_NAMED]}, and have {len(unexpected)} "
            f"that the model does not have, first {unexpected[:_MAX_NAMED]}"
        )
    for name, shape in expected.items():
        if tuple(files.shape(name)) != shape:
            raise ValueError(
                f"policy.model_name={model_name!r}: {name} has shape {tuple(files.shape(name))} in "
                f"its files, and {shape} in the model that its config describes"
            )


def _next_token_layers(
    names: Iterable[str], hf_config: PreTrainedConfig, model_name: str
) -> set[str]:
    """Return the tensors of layers that predict further tokens, and log that they are left out.

    They follow the model's own layers, or are apart from them; transformers does not read them
    either.
    """
    first = hf_config.num_hidden_layers
    # The second is the name in files of configs.
    count = getattr(hf_config, "num_mtp_layers", getattr(hf_config, "num_nextn_predict_layers", 0))
    prefixes = [f"model.layers.{layer}." for layer in range(first, first + (count or 0))]
    if hf_config.model_type in _WITH_NEXT_TOKENS_APART:
        prefixes.append("mtp.")
    found = {name for name in names if name.startswith(tuple(prefixes))}
    if found and dist.get_rank() == 0:
        logger.warning(
            "policy.model_name=%r: its layers for multi-token prediction are left out: they are "
            "neither trained nor exported",
            model_name,
        )
    return found


def _check_copy(mapping: Mapping, files: SafetensorsFiles, model_name: str) -> None:
    """Raise `ValueError` if the files hold a tied tensor twice, with different values."""
    (source,) = mapping.sources
    assert mapping.tied_name is not None
    if not files.equal(source, mapping.tied_name):
        raise ValueError(
            f"policy.model_name={model_name!r}: its config ties {mapping.tied_name} to {source}, "
            "but its files hold different values for them; set tie_word_embeddings=false"
        )


def _global_name(name: str, model: GPTModel) -> str:
    match = _LAYER.match(name)
    if match is None:
        return name
    layer = cast("TransformerLayer", model.decoder.layers[int(match.group(1))])
    rest = name[match.end() :]
    if expert := _EXPERT.search(rest):
        indices = cast("MoELayer", layer.mlp).local_expert_indices
        rest = _EXPERT.sub(f".local_experts.{indices[int(expert.group(1))]}.", rest)
    # Megatron-core counts layers from 1.
    return f"decoder.layers.{layer.layer_number - 1}.{rest}"
