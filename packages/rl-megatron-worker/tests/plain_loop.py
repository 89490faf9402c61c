"""What a plain transformers model and a plain loop give for the same input."""

from functools import partial

import torch
from tolerances import (
    LOGPROBS,
    NORMS,
    PARAMETERS,
    Expected,
    expected_of,
    in_float64,
    measured_training,
)
from transformers import AutoModelForCausalLM


def load(model_name):
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval()
    # torch's attention, which transformers takes by default, does not cap scores.
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return model


def plain_logprobs(model, batch, *, temperature=1.0, dtype=torch.float32):
    """Return log p(token t | tokens < t), row by row without any padding."""

    def compute(model):
        # Half precision ends with the logits.
        out_dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        out = torch.zeros(batch["input_ids"].shape, dtype=out_dtype)
        for row, length in enumerate(batch["input_lengths"].tolist()):
            tokens = batch["input_ids"][row : row + 1, :length]
            with torch.no_grad():
                logits = model(tokens).logits[0].to(out_dtype) / temperature
            chosen = logits[:-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])
            out[row, 1:length] = chosen.squeeze(-1)
        return out

    return expected_of(compute, model, LOGPROBS, dtype=dtype)


def _is_token(rows):
    return torch.arange(rows["input_ids"].shape[1]) < rows["input_lengths"][:, None]


def _padded_logprobs(model, rows):
    """Return the log-probabilities of all but the first token of padded rows, with gradients."""
    logits = model(rows["input_ids"], attention_mask=_is_token(rows).long()).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, rows["input_ids"][:, 1:, None])
    return chosen.squeeze(-1)


def plain_training(model_name, batch, *, global_batch_size, num_calls):
    """Train on whole global batches with torch.optim alone; return parameters, losses, norms."""
    model = load(model_name)
    starts = range(0, len(batch["input_ids"]), global_batch_size)
    batches = [
        {k: v[start : start + global_batch_size] for k, v in batch.items()} for start in starts
    ]
    adamw = partial(torch.optim.AdamW, lr=1e-3, eps=1e-6, weight_decay=0.0)
    trained = measured_training(model, adamw, mean_nll, batches * num_calls)
    # A file has buffers, and tied weights under both names.
    names = {id(each): name for name, each in model.named_parameters()}
    for name, each in model.named_parameters(remove_duplicate=False):
        trained.parameters[name] = trained.parameters[names[id(each)]]
    for name, each in model.named_buffers():
        trained.parameters[name] = Expected(exact=each.double(), error=0.0, row=PARAMETERS)
    return trained


def mean_nll(model, rows):
    """Return the mean over targets of padded rows, and its terms."""
    mask = rows["token_mask"][:, 1:] * rows["sample_mask"][:, None]
    terms = -_padded_logprobs(model, rows) * mask
    return terms.sum() / mask.sum(), terms


def plain_balanced_norm(model_name, batch, *, coefficient, micro_batch_size):
    """Return the norm of the gradients of the mean loss and of the experts' balancing loss.

    The latter is that of the Switch Transformer (Fedus et al. 2021, equation 4), of each
    micro-batch, as a mean over the tokens of all of them.
    """
    plain = load(model_name)
    exact, rounded = (
        _balanced_gradients(model, batch, coefficient, micro_batch_size)
        for model in (in_float64(plain), plain)
    )
    wrong = [left.double() - right for left, right in zip(rounded, exact, strict=True)]
    return Expected(
        exact=torch.nn.utils.get_total_norm(exact),
        error=float(torch.nn.utils.get_total_norm(wrong)),
        row=NORMS,
    )


def _balanced_gradients(model, batch, coefficient, micro_batch_size):
    routed = []
    # Padding that is routed has gradients.
    model.get_input_embeddings().padding_idx = None

    def keep(router, args, output):
        logits, _, chosen = output
        routed.append((logits.softmax(-1), chosen))

    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.register_forward_hook(keep)
    num_tokens, num_targets = batch["input_lengths"].sum(), batch["token_mask"][:, 1:].sum()
    for start in range(0, len(batch["input_ids"]), micro_batch_size):
        rows = {k: v[start : start + micro_batch_size] for k, v in batch.items()}
        chosen = _padded_logprobs(model, rows)
        loss = -(chosen * rows["token_mask"][:, 1:]).sum() / num_targets
        is_token = _is_token(rows)
        count = is_token.sum()
        for probabilities, experts in routed:
            shares = probabilities[is_token.flatten()].mean(0)
            taken = experts[is_token.flatten()].flatten().bincount(minlength=len(shares))
            balance = len(shares) * (shares * taken / taken.sum()).sum()
            loss = loss + coefficient * balance * count / num_tokens
        routed.clear()
        loss.backward()
    return [each.grad for each in model.parameters()]
