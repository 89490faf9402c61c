"""Slices of GPU tensors: over gloo and NCCL on one GPU, over NCCL on two. Not run without them."""

import datetime
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_S
from rl_refit.errors import VerificationError
from rl_refit.protocol.waiting import Deadline
from rl_refit.receiver import RefitReceiver
from rl_refit.resharding import Box, Exchange, ReshardSender, Shard, SliceReceiver, Want
from rl_refit.transports.collective import ProcessGroup

SHAPE = (64, 48)
HALVES = [Box((0, 0), (32, 48)), Box((32, 0), (32, 48))]

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
on_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def group(store, rank, size, backend, device):
    limit = Deadline(PATIENCE_S)
    return ProcessGroup(store, rank, size, backend, "127.0.0.1", device, limit, limit_s=PATIENCE_S)


def places(boxes, device):
    return [
        Want("w", SHAPE, box, torch.zeros(box.shape, device=device).bfloat16()) for box in boxes
    ]


def arrived(wants, full):
    return all(torch.equal(each.data, each.box.view_of(full).bfloat16()) for each in wants)


class Coalesced:
    """A gloo backend that starts messages together, as NCCL does, and gives one work for all."""

    supports_coalescing = True

    def __init__(self, backend):
        self._backend = backend
        self._works = None
        self.most = 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def _get_backend(self, device):
        return self

    def _start_coalescing(self):
        assert self._works is None
        self._works = []

    def send(self, *arguments):
        self._works.append(self._backend.send(*arguments))

    def recv(self, *arguments):
        self._works.append(self._backend.recv(*arguments))

    def _end_coalescing(self):
        works, self._works = self._works, None
        self.most = max(self.most, len(works))
        return Together(works)


class Together:
    def __init__(self, works):
        self._works = works

    def wait(self, limit=datetime.timedelta(seconds=PATIENCE_S)):
        return all(work.wait(limit) for work in self._works)


def test_messages_of_a_round_start_together_where_the_backend_can():
    store, full = dist.HashStore(), torch.randn(SHAPE)

    def run(rank):
        member = group(store, rank, 3, "gloo", torch.device("cpu"))
        backend = Coalesced(member.backend)
        # Each holds a third that all want, so that each has messages both ways.
        box = Box((24 * rank, 0), (min(24, 64 - 24 * rank), 48))
        wants = places([Box.full(SHAPE)], "cpu")
        one = Exchange(
            {"w": Shard(SHAPE, box, box.view_of(full))}, wants, group=backend, timeout_s=PATIENCE_S
        )
        one.begin(1)
        one.transfer(1)
        member.close()
        return arrived(wants, full) and backend.most

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [4, 4, 4]


@pytest.mark.gpu
@on_gpu
def test_nccl_with_one_rank_agrees_and_digests_on_the_gpu():
    device = torch.device("cuda", 0)
    member = group(dist.HashStore(), 0, 1, "nccl", device)
    full = torch.randn(SHAPE, device=device)
    wants = places(HALVES, device)
    held = {"w": Shard(SHAPE, Box.full(SHAPE), full)}
    one = Exchange(held, wants, group=member.backend, timeout_s=PATIENCE_S, device=device)
    for version in (1, 2):
        full += 1
        one.begin(version)
        one.transfer(version)
        one.commit(version)
        assert arrived(wants, full)
    member.close()


@pytest.mark.gpu
@on_gpu
def test_gpu_tensors_go_through_host_messages_over_gloo():
    store, full = dist.HashStore(), torch.randn(SHAPE, device="cuda")
    wants = places(HALVES, "cuda")

    def run(rank):
        member = group(store, rank, 2, "gloo", torch.device("cpu"))
        held = {"w": Shard(SHAPE, Box.full(SHAPE), full)} if rank == 0 else {}
        one = Exchange(held, wants if rank else [], group=member.backend, timeout_s=PATIENCE_S)
        one.begin(1)
        one.transfer(1)
        member.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert arrived(wants, full)


def serve(pipe, address):
    """Be an engine on the second GPU; answer with whether the slices of each version are right."""
    torch.cuda.set_device(1)
    receiver = RefitReceiver(address, timeout_s=PATIENCE_S)
    slices = SliceReceiver(0, device="cuda:1", timeout_s=PATIENCE_S)
    wants = places(HALVES, "cuda:1")
    while (version := pipe.recv()) is not None:
        receiver.begin(version)
        try:
            receiver.receive(version, lambda each, v=version: slices.receive(each, v, wants))
            pipe.send([want.data.cpu() for want in wants])
        except VerificationError as error:
            pipe.send(str(error))
    slices.close()
    receiver.close()


@pytest.mark.multi_gpu
@on_two
def test_slices_go_over_nccl_from_one_gpu_to_another():
    full = torch.randn(SHAPE, device="cuda:0")
    held = {"w": Shard(SHAPE, Box.full(SHAPE), full)}
    with ReshardSender(
        lambda: held, num_receivers=1, device="cuda:0", timeout_s=PATIENCE_S
    ) as sender:
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        engine = context.Process(target=serve, args=(theirs, sender.address), daemon=True)
        engine.start()
        for version in (1, 2):
            full += 1
            pipe.send(version)
            sender.send(version)
            sender.commit(version)
            got = pipe.recv()
            for box, data in zip(HALVES, got, strict=True):
                assert torch.equal(data, box.view_of(full).bfloat16().cpu())
        messages = sender._member._exchange._messages
        pack = messages.pack

        def damaged(flow):
            pack(flow)
            flow.data[3] ^= 1

        messages.pack = damaged
        pipe.send(3)
        with pytest.raises(VerificationError):
            sender.send(3)
        assert "digest of what rank 1 holds" in pipe.recv()
        # A new group, after the failure.
        pipe.send(3)
        sender.send(3)
        pipe.recv()
        pipe.send(None)
        engine.join(PATIENCE_S)
        assert engine.exitcode == 0
