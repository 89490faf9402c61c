"""Refit a real vLLM engine with slices of FSDP2 trainers; run by `test_vllm.py`.

Usage: python vllm_slices.py dense|experts TENSOR_PARALLEL_SIZE DIRECTORY
"""

# ruff: noqa: T201

import copy
import multiprocessing
import re
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_S
from rl_refit import RefitError, RefitSender, TensorSource
from rl_refit.errors import PoisonedError, VerificationError
from rl_refit.resharding import ReshardSender, local_shards
from rl_refit.vllm import flip, init_info, is_staged, on_workers, require_ready, stage
from rl_refit.vllm import refit as receive_on_workers
from tolerances import ENGINE
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

SAME = ENGINE
OTHER = 1e-2
NUM_TRAINERS = 2
SIZES = {
    "vocab_size": 130,  # vLLM pads it to 192
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "dense": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(
        **SIZES,
        tie_word_embeddings=False,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
}


def worst_difference(llm, model):
    from vllm_refits import worst_difference as compare  # imports vLLM, which no trainer needs

    return compare(llm, model)


def wait_until_staged(llm):
    while not is_staged(llm):
        time.sleep(0.001)


def change(model, seed, share=1.0):
    """Add noise to a share of all elements, given by a parameter's name and the seed alone."""
    for name, shard in local_shards(dict(model.named_parameters())).items():
        generator = torch.Generator().manual_seed(seed + sum(name.encode()))
        noise = torch.randn(shard.shape, generator=generator)
        noise *= torch.rand(shard.shape, generator=generator) < share
        shard.data.add_(shard.box.view_of(noise), alpha=0.02 / share**0.5)


def train(rank, directory, num_receivers, pipe, options):
    """Be a trainer that does what it is told; answer with the name of the error, if any."""
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_TRAINERS)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    left_out = set()

    def shards():
        found = local_shards(model.state_dict())
        return {name: each for name, each in found.items() if name not in left_out}

    def send(version):
        sender.send(version)
        sender.commit(version)

    def spoil(version):
        """Send with one bit flipped, of what trainer 1 sends."""
        messages = sender._member._exchange._messages
        pack = messages.pack

        def damaged(flow):
            pack(flow)
            flow.data[len(flow.data) // 2] ^= 4

        messages.pack = damaged if rank == 1 else pack
        with pytest.raises(RefitError):
            sender.commit(version)
        send(version)

    def omit(name, version):
        left_out.add(name)
        sender._member.close()  # or the exchange would refuse other shards than before
        if sender._control is not None:
            sender._control._disconnect(None)
        try:
            send(version)
        finally:
            left_out.clear()

    calls = {"send": send, "spoil": spoil, "omit": omit}
    calls["change"] = lambda seed, share=1.0: change(model, seed, share)
    with ReshardSender(
        shards,
        num_receivers=num_receivers,
        trainers=dist.group.WORLD,
        timeout_s=PATIENCE_S,
        **options,
    ) as sender:
        pipe.send(sender.address if rank == 0 else None)
        while (call := pipe.recv()) is not None:
            name, *arguments = call
            try:
                calls[name](*arguments)
                pipe.send("")
            except RefitError as error:
                pipe.send(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()


class Trainers:
    """The trainers' processes."""

    def __init__(self, directory, num_receivers, **options):
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(NUM_TRAINERS)]
        self._pipes = [pair[0] for pair in pairs]
        self._processes = [
            context.Process(
                target=train, args=(rank, directory, num_receivers, pair[1], options), daemon=True
            )
            for rank, pair in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()  # or a trainer's death would go unnoticed
        self.address, *_ = [pipe.recv() for pipe in self._pipes]

    def call(self, *call):
        """Let all make a call; return a function that waits for their errors."""
        for pipe in self._pipes:
            pipe.send(call)
        return lambda: [pipe.recv() if pipe.poll(PATIENCE_S) else "silence" for pipe in self._pipes]

    def stop(self):
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0


def refit(llm, trainers, version, call="send", *arguments):
    """Refit the engine while the trainers send; return the errors of both."""
    wait = trainers.call(call, *arguments, version)
    try:
        reports = receive_on_workers(llm, version)
    except RefitError as error:
        return [f"{type(error).__name__}: {error}", *wait()], None
    return ["", *wait()], reports


def check_refit(llm, trainers, model, *changed, ranks, version):
    """Change all weights, or a share, and refit; return the reports of an engine that follows."""
    trainers.call("change", version, *changed)()
    change(model, version, *changed)
    before = worst_difference(llm, model)
    assert before > OTHER, before
    errors, reports = refit(llm, trainers, version)
    assert not any(errors), errors
    assert on_workers(llm, require_ready) == [version] * ranks
    after = worst_difference(llm, model)
    print(version, before, after, reports)
    assert after < SAME, after
    return reports


def check_refits(llm, trainers, model, *, ranks, versions):
    """Each version arrives in full, in as many bytes as the engine has weights."""
    for version in versions:
        reports = check_refit(llm, trainers, model, ranks=ranks, version=version)
        # What tensor parallelism replicates is received by each worker.
        numel = sum(each.numel() for each in model.parameters())
        sharded = sum(each.numel() for each in model.parameters() if each.ndim > 1)
        least, most = sharded // ranks + numel - sharded, sharded // ranks + numel // 4
        for report in reports:
            assert least * 3 < report["refit_bytes"] <= most * 4 + (ranks == 1) * numel


def check_changes(llm, trainers, model, *, ranks, version):
    """Of a hundredth of all elements, positions and values arrive, and the weights are right."""
    reports = check_refit(llm, trainers, model, 0.01, ranks=ranks, version=version)
    shares = [report["refit_bytes_sent"] / report["refit_bytes"] for report in reports]
    assert max(shares) < 0.03, shares


def check_wrong_bytes(llm, trainers, model, *, version):
    """A flipped bit is found before it is loaded, fails the refit, and the next one heals it."""
    kept = copy.deepcopy(model)
    errors, _ = refit(llm, trainers, version, "spoil")
    assert all(each.startswith("VerificationError") for each in errors), errors
    found = "digest of what rank|from rank 1: a patch"
    assert re.search(found, errors[0]), errors
    with pytest.raises(PoisonedError, match=found):
        on_workers(llm, require_ready)
    assert worst_difference(llm, kept) < SAME
    errors, _ = refit(llm, trainers, version)
    assert not any(errors), errors
    assert set(on_workers(llm, require_ready)) == {version}


def check_omission(llm, trainers, model, *, version, name, missing):
    """Tensors that leave out a parameter fail the refit, and the next one heals it."""
    errors, _ = refit(llm, trainers, version, "omit", name)
    assert missing in errors[0], errors
    assert missing in errors[1], errors
    with pytest.raises(PoisonedError):
        on_workers(llm, require_ready)
    errors, _ = refit(llm, trainers, version)
    assert not any(errors), errors
    assert worst_difference(llm, model) < SAME


def check_staging(llm, trainers, model, *, version):
    """A version arrives beside the weights that serve, and wrong bytes leave those."""
    kept = copy.deepcopy(model)
    trainers.call("change", version)()
    change(model, version)
    stage(llm, version, place="host")
    wait = trainers.call("spoil", version)
    assert all(each.startswith("VerificationError") for each in wait())
    with pytest.raises(VerificationError):
        wait_until_staged(llm)
    assert set(on_workers(llm, require_ready)) == {version - 1}
    stage(llm, version, place="host")
    wait = trainers.call("send", version)
    assert worst_difference(llm, kept) < SAME
    assert not any(wait())
    wait_until_staged(llm)
    flip(llm, version)
    assert worst_difference(llm, model) < SAME
    assert set(on_workers(llm, require_ready)) == {version}


def check_tensors(llm, model, *, ranks):
    """A sender of tensors finds vLLM's own loaders as they were."""
    source = TensorSource(model.named_parameters())
    change(model, 99)
    with RefitSender(source, "shm", ranks, timeout_s=PATIENCE_S) as sender:
        llm.init_weight_transfer_engine(init_info(sender.address))
        thread = threading.Thread(target=sender.send, args=(1,))
        thread.start()
        receive_on_workers(llm, 1)
        thread.join()
        sender.commit(1)
    assert worst_difference(llm, model) < SAME


def main():
    kind, tensor_parallel_size, directory = sys.argv[1:]
    ranks = int(tensor_parallel_size)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval()
    model.save_pretrained(directory)
    trainers = Trainers(directory, ranks, delta=kind == "dense")
    from vllm_refits import start_engine  # imports vLLM, which no trainer needs

    llm = start_engine(directory, ranks)
    llm.init_weight_transfer_engine(init_info(trainers.address))
    assert worst_difference(llm, model) < SAME
    check_refits(llm, trainers, model, ranks=ranks, versions=(1, 2))
    check_wrong_bytes(llm, trainers, model, version=3)
    check_omission(
        llm,
        trainers,
        model,
        version=4,
        name="model.layers.1.self_attn.k_proj.weight",
        missing="layers.1.self_attn.qkv_proj.weight (shard k)",
    )
    if kind == "dense":
        check_staging(llm, trainers, model, version=5)
    check_refits(llm, trainers, model, ranks=ranks, versions=(6,))
    if kind == "dense":
        for version in (7, 8):
            check_changes(llm, trainers, model, ranks=ranks, version=version)
    trainers.stop()
    check_tensors(llm, model, ranks=ranks)
    print("all refits are as they should be")


if __name__ == "__main__":
    main()
