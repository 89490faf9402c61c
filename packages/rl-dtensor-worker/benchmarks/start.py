"""Measure how long a model takes to start, and the memory of each rank.

Each rank reads its own slices of the checkpoint, against the first rank loading the whole model in
float32 and sending the others their shards. Host memory is what a process has for itself, files
that are mapped aside, at its highest during the start and above what it was before.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from report import Row, parse_options, report
from rl_dtensor_worker.config import EngineConfig
from rl_dtensor_worker.model import build as loading
from rl_dtensor_worker.model.build import build_model, empty_model
from rl_dtensor_worker.parallel.mesh import Meshes
from rl_interfaces.backend.runtime import RankEnvironment, init_process_group
from transformers import Qwen2Config, Qwen2ForCausalLM

RUNS = 3
MIB = 2**20


class HostMemory:
    """The highest memory of this process while the context lasts, in bytes above its start."""

    def __enter__(self) -> HostMemory:
        self._start = self.highest = own_bytes()
        self._running = True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running = False
        self._thread.join()
        self.highest -= self._start

    def _watch(self) -> None:
        while self._running:
            self.highest = max(self.highest, own_bytes())
            time.sleep(0.002)


def own_bytes() -> int:
    """Return the memory of this process that no file is behind."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def start(rank: int, world_size: int, port: int, model: str, whole: bool, results: Any) -> None:
    """Build the model as one rank; put rank, seconds, host and device bytes."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if whole:
        # What is no safetensors file goes through the first rank.
        loading.find_checkpoint = lambda *_: ["whole"]
    environment = RankEnvironment.from_environment()
    init_process_group(environment, timeout_s=600)
    config = EngineConfig.from_policy_config(
        {"model_name": model, "precision": "float32", "dtensor_cfg": {"enabled": True}},
        world_size=world_size,
        init_optimizer=False,
    )
    device = environment.device
    meshes = Meshes.of(config.layout, replicas=1, device_type=device.type)
    dist.barrier()
    with HostMemory() as memory:
        begin = time.perf_counter()
        build_model(
            empty_model(config),
            config,
            meshes=meshes,
            tensor_parallel=None,
            is_small=False,
            device=device,
        )
        dist.barrier()
        seconds = time.perf_counter() - begin
    on_cuda = environment.device.type == "cuda"
    device_bytes = torch.cuda.max_memory_allocated() if on_cuda else 0
    results.put((rank, seconds, memory.highest, device_bytes))
    dist.destroy_process_group()


def run_ranks(model: str, world_size: int, whole: bool) -> list[tuple[int, float, int, int]]:
    """Start new processes and return what each measured, in rank order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = [(rank, world_size, port, model, whole, results) for rank in range(world_size)]
    processes = [context.Process(target=start, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    measured = sorted(results.get(timeout=600) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    return measured


def measure(model: str, *, world_size: int, num_parameters: int) -> list[Row]:
    """Return the medians of a few starts of both ways, which take turns."""
    ways = {"own slices": False, "whole on the first rank": True}
    runs: dict[str, list[Any]] = {way: [] for way in ways}
    for _ in range(RUNS):
        for way, whole in ways.items():
            runs[way].append(run_ranks(model, world_size, whole))
    rows: list[Row] = []
    for way, own in runs.items():
        first = [measured[0][2] / MIB for measured in own]
        others = [max(each[2] for each in measured[1:]) / MIB for measured in own if measured[1:]]
        rows.append(
            {
                "parameters, millions": num_parameters / 1e6,
                "ranks": world_size,
                "way": way,
                "start s": median(measured[0][1] for measured in own),
                "first rank MiB": median(first),
                "largest other MiB": median(others) if others else None,
                "float32 shard MiB": num_parameters * 4 / world_size / MIB,
                "device MiB": max(each[3] for each in own[-1]) / MIB,
            }
        )
    return rows


def main() -> None:
    """Print and write the table."""
    options = parse_options(__doc__)
    hidden, layers = (512, 4) if options.quick else (1024, 12)
    architecture = Qwen2Config(
        vocab_size=32768,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as model:
        whole = Qwen2ForCausalLM(architecture).to(torch.bfloat16)
        num_parameters = sum(parameter.numel() for parameter in whole.parameters())
        whole.save_pretrained(model, max_shard_size="100MB")
        del whole
        for world_size in (1, 2, 4):
            rows += measure(model, world_size=world_size, num_parameters=num_parameters)
    report("start", "From a bfloat16 checkpoint on disk to float32 shards", rows, options.out)


if __name__ == "__main__":
    main()
