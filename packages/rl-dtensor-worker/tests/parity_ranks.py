"""Cases of the parity table that ranks run."""

from typing import NamedTuple

import torch
from losses_for_tests import make_loss
from ranks import parameters_of, worker_for
from rl_batched_data import BatchedDataDict
from rl_dtensor_worker.parallel import collectives
from tiny_model import rows_for_rank

BUDGET = 24


class Case(NamedTuple):
    """What scoring, sending and training give on one rank."""

    place: int
    """The rank's data-parallel place."""
    order: list[int] | None
    """The order of all ranks' rows in the batch; None: as they were."""
    columns: dict[str, torch.Tensor]
    """Per-token log-probabilities of this rank's rows: `logprobs` and `reference`."""
    sent: dict[str, torch.Tensor]
    losses: torch.Tensor
    grad_norms: torch.Tensor
    parameters: dict[str, torch.Tensor]


class TokenCounts(NamedTuple):
    """How many tokens some rows have, and how many of them the model has read."""

    in_rows: int
    read: int


class Rows(NamedTuple):
    """What calls give for the rows of one data-parallel place."""

    place: int
    order: list[int] | None
    columns: dict[str, torch.Tensor]


class Saved(NamedTuple):
    """Parameters when they were saved, and after one more call."""

    saved: dict[str, torch.Tensor]
    continued: dict[str, torch.Tensor]


class Resumed(NamedTuple):
    """Parameters as they were loaded, and after one more call."""

    loaded: dict[str, torch.Tensor]
    continued: dict[str, torch.Tensor]


class LogitTraining(NamedTuple):
    losses: torch.Tensor
    grad_norms: torch.Tensor
    parameters: dict[str, torch.Tensor]
    num_gathers: int
    """How often logits were gathered along the vocabulary."""


def rows_of(worker, batch, section, *, global_batch_size):
    """Return the rows of this rank's data-parallel place, with the plan of `section`."""
    mesh = worker._engine.meshes.data["dp"]
    rank, num_ranks = mesh.get_local_rank(), mesh.size()
    if section is None:
        size = global_batch_size or batch["input_ids"].shape[0]
        return rows_for_rank(batch, rank=rank, num_ranks=num_ranks, global_batch_size=size), None
    arguments = {f"{section}_args": {"max_tokens_per_microbatch": BUDGET}}
    shards, order = BatchedDataDict(batch).shard_by_batch_size(
        num_ranks, batch_size=global_batch_size, **arguments
    )
    return shards[rank], order


def run_case(*, config, batch, section, num_calls, loss="nll"):
    with worker_for(config) as worker:
        rows, order = rows_of(worker, batch, section, global_batch_size=None)
        logprobs = worker.get_logprobs(rows)["logprobs"]
        sent = {name: tensor.clone() for name, tensor in worker.weight_source}
        rows, _ = rows_of(
            worker, batch, section, global_batch_size=config["train_global_batch_size"]
        )
        results = [worker.train(rows, make_loss(loss)) for _ in range(num_calls)]
        reference = worker.get_reference_policy_logprobs(
            rows_of(worker, batch, section, global_batch_size=None)[0]
        )
        return Case(
            place=worker._engine.meshes.data["dp"].get_local_rank(),
            order=order,
            columns={"logprobs": logprobs, "reference": reference["reference_logprobs"]},
            sent=sent,
            losses=torch.cat([result["global_loss"] for result in results]),
            grad_norms=torch.cat([result["grad_norm"] for result in results]),
            parameters=parameters_of(worker),
        )


def count_tokens(*, config, batch, section):
    """Count the tokens that the model reads where it scores rows."""
    num_read = []
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        rows, _ = rows_of(worker, batch, section, global_batch_size=None)
        embeddings = worker._engine.model.get_input_embeddings()
        embeddings.register_forward_pre_hook(
            lambda _, arguments: num_read.append(arguments[0].numel())
        )
        worker.get_logprobs(rows)
    return TokenCounts(int(rows["input_lengths"].sum()), sum(num_read))


def train_and_save(*, config, batch, num_calls, weights_path, optimizer_path):
    """Train `num_calls` times, save, train once more."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        for _ in range(num_calls):
            worker.train(rows, make_loss("nll"))
        saved = parameters_of(worker)
        worker.save_checkpoint(weights_path, optimizer_path)
        worker.train(rows, make_loss("nll"))
        return Saved(saved, parameters_of(worker))


def load_and_train(*, config, batch, weights_path, optimizer_path):
    options = {"weights_path": weights_path, "optimizer_path": optimizer_path}
    with worker_for(config, init_reference_model=False, **options) as worker:
        loaded = parameters_of(worker)
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        worker.train(rows, make_loss("nll"))
        return Resumed(loaded, parameters_of(worker))


def generate_and_score(*, config, batch, greedy):
    """Complete prompts, then score the completions; `scored` has the log-probabilities."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=None)
        output = worker.generate(rows, greedy=greedy)
        lengths = output["unpadded_sequence_lengths"]
        scored = worker.get_logprobs(
            BatchedDataDict({"input_ids": output["output_ids"], "input_lengths": lengths})
        )["logprobs"]
        return Rows(
            place=worker._engine.meshes.data["dp"].get_local_rank(),
            order=None,
            columns={"prompt_lengths": rows["input_lengths"], "scored": scored, **output},
        )


def call_in_layout(*, config, batch, method, **arguments):
    """Call a scoring method on the rows of this rank's data-parallel place."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=None)
        place = worker._engine.meshes.data["dp"].get_local_rank()
        return Rows(place, order=None, columns=dict(getattr(worker, method)(rows, **arguments)))


def train_on_logits(*, config, batch, section, loss):
    """Train three times while counting gathers of logits."""
    gathers = []
    with worker_for(config, init_reference_model=False) as worker:
        tp, vocab_size = worker._engine.parallel.tensor_parallel, worker._engine.info.vocab_size
        gather = collectives.all_gather_dim

        def watched(values, group, dim):
            gathered = gather(values, group, dim)
            # Parts that are unlike are filled up.
            if dim == -1 and gathered.shape[-1] >= vocab_size:
                gathers.append(tuple(gathered.shape))
            return gathered

        assert tp is not None
        collectives.all_gather_dim = watched
        try:
            rows, _ = rows_of(worker, batch, section, global_batch_size=4)
            results = [worker.train(rows, make_loss(loss)) for _ in range(3)]
        finally:
            collectives.all_gather_dim = gather
        return LogitTraining(
            losses=torch.cat([result["global_loss"] for result in results]),
            grad_norms=torch.cat([result["grad_norm"] for result in results]),
            parameters=parameters_of(worker),
            num_gathers=len(gathers),
        )
