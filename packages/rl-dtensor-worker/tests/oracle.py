"""What a plain transformers model and a plain loop give for the same input."""

import torch
from transformers import AutoModelForCausalLM

# One table of tolerances, each with its reason.
LOGPROB_TOLERANCE = 1e-5  # float32 attention over rows of unlike width rounds differently
PARAMETER_TOLERANCE = 1e-5  # three AdamW steps (eps 1e-6) amplify the order of float32 sums
LOSS_TOLERANCE = 1e-6  # one float32 sum, taken in another order


def load(model_name):
    return AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval()


def plain_logprobs(model, batch, *, temperature=1.0, inputs_of=lambda row, length: {}):
    """Return log p(token t | tokens < t), row by row without any padding."""
    out = torch.zeros(batch["input_ids"].shape)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        tokens = batch["input_ids"][row : row + 1, :length]
        with torch.no_grad():
            out[row, 1:length] = _row_logprobs(model, tokens, temperature, **inputs_of(row, length))
    return out


def plain_gradients(model, batch, *, temperature=1.0):
    """Return the gradients of the sum of the log-probabilities, by name, without any padding."""
    for row, length in enumerate(batch["input_lengths"].tolist()):
        tokens = batch["input_ids"][row : row + 1, :length]
        _row_logprobs(model, tokens, temperature).sum().backward()
    return gradients_of(model)


def _row_logprobs(model, tokens, temperature, **inputs):
    logits = model(tokens, **inputs).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_training(model_name, batch, *, global_batch_size, num_calls, temperature=1.0):
    """Train on full global batches with torch.optim alone; return parameters, losses, norms."""
    return train_plainly(
        load(model_name),
        batch,
        global_batch_size=global_batch_size,
        num_calls=num_calls,
        temperature=temperature,
    )


def train_plainly(model, batch, *, global_batch_size, num_calls, temperature=1.0):
    """The same for a model that is there already, and is changed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.01)
    losses, norms = [], []
    for _ in range(num_calls):
        for start in range(0, len(batch["input_ids"]), global_batch_size):
            rows = {k: v[start : start + global_batch_size] for k, v in batch.items()}
            mask = rows["token_mask"][:, 1:] * rows["sample_mask"][:, None]
            is_token = torch.arange(rows["input_ids"].shape[1]) < rows["input_lengths"][:, None]
            logits = model(rows["input_ids"], attention_mask=is_token.long()).logits / temperature
            chosen = logits[:, :-1].log_softmax(-1).gather(-1, rows["input_ids"][:, 1:, None])
            loss = -(chosen.squeeze(-1) * mask).sum() / mask.sum()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return dict(model.named_parameters()), losses, norms


def assert_trained_like(plain, trained):
    """Hold a `training_ranks.Trained` against `plain_training`."""
    parameters, losses, norms = plain
    assert largest_difference(trained.parameters, parameters) < PARAMETER_TOLERANCE
    torch.testing.assert_close(
        trained.losses, torch.tensor(losses), atol=LOSS_TOLERANCE, rtol=LOSS_TOLERANCE
    )
    torch.testing.assert_close(trained.grad_norms, torch.tensor(norms), atol=1e-5, rtol=1e-5)


def largest_difference(left, right):
    """Return the largest difference of two `{name: tensor}` with the same names."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).detach().abs().max()) for name in left)
