"""Megatron's shards to engines, without a full gather."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import slices_ranks
import torch
from patience import PATIENCE_S
from rl_refit import RefitReceiver
from rl_refit.plan import TensorSpec, layer_of
from rl_refit.resharding import ParallelLayout, SliceReceiver, Want
from safetensors.torch import load_file
from tiny_models import build_tiny

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
SEQUENCE = TP2 | {"sequence_parallel": True}

# Ranks and layout of the trainers, model, tensor-parallel engine ranks, the engine's dtype.
CASES = {
    "tp2 to tp1": (2, TP2, "qwen2", 1, torch.float32),
    "pp2 to tp2": (2, PP2, "qwen3_moe", 2, torch.bfloat16),
    "ep2 to tp4": (2, EP2, "qwen3_moe", 4, torch.float32),
    "tp2 pp2 ep2 to tp2": (4, SEQUENCE | PP2 | EP2, "qwen3_moe", 2, torch.bfloat16),
}

# What vLLM's kernels for the CPU take, and a vocabulary that it pads.
SIZES = {
    "vocab_size": 130,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = SIZES | {"head_dim": 32, "moe_intermediate_size": 64}
INTO_VLLM = {
    "tp2": (2, TP2, "qwen2", SIZES),
    "tp2 pp2 ep2": (4, SEQUENCE | PP2 | EP2, "qwen3_moe", EXPERTS),
}


class Engine:
    """A rank of an engine that has rows or columns of each tensor, as tensor parallelism does."""

    def __init__(self, rank, tp, expected, dtype):
        self.rank = rank
        specs = [TensorSpec(name, dtype, tuple(each.shape)) for name, each in expected.items()]
        shapes = {spec.name: spec.shape for spec in specs}
        self.wants = [
            Want(name, shapes[name], box, torch.full(box.shape, torch.nan, dtype=dtype))
            for name, box, ranks in ParallelLayout(tp=tp).place(specs)
            if rank in ranks
        ]
        self.ideal = sum(want.data.nbytes for want in self.wants)

    def follow(self, path, check):
        """Receive two versions; return the reports."""
        address, reports = wait_for(path), []
        with (
            RefitReceiver(address, self.rank, timeout_s=PATIENCE_S) as receiver,
            SliceReceiver(self.rank, timeout_s=PATIENCE_S) as slices,
        ):
            for version in (1, 2):
                receiver.begin(version)
                receiver.receive(
                    version,
                    lambda each, v=version: reports.append(slices.receive(each, v, self.wants)),
                )
                check(self, version)
        return reports


def wait_for(path, sending=None):
    """Return the trainers' address, or raise what they have raised."""
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        if sending is not None and sending.done():
            sending.result()
        assert time.monotonic() < end, "the trainers did not start"
        time.sleep(0.02)
    return json.loads(path.read_text())


@pytest.mark.slow_beyond(4, every=3)
@pytest.mark.parametrize("case", CASES)
def test_engines_get_their_slices_bit_for_bit(pools, tmp_path, case):
    num_ranks, layout, kind, tp, dtype = CASES[case]
    path = build_tiny(tmp_path / "model", kind, vocab_size=68)  # 4 ranks divide it
    expected = load_file(f"{path}/model.safetensors")

    def check(engine, version):
        for want in engine.wants:
            full = (expected[want.name] * version).to(dtype)
            assert torch.equal(want.data, want.box.view_of(full)), want.name

    engines = [Engine(rank, tp, expected, dtype) for rank in range(tp)]
    address = tmp_path / "address"
    with ThreadPoolExecutor(tp) as pool:
        following = [pool.submit(engine.follow, address, check) for engine in engines]
        sent = pools(num_ranks).run(
            slices_ranks.send, path=path, layout=layout, num_engines=tp, address=str(address)
        )
        reports = [each.result(PATIENCE_S) for each in following]
    for engine, received in zip(engines, reports, strict=True):
        assert [each.bytes_received for each in received] == [engine.ideal] * 2
    total = sum(engine.ideal for engine in engines)
    assert [sum(rank["sent"][i] for rank in sent) for i in range(2)] == [total] * 2
    layers = Counter()
    for name, tensor in expected.items():
        layers[layer_of(name)] += tensor.nbytes
    assert max(rank["largest"] for rank in sent) <= max(layers.values())


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.needs("rl-policy[all]")
@pytest.mark.parametrize("case", INTO_VLLM)
def test_a_real_engine_follows_megatron_ranks_by_slices(pools, tmp_path, case):
    pytest.importorskip("vllm")
    num_ranks, layout, kind, sizes = INTO_VLLM[case]
    trainer, engine = (
        build_tiny(tmp_path / f"seed{seed}", kind, seed=seed, **sizes) for seed in range(2)
    )
    address = tmp_path / "address"
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(
            pools(num_ranks).run,
            slices_ranks.send,
            path=trainer,
            layout=layout,
            num_engines=1,
            address=str(address),
            limit_s=PATIENCE_S,
        )
        wait_for(address, sending)
        done = run_vllm(engine, trainer, str(address))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        assert "all refits are as they should be" in done.stdout
        sending.result(PATIENCE_S)


def run_vllm(*arguments):
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_of_slices.py")), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
