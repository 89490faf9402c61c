"""What the tests of the optimizer run on ranks."""

from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron_ranks import (
    LENGTHS,
    build,
    build_reference,
    expected_parameters,
    job,
    make_micro_batch,
    reference_logprobs,
    reference_pass,
    run_schedule,
    token_weights,
)
from rl_megatron_worker.config import OptimizerSettings, SchedulerSettings
from rl_megatron_worker.optim import Trainer
from tolerances import measured_training

MAX_NORM = 3.0


def optimizer_settings(**overrides):
    return OptimizerSettings(
        **{
            "kind": "adam",
            "lr": 1e-3,
            "min_lr": 0.0,
            "weight_decay": 0.1,
            "decoupled_weight_decay": True,
            "adam_betas": (0.9, 0.95),
            # Adam divides by the root of almost nothing where gradients almost vanish.
            "adam_eps": 1e-6,
            "sgd_momentum": 0.9,
            "is_distributed": False,
            "max_grad_norm": MAX_NORM,
            "wants_precision_aware": False,
        }
        | overrides
    )


def constant_schedule(weight_decay):
    return SchedulerSettings(
        lr_decay_style="constant",
        lr_decay_steps=1,
        lr_warmup_steps=0,
        lr_warmup_init=0.0,
        start_weight_decay=weight_decay,
        end_weight_decay=weight_decay,
        weight_decay_style="constant",
    )


def build_trainer(runtime, layout, reference, *, overlap=False, schedule=None, dtype=None, **given):
    """Return the chunks, Megatron-core's config and the trainer."""
    settings = optimizer_settings(**given)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and settings.is_distributed,
        use_distributed_optimizer=settings.is_distributed,
    )
    chunks, config = build(runtime, layout, reference, ddp=ddp, dtype=dtype or torch.float32)
    schedule = schedule or constant_schedule(settings.weight_decay)
    return chunks, config, Trainer(chunks, config, settings, schedule, runtime)


def train_step(runtime, chunks, config, trainer, step):
    """Take a step on this rank's micro-batches; return the norm."""
    size = len(LENGTHS)
    ranks = parallel_state.get_data_parallel_world_size()
    first = (step * ranks + parallel_state.get_data_parallel_rank()) * size
    trainer.begin_step(num_tokens=1)
    run_schedule(
        runtime, chunks, config, [make_micro_batch(first + index) for index in range(size)]
    )
    norm, finite = trainer.gradient_norm()
    if finite:
        trainer.apply_gradients(norm)
    return norm, finite


def reference_loss(reference, step, *, num_ranks):
    """Return the loss of the same step by transformers, and its terms."""
    size, terms = len(LENGTHS) * num_ranks, []
    for index in range(step * size, (step + 1) * size):
        tokens, lengths = make_micro_batch(index)
        terms.append(reference_logprobs(reference, tokens, lengths) * token_weights(tokens))
    terms = torch.cat(terms)
    return terms.sum(), terms


def reference_optimizer(parameters, *, cls=torch.optim.AdamW, **arguments):
    """Return torch's optimizer, which decays matrices alone, as Megatron-core's does."""
    parameters = list(parameters)
    matrices = [each for each in parameters if each.ndim > 1]
    vectors = [each for each in parameters if each.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return cls(groups, lr=1e-3, **arguments)


def three_steps_ranks(
    *, kind="dense", num_layers=2, layout=None, sgd=False, coupled=False, **given
):
    """Return errors of norms and parameters against torch's three steps in float64.

    As shares of what rounding explains.
    """
    with job(**(layout or {})) as (runtime, plan):
        reference = build_reference(kind, num_layers=num_layers)
        if sgd:
            given |= {"kind": "sgd"}
            optimizer = {"cls": torch.optim.SGD, "momentum": 0.9}
        else:
            cls = torch.optim.Adam if coupled else torch.optim.AdamW
            given |= {"decoupled_weight_decay": not coupled}
            optimizer = {"cls": cls, "betas": (0.9, 0.95), "eps": 1e-6}
        chunks, config, trainer = build_trainer(runtime, plan, reference, **given)
        plain = measured_training(
            reference,
            partial(reference_optimizer, **optimizer),
            partial(reference_loss, num_ranks=plan.data),
            range(3),
            max_norm=MAX_NORM,
        )
        norms = []
        for step in range(3):
            norm, finite = train_step(runtime, chunks, config, trainer, step)
            expected = plain.norms[step]
            norms.append(float((norm - expected.exact).abs() / expected.bound))
            assert finite
        trainer.advance_schedule()
        exact = {name: each.exact for name, each in plain.parameters.items()}
        bounds = {name: each.bound for name, each in plain.parameters.items()}
        pairs, limits = (
            expected_parameters(chunks, each, reference.config) for each in (exact, bounds)
        )
        return {
            "norms": max(norms),
            "clipped": bool(expected.exact > MAX_NORM),
            "parameters": max(
                # Rows that complete the vocabulary are 0, and so is their limit.
                ((own - value).abs() / limit.clamp(min=1e-12)).max().item()
                for (own, value), (_, limit) in zip(pairs, limits, strict=True)
            ),
        }


def schedule_ranks():
    """Return the rates before each of six `train` calls under a warm-up and a linear decay."""
    schedule = SchedulerSettings(
        lr_decay_style="linear",
        lr_decay_steps=4,
        lr_warmup_steps=2,
        lr_warmup_init=0.0,
        start_weight_decay=0.0,
        end_weight_decay=0.4,
        weight_decay_style="linear",
    )
    with job() as (runtime, plan):
        _, _, trainer = build_trainer(
            runtime, plan, build_reference("dense", num_layers=2), schedule=schedule
        )
        found = {"rates": [], "decays": []}
        for _ in range(6):
            decays = [group["weight_decay"] for group in trainer.optimizer.param_groups]
            found["rates"].append(trainer.learning_rate)
            found["decays"].append(max(decays))
            trainer.advance_schedule()
        return found


def small_steps_ranks(*, is_distributed):
    """Return the largest change of bfloat16 weights after each of 40 steps too small for them."""
    with job() as (runtime, plan):
        reference = build_reference("dense", num_layers=2)
        chunks, config, trainer = build_trainer(
            runtime,
            plan,
            reference,
            dtype=torch.bfloat16,
            is_distributed=is_distributed,
            lr=2e-5,
            weight_decay=0.0,
        )
        before = [each.detach().clone() for chunk in chunks for each in chunk.parameters()]

        def largest_change():
            now = [each for chunk in chunks for each in chunk.parameters()]
            return max(
                ((a.float() - b.float()).abs() / b.float().abs().clamp(min=0.1)).max().item()
                for a, b in zip(now, before, strict=True)
            )

        changes = []
        for _ in range(40):
            train_step(runtime, chunks, config, trainer, 0)
            changes.append(largest_change())
        return changes


def overflow_ranks(*, kind, layout=None):
    """Let a gradient overflow in float16; return scales, what changed, and a step after it."""
    with job(**(layout or {})) as (runtime, plan):
        reference = build_reference(kind, num_layers=2)
        chunks, config, trainer = build_trainer(runtime, plan, reference, dtype=torch.float16)
        named = [pair for chunk in chunks for pair in chunk.named_parameters()]
        before = [each.detach().clone() for _, each in named]
        trainer.begin_step(num_tokens=1)
        run_schedule(runtime, chunks, config, [make_micro_batch(0)])
        # In a parameter of experts, where there are some: theirs is another optimizer.
        victim = next(each for name, each in reversed(named) if "linear_fc" in name)
        victim.main_grad.view(-1)[0] = float("inf")
        norm, finite = trainer.gradient_norm()
        same = all(torch.equal(a, b) for a, (_, b) in zip(before, named, strict=True))
        scales = [part.grad_scaler.scale.item() for part in trainer._optimizers()]
        finite_norm = None
        while finite_norm is None:
            # Scaled by 2 ** 15 the gradients are too large as well, for some steps.
            found, good = train_step(runtime, chunks, config, trainer, 0)
            finite_norm = found.item() if good else None
        changed = any(not torch.equal(a, b) for a, (_, b) in zip(before, named, strict=True))
        for index in range(len(LENGTHS) * plan.data):
            reference_pass(reference, *make_micro_batch(index))
        squares = sum(each.grad.square().sum() for each in reference.parameters())
        return {
            "norm": norm.item(),
            "finite": finite,
            "same": same,
            "scales": scales,
            "finite_norm": finite_norm,
            "reference_norm": squares.sqrt().item(),
            "changed": changed,
        }


def moved_ranks(*, is_distributed, dtype):
    """Return whether training goes on bit for bit after its state has been away and back."""
    results = []
    with job() as (runtime, plan):
        for moves in (False, True):
            reference = build_reference("dense", num_layers=2)
            chunks, config, trainer = build_trainer(
                runtime, plan, reference, is_distributed=is_distributed, dtype=dtype
            )
            train_step(runtime, chunks, config, trainer, 0)
            if moves:
                trainer.move_state(torch.device("cpu"))
                trainer.release_gradients()
                sizes = [
                    buffer.grad_data.untyped_storage().size()
                    for chunk in chunks
                    for buffer in chunk.buffers
                ]
                assert not any(sizes), sizes
                trainer.restore_gradients()
                trainer.move_state(runtime.device)
            train_step(runtime, chunks, config, trainer, 1)
            results.append([each.detach().clone() for c in chunks for each in c.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))
