"""Cases of the reference, residency and information that ranks run."""

import gc
import os
from pathlib import Path
from typing import NamedTuple

import torch
from losses_for_tests import make_loss
from ranks import my_rows, shards_of, worker_for
from rl_dtensor_worker.parallel.fsdp import local_tensor


class PolicyAndReference(NamedTuple):
    """Log-probabilities before training, and after each call of `train`."""

    policy: list[torch.Tensor]
    reference: list[torch.Tensor]


class InterruptedSwap(NamedTuple):
    was_swapped: bool
    is_restored: bool


class Description(NamedTuple):
    """What a worker says of itself."""

    text: str
    is_alive: bool
    info: dict
    device_id: str
    state_names: list[str]


class StateDevices(NamedTuple):
    """The device types that one residency state uses, and the memory that it allocates."""

    parameters: set[str]
    optimizer: set[str]
    buffers: set[str]
    memory_mb: float


class Moves(NamedTuple):
    is_same_model: bool
    devices: set[str]
    same_shards: bool
    still_trains: bool


class SwapAddresses(NamedTuple):
    """The addresses of all tensors of a swap, after the first and after the third."""

    first: list[int]
    third: list[int]


class SwapLogits(NamedTuple):
    before: torch.Tensor
    inside: torch.Tensor
    after: torch.Tensor


def reference_stays(*, config, batch):
    """Score with policy and reference before and after each of two calls of `train`."""
    with worker_for(config) as worker:
        rows = my_rows(batch, 4)
        reference = [worker.get_reference_policy_logprobs(rows)["reference_logprobs"]]
        policy = [worker.get_logprobs(rows)["logprobs"]]
        for _ in range(2):
            worker.train(rows, make_loss("nll"))
            shards = shards_of(worker)
            reference.append(worker.get_reference_policy_logprobs(rows)["reference_logprobs"])
            restored = shards_of(worker)
            assert all(torch.equal(shards[n], restored[n]) for n in shards)
            policy.append(worker.get_logprobs(rows)["logprobs"])
        return PolicyAndReference(policy, reference)


def reference_context_restores_after_an_error(*, config):
    with worker_for(config) as worker:
        worker._add_noise_to_weights()
        before = shards_of(worker)
        inside = None
        try:
            with worker.use_reference_model():
                inside = shards_of(worker)
                raise KeyError("planted")
        except KeyError:
            pass
        after = shards_of(worker)
        return InterruptedSwap(
            was_swapped=any(not torch.equal(before[n], inside[n]) for n in before),
            is_restored=all(torch.equal(before[n], after[n]) for n in before),
        )


def offload_and_reload(*, config, batch, offload):
    """Return the parameters after train, (offload and reload,) train."""
    with worker_for(config, init_reference_model=False) as worker:
        rows = my_rows(batch, 4)
        worker.train(rows, make_loss("nll"))
        if offload:
            worker.offload_before_refit()
            worker.offload_after_refit()
            worker.prepare_for_lp_inference()
            worker.get_logprobs(rows)
            worker.prepare_for_training()
        worker.train(rows, make_loss("nll"))
        return shards_of(worker)


def calls_in_wrong_states(*, config, batch):
    """Return the error text of each call that its state does not allow."""
    errors = []
    with worker_for(config) as worker:
        rows = my_rows(batch, 4)

        def attempt(call):
            try:
                call()
            except RuntimeError as error:
                errors.append(f"{type(error).__name__}: {error}")
            else:
                errors.append("allowed")

        worker.prepare_for_lp_inference()
        attempt(lambda: worker.train(rows, make_loss("nll")))
        attempt(lambda: worker.train(rows, make_loss("nll"), eval_mode=True))
        worker.offload_after_refit()
        attempt(lambda: worker.get_logprobs(rows))
        attempt(lambda: worker.generate(rows))
        worker.prepare_for_training()
        attempt(lambda: worker.train(rows, make_loss("nll")))
    return errors


def describe(*, config, directory):
    """Describe a worker, and profile it into a trace below `directory`."""
    os.chdir(directory)
    with worker_for(config) as worker:
        worker.reset_peak_memory_stats()
        worker.start_gpu_profiling()
        torch.ones(4).sum()
        worker.stop_gpu_profiling()
        return Description(
            text=repr(worker),
            is_alive=worker.is_alive(),
            info=worker.get_gpu_info(),
            device_id=worker.report_device_id(),
            state_names=sorted(worker.return_state_dict()),
        )


def devices_in_each_state(*, config, batch):
    """Return the `StateDevices` of each residency state, by its name."""

    def devices(worker):
        state = worker._engine.optimizer.state.optimizer.state.values()
        slots = [v for slots in state for v in slots.values() if v.ndim]
        types = (
            {tensor.device.type for tensor in tensors}
            for tensors in (worker.model.parameters(), slots, worker.model.buffers())
        )
        return StateDevices(*types, memory_mb=worker.get_gpu_info()["memory_allocated_mb"])

    found = {}
    with worker_for(config) as worker:
        worker.train(my_rows(batch, 4), make_loss("nll"))
        for name, call in (
            ("training", worker.prepare_for_training),
            ("inference", worker.prepare_for_lp_inference),
            ("refitting", worker.offload_before_refit),
            ("offloaded", worker.offload_after_refit),
        ):
            call()
            found[name] = devices(worker)
    return found


def documented_moves(*, config, batch):
    with worker_for(config, init_reference_model=False) as worker:
        before = shards_of(worker)
        moved = worker.move_to_cpu(worker.model)
        devices = {tensor.device.type for tensor in (*moved.parameters(), *moved.buffers())}
        back = worker.move_buffer_to_device(worker.move_to_cuda(moved), worker._engine.info.device)
        after = shards_of(worker)
        result = worker.train(my_rows(batch, 4), make_loss("nll"))
        return Moves(
            is_same_model=moved is worker.model and back is worker.model,
            devices=devices,
            same_shards=all(torch.equal(before[n], after[n]) for n in before),
            still_trains=bool(torch.isfinite(result["grad_norm"]).all()),
        )


def reference_of(worker):
    """Return the `ReferenceCopy` inside the closure that the engine returned."""
    from rl_interfaces.backend.components import ReferenceCopy

    (reference,) = (
        cell.cell_contents
        for cell in worker._reference.__wrapped__.__closure__
        if isinstance(cell.cell_contents, ReferenceCopy)
    )
    return reference


def bytes_of_copies(*, config):
    """Return the host bytes of the reference, and of the policy while that is swapped in."""
    with worker_for(config) as worker:
        reference = reference_of(worker)
        with worker.use_reference_model():
            return reference._reference.num_bytes, reference._policy.num_bytes


def memory_of_swaps(*, config, batch):
    """Swap the reference in three times, with a `train` after each."""
    with worker_for(config) as worker:
        rows, places = my_rows(batch, 4), []
        for _ in range(3):
            worker.get_reference_policy_logprobs(rows)
            reference = reference_of(worker)
            held = [*reference._reference.blocks, *reference._policy.blocks]
            held += [local_tensor(parameter) for parameter in worker.model.parameters()]
            places.append([tensor.data_ptr() for tensor in held])
            worker.train(rows, make_loss("nll"))
        return SwapAddresses(first=places[0], third=places[-1])


def forwards_around_a_swap(*, config, batch):
    """Return the logits of the model before, inside and after a swap that no call is made in."""
    with worker_for(config) as worker, torch.no_grad():
        worker._add_noise_to_weights()
        before = worker.model(batch["input_ids"]).logits
        with worker.use_reference_model():
            inside = worker.model(batch["input_ids"]).logits
        return SwapLogits(before, inside, worker.model(batch["input_ids"]).logits)


def threads_of_groups():
    """Return the names of this process's threads that serve a process group or its store."""
    gc.collect()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name or "tcpstore" in name]


def tensors_in_cycles(*, config, batch):
    """Return the shapes of the tensors that a step leaves to the collector of cycles."""
    with worker_for(config) as worker:
        rows = my_rows(batch, config["train_global_batch_size"])
        loss = make_loss("nll")
        worker.prepare_for_training()
        worker.train(rows, loss)
        step(worker, rows, loss)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            step(worker, rows, loss)
            gc.collect()
            return [tuple(each.shape) for each in gc.garbage if isinstance(each, torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()


def step(worker, rows, loss):
    worker.prepare_for_lp_inference()
    worker.generate(rows, greedy=True)
    worker.get_logprobs(rows)
    worker.get_reference_policy_logprobs(rows)
    worker.prepare_for_training()
    worker.train(rows, loss)
    worker.offload_before_refit()
    worker.offload_after_refit()
