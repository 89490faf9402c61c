"""What a rank gives for a case of the parity table."""

import torch
from losses_for_tests import make_loss
from ranks import parameters_of, worker_for
from rl_batched_data import BatchedDataDict
from rl_dtensor_worker.parallel import collectives
from tiny_model import rows_for_rank

BUDGET = 24


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
    """Return what scoring, sending and training give, and this rank's data-parallel place."""
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
        return {
            "place": worker._engine.meshes.data["dp"].get_local_rank(),
            "order": order,
            "logprobs": logprobs,
            "reference": reference["reference_logprobs"],
            "sent": sent,
            "losses": torch.cat([result["global_loss"] for result in results]),
            "grad_norms": torch.cat([result["grad_norm"] for result in results]),
            "parameters": parameters_of(worker),
        }


def train_and_save(*, config, batch, num_calls, weights_path, optimizer_path):
    """Train `num_calls` times, save, train once more; return the parameters after both."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        for _ in range(num_calls):
            worker.train(rows, make_loss("nll"))
        saved = parameters_of(worker)
        worker.save_checkpoint(weights_path, optimizer_path)
        worker.train(rows, make_loss("nll"))
        return saved, parameters_of(worker)


def load_and_train(*, config, batch, weights_path, optimizer_path):
    """Load, train once; return the parameters as loaded, and after."""
    options = {"weights_path": weights_path, "optimizer_path": optimizer_path}
    with worker_for(config, init_reference_model=False, **options) as worker:
        loaded = parameters_of(worker)
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        worker.train(rows, make_loss("nll"))
        return loaded, parameters_of(worker)


def generate_and_score(*, config, batch, greedy):
    """Return this rank's place, its completions, and the log-probabilities they are given."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=None)
        output = worker.generate(rows, greedy=greedy)
        lengths = output["unpadded_sequence_lengths"]
        scored = worker.get_logprobs(
            BatchedDataDict({"input_ids": output["output_ids"], "input_lengths": lengths})
        )["logprobs"]
        return {
            "place": worker._engine.meshes.data["dp"].get_local_rank(),
            "order": None,
            "prompt_lengths": rows["input_lengths"],
            "scored": scored,
            **output,
        }


def call_in_layout(*, config, batch, method, **arguments):
    """Return what a scoring call gives for this rank's rows, and its data-parallel place."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=None)
        place = worker._engine.meshes.data["dp"].get_local_rank()
        return {"place": place, "order": None, **getattr(worker, method)(rows, **arguments)}


def train_on_logits(*, config, batch, loss):
    """Train three times; return losses, norms, parameters, and how often logits were gathered."""
    gathers = []
    with worker_for(config, init_reference_model=False) as worker:
        tp, vocab_size = worker._engine.parallel.tensor_parallel, worker._engine.info.vocab_size
        gather = collectives.all_gather_dim

        def watched(values, group, dim):
            gathered = gather(values, group, dim)
            if dim == -1 and gathered.shape[-1] == vocab_size:
                gathers.append(tuple(gathered.shape))
            return gathered

        assert tp is not None
        collectives.all_gather_dim = watched
        try:
            rows, _ = rows_of(worker, batch, None, global_batch_size=4)
            results = [worker.train(rows, make_loss(loss)) for _ in range(3)]
        finally:
            collectives.all_gather_dim = gather
        return {
            "losses": torch.cat([result["global_loss"] for result in results]),
            "grad_norms": torch.cat([result["grad_norm"] for result in results]),
            "parameters": parameters_of(worker),
            "num_gathers": len(gathers),
        }
