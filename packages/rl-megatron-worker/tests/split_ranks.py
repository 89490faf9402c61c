"""Cases of split training that ranks run."""

from itertools import pairwise
from typing import NamedTuple

import torch
from batches import LOSSES
from worker_ranks import rows_of, sent_by, worker_for


class Steps(NamedTuple):
    """The norms of some optimizer steps, the weights after them, and the losses of all calls."""

    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    losses: list[float]


def train_at_once(*, config, batch, edges, loss, section=None, num_steps=2):
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(batch, section)
        results = [worker.train(rows, LOSSES[loss](), gbs=batch.size) for _ in range(num_steps)]
        norms = [float(result["grad_norm"]) for result in results]
        losses = [float(result["global_loss"]) for result in results]
        return Steps(norms, sent_by(worker), losses)


def train_in_calls(*, config, batch, edges, loss, section=None, num_steps=2):
    """Return the steps of a call per chunk; between them the worker scores and trains at once."""
    with worker_for(config, init_reference_model=False) as worker:
        norms, losses = [], []
        for _ in range(num_steps):
            for start, end in pairwise(edges):
                rows, _ = rows_of(batch.slice(start, end), section)
                result = worker.forward_backward(rows, LOSSES[loss]())
                losses.append(float(result["global_loss"]))
                worker.get_logprobs(rows)
            norms.append(worker.optimizer_step()["grad_norm"])
        return Steps(norms, sent_by(worker), losses)


def train_in_turns(*, config, batch, edges, loss):
    """Return the steps of `train` before and after split ones, whose reductions must not mix."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(batch, None)
        norms = []
        for is_split in (False, True, False, True, True, False):
            if not is_split:
                (norm,) = worker.train(rows, LOSSES[loss](), gbs=batch.size)["grad_norm"].tolist()
            else:
                for start, end in pairwise(edges):
                    worker.forward_backward(rows_of(batch.slice(start, end))[0], LOSSES[loss]())
                norm = worker.optimizer_step()["grad_norm"]
            norms.append(norm)
        return Steps(norms, sent_by(worker), [])


def failures_drop_gradients(*, config, batch):
    """Return the error of a failed call and of the step after it, and the step of the next call."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(batch, None)
        worker.forward_backward(rows, LOSSES["nll"]())
        errors = []
        for call in (
            lambda: worker.forward_backward(rows, _failing_loss),
            worker.optimizer_step,
        ):
            try:
                call()
            except (LookupError, RuntimeError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        worker.forward_backward(rows, LOSSES["nll"]())
        return errors, worker.optimizer_step()["grad_norm"]


def _failing_loss(*_):
    raise LookupError("planted")


_failing_loss.loss_type = LOSSES["nll"].loss_type


def refusal_with_balancing(*, config, batch):
    with worker_for(config, init_reference_model=False) as worker:
        try:
            worker.forward_backward(rows_of(batch, None)[0], LOSSES["nll"]())
        except ValueError as error:
            return str(error)
    return None
