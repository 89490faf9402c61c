"""What the ranks of `test_source.py` do: shard a module, read its source, refit a receiver."""

import threading

import torch
import torch.distributed as dist
from patience import PATIENCE_S
from rl_refit import ModuleSource, RefitReceiver, RefitSender
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(7, 12)
        self.down = nn.Linear(12, 7, bias=False)
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, hidden):
        return hidden + self.down(self.up(hidden).relu())


class Model(nn.Module):
    """Seven rows are uneven on two ranks, and one row leaves a rank's shard empty."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 7)
        self.layers = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.randn(1, 7))
        self.head = nn.Linear(7, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden * self.gain)


def build():
    torch.manual_seed(0)
    return Model()


def sharded(layout):
    """Return the model in a layout: "plain", "fsdp", "tp" or "fsdp+tp"."""
    model, world = build(), dist.get_world_size()
    axes = layout.split("+") if layout != "plain" else []
    sizes = [world // 2, 2] if len(axes) == 2 else [world] * len(axes)
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(axes)) if axes else None
    if "tp" in axes:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
    if "fsdp" in axes:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
    return model


def step(model):
    """Train one step, on the same tokens everywhere."""
    tokens = torch.arange(7)[None]
    model(tokens).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    model.zero_grad()


def read(source):
    return {name: tensor.clone() for name, tensor in source}


def run(rank, world, path, layouts, results):
    """Read and send each layout before and after a step; rank 0 saves what it has seen."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    seen = {}
    for layout in layouts:
        model = sharded(layout)
        source, narrow = ModuleSource(model), ModuleSource(model, dtype=torch.bfloat16)
        before = read(source)
        step(model)
        with torch.no_grad():
            model(torch.arange(7)[None])  # FSDP2 leaves the root's full parameters in the module
        seen[layout] = {
            "metadata": source.metadata(),
            "before": before,
            "after": read(source),
            "narrow": read(narrow),
            "received": refit(narrow),
        }
    torch.save(seen, f"{results}-{rank}")
    dist.destroy_process_group()


def refit(source):
    """Send to a receiver on rank 0 with all ranks; return what it got."""
    is_first, got = dist.get_rank() == 0, {}
    with RefitSender(source, num_receivers=int(is_first), timeout_s=PATIENCE_S) as sender:
        if not is_first:
            sender.send(1)
            return got
        with RefitReceiver(sender.address, timeout_s=PATIENCE_S) as receiver:
            receiver.begin(1)

            def load(tensors):
                got.update({name: tensor.clone() for name, tensor in tensors})

            receiving = threading.Thread(target=receiver.receive, args=(1, load))
            receiving.start()
            sender.send(1)
            receiving.join()
    return got
