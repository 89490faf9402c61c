"""Losses that the workers import by name."""

from rl_interfaces import LossInput, LossType


class MeanLogprobLoss:
    """The mean negative log-probability of the valid target tokens."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.LOGPROBS

    def __call__(self, logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = -(logprobs[:, 1:] * mask).sum() / global_valid_toks
        return loss, {
            "num_valid_samples": data["sample_mask"].sum().item(),
            "first_tokens": data["input_ids"][:, 0].sum().item(),
        }


class FailingLoss(MeanLogprobLoss):
    """Fails where a row starts with the token that it is told."""

    def __init__(self, first_token):
        self.first_token = first_token

    def __call__(self, logprobs, data, global_valid_seqs, global_valid_toks):
        if (data["input_ids"][:, 0] == self.first_token).any():
            raise ArithmeticError(f"a row starts with {self.first_token}")
        return super().__call__(logprobs, data, global_valid_seqs, global_valid_toks)
