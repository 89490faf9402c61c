"""What the tests of loading and export run on ranks."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron_ranks import job
from rl_interfaces.backend.checkpoint.hf_files import (
    SafetensorsFiles,
    write_config,
    write_hf_directory,
)
from rl_interfaces.backend.engine import HfExport
from rl_megatron_worker.convert import converter_for
from rl_megatron_worker.layout import PackedRows
from rl_megatron_worker.model import load as loading
from rl_megatron_worker.model.build import build_model
from rl_megatron_worker.model.config import ModelOptions, transformer_config
from rl_megatron_worker.model.heads import TokenHead
from rl_megatron_worker.model.load import load_weights
from rl_megatron_worker.parallel.groups import MegatronLayout
from rl_megatron_worker.parallel.schedule import run_chunk
from rl_megatron_worker.weights import MegatronWeights
from tiny_models import build_tokenizer
from transformers import AutoConfig

CPU = torch.device("cpu")


class Built(NamedTuple):
    """A model on this rank."""

    chunks: list
    mappings: list
    hf_config: object


def build(path, runtime, layout, *, dtype=torch.float32, ddp=False, mappings=None):
    """Return the chunks of this rank, filled with NaN, and the mappings of their parameters."""
    hf_config = AutoConfig.from_pretrained(path)
    converter = converter_for(hf_config)
    architecture = converter.architecture(hf_config)
    options = ModelOptions(params_dtype=dtype)
    config = transformer_config(architecture, layout, options, runtime)
    reduction = DistributedDataParallelConfig(use_distributed_optimizer=True) if ddp else None
    chunks = build_model(architecture, config, layout, runtime, ddp=reduction)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)
    return Built(chunks, mappings or converter.mappings(architecture), hf_config)


def load(path, runtime, layout, **options):
    built = build(path, runtime, layout, **options)
    load_weights(*built, model_name=path)
    return built


def logits(*, path, sequences):
    """Return the logits of each sequence, packed into one row, by a model on one rank."""
    with job() as (runtime, layout), torch.no_grad():
        chunks, _, _ = load(path, runtime, layout)
        lengths = [len(sequence) for sequence in sequences]
        edges = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        group = parallel_state.get_context_parallel_group()
        with runtime.scope():
            rows = PackedRows.of(edges, max_seqlen=max(lengths), group=group)
            hidden = run_chunk(chunks[0], torch.cat(sequences), rows)
            return TokenHead(chunk=chunks[0]).logits(hidden).split(lengths)


def load_and_gather(*, paths, layout, dtype=torch.float32, wire_dtype=torch.float32, ddp=False):
    """Return metadata, groups and two passes over the tensors of each model, see `passes_of`."""
    gathered = []
    with job(**layout) as (runtime, ranks):
        for path in paths:
            chunks, mappings, _ = load(path, runtime, ranks, dtype=dtype, ddp=ddp)
            weights = MegatronWeights(chunks, mappings, wire_dtype=wire_dtype, device=CPU)
            gathered.append(passes_of(weights) | {"shards": shards_of(weights)})
    return gathered


def shards_of(weights):
    """Return what this rank holds, each as a tensor of its own; or why it is not slices."""
    try:
        held = weights.shards()
    except ValueError as error:
        return str(error)
    return {
        name: [each._replace(data=each.data.clone()) for each in shards]
        for name, shards in held.items()
    }


def passes_of(weights):
    passes = [[(name, tensor.clone()) for name, tensor in weights] for _ in range(2)]
    return {"metadata": weights.metadata(), "groups": weights.groups(), "passes": passes}


@contextmanager
def experts_sharded_twice():
    """Four ranks with expert and expert-tensor parallelism, with which gloo cannot compute."""
    with job() as (runtime, _):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=2,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=2,
        )
        yield (
            runtime,
            MegatronLayout(data=2, tensor=2, expert=2, expert_tensor=2, sequence_parallel=True),
        )


def load_and_gather_experts_sharded_twice(*, path):
    with experts_sharded_twice() as (runtime, layout):
        chunks, mappings, _ = load(path, runtime, layout)
        return passes_of(MegatronWeights(chunks, mappings, wire_dtype=torch.float32, device=CPU))


def gather_some(*, path, layout, names):
    """Return the tensors `names`, the weights' own groups, and the error of an unknown name."""
    with job(**layout) as (runtime, ranks):
        chunks, mappings, _ = load(path, runtime, ranks)
        weights = MegatronWeights(chunks, mappings, wire_dtype=torch.float32, device=CPU)
        found = {
            "named": [(name, tensor.clone()) for name, tensor in weights.gather(names)],
            "groups": [(each, [t.clone() for t in group]) for each, group in weights.iter_groups()],
        }
        try:
            list(weights.gather(["model.layers.99.mlp.up_proj.weight"]))
        except ValueError as error:
            found["error"] = str(error)
    return found


def metadata_on_one_rank(*, path, layout):
    """Return what the first rank finds about the weights without the other taking part."""
    with job(**layout) as (runtime, ranks):
        chunks, mappings, _ = load(path, runtime, ranks)
        if torch.distributed.get_rank() > 0:
            return None
        weights = MegatronWeights(chunks, mappings, wire_dtype=torch.float32, device=CPU)
        return {"metadata": weights.metadata(), "groups": weights.groups()}


def gather_after_a_change(*, path, layout):
    """Return the tensors before and after every parameter has grown by 1."""
    with job(**layout) as (runtime, ranks):
        chunks, mappings, _ = load(path, runtime, ranks, ddp=True)
        weights = MegatronWeights(chunks, mappings, wire_dtype=torch.float32, device=CPU)
        before = {name: tensor.clone() for name, tensor in weights}
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.add_(1)
        return {"before": before, "after": {name: tensor.clone() for name, tensor in weights}}


def count_elements_read(*, path, layout):
    """Return how many elements this rank has read, and how many its parameters have."""
    counted = []

    class Counting(SafetensorsFiles):
        def read(self, name, indices=None):
            tensor = super().read(name, indices)
            counted.append(tensor.numel())
            return tensor

    loading.SafetensorsFiles = Counting
    with job(**layout) as (runtime, ranks):
        chunks, _, _ = load(path, runtime, ranks)
        num_held = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        return {"num_read": sum(counted), "num_held": num_held}


def load_that_fails(*, path, layout, edit=None):
    """Return the error of loading; `edit` changes the mappings."""
    with job(**layout) as (runtime, ranks):
        chunks, mappings, hf_config = build(path, runtime, ranks)
        try:
            load_weights(chunks, edit(mappings) if edit else mappings, hf_config, model_name=path)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return None


def without_biases(mappings):
    return [each for each in mappings if not each.names[0].endswith("bias")]


def with_a_gate(mappings):
    gate = replace(mappings[0], names=("decoder.layers.0.gate",))
    return [*mappings, gate]


def load_with_a_broken_rank(*, path):
    """Let the last rank fail to read; return the error of each."""

    class Unreadable(SafetensorsFiles):
        def read(self, name, indices=None):
            raise OSError("planted")

    with job(tensor_model_parallel_size=2) as (runtime, ranks):
        chunks, mappings, hf_config = build(path, runtime, ranks)
        if torch.distributed.get_rank() == 1:
            loading.SafetensorsFiles = Unreadable
        try:
            load_weights(chunks, mappings, hf_config, model_name=path)
        except (RuntimeError, OSError) as error:
            return f"{type(error).__name__}: {error}"
    return None


def export(*, path, layout, directory, max_file_bytes, dtype=torch.float32):
    with job(**layout) as (runtime, ranks):
        chunks, mappings, hf_config = load(path, runtime, ranks, dtype=dtype)
        write_hf_directory(
            HfExport(
                write_config=partial(write_config, hf_config, dtype=torch.float32),
                source=MegatronWeights(chunks, mappings, wire_dtype=torch.float32, device=CPU),
            ),
            build_tokenizer(),
            Path(directory),
            max_file_bytes=max_file_bytes,
        )
