"""What the ranks of `test_resharding.py` do: trainers with DTensors, engines with slices."""

import os
import time
import traceback

import torch
import torch.distributed as dist
import torch.utils._python_dispatch as dispatch
from patience import PATIENCE_S
from rl_refit import RefitError, RefitReceiver
from rl_refit.resharding import (
    Box,
    Exchange,
    ReshardSender,
    Shard,
    SliceReceiver,
    Want,
    local_shards,
)
from rl_refit.resharding.bases import Bases, ShardCopies
from source_ranks import Block
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

FIRST = 3
"""The first element of each tensor in the last version."""
ROUND_BYTES = 128
"""Less than a layer, so that there are several rounds."""


class Model(nn.Module):
    """Seven rows are uneven on two ranks, and one row leaves a rank's shard empty."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 7)
        self.layers = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.randn(1, 7))


def build():
    torch.manual_seed(0)
    return Model()


def sharded(fsdp, tp):
    """Return the model on the first `fsdp * tp` ranks of the world; collective over all ranks."""
    model = build()
    ranks = torch.arange(fsdp * tp).view(fsdp, tp)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("fsdp", "tp"))
    if mesh.get_coordinate() is None:
        return None
    if tp > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    return model


def wants(tp_rank, tp, dtype):
    """Return what an engine of that tensor-parallel rank wants, in places of its own."""
    found = []
    for name, tensor in build().state_dict().items():
        dim = 0 if ".up." in name else 1 if ".down." in name else None
        box = Box.full(tuple(tensor.shape))
        if dim is not None:
            size = tensor.shape[dim] // tp
            offset, shape = [0] * tensor.ndim, list(tensor.shape)
            offset[dim], shape[dim] = tp_rank * size, size
            box = Box(tuple(offset), tuple(shape))
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        found.append(Want(name, tuple(tensor.shape), box, torch.zeros(box.shape, dtype=kind)))
    return found


class LargestAllocation(dispatch.TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
        return out


def run(rank, world, path, case, results):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    try:
        seen = CASES[case["kind"]](rank, case)
    except Exception as error:
        seen = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    torch.save(seen, f"{results}-{rank}")
    if "victim" in case:
        os._exit(0)  # the group's threads may wait for the dead peer
    dist.destroy_process_group()


def ends(rank, case):
    """Return what this rank holds and wants."""
    model = sharded(case["fsdp"], case["tp"])
    num_trainers = case["fsdp"] * case["tp"]
    held = {} if model is None else local_shards(model.state_dict())
    engine = rank - num_trainers
    mine = wants(engine % case["engine_tp"], case["engine_tp"], case["dtype"])
    return held, mine if engine >= 0 else []


def refit(rank, case):
    """Refit three times; the last one changes the first element of each tensor alone."""
    held, mine = ends(rank, case)
    bases = Bases(ShardCopies() if held else None)
    one = Exchange(held, mine, round_bytes=ROUND_BYTES, timeout_s=PATIENCE_S, bases=bases)
    reports = []
    largest = LargestAllocation()
    for version in (1, 2, 3):
        for shard in held.values():
            if version == 2 and shard.data.is_floating_point():
                shard.data.mul_(2)
            if version == 3 and not any(shard.box.offset):
                shard.data.view(-1)[0] = FIRST
        one.begin(version)
        with largest:
            reports.append(one.transfer(version))
        one.commit(version)
    return {
        "got": [(want.name, want.box, want.data) for want in mine],
        "version": one.require_ready(),
        "reports": reports,
        "ideal": sum(want.data.nbytes for want in mine),
        "largest": largest.nbytes,
        "rounds": one.plan.num_rounds,
    }


def corrupt(rank, case):
    """Refit while one bit of the victim's first message is flipped on its way."""
    held, mine = ends(rank, case)
    one = Exchange(held, mine, round_bytes=ROUND_BYTES, timeout_s=PATIENCE_S)
    if rank == case["victim"]:
        unpack = one._messages.unpack

        def damaged(flow):
            flow.data[len(flow.data) // 2] ^= 4
            one._messages.unpack = unpack
            unpack(flow)

        one._messages.unpack = damaged
    return failing(one)


def misplace(rank, case):
    """Refit while the victim writes the rows of each piece in another order."""
    held, mine = ends(rank, case)
    one = Exchange(held, mine, round_bytes=ROUND_BYTES, timeout_s=PATIENCE_S)
    if rank == case["victim"]:
        place = one._messages._place
        one._messages._place = lambda index, piece: place(index, piece.flip(0))
    return failing(one)


def twice(rank, case):
    """Refit an engine that wants rows in several places, some of which overlap."""
    full = torch.arange(12.0).view(4, 3)
    held = {"w": Shard((4, 3), Box.full((4, 3)), full)} if rank == 0 else {}
    boxes = [Box((0, 0), (4, 3)), Box((0, 0), (4, 3)), Box((1, 0), (3, 2))] if rank else []
    wanted = [Want("w", (4, 3), box, torch.zeros(box.shape)) for box in boxes]
    one = Exchange(held, wanted, timeout_s=PATIENCE_S)
    one.begin(1)
    one.transfer(1)
    assert all(torch.equal(want.data, want.box.view_of(full)) for want in wanted)
    return {}


def versions(rank, case):
    """Refit while the ranks do not agree on the version."""
    held, mine = ends(rank, case)
    one = Exchange(held, mine, timeout_s=PATIENCE_S)
    one.begin(1 + rank)
    seen = {}
    for attempt in ("first", "again"):
        try:
            one.transfer(1 + rank)
        except RuntimeError as error:
            seen[attempt] = str(error)
        one.begin(1 + rank)
    return seen


def die(rank, case):
    """Refit while the victim ends in the midst of it, or falls silent."""
    held, mine = ends(rank, case)
    dist.barrier()  # the limit is for the exchange alone, and trainers take longer to get here
    one = Exchange(held, mine, round_bytes=ROUND_BYTES, timeout_s=case["limit_s"])
    if rank == case["victim"]:
        if case["how"] == "silent":
            time.sleep(3 * case["limit_s"])
        os._exit(1 if case["how"] == "exit" else 0)
    return failing(one)


def follow(rank, case):
    """Refit an engine from two trainers, which first wait in vain for it."""
    trainers = dist.new_group([0, 1])
    seen = {"sent": []}
    full = build().state_dict()
    if rank == 2:
        address = [None]
        dist.broadcast_object_list(address, src=0)
        with (
            RefitReceiver(address[0], timeout_s=PATIENCE_S) as receiver,
            SliceReceiver(0) as slices,
        ):
            mine = wants(0, 1, torch.bfloat16)
            for version in (1, 2):
                receiver.begin(version)
                receiver.receive(version, lambda each, v=version: slices.receive(each, v, mine))
                dist.barrier()
                assert receiver.require_ready() == version
                assert all(
                    torch.equal(want.data, want.box.view_of(full[want.name]).to(want.data.dtype))
                    for want in mine
                )
                seen["sent"].append(version)
        return seen
    mesh = DeviceMesh.from_group(trainers, "cpu")
    model = build()
    fully_shard(model, mesh=mesh)

    def shards():
        return local_shards(model.state_dict())

    with ReshardSender(shards, num_receivers=1, trainers=trainers, timeout_s=3) as sender:
        try:
            sender.send(1)
        except RefitError as error:
            seen["alone"] = str(error)
    with ReshardSender(shards, num_receivers=1, trainers=trainers, timeout_s=PATIENCE_S) as sender:
        dist.broadcast_object_list([sender.address if rank == 0 else None], src=0)
        for version in (1, 2):
            sender.send(version)
            sender.commit(version)
            dist.barrier()
            seen["sent"].append(version)
    return seen


def failing(one):
    """Return how a transfer fails, and what the rank then says of its weights."""
    one.begin(1)
    seen = {}
    try:
        one.transfer(1)
    except RuntimeError as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    try:
        one.require_ready()
    except RuntimeError as error:
        seen["ready"] = f"{type(error).__name__}"
    return seen


CASES = {"refit": refit, "corrupt": corrupt, "misplace": misplace, "die": die}
CASES |= {"twice": twice, "versions": versions, "follow": follow}
