"""One rank of an attention over context-parallel sequences."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from rl_batched_data import PackedSequences
from rl_dtensor_worker.attention import ContextRows, Heads, Window


class Attended(NamedTuple):
    """The gathered output, and the gathered gradients of query, key and value."""

    output: torch.Tensor
    gradients: list[torch.Tensor]


def attend_to_shards(*, states, weights, lengths, window):
    dist.init_process_group("gloo")
    try:
        group = dist.group.WORLD
        packed = PackedSequences.of(
            torch.tensor(lengths), max(lengths), pad_multiple=2 * group.size()
        )
        rows = ContextRows.of(packed, group)
        own = [part.index_select(2, rows.shards.own).requires_grad_() for part in states]
        module = torch.nn.Module()
        output = rows.attend(module, Heads(*own), None if window is None else Window(window))
        gathered = rows.gather(output)
        (gathered * weights).sum().backward()
        gradients = [
            rows.gather(part.grad.transpose(1, 2)).transpose(1, 2).contiguous() for part in own
        ]
        return Attended(gathered.detach(), gradients)
    finally:
        dist.destroy_process_group()
