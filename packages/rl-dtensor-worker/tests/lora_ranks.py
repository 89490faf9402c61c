"""Cases of adapters that ranks run."""

from typing import NamedTuple

import torch
from losses_for_tests import make_loss
from parity_ranks import Resumed, rows_of
from ranks import parameters_of, shards_of, worker_for


class Adapted(NamedTuple):
    """What a new worker trains, holds and sends."""

    trained: list[str]
    num_optimized: int
    dtypes: dict[str, torch.dtype]
    parameters: dict[str, torch.Tensor]
    info: dict
    sent: dict[str, torch.Tensor]


class ScoredAroundStep(NamedTuple):
    """Reference log-probabilities before and after a step, the policy's after it, and its norm."""

    reference: torch.Tensor
    reference_after: torch.Tensor
    policy_after: torch.Tensor
    grad_norm: torch.Tensor


class SavedAdapters(NamedTuple):
    """What a worker held when it saved, and after one more call."""

    sent: dict[str, torch.Tensor]
    is_untouched: bool
    saved: dict[str, torch.Tensor]
    num_slots: int
    continued: dict[str, torch.Tensor]


class SeededLosses(NamedTuple):
    trained: torch.Tensor
    scored: torch.Tensor


class Judged(NamedTuple):
    """Scores, one step's loss, what was held after it, and why there is no reference."""

    scores: torch.Tensor
    loss: torch.Tensor
    parameters: dict[str, torch.Tensor]
    sent: dict[str, torch.Tensor]
    refusal: str | None


def sent_by(worker):
    return {name: tensor.clone() for name, tensor in worker.weight_source}


def sources_of(*, config, dtype=torch.float32):
    """Return the base and the factors as they are sent, gathered in order and one at a time."""
    with worker_for(config) as worker:
        base, factors = worker._engine.adapter_sources(dtype)
        sent = {name: tensor.clone() for name, tensor in factors}
        for name, tensor in factors.gather(reversed(sent)):
            assert torch.equal(tensor, sent[name])
        info = {meta.name: (meta.dtype, meta.shape) for meta in factors.metadata()}
        assert info == {name: (each.dtype, tuple(each.shape)) for name, each in sent.items()}
        return {name: tensor.clone() for name, tensor in base}, sent


def describe(*, config):
    with worker_for(config) as worker:
        model = worker.model
        optimizer = worker._engine.optimizer.state.optimizer
        return Adapted(
            trained=sorted(n for n, p in model.named_parameters() if p.requires_grad),
            num_optimized=sum(len(group["params"]) for group in optimizer.param_groups),
            dtypes={name: parameter.dtype for name, parameter in model.named_parameters()},
            parameters=parameters_of(worker),
            info=worker.prepare_refit_info(),
            sent=sent_by(worker),
        )


def score_before_training(*, config, batch):
    """Score as the reference first of all, then around a step."""
    with worker_for(config) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        reference = worker.get_reference_policy_logprobs(rows)["reference_logprobs"]
        result = worker.train(rows, make_loss("nll"))
        after = worker.get_reference_policy_logprobs(rows)["reference_logprobs"]
        policy = worker.get_logprobs(rows)["logprobs"]
        return ScoredAroundStep(reference, after, policy, result["grad_norm"])


def score_plainly(*, config, batch):
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        return worker.get_logprobs(rows)["logprobs"]


def train_and_save(*, config, batch, directory):
    """Train, save in all three ways, and train once more."""
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
        return SavedAdapters(
            sent=sent,
            is_untouched=is_untouched,
            saved=saved,
            num_slots=len(slots),
            continued=parameters_of(worker),
        )


def load_and_train(*, config, batch, directory):
    """Load what `train_and_save` saved, and train once."""
    paths = {"weights_path": f"{directory}/weights", "optimizer_path": f"{directory}/optimizer"}
    with worker_for(config, init_reference_model=False, **paths) as worker:
        loaded = parameters_of(worker)
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        worker.train(rows, make_loss("nll"))
        return Resumed(loaded, parameters_of(worker))


def start(*, config, weights_path=None):
    with worker_for(config, init_reference_model=False, weights_path=weights_path):
        pass


def train_twice_from_one_seed(*, config, batch):
    """Evaluate rows, then train on them."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(worker, batch, None, global_batch_size=4)
        scored = worker.train(rows, make_loss("nll"), eval_mode=True)["global_loss"]
        trained = worker.train(rows, make_loss("nll"))["global_loss"]
        return SeededLosses(trained, scored)


def judge(*, config, batch, directory):
    """Score, train a step, save."""
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
        return Judged(
            scores=scores,
            loss=result["global_loss"],
            parameters=parameters_of(worker),
            sent=sent_by(worker),
            refusal=refusal,
        )


def loaded_parameters(*, config, directory):
    """Return the parameters of a worker that starts from what `judge` saved."""
    paths = {"weights_path": f"{directory}/weights", "optimizer_path": f"{directory}/optimizer"}
    with worker_for(config, **paths) as worker:
        return parameters_of(worker)
