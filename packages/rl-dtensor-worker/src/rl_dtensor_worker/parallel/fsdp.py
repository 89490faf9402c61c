"""Fully sharded data parallelism: apply it, unshard for a while, copy shards to the CPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def shard_model(
    model: nn.Module,
    layers: Iterable[nn.Module],
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    cpu_offload: bool,
) -> nn.Module:
    """Shard `model` over `mesh`, each of `layers` as a unit of its own.

    A rank that is alone and computes in its parameters' own dtype has nothing to gather and nothing
    to cast: its model stays as it is, without the copies that FSDP makes all the same.

    A mesh of two axes has copies along the first, and shards along the second.

    Parameters stay in their own dtype; forward and backward run in `compute_dtype`; gradients are
    summed, not averaged, in float32. A loss divided by a global count is then right as it is.
    """
    casts = any(parameter.dtype != compute_dtype for parameter in model.parameters())
    if dist.get_world_size() == 1 and not casts and not cpu_offload:
        return model
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    pin_memory = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin_memory) if cpu_offload else OffloadPolicy()
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for module in _fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        # Sum and nothing else: the pre-multiplied sum behind a divide factor is NCCL's alone.
        module.set_force_sum_reduction_for_comms(True)
    return model


@contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Generator[None, None, None]:
    """Keep every parameter of `model` whole on each rank; inside, forwards need no collective.

    Costs one unsharded copy in the compute dtype. Entering is collective; inside, each rank may
    run as many forwards as it likes.
    """
    modules = _fsdp_modules(model)
    reshard = [_reshards_after_forward(module) for module in modules]
    try:
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        yield
    finally:
        for module, flag in zip(modules, reshard, strict=True):
            module.reshard()
            module.set_reshard_after_forward(flag, recurse=False)


def reshard_model(model: nn.Module) -> None:
    """Free the whole parameters that a forward without a backward leaves behind.

    FSDP keeps its root unsharded after a forward, in the expectation of a backward. Until then
    `model.named_parameters()` is not the shards that checkpoints and copies want.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def abandon_pass(model: nn.Module) -> None:
    """Drop a forward or backward that raised, its gradients included.

    FSDP takes a pass that has begun to be still under way, and so would hand the next one's
    gradients to no parameter. torch 2.11 has no `FSDPModule.reset_iter_state`, which also keeps
    gradients that were not reduced yet.
    """
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        if state._is_root is None:
            continue  # It has never run.
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        group = state._fsdp_param_group
        if group is not None:
            group.finalize_backward()
            group.comm_ctx.post_forward_order.clear()
            group._training_state = TrainingState.IDLE
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                    unsharded.grad = None
    reshard_model(model)
    model.zero_grad(set_to_none=True)


def get_cpu_state_dict(
    state_generator: Iterable[tuple[str, torch.Tensor | DTensor]], pin_memory: bool = False
) -> dict[str, torch.Tensor]:
    """Return a CPU copy of each tensor; of a DTensor, this rank's shard.

    Args:
        state_generator: Names and tensors, for example `model.state_dict().items()`.
        pin_memory: Copy into page-locked memory, from and to which a GPU copies faster.
    """
    copies: dict[str, torch.Tensor] = {}
    on_cuda = False
    for name, tensor in state_generator:
        local = local_tensor(tensor)
        on_cuda = on_cuda or local.is_cuda
        copy = torch.empty_like(local, device="cpu", pin_memory=pin_memory)
        copies[name] = copy.copy_(local, non_blocking=True)
    if on_cuda:
        torch.cuda.synchronize()
    return copies


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, detached and sharing its memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor on every rank, detached. Collective for a DTensor."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _reshards_after_forward(module: FSDPModule) -> bool:
    # One group, as `shard_model` gives all parameters of a module to one mesh.
    group = module._get_fsdp_state()._fsdp_param_group
    return group is not None and group.post_forward_mesh_info is not None
