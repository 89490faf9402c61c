"""What the tests of loading and export run on ranks."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron_ranks import job
from rl_interfaces.backend.checkpoint.hf_files import SafetensorsFiles, write_hf_directory
from rl_interfaces.backend.engine import HfExport
from rl_megatron_worker.attention.layout import PackedRows
from rl_megatron_worker.convert import converter_for
from rl_megatron_worker.engine import write_config
from rl_megatron_worker.model import load as loading
from rl_megatron_worker.model.build import build_model
from rl_megatron_worker.model.config import ModelOptions, transformer_config
from rl_megatron_worker.model.heads import scoring_options
from rl_megatron_worker.model.load import load_weights
from rl_megatron_worker.parallel.groups import MegatronLayout
from rl_megatron_worker.parallel.schedule import run_chunk
from rl_megatron_worker.weights import MegatronWeights
from tiny_models import build_tokenizer
from transformers import AutoConfig, GenerationConfig

CPU = torch.device("cpu")


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
    return chunks, mappings or converter.mappings(architecture), hf_config


def load(path, runtime, layout, **options):
    chunks, mappings, hf_config = build(path, runtime, layout, **options)
    load_weights(chunks, mappings, hf_config, model_name=path)
    return chunks, mappings, hf_config


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
        return (hidden @ scoring_options(chunks[0])["output_matrix"].T).split(lengths)


def load_and_gather(*, paths, layout, dtype=torch.float32, wire_dtype=torch.float32, ddp=False):
    """Return metadata, groups and two passes over the tensors of each model."""
    gathered = []
    with job(**layout) as (runtime, ranks):
        for path in paths:
            chunks, mappings, _ = load(path, runtime, ranks, dtype=dtype, ddp=ddp)
            weights = MegatronWeights(chunks, mappings, wire_dtype=wire_dtype, device=CPU)
            gathered.append(passes_of(weights))
    return gathered


def passes_of(weights):
    passes = [[(name, tensor.clone()) for name, tensor in weights] for _ in range(2)]
    return weights.metadata(), weights.groups(), passes


@contextmanager
def experts_cut_and_dealt_out():
    """Four ranks of which two share each expert: more than gloo can compute with."""
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


def load_and_gather_cut_experts(*, path):
    with experts_cut_and_dealt_out() as (runtime, layout):
        chunks, mappings, _ = load(path, runtime, layout)
        return passes_of(MegatronWeights(chunks, mappings, wire_dtype=torch.float32, device=CPU))


def gather_some(*, path, layout, names):
    """Return what is gathered of `names`, in one go and in the weights' own groups."""
    with job(**layout) as (runtime, ranks):
        chunks, mappings, _ = load(path, runtime, ranks)
        weights = MegatronWeights(chunks, mappings, wire_dtype=torch.float32, device=CPU)
        some = [(name, tensor.clone()) for name, tensor in weights.gather(names)]
        groups = [(each, [t.clone() for t in tensors]) for each, tensors in weights.iter_groups()]
        try:
            list(weights.gather(["model.layers.99.mlp.up_proj.weight"]))
        except ValueError as error:
            return some, groups, str(error)
    return some, groups, None


def metadata_on_one_rank(*, path, layout):
    """Return what the first rank alone learns of the weights, while the other does nothing."""
    with job(**layout) as (runtime, ranks):
        chunks, mappings, _ = load(path, runtime, ranks)
        if torch.distributed.get_rank() > 0:
            return None
        weights = MegatronWeights(chunks, mappings, wire_dtype=torch.float32, device=CPU)
        return weights.metadata(), weights.groups()


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
        return before, {name: tensor.clone() for name, tensor in weights}


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
        return sum(counted), sum(p.numel() for chunk in chunks for p in chunk.parameters())


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
                write_config=partial(
                    write_config, hf_config, GenerationConfig(eos_token_id=[1, 2])
                ),
                source=MegatronWeights(chunks, mappings, wire_dtype=torch.float32, device=CPU),
            ),
            build_tokenizer(),
            Path(directory),
            max_file_bytes=max_file_bytes,
        )
