"""What a model and an optimizer give for a batch in one process, without a policy."""

import torch


def plain_logprobs(model, data):
    """Return the log-probabilities of each row, `[batch, seq]`, without any padding.

    Args:
        model: Returns logits, or an output of transformers that has them.
        data: A batch; rows are computed one by one.
    """
    out = torch.zeros(data["input_ids"].shape)
    for row, length in enumerate(data["input_lengths"].tolist()):
        tokens = data["input_ids"][row : row + 1, :length]
        output = model(tokens)
        logits = getattr(output, "logits", output)[0]
        scores = logits[:-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])
        out[row, 1:length] = scores[:, 0]
    return out


def mean_loss(logprobs, rows):
    return -(logprobs * rows["token_mask"]).sum() / rows["token_mask"].sum()


def train_plainly(
    model, optimizer, data, *, gbs=4, num_calls=1, max_norm=float("inf"), loss=mean_loss
):
    """Change `model` by a step per `gbs` rows; return the loss and gradient norm of each step."""
    losses, norms = [], []
    for _ in range(num_calls):
        for start in range(0, data.size, gbs):
            rows = data.slice(start, min(start + gbs, data.size))
            value = loss(plain_logprobs(model, rows), rows)
            optimizer.zero_grad()
            value.backward()
            losses.append(value.detach())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
    return torch.stack(losses), torch.stack(norms)
