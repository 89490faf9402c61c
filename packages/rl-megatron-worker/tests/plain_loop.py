"""What a plain transformers model and a plain loop give for the same input."""

import torch
from transformers import AutoModelForCausalLM

# One table of tolerances, each with its reason.
LOGPROB_TOLERANCE = 1e-5  # float32 attention over rows of unlike width rounds differently
PARAMETER_TOLERANCE = 1e-5  # three AdamW calls (eps 1e-6) amplify the order of float32 sums
# Losses are about 4, norms about 10, where float32 has steps of 5e-7 and 1e-6: sums of hundreds of
# terms, taken in another order, agree to a few of them.
RELATIVE_TOLERANCE = 2e-6


def load(model_name):
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval()
    # torch's attention, which transformers takes by default, does not cap scores.
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return model


def plain_logprobs(model, batch, *, temperature=1.0):
    """Return log p(token t | tokens < t), row by row without any padding."""
    out = torch.zeros(batch["input_ids"].shape)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        tokens = batch["input_ids"][row : row + 1, :length]
        with torch.no_grad():
            logits = model(tokens).logits[0] / temperature
        chosen = logits[:-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])
        out[row, 1:length] = chosen.squeeze(-1)
    return out


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.0)
    losses, norms = [], []
    for _ in range(num_calls):
        for start in range(0, len(batch["input_ids"]), global_batch_size):
            rows = {k: v[start : start + global_batch_size] for k, v in batch.items()}
            mask = rows["token_mask"][:, 1:] * rows["sample_mask"][:, None]
            loss = -(_padded_logprobs(model, rows) * mask).sum() / mask.sum()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model.state_dict(), losses, norms


def plain_balanced_norm(model_name, batch, *, coefficient, micro_batch_size):
    """Return the norm of the gradients of the mean loss and of the experts' balancing loss.

    The latter is that of the Switch Transformer (Fedus et al. 2021, equation 4), of each
    micro-batch, as a mean over the tokens of all of them.
    """
    model, routed = load(model_name), []
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
    return float(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]))
