"""Cases of scoring and generation that ranks run."""

from typing import NamedTuple

import torch
from losses_for_tests import make_loss
from ranks import my_rows, this_rank, worker_for
from training_ranks import my_planned_rows


class Generated(NamedTuple):
    """The output of each `generate`, and `get_logprobs` of the last one's sequences."""

    outputs: list[dict]
    scored: torch.Tensor


class CountedTokens(NamedTuple):
    """Completions, and the tokens that the model took in each forward of theirs."""

    output_ids: torch.Tensor
    totals: torch.Tensor
    num_tokens: list[int]


class BothModes(NamedTuple):
    logprobs: torch.Tensor
    scoring: torch.Tensor
    training: torch.Tensor
    exported: str


class GeneratedThenScored(NamedTuple):
    output_ids: torch.Tensor
    logprobs: torch.Tensor
    order: list[int]


class PlannedCall(NamedTuple):
    """A call's output for this rank's rows, and the order of all ranks' rows in the batch."""

    output: dict[str, torch.Tensor]
    order: list[int]


def score(*, config, batch, micro_batch_size=None):
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        return worker.get_logprobs(my_rows(batch), micro_batch_size)["logprobs"]


def score_under_torchrun(config, batch):
    """Return the scores as numbers: a tensor's memory would go with its process."""
    torch.set_num_threads(1)
    return score(config=config, batch=batch).tolist()


def generate(*, config, batch, greedy=False, num_calls=1):
    """Generate `num_calls` times, then score the last completions."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        rows = my_rows(batch)
        outputs = [dict(worker.generate(rows, greedy=greedy)) for _ in range(num_calls)]
        sequences = type(rows)(
            {
                "input_ids": outputs[-1]["output_ids"],
                "input_lengths": outputs[-1]["unpadded_sequence_lengths"],
            }
        )
        return Generated(outputs, worker.get_logprobs(sequences)["logprobs"])


def generate_counting_tokens(*, config, batch):
    """Generate greedily, and count the tokens that the model takes in each forward."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        worker.generate(batch, greedy=True)  # with the check of the decoder
        num_tokens = []
        embeddings = worker.model.get_input_embeddings()
        hook = embeddings.register_forward_pre_hook(
            lambda _, arguments: num_tokens.append(arguments[0].numel())
        )
        output = worker.generate(batch, greedy=True)
        hook.remove()
    return CountedTokens(output["output_ids"], output["unpadded_sequence_lengths"], num_tokens)


def score_as_given(*, config, batch):
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        return worker.get_logprobs(batch)["logprobs"]


def score_in_layout(*, config, batch, section=None):
    """Score all rows on every rank of one data-parallel group, in the caller's order."""
    order = list(range(batch.size))
    if section is not None:
        budget = {"max_tokens_per_microbatch": 24}
        (batch,), order = batch.shard_by_batch_size(1, **{f"{section}_args": budget})
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        logprobs = worker.get_logprobs(batch)["logprobs"]
    return logprobs[torch.tensor(order).argsort()]


def score_then_export(*, config, batch, directory):
    """Score all rows on every rank, then export the model."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        logprobs = worker.get_logprobs(batch)["logprobs"]
        worker.save_hf_checkpoint(directory)
        return logprobs


def score_in_both_modes(*, config, batch, directory):
    """Score a batch in train mode and in eval mode, then export the model."""
    with worker_for(config, init_reference_model=False) as worker:
        scoring = worker.get_logprobs(batch)["logprobs"]
        losses = [
            worker.train(batch, make_loss("nll"), eval_mode=eval_mode)["global_loss"]
            for eval_mode in (True, False)
        ]
        worker.save_hf_checkpoint(directory)
        return BothModes(scoring, *(torch.as_tensor(loss) for loss in losses), directory)


def score_with_attention(*, config, attention, batch, section):
    """Score with a model whose attention knows nothing of packed sequences."""
    from transformers import AttentionInterface

    def sees_everything(module, query, key, value, attention_mask, scaling, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
        return output.transpose(1, 2), None

    AttentionInterface.register("sees_everything", sees_everything)
    return score_in_layout(config=config | {"model_name": attention}, batch=batch, section=section)


def generate_then_score(*, config, batch, section, num_tokens):
    """Complete the prompts greedily, then score `batch` as planned."""
    rows, order = my_planned_rows(batch, section, num_tokens)
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        output = worker.generate(my_rows(batch), greedy=True)
        logprobs = worker.get_logprobs(rows)["logprobs"]
        return GeneratedThenScored(output["output_ids"], logprobs, order)


def call_planned(*, config, batch, method, section=None, num_tokens=24, **arguments):
    """Call a scoring method on this rank's rows, planned if `section` says how."""
    rank, num_ranks = this_rank()
    if section is None:
        rows, order = my_rows(batch), list(range(batch.size))
    else:
        budget = {"max_tokens_per_microbatch": num_tokens}
        key = {"dynamic_batching": "dynamic_batching_args"}.get(section, "sequence_packing_args")
        shards, order = batch.shard_by_batch_size(num_ranks, **{key: budget})
        rows = shards[rank]
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        return PlannedCall(dict(getattr(worker, method)(rows, **arguments)), order)


def calls_of_the_wrong_head(*, config, batch):
    """Return the error of each call that the model's head does not allow."""
    errors = {}
    with worker_for(config, init_reference_model=False) as worker:
        calls = {
            "get_logprobs": lambda: worker.get_logprobs(batch),
            "get_topk_logits": lambda: worker.get_topk_logits(batch, 2),
            "too many": lambda: worker.get_topk_logits(batch, 65),
            "score": lambda: worker.score(batch),
            "generate": lambda: worker.generate(batch),
            "train": lambda: worker.train(batch, make_loss("nll")),
        }
        for name, call in calls.items():
            try:
                call()
            except ValueError as error:
                errors[name] = str(error)
    return errors
