"""A plain attention, and ours on ranks that share sequences."""

import os

import torch
from megatron.core import parallel_state
from megatron_ranks import job
from rl_megatron_worker.attention import PackedAttention
from rl_megatron_worker.layout import PackedRows
from rl_megatron_worker.model.config import DecoderConfig


def plain_attention(query, key, value, lengths):
    """Return causal attention of each sequence alone, `[tokens, heads * size]`."""
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        repeats = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(repeats, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        shares = scores.masked_fill(future, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", shares, v).flatten(1))
    return torch.cat(outputs)


def context_ranks(*, lengths):
    """Return the largest differences from plain attention over all tokens."""
    heads, groups, size, total = 4, 2, 8, sum(lengths)
    num_ranks = int(os.environ["WORLD_SIZE"])
    with job(context_parallel_size=num_ranks) as (runtime, _), runtime.scope():
        generator = torch.Generator().manual_seed(1)
        whole = [
            torch.randn(total, each, size, dtype=torch.float64, generator=generator)
            for each in (heads, groups, groups)
        ]
        weights = torch.randn(total, heads * size, dtype=torch.float64, generator=generator)
        edges = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        group = parallel_state.get_context_parallel_group()
        rows = PackedRows.of(edges, max_seqlen=max(lengths), group=group)
        inputs = [rows.shard(each).clone().requires_grad_() for each in whole]
        config = DecoderConfig(
            num_layers=1,
            hidden_size=heads * size,
            num_attention_heads=heads,
            context_parallel_size=num_ranks,
        )
        own = PackedAttention(config, 1, None, "self").eval()(*inputs, None, packed_seq_params=rows)
        grads = torch.autograd.grad((own * rows.shard(weights)).sum(), inputs)
        for each in whole:
            each.requires_grad_()
        expected = plain_attention(*whole, lengths)
        expected_grads = torch.autograd.grad((expected * weights).sum(), whole)
        return {
            "values": (own - rows.shard(expected)).abs().max().item(),
            "gradients": [
                (a - rows.shard(b)).abs().max().item()
                for a, b in zip(grads, expected_grads, strict=True)
            ],
            "joined": torch.equal(rows.gather(rows.shard(weights)), weights),
        }
