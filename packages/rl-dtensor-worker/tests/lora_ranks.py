"""What a rank gives for a test of adapters."""

import torch
from losses_for_tests import make_loss
from parity_ranks import rows_of
from ranks import parameters_of, shards_of, worker_for
from rl_dtensor_worker.parallel.fsdp import local_tensor


def sent_by(worker):
    return {name: tensor.clone() for name, tensor in worker.weight_source}


def describe(*, config):
    """Return what a new worker trains, holds and sends."""
    with worker_for(config) as worker:
        model = worker.model
        optimizer = worker._engine.optimizer.state.optimizer
        return {
            "trained": sorted(n for n, p in model.named_parameters() if p.requires_grad),
            "optimized": sum(len(group["params"]) for group in optimizer.param_groups),
            "dtypes": {name: parameter.dtype for name, parameter in model.named_parameters()},
            "parameters": parameters_of(worker),
            "info": worker.prepare_refit_info(),
            "sent": sent_by(worker),
        }


def score_before_training(*, config, batch):
    """Return reference log-probabilities around a step, the first call of all, and its norm."""
    with worker_for(config) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        reference = worker.get_reference_policy_logprobs(rows)["reference_logprobs"]
        result = worker.train(rows, make_loss("nll"))
        after = worker.get_reference_policy_logprobs(rows)["reference_logprobs"]
        policy = worker.get_logprobs(rows)["logprobs"]
        return {
            "reference": reference,
            "after": after,
            "policy": policy,
            "grad_norm": result["grad_norm"],
        }


def score_plainly(*, config, batch):
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        return worker.get_logprobs(rows)["logprobs"]


def train_and_save(*, config, batch, directory):
    """Train, save in all three ways, and train once more; return what was held at each time."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        worker.train(rows, make_loss("nll"))
        before = shards_of(worker)
        sent = sent_by(worker)
        is_untouched = all(torch.equal(t, before[n]) for n, t in shards_of(worker).items())
        worker.save_checkpoint(f"{directory}/weights", f"{directory}/optimizer")
        worker.save_adapters(f"{directory}/adapters")
        worker.save_hf_checkpoint(f"{directory}/merged", max_file_bytes=40_000)
        saved = parameters_of(worker)
        slots = worker._engine.optimizer.state.optimizer.state
        worker.train(rows, make_loss("nll"))
        return {
            "sent": sent,
            "is_untouched": is_untouched,
            "saved": saved,
            "num_slots": len(slots),
            "continued": parameters_of(worker),
            "shards": {n: local_tensor(p).shape for n, p in worker.model.named_parameters()},
        }


def load_and_train(*, config, batch, directory):
    """Load what `train_and_save` saved, train once; return the parameters before and after."""
    paths = {"weights_path": f"{directory}/weights", "optimizer_path": f"{directory}/optimizer"}
    with worker_for(config, init_reference_model=False, **paths) as worker:
        loaded = parameters_of(worker)
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        worker.train(rows, make_loss("nll"))
        return loaded, parameters_of(worker)


def start(*, config, weights_path=None):
    with worker_for(config, init_reference_model=False, weights_path=weights_path):
        pass


def train_twice_from_one_seed(*, config, batch):
    """Return the losses of a call in training mode, and of the same rows in eval mode."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        scored = worker.train(rows, make_loss("nll"), eval_mode=True)["global_loss"]
        trained = worker.train(rows, make_loss("nll"))["global_loss"]
        return trained, scored


def judge(*, config, batch, directory):
    """Score, train a step, save; return what was held, and why there is no reference."""
    with worker_for(config) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        scores = worker.score(rows)["scores"]
        result = worker.train(rows, make_loss("squares"), mbs=1)
        worker.save_checkpoint(f"{directory}/weights", f"{directory}/optimizer")
        worker.save_adapters(f"{directory}/adapters")
        try:
            with worker.use_reference_model():
                refusal = None
        except RuntimeError as error:
            refusal = str(error)
        return {
            "scores": scores,
            "loss": result["global_loss"],
            "parameters": parameters_of(worker),
            "sent": sent_by(worker),
            "refusal": refusal,
        }


def loaded_parameters(*, config, directory):
    """Return the parameters of a worker that starts from what `judge` saved."""
    paths = {"weights_path": f"{directory}/weights", "optimizer_path": f"{directory}/optimizer"}
    with worker_for(config, **paths) as worker:
        return parameters_of(worker)
