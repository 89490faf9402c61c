"""Cases of loading pretrained models that ranks run."""

from contextlib import contextmanager
from typing import NamedTuple

import torch
from patience import PATIENCE_S
from ranks import this_rank
from rl_dtensor_worker.parallel.fsdp import full_tensor
from tiny_model import make_config


class LoadedModel(NamedTuple):
    """Every tensor of a model, gathered, and the placements of its parameters."""

    tensors: dict[str, torch.Tensor]
    placements: set[str]


@contextmanager
def process_group():
    from rl_interfaces.backend.runtime import RankEnvironment, init_process_group
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    environment = RankEnvironment.from_environment()
    init_process_group(environment, timeout_s=PATIENCE_S)
    try:
        yield environment
    finally:
        torch.distributed.destroy_process_group()
        _clear_sharding_prop_cache()


def tensors_of(model):
    """Return every parameter, gathered, and every buffer, on the CPU. Collective."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: full_tensor(tensor).cpu().clone() for name, tensor in tensors}


def load_models(*, model_names, **settings):
    """Return the tensors of each model, sharded over the data-parallel axis."""
    from rl_dtensor_worker.config import EngineConfig
    from rl_dtensor_worker.model.build import build_model, empty_model
    from rl_dtensor_worker.parallel.mesh import Meshes

    loaded = []
    with process_group() as environment:
        for name in model_names:
            config = EngineConfig.from_policy_config(
                make_config(name, **settings),
                world_size=environment.world_size,
                init_optimizer=True,
            )
            device = environment.device
            meshes = Meshes.of(config.layout, replicas=1, device_type=device.type)
            model = build_model(
                empty_model(config),
                config,
                meshes=meshes,
                tensor_parallel=None,
                is_small=False,
                device=device,
            )
            loaded.append(tensors_of(model))
            meshes.leave()
    return loaded if environment.rank == 0 else None


def load_over_two_axes(*, model_names):
    """Return each model, loaded on two data- by two tensor-parallel ranks."""
    from rl_dtensor_worker.config import EngineConfig
    from rl_dtensor_worker.model.build import ModelLoader

    loaded = []
    with process_group() as environment:
        for name in model_names:
            config = EngineConfig.from_policy_config(
                make_config(name), world_size=4, init_optimizer=True
            )
            model = model_on_meta(name)
            loader = ModelLoader(model, config)
            mesh = shard_over_two_axes(model)
            loader.fill(model, device=environment.device)
            placements = {repr(parameter.placements) for parameter in model.parameters()}
            loaded.append(LoadedModel(tensors_of(model), placements))
            # DTensor keeps the mesh, and that its groups with their threads.
            mesh._pg_registry.clear()
    return loaded


def model_on_meta(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(name)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def shard_over_two_axes(model):
    """Shard over two tensor-parallel ranks, then along rows over two others; return the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    styles = {name: ColwiseParallel() for name in columns}
    styles |= {name: RowwiseParallel() for name in rows}
    for layer in model.model.layers:
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] in styles:
                parallelize_module(module, mesh["tp"], styles[name.rpartition(".")[2]])
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    model.tie_weights(recompute_mapping=False)
    return mesh


def load_with_a_broken_rank(*, model_name):
    """Let the last rank fail to read; return the error of each."""
    from rl_dtensor_worker.model import build as loading
    from rl_interfaces.backend.checkpoint.hf_files import SafetensorsFiles

    class Unreadable(SafetensorsFiles):
        def read(self, name, indices=None):
            raise OSError("planted")

    rank, num_ranks = this_rank()
    if rank == num_ranks - 1:
        loading.SafetensorsFiles = Unreadable
    try:
        load_models(model_names=[model_name])
    except (RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        loading.SafetensorsFiles = SafetensorsFiles
    return None
