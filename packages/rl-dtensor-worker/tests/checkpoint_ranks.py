"""Cases of saves and loads that ranks run."""

from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from loading_ranks import model_on_meta, process_group, shard_over_two_axes
from losses_for_tests import make_loss
from patience import PATIENCE_S
from ranks import my_rows, parameters_of, shards_of, this_rank, worker_for
from rl_dtensor_worker import DTensorPolicyWorker
from rl_dtensor_worker.parallel.fsdp import local_tensor
from tiny_model import build_tokenizer, make_config


class Continued(NamedTuple):
    """A rank after the calls that follow a save, or a load of it."""

    result: dict
    shards: dict[str, torch.Tensor]
    sampled: torch.Tensor
    parameters: dict[str, torch.Tensor]


class AroundLoad(NamedTuple):
    """A rank's shards after one call that followed a save, and one that followed its load."""

    continued: dict[str, torch.Tensor]
    loaded: dict[str, torch.Tensor]


class RefusedLoad(NamedTuple):
    error: str
    is_unchanged: bool


class FailedStart(NamedTuple):
    closed: list[str]
    is_in_group: bool
    error: str


class FailedSaves(NamedTuple):
    """What each save said, and whether a later one loads."""

    under_a_file: str
    no_room: str
    no_room_again: str
    existing: str
    is_loaded: bool


class Advance(NamedTuple):
    result: dict
    shards: dict[str, torch.Tensor]
    sampled: torch.Tensor


class BackgroundSave(NamedTuple):
    is_on_disk: bool
    first: Advance
    again: Advance


def train_save_train(*, config, batch, directory):
    """Train once, save, train twice more; return the rank's state after the last call."""
    with worker_for(config, init_reference_model=False) as worker:
        rows = my_rows(batch, 4)
        worker.train(rows, make_loss("nll"))
        worker.generate(rows)  # the random state that is saved is not a new worker's
        worker.save_checkpoint(
            f"{directory}/weights", f"{directory}/optimizer", f"{directory}/tokenizer"
        )
        worker.save_hf_checkpoint(f"{directory}/hf")
        sampled = worker.generate(rows)["output_ids"]
        worker.train(rows, make_loss("nll"))
        result = worker.train(rows, make_loss("nll"))
        return Continued(result, shards_of(worker), sampled, parameters_of(worker))


def load_and_train(*, config, batch, directory):
    """Load what `train_save_train` saved, in a new worker, and train twice as it did."""
    paths = {"weights_path": f"{directory}/weights", "optimizer_path": f"{directory}/optimizer"}
    with worker_for(config, init_reference_model=False, **paths) as worker:
        rows = my_rows(batch, 4)
        sampled = worker.generate(rows)["output_ids"]
        worker.train(rows, make_loss("nll"))
        result = worker.train(rows, make_loss("nll"))
        return Continued(result, shards_of(worker), sampled, parameters_of(worker))


def continue_and_load(*, config, batch, directory, num_before):
    """Save after `num_before` calls; train once, load the save and train once again."""
    paths = (f"{directory}/weights", f"{directory}/optimizer")
    rows, found = my_rows(batch, 4), []
    with worker_for(config, init_reference_model=False) as worker:
        for _ in range(num_before):
            worker.train(rows, make_loss("nll"))
        worker.save_checkpoint(*paths)
        for _ in range(2):
            worker.train(rows, make_loss("nll"))
            found.append(shards_of(worker))
            worker.load_checkpoint(*paths)
    return AroundLoad(*found)


def resume(*, config, batch, directory):
    """Return the shards after a load in a new worker, and one call."""
    paths = {"weights_path": f"{directory}/weights", "optimizer_path": f"{directory}/optimizer"}
    with worker_for(config, init_reference_model=False, **paths) as worker:
        worker.train(my_rows(batch, 4), make_loss("nll"))
        return shards_of(worker)


def refused_load(*, config, batch, weights_path, optimizer_path):
    """Return the error of a load after a `train` call, and whether it changed anything."""

    def everything(worker):
        state = worker._engine.optimizer.state.optimizer.state
        slots = [dict(state[parameter]) for parameter in worker.model.parameters()]
        tensors = [local_tensor(each).clone() for values in slots for each in values.values()]
        return [*tensors, *shards_of(worker).values()]

    with worker_for(config, init_reference_model=False) as worker:
        worker.train(my_rows(batch, 4), make_loss("nll"))
        before = everything(worker)
        try:
            worker.load_checkpoint(weights_path, optimizer_path)
        except ValueError as error:
            after = everything(worker)
            same = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
            return RefusedLoad(str(error), same)


def start_from_nothing(*, config):
    """Start from a checkpoint that is not there; return what was closed, and what is left."""
    from rl_interfaces.backend import worker as module

    closed, classes = (
        [],
        {name: getattr(module, name) for name in ("Checkpointer", "WeightTransfer")},
    )

    def watched(name):
        class Watched(classes[name]):
            def close(self):
                closed.append(name)
                super().close()

        return Watched

    for name in classes:
        setattr(module, name, watched(name))
    try:
        DTensorPolicyWorker(config, build_tokenizer(), weights_path="/no/such/checkpoint")
    except ValueError as error:
        return FailedStart(closed, torch.distributed.is_initialized(), str(error))
    finally:
        for name, own in classes.items():
            setattr(module, name, own)


def leave_save_running():
    """Return while a save in the background still waits for what never happens."""
    import threading

    from rl_interfaces.backend.checkpoint.checkpointer import PendingSave

    PendingSave(threading.Event().wait, path=Path("weights"), device=torch.device("cpu"))


def load_only(*, config, weights_path, optimizer_path=None):
    with worker_for(config, init_reference_model=False) as worker:
        worker.load_checkpoint(weights_path, optimizer_path)
        return parameters_of(worker)


def save_twice(*, config, directory):
    """Save, change the weights, save over it; return the parameters of the second save."""
    with worker_for(config, init_reference_model=False) as worker:
        worker.save_checkpoint(f"{directory}/weights")
        worker._add_noise_to_weights()
        worker.save_checkpoint(f"{directory}/weights")
        return parameters_of(worker)


def saves_that_fail(*, config, directory):
    """Save where nothing can be written, then where it can."""
    import resource
    import signal

    rank, _ = this_rank()
    errors = []

    def attempt(worker, path):
        try:
            worker.save_checkpoint(path)
            worker.finish_checkpoint()
        except (RuntimeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append("saved")

    @contextmanager
    def no_room():
        """Give the last rank a disk on which files end early."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    if rank == 0:
        (Path(directory) / "mine").mkdir()
        (Path(directory) / "mine" / "thesis.tex").write_text("")
    with worker_for(config, init_reference_model=False) as worker:
        attempt(worker, f"{directory}/file/weights")
        with no_room():
            attempt(worker, f"{directory}/weights")
            attempt(worker, f"{directory}/weights")
        attempt(worker, f"{directory}/mine")
        before = shards_of(worker)
        worker.save_checkpoint(f"{directory}/weights")
        worker._add_noise_to_weights()
        worker.load_checkpoint(f"{directory}/weights")
        after = shards_of(worker)
        is_loaded = all(torch.equal(before[n], after[n]) for n in before)
        return FailedSaves(*errors, is_loaded=is_loaded)


def save_with_tokenizer(*, config, weights_path, tokenizer_paths):
    """Save with the tokenizer in several places; return what came of each."""
    outcomes = []
    with worker_for(config, init_reference_model=False) as worker:
        for path in tokenizer_paths:
            try:
                worker.save_checkpoint(weights_path, tokenizer_path=path)
                outcomes.append("saved")
            except ValueError as error:
                outcomes.append(str(error))
    return outcomes


def export(*, config, path, max_bytes):
    with worker_for(config, init_reference_model=False) as worker:
        worker.save_hf_checkpoint(path, max_file_bytes=max_bytes)


def save_over_two_axes(*, model_name, directory):
    """Add 1 to the weights and save them, over two data- by two tensor-parallel ranks."""
    from rl_dtensor_worker.config import EngineConfig
    from rl_dtensor_worker.model.build import ModelLoader
    from rl_dtensor_worker.weights import ModelWeights, trained_state
    from rl_interfaces.backend.checkpoint.checkpointer import (
        Checkpointer,
        RankRandomState,
        TensorFormat,
    )
    from rl_interfaces.backend.checkpoint.hf_files import write_hf_directory
    from rl_interfaces.backend.engine import HfExport

    with process_group() as environment:
        config = EngineConfig.from_policy_config(
            make_config(model_name), world_size=4, init_optimizer=True
        )
        model = model_on_meta(model_name)
        loader = ModelLoader(model, config)
        shard_over_two_axes(model)
        loader.fill(model, device=environment.device)
        with torch.no_grad():
            for parameter in model.parameters():
                local_tensor(parameter).add_(1)
        layout = TensorFormat(model=model, training=None, weights=lambda: trained_state(model))
        checkpointer = Checkpointer(layout, timeout_s=PATIENCE_S, device=torch.device("cpu"))
        random_state = RankRandomState(data_parallel_rank=0, is_written_here=False, state={})
        checkpointer.save(f"{directory}/weights", None, random_state)
        device = environment.device
        source = ModelWeights(model, wire_dtype=torch.float32, device=device)
        export = HfExport(
            write_config=lambda path: model.save_pretrained(path, state_dict={}), source=source
        )
        with checkpointer.replacing(f"{directory}/hf") as path:
            write_hf_directory(export, build_tokenizer(), path, max_file_bytes=20_000)
        checkpointer.close()


def train_while_saving(*, config, batch, directory):
    """Train while a save is held back, then load it and train again."""
    import threading

    from rl_interfaces.backend.checkpoint.checkpointer import TensorPart

    write, may_write = TensorPart.write, threading.Event()

    def held_back(*arguments):
        assert may_write.wait(PATIENCE_S)
        write(*arguments)

    def advance(worker):
        sampled = worker.generate(rows)["output_ids"]
        result = worker.train(rows, make_loss("nll"))
        return Advance(result, shards_of(worker), sampled)

    rows = my_rows(batch, 4)
    paths = (f"{directory}/weights", f"{directory}/optimizer")
    TensorPart.write = held_back
    try:
        with worker_for(config, init_reference_model=False) as worker:
            worker.train(rows, make_loss("nll"))
            worker.save_checkpoint(*paths)
            first = advance(worker)
            is_on_disk = Path(paths[0]).exists()
            may_write.set()
            worker.load_checkpoint(*paths)
            return BackgroundSave(is_on_disk, first, advance(worker))
    finally:
        TensorPart.write = write


def contexts_after_a_save(*, config, directory):
    """Save in the background; return the GPUs on which this process has a context of the driver."""
    with worker_for(config, init_reference_model=False) as worker:
        worker.save_checkpoint(f"{directory}/weights", f"{directory}/optimizer")
        worker.finish_checkpoint()
        return [
            index
            for index in range(torch.cuda.device_count())
            if torch._C._cuda_hasPrimaryContext(index)
        ]
