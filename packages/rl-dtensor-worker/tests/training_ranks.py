"""Cases of training that ranks run."""

import logging
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from loading_ranks import process_group
from losses_for_tests import make_loss
from ranks import my_rows, parameters_of, shards_of, this_rank, worker_for
from rl_batched_data import BatchedDataDict
from rl_dtensor_worker.optim import sum_gradients
from rl_dtensor_worker.parallel.fsdp import full_tensor
from rl_dtensor_worker.parallel.styles import Replicated
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Trained(NamedTuple):
    """The full parameters after some calls of `train`, and what each call returned."""

    parameters: dict[str, torch.Tensor]
    results: list[dict]

    @property
    def losses(self):
        """The loss of each optimizer step of all calls, `[steps]`."""
        return torch.cat([result["global_loss"] for result in self.results])

    @property
    def grad_norms(self):
        """The gradient norm of each optimizer step of all calls, `[steps]`."""
        return torch.cat([result["grad_norm"] for result in self.results])


class EvalTrace(NamedTuple):
    """Whether an evaluation left a rank's state as it was, and what it returned."""

    same_shards: bool
    same_random: bool
    same_mode: bool
    result: dict


class UnshardedForwards(NamedTuple):
    same_shards: bool
    same_copies: bool
    logits: torch.Tensor | None


class FailedUnshard(NamedTuple):
    num_unsharded: int
    same_shards: bool
    same_flags: bool


class PlannedRows(NamedTuple):
    """A rank's rows with their plan, and the order of all ranks' rows in the batch."""

    rows: BatchedDataDict
    order: list[int]


class PlannedScores(NamedTuple):
    logprobs: torch.Tensor
    order: list[int]


def train(*, config, batch, num_calls=1, loss="nll", gbs=None, mbs=None):
    with worker_for(config, init_reference_model=False) as worker:
        size = gbs or config["train_global_batch_size"]
        rows = my_rows(batch, size)
        results = [worker.train(rows, make_loss(loss), gbs=gbs, mbs=mbs) for _ in range(num_calls)]
        return Trained(parameters_of(worker), results)


def warnings_of_skipped_steps(*, config, batch):
    """Return what the optimizer warns of while the steps of a call are not finite."""
    texts = []

    class Kept(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    logger, handler = logging.getLogger("rl_dtensor_worker.optim"), Kept(logging.WARNING)
    logger.addHandler(handler)
    try:
        train(config=config, batch=batch, loss="nonfinite")
    finally:
        logger.removeHandler(handler)
    return texts


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("planted")


def train_after_a_failure(*, config, batch, fails, failing_batch):
    """Train after a call whose `fails` has raised."""

    def fail(*_):
        raise MemoryError("planted")

    with worker_for(config, init_reference_model=False) as worker:
        layer, loss, rows = worker.model.model.layers[0], make_loss("nll"), my_rows(failing_batch)
        if fails == "loss":
            loss = make_loss("failing")
        elif fails == "backward":
            hook = layer.register_forward_hook(lambda *each: _Failing.apply(each[-1]))
        else:
            hook = layer.self_attn.register_forward_pre_hook(fail)
        try:
            worker.train(rows, loss, eval_mode=fails == "evaluation")
        except MemoryError:
            pass
        else:
            raise AssertionError(f"the {fails} did not fail")
        if fails != "loss":
            hook.remove()
        result = worker.train(my_rows(batch), make_loss("nll"))
        return Trained(parameters_of(worker), [result])


def eval_leaves_no_trace(*, config, batch):
    """Evaluate with a loss that draws random numbers."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        before, random_before = shards_of(worker), torch.get_rng_state()
        training_before = worker.model.training
        result = worker.train(my_rows(batch, 4), make_loss("drawing"), eval_mode=True)
        after = shards_of(worker)
        return EvalTrace(
            same_shards=all(torch.equal(before[n], after[n]) for n in before),
            same_random=torch.equal(random_before, torch.get_rng_state()),
            same_mode=worker.model.training == training_before,
            result=result,
        )


def unsharded_forwards(*, config, batch):
    """Let only rank 0 run forwards inside `unshard_fsdp2_model`."""
    from rl_dtensor_worker import get_cpu_state_dict, unshard_fsdp2_model

    with worker_for(config, init_reference_model=False) as worker:
        before = shards_of(worker)
        copies = get_cpu_state_dict(worker.model.state_dict().items())
        worker.model.eval()
        with unshard_fsdp2_model(worker.model), torch.no_grad():
            num_forwards = 3 if this_rank()[0] == 0 else 0
            logits = [worker.model(batch["input_ids"]).logits for _ in range(num_forwards)]
        after = shards_of(worker)
        worker.train(my_rows(batch, 4), make_loss("nll"))  # sharded passes still work
        return UnshardedForwards(
            same_shards=all(torch.equal(before[n], after[n]) for n in before),
            same_copies=all(torch.equal(before[n], copies[n]) for n in before),
            logits=logits[-1] if logits else None,
        )


def gradients_around_a_call(*, config, batch, interrupt):
    """Return a pass's gradients; another call may free gathered parameters before its backward."""
    from rl_dtensor_worker.parallel.fsdp import reshard_model

    with worker_for(config, init_reference_model=False) as worker:
        (step,) = worker._steps(
            my_rows(batch), local_batch_size=None, given=None, default=batch["input_ids"].shape[0]
        )
        (micro_batch,) = step.micro_batches(worker._engine.info.device)
        scores = worker._engine.forward.logprobs(micro_batch)
        if interrupt:
            reshard_model(worker.model)
        scores.sum().backward()
        return {n: full_tensor(p.grad) for n, p in worker.model.named_parameters()}


def train_as_given(*, config, batch, loss="nll", gbs=None, mbs=None, **options):
    with worker_for(config, init_reference_model=False, **options) as worker:
        return worker.train(batch, make_loss(loss), gbs=gbs, mbs=mbs)


def my_planned_rows(batch, section, num_tokens, *, global_batch_size=None, **options):
    """Shard `batch` and plan its micro-batches."""
    rank, num_ranks = this_rank()
    name = f"{section}_args"
    shards, order = BatchedDataDict(batch).shard_by_batch_size(
        num_ranks,
        batch_size=global_batch_size,
        **{name: {"max_tokens_per_microbatch": num_tokens, **options}},
    )
    return PlannedRows(shards[rank], order)


def score_planned(*, config, batch, section, num_tokens, **options):
    """Score this rank's rows as the policy and as the reference, which must agree."""
    rows, order = my_planned_rows(batch, section, num_tokens, **options)
    with worker_for(config, init_optimizer=False) as worker:
        logprobs = worker.get_logprobs(rows)["logprobs"]
        reference = worker.get_reference_policy_logprobs(rows)["reference_logprobs"]
        assert torch.equal(logprobs, reference)
        return PlannedScores(logprobs, order)


def packed_lengths(*, config, batch, num_tokens):
    """Return the lengths of the packed micro-batches, and what scoring gives with them."""
    rows, order = my_planned_rows(batch, "sequence_packing", num_tokens)
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        (step,) = worker._steps(rows, local_batch_size=None, given=None, default=1)
        packed = [each.packed for each in step.micro_batches(worker._engine.info.device)]
        lengths = [each.total_length for each in packed if each is not None]
        return lengths, PlannedScores(worker.get_logprobs(rows)["logprobs"], order)


def train_planned(*, config, batch, section, num_tokens, num_calls, loss="nll", **options):
    rows, _ = my_planned_rows(
        batch,
        section,
        num_tokens,
        global_batch_size=config["train_global_batch_size"],
        **options,
    )
    with worker_for(config, init_reference_model=False) as worker:
        results = [worker.train(rows, make_loss(loss)) for _ in range(num_calls)]
        return Trained(parameters_of(worker), results)


def train_as_planned(*, config, batch, section, num_tokens, mbs=None):
    """Train with a plan that this rank made alone, which may not match the others'."""
    rows, _ = my_planned_rows(batch, section, num_tokens[this_rank()[0]])
    with worker_for(config, init_reference_model=False) as worker:
        return worker.train(rows, make_loss("nll"), mbs=mbs)


def calls_leave_the_batch_alone(*, config, batch, section, num_tokens):
    """Return whether each call left every entry, padding included, as it was."""
    rows = my_rows(batch, 4)
    if section is not None:
        rows, _ = my_planned_rows(batch, section, num_tokens, global_batch_size=4)
    before = rows.writable()
    kept = {}
    with worker_for(config) as worker:
        calls = {
            "get_logprobs": lambda: worker.get_logprobs(rows),
            "get_reference_policy_logprobs": lambda: worker.get_reference_policy_logprobs(rows),
            "generate": lambda: worker.generate(my_rows(batch)),
            "train": lambda: worker.train(rows, make_loss("nll")),
            "train over logits": lambda: worker.train(rows, make_loss("logits")),
        }
        for name, call in calls.items():
            call()
            kept[name] = rows == before
    return kept


def failing_unshard(*, config, batch):
    """Let the last module fail to unshard, then train."""
    from rl_dtensor_worker import unshard_fsdp2_model
    from rl_dtensor_worker.parallel.fsdp import _fsdp_modules, _reshards_after_forward

    def fail():
        raise torch.OutOfMemoryError("planted")

    with worker_for(config, init_reference_model=False) as worker:
        modules = _fsdp_modules(worker.model)
        before = shards_of(worker), [_reshards_after_forward(module) for module in modules]
        modules[-1].unshard = fail
        try:
            with unshard_fsdp2_model(worker.model):
                pass
        except torch.OutOfMemoryError:
            del modules[-1].unshard
        after = shards_of(worker), [_reshards_after_forward(module) for module in modules]
        num_unsharded = sum(
            not isinstance(parameter, DTensor) for parameter in worker.model.parameters()
        )
        worker.train(my_rows(batch, 4), make_loss("nll"))
        same_shards = all(torch.equal(before[0][name], after[0][name]) for name in before[0])
        return FailedUnshard(num_unsharded, same_shards, same_flags=before[1] == after[1])


def num_sharded_modules(*, config, as_small=False):
    from torch.distributed.fsdp import FSDPModule

    options = {"init_optimizer": False, "init_reference_model": False, "as_small": as_small}
    with worker_for(config, **options) as worker:
        return sum(isinstance(module, FSDPModule) for module in worker.model.modules())


def sequence_scope(*, config, sums=True):
    """Return the name of the scope of sequence parallelism that the start has chosen.

    Without `sums` a gradient that a rank has of its own tokens is taken for that of all.
    """
    unsummed = mock.patch.object(Replicated, "gradient", lambda _, placement: placement)
    with (
        nullcontext() if sums else unsummed,
        worker_for(config, init_reference_model=False) as worker,
    ):
        assert all(parameter.grad is None for parameter in worker.model.parameters())
        return worker._engine.parallel.tensor_parallel.scope.name


class WholeRun(NamedTuple):
    """What every call of a short run returned, and the collectives that two of them made."""

    values: dict[str, torch.Tensor]
    collectives: dict[str, dict[str, int]]


def run_of_every_call(*, config, batch, as_small):
    """Generate, score, score under the reference, and train, a few times over."""
    values, collectives = {}, {}
    with worker_for(config, as_small=as_small) as worker:
        rows = my_rows(batch, config["train_global_batch_size"])
        prompts = rows.slice(0, rows.size)
        for turn in range(3):
            worker.prepare_for_lp_inference()
            values[f"{turn} generated"] = worker.generate(prompts)["output_ids"]
            with counted_collectives() as collectives["get_logprobs"]:
                values[f"{turn} logprobs"] = worker.get_logprobs(rows)["logprobs"]
            reference = worker.get_reference_policy_logprobs(rows)
            values[f"{turn} reference"] = reference["reference_logprobs"]
            worker.prepare_for_training()
            with counted_collectives() as collectives["train"]:
                result = worker.train(rows, make_loss("nll"))
            values |= {f"{turn} {key}": result[key] for key in ("global_loss", "grad_norm")}
        values |= parameters_of(worker)
    return WholeRun(values, collectives)


@contextmanager
def counted_collectives():
    """Count the calls of torch's collectives, by name."""
    names = ("all_reduce", "all_gather", "all_gather_single", "reduce_scatter_single", "broadcast")
    counts = dict.fromkeys(names, 0)

    def counted(name, plain):
        def call(*arguments, **options):
            counts[name] += 1
            return plain(*arguments, **options)

        return call

    with ExitStack() as stack:
        for name in names:
            plain = getattr(dist, name, None)
            if plain is not None:
                stack.enter_context(mock.patch.object(dist, name, counted(name, plain)))
        yield counts


def sums_of_unused_parameters():
    """Sum gradients of which this rank has some."""
    rank, _ = this_rank()
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
    parameters[0].grad = torch.full((2, 3), rank + 1.0)
    if rank == 0:
        parameters[1].grad = torch.full((2, 3), 5.0)
    with process_group():
        sum_gradients(parameters, group=dist.group.WORLD)
    return [p.grad for p in parameters]


def largest_unit(*, config):
    """Return the most parameters that FSDP gathers at once, and those of the embedding."""
    with worker_for(config, init_reference_model=False, as_small=False) as worker:
        states = [
            module._get_fsdp_state()
            for module in worker.model.modules()
            if isinstance(module, FSDPModule)
        ]
        units = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
        sizes = [sum(each._orig_size.numel() for each in unit.fsdp_params) for unit in units]
        return max(sizes), worker.model.get_input_embeddings().weight.numel()


def input_kept_after_scoring(*, config, batch):
    """Return whether a layer's gathered input outlives the call."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        worker.get_logprobs(batch)
        return worker._engine.parallel.tensor_parallel._last_gather is not None
