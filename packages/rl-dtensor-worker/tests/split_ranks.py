"""Cases of split training that ranks run."""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from loading_ranks import process_group
from losses_for_tests import make_loss
from ranks import my_rows, parameters_of, worker_for
from rl_dtensor_worker.parallel.fsdp import full_tensor
from rl_interfaces import LossInput, LossType

NUM_TOKENS = 24


class Steps(NamedTuple):
    """The norms of some optimizer steps, the parameters after them, and the losses of all calls."""

    grad_norms: list[float]
    parameters: dict[str, torch.Tensor]
    losses: list[float]


def rows_of(worker, batch, section):
    """Return this rank's rows of one global batch, planned by the config section if it is given."""
    plan = {f"{section}_args": {"max_tokens_per_microbatch": NUM_TOKENS}} if section else {}
    num_ranks = dist.get_world_size(worker._engine.info.data_group)
    shards = batch.shard_by_batch_size(num_ranks, allow_uneven_shards=True, **plan)
    return (shards[0] if section else shards)[worker._data_rank]


def trained_parameters(worker):
    return {name: each for name, each in parameters_of(worker).items() if is_trained(worker, name)}


def is_trained(worker, name):
    return dict(worker.model.named_parameters())[name].requires_grad


def both(**options):
    """Return the steps of `train` on the full batch, and those of a call per chunk."""
    with process_group():
        return train_at_once(**options), train_in_calls(**options)


def train_at_once(*, config, batch, loss, section=None, num_steps=2, edges=None):
    with worker_for(config, init_reference_model=False) as worker:
        rows, size = rows_of(worker, batch, section), batch.size
        results = [worker.train(rows, make_loss(loss), gbs=size) for _ in range(num_steps)]
        norms = [float(result["grad_norm"]) for result in results]
        losses = [float(result["global_loss"]) for result in results]
        return Steps(norms, trained_parameters(worker), losses)


def train_in_calls(*, config, batch, edges, loss, section=None, num_steps=2):
    with worker_for(config, init_reference_model=False) as worker:
        norms, losses = [], []
        for _ in range(num_steps):
            for start, end in pairwise(edges):
                rows = rows_of(worker, batch.slice(start, end), section)
                result = worker.forward_backward(rows, make_loss(loss))
                losses.append(float(result["global_loss"]))
            norms.append(worker.optimizer_step()["grad_norm"])
        return Steps(norms, trained_parameters(worker), losses)


class MixedLoss:
    """A sequence-level loss with a penalty that is averaged over tokens."""

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInput.LOGPROBS

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        cost = -(next_token_logits.sum(1) * data["sample_mask"]).sum() / global_valid_seqs
        penalty = next_token_logits.square().sum() / global_valid_toks
        return cost + penalty, {"num_valid_samples": int(data["sample_mask"].sum())}


class ShiftedLoss:
    """A token-level loss with a constant, which no count divides."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.LOGPROBS

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"][:, None]
        cost = -(next_token_logits * mask).sum() / global_valid_toks
        return cost + 0.5, {"num_valid_samples": int(data["sample_mask"].sum())}


def refused_losses(*, config, batch):
    """Return the errors of losses that are no sums divided by their count, and what follows."""
    rows, found = my_rows(batch), []
    with worker_for(config, init_reference_model=False) as worker:
        for loss in (MixedLoss(), ShiftedLoss()):
            try:
                worker.forward_backward(rows, loss)
            except ValueError as error:
                found.append(str(error))
        found.append(_error_of(worker.optimizer_step))
        worker.train(rows, make_loss("nll"), gbs=batch.size)
        return found


def _error_of(call):
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None


def failures_drop_gradients(*, config, batch):
    """Return what a step says after a pass has failed, and the norm of the next steps."""
    rows, found, norms = my_rows(batch), [], []
    with worker_for(config, init_reference_model=False) as worker:
        for fail in (_fail_in_backward, _fail_in_scoring):
            worker.forward_backward(rows, make_loss("nll"))
            fail(worker, rows)
            found.append(_error_of(worker.optimizer_step))
            worker.forward_backward(rows, make_loss("nll"))
            before = {name: each.clone() for name, each in parameters_of(worker).items()}
            gradients = [full_tensor(p.grad) for p in worker.model.parameters()]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))
            worker.zero_grad()
            after = parameters_of(worker)
            assert all(torch.equal(before[name], after[name]) for name in before)
        return found, norms


def _fail_in_backward(worker, rows):
    try:
        worker.forward_backward(rows, make_loss("failing"), mbs=1)
    except MemoryError:
        return
    raise AssertionError("the loss has not failed")


def _fail_in_scoring(worker, rows):
    try:
        worker.train(rows, make_loss("failing"), eval_mode=True, mbs=1)
    except MemoryError:
        return
    raise AssertionError("the loss has not failed")


def loss_scales(*, config, batch):
    """Return the loss scale after each of a finite, a spoilt and a discarded step."""
    rows, scales = my_rows(batch), []
    masked = rows.writable()
    masked["sample_mask"].zero_()
    with worker_for(config, init_reference_model=False) as worker:
        scaler = worker._engine.optimizer.scaler
        for losses in (["nll", "nll"], ["nll", "nonfinite", "nll"]):
            for loss in losses:
                worker.forward_backward(rows, make_loss(loss))
            worker.optimizer_step()
            scales.append((scaler.scale, scaler.good_steps))
        worker.forward_backward(rows, make_loss("nll"))
        worker.zero_grad()
        scales.append((scaler.scale, scaler.good_steps))
        before = parameters_of(worker)
        worker.forward_backward(masked, make_loss("nll"))
        skipped = worker.optimizer_step()
        after = parameters_of(worker)
        return scales, skipped, all(torch.equal(before[name], after[name]) for name in before)
