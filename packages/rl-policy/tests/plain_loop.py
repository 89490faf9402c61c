"""What a model and an optimizer give for a batch in one process, without a policy."""

from typing import NamedTuple

import torch
from tolerances import LOGPROBS, Expected, expected_of, in_float64, measured_training


class PlainRun(NamedTuple):
    """What training gives in float64, and how far float32 may be off."""

    parameters: dict[str, Expected]
    losses: Expected
    norms: Expected
    twin: torch.nn.Module
    """The model after training in float64."""


def plain_logprobs(model, data):
    """Return the log-probabilities of each row, `[batch, seq]`, without any padding.

    Args:
        model: Returns logits, or an output of transformers that has them.
        data: A batch; rows are computed one by one.
    """
    dtype = next(model.parameters()).dtype
    out = torch.zeros(data["input_ids"].shape, dtype=dtype)
    for row, length in enumerate(data["input_lengths"].tolist()):
        tokens = data["input_ids"][row : row + 1, :length]
        output = model(tokens)
        logits = getattr(output, "logits", output)[0]
        scores = logits[:-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])
        out[row, 1:length] = scores[:, 0]
    return out


def expected_logprobs(model, data, *, twin=None):
    """Return them in float64, and how far float32 may be off; see `tolerances.expected_of`."""
    with torch.no_grad():
        return expected_of(lambda each: plain_logprobs(each, data), model, LOGPROBS, twin=twin)


def mean_loss(logprobs, rows):
    return -(logprobs * rows["token_mask"]).sum() / rows["token_mask"].sum()


def train_plainly(
    model, make_optimizer, data, *, gbs=4, num_calls=1, max_norm=float("inf"), loss=mean_loss
):
    """Change `model` by a step per `gbs` rows; see `tolerances.measured_training`."""
    starts = range(0, data.size, gbs)
    batches = [data.slice(start, min(start + gbs, data.size)) for start in starts]

    def loss_of(model, rows):
        logprobs = plain_logprobs(model, rows)
        # Other losses are of whole rows.
        terms = logprobs if loss is mean_loss else logprobs.sum(-1)
        return loss(logprobs, rows), terms

    twin = in_float64(model)
    options = {"max_norm": max_norm, "twin": twin}
    trained = measured_training(model, make_optimizer, loss_of, batches * num_calls, **options)
    return PlainRun(*trained, twin)
