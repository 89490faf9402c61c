"""What the ranks of `test_slices.py` do: a Megatron job that sends its shards to engines."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.utils._python_dispatch as dispatch
from convert_ranks import CPU, load
from megatron_ranks import job
from patience import PATIENCE_S
from rl_megatron_worker.weights import MegatronWeights
from rl_refit.resharding import ReshardSender


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


def send(*, path, layout, num_engines, address, limit_s=PATIENCE_S):
    """Send a model, and after a change once more; return what this rank has sent and made."""
    with job(**layout) as (runtime, ranks):
        chunks, mappings, _ = load(path, runtime, ranks)
        weights = MegatronWeights(chunks, mappings, wire_dtype=torch.float32, device=CPU)
        largest, sent = LargestAllocation(), []
        with ReshardSender(
            weights.shards,
            num_receivers=num_engines,
            trainers=dist.group.WORLD,
            timeout_s=limit_s,
        ) as sender:
            if dist.get_rank() == 0:
                _publish(Path(address), sender.address)
            for version in (1, 2):
                with largest:
                    sender.send(version)
                sender.commit(version)
                sent.append(sender.report.bytes_sent)
                with torch.no_grad():
                    for parameter in (each for chunk in chunks for each in chunk.parameters()):
                        parameter.mul_(2)
        return {"sent": sent, "largest": largest.nbytes}


def _publish(path, address):
    """Write a file that nobody sees half of."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(address))
    beside.rename(path)
