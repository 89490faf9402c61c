"""What the tests of checkpoints run on ranks."""

import os
from pathlib import Path

import psutil
import pytest
import torch
from megatron_ranks import build_reference, job
from optim_ranks import build_trainer, train_step
from patience import PATIENCE_S
from rl_interfaces.backend.checkpoint.checkpointer import Checkpointer, RankRandomState
from rl_megatron_worker.checkpoint import InProcessSave, MegatronFormat


class Saves(Checkpointer):
    """A checkpointer whose callers need not say what the random state is."""

    def save(self, weights_path, optimizer_path, state=None):
        super().save(weights_path, optimizer_path, rank_state(state or {}))

    def load(self, weights_path, optimizer_path):
        return super().load(weights_path, optimizer_path, rank_state({}))


def rank_state(state):
    return RankRandomState(data_parallel_rank=0, is_written_here=True, state=state)


def start(runtime, plan, kind="dense", *, seed=0, timeout_s=PATIENCE_S, **given):
    reference = build_reference(kind, seed=seed)
    chunks, config, trainer = build_trainer(runtime, plan, reference, **given)
    layout = MegatronFormat(chunks, runtime, trainer=trainer)
    saves = Saves(layout, timeout_s=timeout_s, device=torch.device("cpu"))
    return reference, chunks, config, trainer, saves


def save_ranks(*, directory, layout=None, **given):
    """Train a step, save, train another; return this rank's norms."""
    with job(**(layout or {})) as (runtime, plan):
        _, chunks, config, trainer, saves = start(runtime, plan, **given)
        first, _ = train_step(runtime, chunks, config, trainer, 0)
        trainer.advance_schedule()
        drawn = torch.rand(3).tolist()
        saves.save(f"{directory}/weights", f"{directory}/optimizer", {"cpu": torch.get_rng_state()})
        children = psutil.Process().children()
        after = torch.rand(3).tolist()
        second, _ = train_step(runtime, chunks, config, trainer, 1)
        saves.close()
        return {
            "norms": (first.item(), second.item()),
            "drawn": (drawn, after),
            "children": len(children),
            "digest": digest(chunks),
        }


def digest(chunks):
    """Return the sums of squares of all parameters of this rank, by layer-independent order."""
    return [
        parameter.detach().double().square().sum().item()
        for chunk in chunks
        for parameter in chunk.parameters()
    ]


def resume_ranks(*, directory, reference_step, layout=None, **given):
    """Load into a model of other weights, and train the second step; see `save_ranks`."""
    with job(**(layout or {})) as (runtime, plan):
        _, chunks, config, trainer, saves = start(runtime, plan, seed=5, **given)
        random_state = saves.load(f"{directory}/weights", f"{directory}/optimizer")
        if random_state is not None:
            torch.set_rng_state(random_state["cpu"])
        drawn = torch.rand(3).tolist()
        norm, _ = train_step(runtime, chunks, config, trainer, reference_step)
        return {
            "norm": norm.item(),
            "drawn": drawn,
            "random": random_state is not None,
            "calls": trainer.scheduler.num_steps,
            "digest": digest(chunks),
        }


def weights_only_ranks(*, directory, dtype):
    """Load weights alone; return whether the float32 copies follow them."""
    with job() as (runtime, plan):
        _, chunks, _, _, saves = start(runtime, plan, dtype=dtype)
        saves.save(f"{directory}/weights", None)
        _, others, _, trainer, saves = start(runtime, plan, seed=5, dtype=dtype)
        saves.load(f"{directory}/weights", None)
        trainer.begin_step(num_tokens=1)
        norm, _ = trainer.gradient_norm()
        trainer.apply_gradients(norm)  # zero gradients, no decay of vectors: weights are copies
        pairs = zip(chunks[0].parameters(), others[0].parameters(), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs if a.ndim == 1)


def refused_ranks(*, directory, dtype, paths):
    """Load what is not of this worker; return why it is refused, and what that has changed."""
    with job() as (runtime, plan):
        _, _, _, _, saves = start(runtime, plan, "tied")
        saves.save(f"{directory}/tied", None)
        _, _, _, _, saves = start(runtime, plan)
        saves.save(f"{directory}/weights", f"{directory}/optimizer")
        _, chunks, config, trainer, saves = start(runtime, plan, seed=5, dtype=dtype)
        train_step(runtime, chunks, config, trainer, 0)
        trainer.init_state()
        before = everything(chunks, trainer)
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the caller looks at the text
            saves.load(*(path and f"{directory}/{path}" for path in paths))
        after = everything(chunks, trainer)
        return {"error": str(raised.value), "is_unchanged": before == after}


def everything(chunks, trainer):
    """Return the sums of squares of the parameters, of the optimizer's copies and of its state."""
    sums = digest(chunks)
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            sums += [copy.detach().double().square().sum().item() for copy in group["params"]]
        for state in part.optimizer.state.values():
            sums += [value.double().square().sum().item() for value in state.values()]
    return sums


def going_back_ranks(*, directory):
    """Load an earlier save into a run that has gone on; return the schedule then and now."""
    with job() as (runtime, plan):
        _, chunks, config, trainer, saves = start(runtime, plan)

        def take_steps(count):
            for step in range(count):
                train_step(runtime, chunks, config, trainer, step)
                trainer.advance_schedule()
            return trainer.scheduler.num_steps, trainer.learning_rate

        saved = take_steps(2)
        saves.save(f"{directory}/weights", f"{directory}/optimizer")
        later = take_steps(3)
        saves.load(f"{directory}/weights", f"{directory}/optimizer")
        loaded = (trainer.scheduler.num_steps, trainer.learning_rate)
        return {"saved": saved, "later": later, "loaded": loaded}


def dying_writer_ranks(*, directory, victim):
    """Let a rank die while it writes the second checkpoint; return what the others see."""
    with job() as (runtime, plan):
        _, chunks, config, trainer, saves = start(runtime, plan, timeout_s=PATIENCE_S)
        saves.save(f"{directory}/weights", f"{directory}/optimizer")
        train_step(runtime, chunks, config, trainer, 0)
        if torch.distributed.get_rank() == victim:
            InProcessSave.save = lambda *_: os._exit(9)
        with pytest.raises(RuntimeError, match="was not written") as raised:
            saves.save(f"{directory}/weights", f"{directory}/optimizer")
        return str(raised.value)


def failing_writer_ranks(*, directory, victim):
    """Let a file of one rank be impossible to write; return what every rank sees."""
    from torch.distributed.checkpoint import filesystem

    with job() as (runtime, plan):
        _, _, _, _, saves = start(runtime, plan, is_distributed=True)
        saves.save(f"{directory}/weights", None)
        if torch.distributed.get_rank() == victim:

            def fail(*_, **__):
                raise OSError(28, "No space left on device")

            filesystem._write_files_from_queue = fail
        with pytest.raises(RuntimeError, match="was not written") as raised:
            saves.save(f"{directory}/weights", None)
        torch.distributed.barrier()
        left = sorted(each.name for each in Path(directory).iterdir())
        saves.load(f"{directory}/weights", None)
        return {"error": str(raised.value), "left": left}
