"""Ranks that load the last checkpoint, check it, and save one after the other until they die."""

import os
import traceback

import ranks
import torch
from rl_dtensor_worker.parallel.fsdp import local_tensor

NUM_RANKS = 2


def serve(connection):
    """Fork ranks on demand; send their process ids, then their exit codes."""
    torch.set_num_threads(1)
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        children = []
        for rank in range(NUM_RANKS):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    run_rank(rank, **arguments)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
        connection.send(children)
        connection.send([os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children])


def run_rank(rank, *, config, directory, port, first_version, last_version):
    """Load, check which version that was, and save versions; rank 0 logs both to a file."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    paths = (f"{directory}/weights", f"{directory}/optimizer")
    with ranks.worker_for(config, init_reference_model=False) as worker:
        write_version(worker, 0)
        if first_version > 1:
            worker.load_checkpoint(*paths)
            log(rank, directory, f"loaded {version_of(worker)}")
        for version in range(first_version, last_version + 1):
            write_version(worker, version)
            log(rank, directory, f"saving {version}")
            worker.save_checkpoint(*paths)
            log(rank, directory, f"saved {version}")
        worker.finish_checkpoint()


def write_version(worker, version):
    """Fill parameters and optimizer state with a number."""
    optimizer = worker._engine.optimizer.state.optimizer
    if not optimizer.state:
        for parameter in worker.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for parameter, state in optimizer.state.items():
            parameter.fill_(float(version))
            for value in state.values():
                value.fill_(float(version))


def version_of(worker):
    """Return the number that fills this rank's parameters and optimizer state, or `mixed`."""
    state = worker._engine.optimizer.state.optimizer.state
    tensors = [
        tensor for parameter, slots in state.items() for tensor in (parameter, *slots.values())
    ]
    values = {value for t in tensors for value in local_tensor(t).unique().tolist()}
    return f"{values.pop():g}" if len(values) == 1 else f"mixed {sorted(values)}"


def log(rank, directory, text):
    if rank == 0:
        with open(f"{directory}/log", "a") as file:
            file.write(text + "\n")
