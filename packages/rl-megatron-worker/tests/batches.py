"""Batches, configs and losses that are small enough for any machine."""

import torch
from rl_batched_data import BatchedDataDict, token_logprobs
from rl_interfaces import LossInput, LossType
from tiny_models import PAD, VOCAB_SIZE


def make_batch(num_rows, *, width=12, seed=1):
    """Return right-padded rows of unlike lengths, every real token but the first a target."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, width + 1, (num_rows,), generator=generator)
    input_ids = torch.randint(2, VOCAB_SIZE, (num_rows, width), generator=generator)
    is_token = torch.arange(width) < lengths[:, None]
    token_mask = is_token.float()
    token_mask[:, 0] = 0.0
    return BatchedDataDict(
        {
            "input_ids": torch.where(is_token, input_ids, PAD),
            "input_lengths": lengths,
            "token_mask": token_mask,
            "sample_mask": torch.ones(num_rows),
        }
    )


def laid_out(batch, num_rows, multiple):
    """Return the rows as the model has them: completed with padding, and by rows of one token."""
    missing = num_rows - batch.size
    rows = {k: torch.nn.functional.pad(v.T, (0, missing)).T for k, v in batch.items()}
    rows["input_lengths"] = -(-rows["input_lengths"].clamp(min=1) // multiple) * multiple
    return rows


def make_config(model_name, *, sections=None, **layout):
    """Return a policy config in float32 whose AdamW does not amplify rounding (eps 1e-6)."""
    optimizer = {"optimizer": "adam", "lr": 1e-3, "adam_eps": 1e-6, "weight_decay": 0.0}
    return {
        "model_name": model_name,
        "precision": "float32",
        "megatron_cfg": {"enabled": True, "optimizer": optimizer, **layout},
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "max_grad_norm": 1.0,
        "generation": {"max_new_tokens": 8, "temperature": 1.0},
        **(sections or {}),
    }


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


class ShardedLoss(LogprobLoss):
    """The same from this rank's shard of the logits; no rank ever has all of them."""

    input_type = LossInput.LOGITS
    accepts_sharded_logits = True

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        group = next_token_logits.device_mesh.get_group()
        shard_size = -(-next_token_logits.shape[-1] // group.size())
        logprobs = token_logprobs(
            next_token_logits.to_local(),
            data["input_ids"],
            tp_group=group,
            vocab_start=group.rank() * shard_size,
        )
        loss, metrics = _masked_mean(logprobs[:, 1:], data, global_valid_toks)
        return loss, metrics | {"shard_size": next_token_logits.to_local().shape[-1]}


class GatheringLoss(LogitLoss):
    """The same from shards that the loss gathers itself."""

    accepts_sharded_logits = True

    def __call__(self, next_token_logits, *others):
        return super().__call__(next_token_logits.full_tensor(), *others)


class NonFiniteLoss(LogprobLoss):
    """A loss whose gradients are not finite."""

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        loss, metrics = super().__call__(
            next_token_logits, data, global_valid_seqs, global_valid_toks
        )
        return loss * torch.tensor(float("inf")), metrics


class SequenceLoss(LogprobLoss):
    """The mean over sequences of their summed negative log-likelihoods."""

    loss_type = LossType.SEQUENCE_LEVEL

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        return _masked_mean(next_token_logits[:, 1:], data, global_valid_seqs)


LOSSES = {
    "nll": LogprobLoss,
    "sequence": SequenceLoss,
    "logits": LogitLoss,
    "sharded": ShardedLoss,
    "gathering": GatheringLoss,
    "nonfinite": NonFiniteLoss,
}


def _masked_mean(logprobs, data, global_valid_toks):
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    loss = -(logprobs * mask).sum() / global_valid_toks
    return loss, {"num_valid_samples": int(data["sample_mask"].sum()), "nll": float(loss.detach())}
