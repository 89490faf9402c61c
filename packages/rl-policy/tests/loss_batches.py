"""Batches for the tests of losses."""

import math

import torch


def one_token(*, ratio, advantage, **columns):
    """Return log-probabilities and a batch of one row `[first token, target token]`."""
    prev = math.log(0.25)
    logprobs = torch.tensor([[0.0, prev + math.log(ratio)]], dtype=torch.float64)
    batch = {
        "token_mask": torch.tensor([[0, 1]]),
        "sample_mask": torch.tensor([1.0]),
        "prev_logprobs": torch.tensor([[0.0, prev]], dtype=torch.float64),
        "advantages": torch.tensor([[advantage, advantage]], dtype=torch.float64),
    }
    for name, value in columns.items():
        batch[name] = torch.tensor([[0.0, value]], dtype=torch.float64)
    return logprobs.requires_grad_(), batch


def evaluate(loss_fn, logprobs, batch, *, seqs=None, toks=None):
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    seqs = batch["sample_mask"].sum() if seqs is None else torch.tensor(seqs)
    toks = mask.sum() if toks is None else torch.tensor(toks)
    return loss_fn(logprobs, batch, seqs, toks)


def two_rows():
    """Return two rows: targets 2 of row 0 (costs 1 and 2) and 4 of row 1 (cost 4 each)."""
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]])
    advantages = -torch.tensor([[9.0, 9.0, 1.0, 2.0, 9.0], [9.0, 4.0, 4.0, 4.0, 4.0]])
    logprobs = torch.tensor([[0.0, -1.0, -2.0, -3.0, 0.0], [0.0, -1.0, -1.0, -1.0, -1.0]])
    batch = {
        "token_mask": mask,
        "sample_mask": torch.ones(2),
        "prev_logprobs": logprobs.clone(),
        "advantages": advantages,
    }
    return logprobs.requires_grad_(), batch


def random_batch(rows=6, width=7):
    generator = torch.Generator().manual_seed(3)

    def normal(scale):
        return scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    logprobs = -normal(1.0).abs()
    batch = {
        "token_mask": (torch.rand(rows, width, generator=generator) < 0.6).long(),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]),
        "advantages": normal(1.0),
        "prev_logprobs": logprobs + normal(0.3),
        "generation_logprobs": logprobs + normal(0.3),
        "reference_logprobs": logprobs + normal(0.3),
    }
    return logprobs, batch


def counts_of(batch):
    """Return the valid rows and target tokens of a batch."""
    targets = batch["token_mask"][:, 1:].sum(1) * batch["sample_mask"]
    return batch["sample_mask"].sum(), targets.sum()
