"""What a plain transformers model and a plain loop give for the same input."""

from functools import partial

import torch
from tolerances import (
    GRADIENTS,
    LOGPROBS,
    Expected,
    Trained,
    assert_all_close,
    assert_close,
    expected_of,
    in_float64,
    measured_training,
)
from transformers import AutoModelForCausalLM


def load(model_name):
    return AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval()


def plain_logprobs(
    model,
    batch,
    *,
    temperature=1.0,
    num_ids=None,
    inputs_of=lambda row, length: {},
    dtype=torch.float32,
):
    """Return log p(token t | tokens < t), among the first `num_ids`, row by row and unpadded."""

    def compute(model):
        in_dtype = next(model.parameters()).dtype
        out = torch.zeros(batch["input_ids"].shape, dtype=at_least_float32(in_dtype))
        for row, length in enumerate(batch["input_lengths"].tolist()):
            tokens = batch["input_ids"][row : row + 1, :length]
            inputs = {
                name: each.to(in_dtype) if each.is_floating_point() else each
                for name, each in inputs_of(row, length).items()
            }
            with torch.no_grad():
                out[row, 1:length] = _row_logprobs(
                    model, tokens, temperature, num_ids=num_ids, **inputs
                )
        return out

    return expected_of(compute, model, LOGPROBS, dtype=dtype)


def plain_gradients(model, batch, *, temperature=1.0):
    """Return the gradients of the sum of the log-probabilities, by name, without any padding."""
    exact, rounded = in_float64(model), model
    for each in (exact, rounded):
        for row, length in enumerate(batch["input_lengths"].tolist()):
            tokens = batch["input_ids"][row : row + 1, :length]
            _row_logprobs(each, tokens, temperature).sum().backward()
    exact, rounded = gradients_of(exact), gradients_of(rounded)
    common = {
        "error": largest_difference(rounded, exact),
        "scale": max(float(each.abs().max()) for each in exact.values()),
    }
    return {name: Expected(exact=each, row=GRADIENTS, **common) for name, each in exact.items()}


def _row_logprobs(model, tokens, temperature, *, num_ids=None, **inputs):
    logits = model(tokens, **inputs).logits[0, :-1, :num_ids]
    logits = logits.to(at_least_float32(logits.dtype)) / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)


def at_least_float32(dtype):
    """Return the dtype of log-probabilities: half precision ends with the logits."""
    return torch.promote_types(dtype, torch.float32)


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
    starts = range(0, len(batch["input_ids"]), global_batch_size)
    batches = [
        {k: v[start : start + global_batch_size] for k, v in batch.items()} for start in starts
    ]
    adamw = partial(torch.optim.AdamW, lr=1e-3, eps=1e-6, weight_decay=0.01)
    loss_of = partial(mean_nll, temperature=temperature)
    return measured_training(model, adamw, loss_of, batches * num_calls)


def mean_nll(model, rows, *, temperature):
    """Return the mean over targets of padded rows, and its terms."""
    mask = rows["token_mask"][:, 1:] * rows["sample_mask"][:, None]
    is_token = torch.arange(rows["input_ids"].shape[1]) < rows["input_lengths"][:, None]
    logits = model(rows["input_ids"], attention_mask=is_token.long()).logits / temperature
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, rows["input_ids"][:, 1:, None])
    terms = -chosen.squeeze(-1) * mask
    return terms.sum() / mask.sum(), terms


def assert_trained_like(plain: Trained, trained):
    """Hold a `training_ranks.Trained` against `plain_training`."""
    assert_all_close(trained.parameters, plain.parameters)
    assert_close(trained.losses, plain.losses, "losses")
    assert_close(trained.grad_norms, plain.norms, "grad_norms")


def largest_difference(left, right):
    """Return the largest difference of two `{name: tensor}` with the same names."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).detach().abs().max()) for name in left)
