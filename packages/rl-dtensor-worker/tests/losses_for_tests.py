"""Losses in the documented protocol, and the same numbers from plain transformers."""

import torch
from rl_batched_data import target_scores
from rl_interfaces import LossInput, LossType
from torch.distributed.tensor import DTensor, Shard


def _masked_mean(logprobs, data, global_valid_toks):
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    loss = -(logprobs * mask).sum() / global_valid_toks
    return loss, {"num_valid_samples": int(data["sample_mask"].sum()), "nll": float(loss.detach())}


class LogprobLoss:
    """Mean negative log-likelihood from log-probabilities."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.LOGPROBS

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        return _masked_mean(next_token_logits[:, 1:], data, global_valid_toks)


class LogitLoss:
    """The same from logits, as a loss of the reference's protocol has them."""

    loss_type = LossType.TOKEN_LEVEL

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        logprobs = next_token_logits[:, :-1].log_softmax(-1)
        chosen = logprobs.gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
        return _masked_mean(chosen, data, global_valid_toks)


class ShardedLogitLoss(LogitLoss):
    """The same from this rank's shard of the vocabulary, where the logits are sharded."""

    accepts_sharded_logits = True

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        assert isinstance(next_token_logits, DTensor)
        assert next_token_logits.placements == (Shard(2),)
        group = next_token_logits.device_mesh.get_group()
        local = next_token_logits.to_local()
        most = -(-next_token_logits.shape[-1] // group.size())
        start = group.rank() * most
        assert local.shape[-1] == min(most, next_token_logits.shape[-1] - start)
        targets = data["input_ids"].roll(-1, dims=1)
        scores = target_scores(local, targets, tp_group=group, vocab_start=start).logprobs
        return _masked_mean(scores[:, :-1], data, global_valid_toks)


class NonFiniteLoss(LogprobLoss):
    """A loss whose gradients are not finite."""

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        loss, metrics = super().__call__(
            next_token_logits, data, global_valid_seqs, global_valid_toks
        )
        return loss * torch.tensor(float("inf")), metrics


class FailingLoss(LogprobLoss):
    """Raises at the second micro-batch."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        self.num_calls += 1
        if self.num_calls == 2:
            raise MemoryError("planted")
        return super().__call__(next_token_logits, data, global_valid_seqs, global_valid_toks)


class DrawingLoss(LogprobLoss):
    """Draws a random number, as a loss with dropout of its own would."""

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        torch.rand(1)
        return super().__call__(next_token_logits, data, global_valid_seqs, global_valid_toks)


class SequenceLoss(LogprobLoss):
    """Needs no token mask."""

    loss_type = LossType.SEQUENCE_LEVEL

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        loss = -(next_token_logits.sum(1) * data["sample_mask"]).sum() / global_valid_seqs
        return loss, {"num_valid_samples": int(data["sample_mask"].sum())}


class SquaresLoss:
    """How far scores are from 1; what a reward or value model gives stands in for logits."""

    loss_type = LossType.SEQUENCE_LEVEL

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        distances = (next_token_logits - 1) ** 2
        per_row = distances if distances.ndim == 1 else distances.sum(1)
        loss = (per_row * data["sample_mask"]).sum() / global_valid_seqs
        return loss, {"num_valid_samples": int(data["sample_mask"].sum())}


def make_loss(name):
    return {
        "nll": LogprobLoss,
        "logits": LogitLoss,
        "sharded_logits": ShardedLogitLoss,
        "nonfinite": NonFiniteLoss,
        "failing": FailingLoss,
        "drawing": DrawingLoss,
        "sequence": SequenceLoss,
        "squares": SquaresLoss,
    }[name]()
