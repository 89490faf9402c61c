"""Fully sharded data parallelism (FSDP2), and access to the shards of DTensors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def shard_model(
    model: nn.Module,
    layers: Iterable[nn.Module] | None,
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    cpu_offload: bool,
) -> nn.Module:
    """Shard `model` over `mesh`, each of `layers` as an FSDP unit, and the rest as another.

    Parameters stay in their own dtype; forward and backward run in `compute_dtype`; gradients are
    summed, not averaged, in float32, as the loss is divided by global counts already.

    Args:
        model: On the meta device.
        layers: Its repeated blocks. None: the model is one unit, which is gathered at once.
        mesh: With two axes, parameters are replicated along the first and sharded along the second.
        compute_dtype: Of forward and backward.
        cpu_offload: Whether parameters, gradients and optimizer state are kept on the CPU.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    pin_memory = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin_memory) if cpu_offload else OffloadPolicy()
    # Layers first: the root then takes the parameters that no layer has.
    for layer in layers or ():
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for module in _fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        # A divide factor would use the pre-multiplied sum, which only NCCL has.
        module.set_force_sum_reduction_for_comms(True)
    return model


@contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Generator[None, None, None]:
    """Keep every parameter of `model` unsharded on each rank inside.

    Costs one full copy in the compute dtype. Entering is collective; inside, forwards need no FSDP
    collective, and each rank may run a different number of them.
    """
    modules = _fsdp_modules(model)
    reshard = [_reshards_after_forward(module) for module in modules]
    try:
        for module in modules:
            # Otherwise the first forward inside would shard the parameters again.
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        yield
    finally:
        for module, flag in zip(modules, reshard, strict=True):
            module.reshard()
            module.set_reshard_after_forward(flag, recurse=False)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP manages the parameters of `model`."""
    return isinstance(model, FSDPModule)


def reshard_after_backward(model: nn.Module, *, enabled: bool) -> None:
    """Set whether a backward pass frees the unsharded parameters, or the next pass finds them."""
    for module in _fsdp_modules(model):
        module.set_reshard_after_backward(enabled, recurse=False)


def reshard_model(model: nn.Module) -> None:
    """Free the unsharded parameters that a forward without a backward leaves behind.

    FSDP keeps its root unsharded after a forward, since a backward usually follows. Until then
    `model.named_parameters()` yields unsharded tensors, and not the DTensors that checkpoints need.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def abandon_pass(model: nn.Module) -> None:
    """Reset FSDP after a forward or backward that raised, and drop its gradients.

    FSDP would consider the interrupted pass still in progress, and lose the gradients of the next
    one. Newer torch has `FSDPModule.reset_iter_state`, but torch 2.11 does not, and it keeps
    gradients that were not reduced yet.
    """
    reshard_after_backward(model, enabled=True)
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        if state._is_root is None:
            continue  # Lazily initialised: this module has never run.
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        group = state._fsdp_param_group
        if group is not None:
            # Waits for a reduction in flight, and resets what the next backward starts from.
            group.finalize_backward()
            group.comm_ctx.post_forward_order.clear()
            group._training_state = TrainingState.IDLE
            for parameter in group.fsdp_params:
                if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                    unsharded.grad = None
                # From torch 2.15 on a view of the gradient above, which cannot be set.
                if parameter.unsharded_accumulated_grad is not None:
                    parameter.unsharded_accumulated_grad = None
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
    """Return this rank's shard, detached, sharing its memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor on every rank, detached. Collective for a DTensor."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def owned_indices(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return, per dim, the ascending indices of the full tensor that this rank's shard has.

    Supports any placement on any mesh. If tensor parallelism and FSDP shard the same dim, a rank's
    rows need not be contiguous.
    """
    indices = [torch.arange(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for placement, ranks, rank in zip(
            tensor.placements, tensor.device_mesh.shape, coordinate, strict=True
        ):
            if placement.is_shard() or isinstance(placement, _StridedShard):
                dim: int = placement.dim  # type: ignore[attr-defined]
                parts, _ = _along_rows(placement)._split_tensor(
                    indices[dim], ranks, with_padding=False
                )
                indices[dim] = parts[rank]
    return indices


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _reshards_after_forward(module: FSDPModule) -> bool:
    # One group, as `shard_model` gives all parameters of a module to one mesh.
    group = module._get_fsdp_state()._fsdp_param_group
    return group is not None and group.post_forward_mesh_info is not None


def _along_rows(placement: Placement) -> Shard | _StridedShard:
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)
