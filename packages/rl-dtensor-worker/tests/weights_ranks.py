"""Cases of gathering and sending weights that ranks run."""

from typing import NamedTuple

import torch
from losses_for_tests import make_loss
from patience import PATIENCE_S
from ranks import my_rows, parameters_of, this_rank, worker_for
from rl_interfaces.backend.transfer import QuantizedSource
from tiny_model import make_batch


class Gathered(NamedTuple):
    """The metadata of a source, its names and tensors in each of two passes, and its shards."""

    metadata: list
    passes: list[list[tuple[str, torch.Tensor]]]
    shards: dict | str = ""


class GatheredGroups(NamedTuple):
    """The metadata of a source, a pass over its tensors, and one over its groups."""

    metadata: list
    tensors: list[tuple[str, torch.Tensor]]
    groups: list[tuple[list[str], list[torch.Tensor]]]


class Streamed(NamedTuple):
    """The report of one version, and whether this rank's receivers have the worker's weights."""

    report: dict
    is_same: bool
    num_receivers: int


def gather_weights(*, config):
    with worker_for(config, init_reference_model=False) as worker:
        source = worker.weight_source
        passes = [[(name, tensor.clone()) for name, tensor in source] for _ in range(2)]
        return Gathered(source.metadata(), passes, _shards(source))


def _shards(source):
    """Return copies of what this rank holds, or why it holds no shards."""
    try:
        shards = source.shards()
    except ValueError as error:
        return str(error)
    return {name: each._replace(data=each.data.clone()) for name, each in shards.items()}


def _bits(tensor):
    """Return a copy; of float8 its bytes, which a pipe takes."""
    return tensor.view(torch.uint8).clone() if tensor.dtype.itemsize == 1 else tensor.clone()


def gather_quantized(*, config):
    """Gather in block-FP8, quantised before the gather and, in the second pass, after it."""
    with worker_for(config, init_reference_model=False) as worker:
        plain = worker.weight_source
        names = [meta.name for meta in plain.metadata() if len(meta.shape) > 1]
        early, late = plain.quantized(names), QuantizedSource(plain, names)
        assert early.metadata() == late.metadata()
        some = [meta.name for meta in early.metadata()][1::3]
        passes = [
            [(name, _bits(tensor)) for name, tensor in each]
            for each in (early, late, early.gather(some))
        ]
        dtypes = [tensor.dtype for _, tensor in early]
        assert dtypes == [meta.dtype for meta in early.metadata()]
        return Gathered(early.metadata(), passes)


def gather_and_export(*, config, directory):
    with worker_for(config, init_reference_model=False) as worker:
        source = worker.weight_source
        tensors = [(name, tensor.clone()) for name, tensor in source]
        some = [name for name, _ in tensors][1::3]
        chosen = [(name, tensor.clone()) for name, tensor in source.gather(some)]
        worker.save_hf_checkpoint(directory, max_file_bytes=30_000)
        return Gathered(source.metadata(), [tensors, chosen])


def stream_weights(*, config, transport, pairs):
    """Train and stream, twice, to receivers in threads: one per rank, or all of them on rank 0."""
    from concurrent.futures import ThreadPoolExecutor

    from rl_refit import RefitReceiver

    rank, num_ranks = this_rank()
    counts = [1] * num_ranks if pairs else [num_ranks, *[0] * (num_ranks - 1)]
    batch = make_batch(4)
    with worker_for(config, init_reference_model=False) as worker:
        address = worker.open_refit(
            receivers_per_rank=counts, transport=transport, bucket_bytes=1 << 14
        )
        receivers = [
            RefitReceiver(address, rank if pairs else index, timeout_s=PATIENCE_S)
            for index in range(counts[rank])
        ]

        def receive(receiver, version):
            loaded = {}
            receiver.begin(version)
            receiver.receive(
                version, lambda tensors: loaded.update((n, t.clone()) for n, t in tensors)
            )
            receiver.commit(version)
            return loaded

        seen = []
        with ThreadPoolExecutor(max(len(receivers), 1)) as pool:
            for version in (1, 2):
                worker.train(my_rows(batch, 4), make_loss("nll"))
                running = [pool.submit(receive, each, version) for each in receivers]
                report = worker.send_weights(version)
                loaded = [future.result(timeout=PATIENCE_S) for future in running]
                own = parameters_of(worker)
                is_same = all(_same(each, own) for each in loaded)
                seen.append(Streamed(report, is_same, num_receivers=len(loaded)))
        for receiver in receivers:
            receiver.close()
        return seen


def _same(loaded, own):
    return list(loaded) == list(own) and all(torch.equal(loaded[n], own[n]) for n in own)


def broadcast_weights(*, config, port):
    """Broadcast to two receivers in threads of rank 0; return whether they got the weights."""
    from concurrent.futures import ThreadPoolExecutor

    from rl_refit.compat.broadcast import BroadcastGroup

    rank, _ = this_rank()
    with worker_for(config, init_reference_model=False) as worker:
        info = worker.prepare_info_for_collective()
        own = parameters_of(worker)

        def receive(receiver_rank):
            with BroadcastGroup(
                "127.0.0.1", port, rank=receiver_rank, world_size=3, timeout_s=PATIENCE_S
            ) as group:
                return _same(dict(group.receive(info)), own)

        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(receive, each) for each in (1, 2)] if rank == 0 else []
            worker.init_collective("127.0.0.1", port, 3)
            worker.broadcast_weights_for_collective()
            return [future.result(timeout=PATIENCE_S) for future in running]


def transfers_in_wrong_states(*, config):
    errors = []
    with worker_for(config, init_reference_model=False) as worker:
        for prepare in (worker.prepare_for_training, worker.offload_after_refit):
            prepare()
            for call in (
                lambda: worker.send_weights(1),
                lambda: worker.broadcast_weights_for_collective(),
                lambda: worker.get_weights_ipc_handles(["no such tensor"]),
                lambda: worker.prepare_weights_for_ipc(),
            ):
                try:
                    call()
                except (RuntimeError, ValueError) as error:
                    errors.append(f"{type(error).__name__}: {error}")
                else:
                    errors.append("allowed")
    return errors


def gather_groups(*, config):
    with worker_for(config, init_reference_model=False) as worker:
        source = worker.weight_source
        tensors = [(name, tensor.clone()) for name, tensor in source]
        groups = [(names, [t.clone() for t in each]) for names, each in source.iter_groups()]
        return GatheredGroups(source.metadata(), tensors, groups)
