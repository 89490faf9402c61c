"""Small programs on the device, and their figures; runs in the process of `run_on_fake_cuda`."""

from operator import is_

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rl_interfaces.backend.host_memory import OffloadBuffers
from rl_interfaces.testing.fake_cuda import fake_cuda
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.bias import causal_lower_right

CUDA = torch.device("cuda", 0)
# Only this file's lines: it is in no package of the repository.
PACKAGES = ("fake_cuda_checks",)


def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None


def mixtures():
    """Return the error of each way to mix devices; None where it is allowed."""
    with fake_cuda(world_size=2):
        on_host, on_device = torch.ones(4), torch.ones(4, device=CUDA)
        return {
            "operator": error_of(lambda: on_host + on_device),
            "foreach": error_of(lambda: torch._foreach_add_([on_device], [on_host])),
            "collective": error_of(lambda: dist.all_gather([on_host, on_host], on_device)),
            "index": error_of(
                lambda: torch.zeros(9)[torch.ones(4, device=CUDA, dtype=torch.int64)]
            ),
            "scalar": error_of(lambda: on_device * torch.tensor(2.0)),
        }


def waits():
    """Return the kinds of waits of each statement."""
    with fake_cuda(packages=PACKAGES) as device:
        values, mask = torch.ones(4, device=CUDA), torch.ones(4, device=CUDA) > 0
        host = torch.ones(4)
        calls = {
            "item": lambda: values.sum().item(),
            "float": lambda: float(values[0]),
            "bool": lambda: bool((values > 0).all()),
            "tolist": lambda: values.tolist(),
            "cpu": lambda: values.cpu(),
            "copy to host": lambda: host.copy_(values),
            "upload": lambda: host.to(CUDA),
            "set an element": lambda: values.__setitem__(0, torch.tensor(2.0)),
            "tensor": lambda: torch.tensor([1, 2], device=CUDA),
            "mask": lambda: values[mask],
            "nonzero": lambda: mask.nonzero(),
            "synchronize": torch.cuda.synchronize,
            "event": lambda: torch.cuda.Event().synchronize(),
            "empty_cache": torch.cuda.empty_cache,
            "asynchronous upload": lambda: host.to(CUDA, non_blocking=True),
            "asynchronous copy": lambda: host.copy_(values, non_blocking=True),
            "fill under a mask": lambda: values.masked_fill(mask, 0.0),
            "compute": lambda: (values * 2).sum(),
        }
        found = {}
        for name, call in calls.items():
            with device.phase() as figures:
                call()
            found[name] = [sync.kind for sync in figures.syncs.elements()]
        with device.phase() as figures:
            read_twice(values)
        return {"kinds": found, "places": {str(s): n for s, n in figures.syncs.items()}}


def read_twice(values):
    for value in values[:2]:
        value.item()


def offloads():
    """Return what two offloads of some tensors, a DTensor among them, wait for and use."""
    with fake_cuda(world_size=2, packages=("rl_interfaces",)) as device:
        buffers, mesh = OffloadBuffers(), init_device_mesh("cuda", (2,))
        tensors = [
            DTensor.from_local(torch.ones(3, 4, device=CUDA), mesh, [Shard(0)], run_check=False),
            torch.ones(6, 5, device=CUDA).T,
            torch.ones(0, 4, device=CUDA),
            torch.ones(7, device=CUDA, dtype=torch.int64),
        ]
        wanted, places, waits = [layout_of(each) for each in tensors], [], []
        for _ in range(2):
            with device.phase() as figures:
                offloaded = buffers.moved(tensors, torch.device("cpu"))
            assert {each.device.type for each in offloaded} == {"cpu"}
            assert [layout_of(each) for each in offloaded] == wanted
            places.append([plain(each).data_ptr() for each in offloaded])
            # What is offloaded already stays where it is, and keeps its memory.
            assert all(map(is_, buffers.moved(offloaded, torch.device("cpu")), offloaded))
            assert buffers.num_bytes > 0
            waits.append([figures.num_syncs])
            with device.phase() as figures:
                tensors = buffers.moved(offloaded, CUDA)
            assert {each.device.type for each in tensors} == {"cuda"}
            assert [layout_of(each) for each in tensors] == wanted
            waits[-1].append(figures.num_syncs)
        return {"places": places, "waits": waits, "num_bytes": buffers.num_bytes}


def layout_of(tensor):
    return isinstance(tensor, DTensor), tuple(tensor.shape), tensor.stride(), str(tensor.dtype)


def plain(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def launches():
    with fake_cuda() as device:
        values = torch.ones(4, 4, device=CUDA)
        with device.phase() as views:
            values.view(2, 8).t()[1:].detach()
            torch.empty(9, device=CUDA)
        with device.phase() as kernels:
            F.relu(values @ values) + 1
        with device.phase() as on_host:
            torch.ones(4) + 1
        return [views.launches, kernels.launches, on_host.launches]


def memory():
    """Return bytes over the life of some tensors."""
    found = {}
    with fake_cuda() as device:
        with device.phase() as figures:
            first = torch.empty(1000, device=CUDA)  # 4000 bytes: 8 blocks
            view = first[:10]
            second = torch.empty(10, device=CUDA)  # 40 bytes: one block
            del first, second
        found["view holds all"] = [figures.live_bytes, figures.peak_bytes]
        found["named"] = device.allocated()
        del view
        found["freed"] = device.live_bytes
        buffer = torch.empty(1024, device=CUDA)
        buffer.untyped_storage().resize_(0)
        found["resized"] = device.live_bytes
        buffer.untyped_storage().resize_(4096)
        found["resized back"] = device.live_bytes
        assert torch.cuda.max_memory_allocated() == device.peak_bytes
    return found


def moves():
    """Return the bytes of a model that moves there and back, in three ways."""
    found = {}
    with fake_cuda() as device:
        model = nn.Linear(256, 256)  # real: 263168 bytes
        held = [*model.parameters()]
        model.to(CUDA)
        found["module to cuda"] = device.live_bytes
        model.to("cpu")
        found["module to cpu"] = device.live_bytes
        for parameter in model.parameters():
            parameter.data = parameter.data.to(CUDA)
        found["data to cuda"] = device.live_bytes
        found["devices"] = sorted({str(each.device) for each in model.parameters()})
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(8, 256, device=CUDA)).sum().backward()
        optimizer.step()
        found["trained"] = device.live_bytes
        for parameter in model.parameters():
            parameter.grad = None
            parameter.data = parameter.data.to("cpu")
            for name, state in optimizer.state[parameter].items():
                optimizer.state[parameter][name] = state.to("cpu")
        del state
        found["data to cpu"] = device.live_bytes
        small = torch.ones(4)
        small.data = small.data.to(CUDA)
        found["real data to cuda"] = [str(small.device), small.tolist()]
        del held
    return found


def values():
    """Return what the host sees of values on the device."""
    with fake_cuda() as device:
        lengths = torch.tensor([3, 5]).to(CUDA)
        total = (lengths + 1).cumsum(0)
        unknown = torch.randn(100, device=CUDA)
        device.received = torch.tensor([7, 8])
        return {
            "integers": total.tolist(),
            "selected": (lengths > 3).nonzero().tolist(),
            "unknown float": unknown.sum().item(),
            "finite": bool(torch.isfinite(unknown.norm())),
            "drawn": torch.multinomial(unknown.softmax(0), 1).tolist(),
        }


def collectives():
    with fake_cuda(rank=1, world_size=4) as device:
        own = torch.tensor([5], device=CUDA)
        found = [torch.empty_like(own) for _ in range(4)]
        dist.all_gather(found, own)
        total = torch.tensor([5], device=CUDA)
        dist.all_reduce(total)
        device.reduce = lambda values: values + 1
        reduced = torch.tensor([5], device=CUDA)
        dist.all_reduce(reduced)
        device.received = torch.tensor([9])
        received = torch.empty_like(own)
        dist.recv(received, src=0)
        shard = torch.empty(2, device=CUDA)
        work = dist.reduce_scatter_tensor(shard, torch.ones(8, device=CUDA), async_op=True)
        work.wait()
        text = [""] * 4
        dist.all_gather_object(text, "same")
        return {
            "rank": [
                dist.get_rank(),
                dist.get_world_size(),
                dist.get_world_size(dist.new_group([1])),
            ],
            "gathered": torch.cat(found).tolist(),
            "summed": total.tolist(),
            "reduced": reduced.tolist(),
            "received": received.tolist(),
            "objects": text,
        }


def attention_bytes():
    """Return the peak bytes of attention over 2048 tokens, by kernel."""
    size = (1, 4, 2048, 64)
    found = {}
    with fake_cuda() as device:
        query, key = (torch.ones(size, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
        few = torch.ones(1, 2, 2048, 64, device=CUDA, dtype=torch.bfloat16)
        mask = torch.ones(1, 1, 2048, 2048, dtype=torch.bool, device=CUDA)
        calls = {
            "causal": lambda: F.scaled_dot_product_attention(query, key, key, is_causal=True),
            "grouped": lambda: F.scaled_dot_product_attention(
                query, few, few, is_causal=True, enable_gqa=True
            ),
            "lower right": lambda: F.scaled_dot_product_attention(
                query[:, :, :1024], few, few, causal_lower_right(1024, 2048), enable_gqa=True
            ),
            "grouped with a mask": lambda: F.scaled_dot_product_attention(
                query, few, few, mask, enable_gqa=True
            ),
        }
        for name, call in calls.items():
            before = device.live_bytes
            with device.phase() as figures:
                call()
            found[name] = figures.peak_bytes - before
    return found


class Toy(nn.Module):
    """Layers, and what a bug of each kind would add to them."""

    def __init__(self, num_layers, bug=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, device=CUDA) for _ in range(num_layers))
        self.bug, self.kept = bug, []

    def forward(self, hidden):
        for layer in self.layers:
            if self.bug == "wait":
                assert float(hidden.abs().max()) >= 0
            if self.bug == "launches":
                hidden = torch.stack([row * 1.0 for row in hidden])
            if self.bug == "bytes":
                hidden = (hidden.repeat(64, 1) * 1.0)[: len(hidden)]
            if self.bug == "kept":
                self.kept.append(hidden.detach())
            hidden = layer(hidden).relu()
        return hidden


def planted(bug):
    """Return the numbers of a training step of `Toy`, as `Numbers` has them."""
    phases = {}
    for num_layers in (2, 3):
        with fake_cuda(packages=PACKAGES) as device:
            model = Toy(num_layers, bug)
            with device.phase() as phases[num_layers]:
                loss = model(torch.ones(8, 64, device=CUDA)).sum()
                loss.backward()
                loss.item()
            model.zero_grad(set_to_none=True)
            del loss
            model.to("cpu")
            left = device.live_bytes
    shallow, deep = phases[2], phases[3]
    return {
        "launches_per_layer": deep.launches - shallow.launches,
        "syncs_per_layer": deep.num_syncs - shallow.num_syncs,
        "offloaded_bytes": left,
        "peak_bytes": {"train": shallow.peak_bytes},
        "syncs": {sync.place: count for sync, count in shallow.syncs.items()},
    }


def everything():
    """Return the results of all checks: a process takes seconds to start."""
    checks = (
        mixtures,
        waits,
        offloads,
        launches,
        memory,
        moves,
        values,
        collectives,
        attention_bytes,
    )
    found = {check.__name__: check() for check in checks}
    bugs = (None, "wait", "launches", "bytes", "kept")
    return found | {"planted": {str(bug): planted(bug) for bug in bugs}}


def fail():
    raise ValueError("on purpose")
