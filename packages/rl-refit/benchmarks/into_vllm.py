"""Measure a refit into a real vLLM, against vLLM's own load of tensors that it already has.

All ways end with the same weights in the same engine, and take turns in one run:

- own load: vLLM's start, load and finish with tensors of its own process, the limit;
- near, near verified, golden: `RefitSender` in another process, near over `shm`, or over `cuda_ipc`
  where vLLM runs on a GPU;
- handles: a handle per tensor, group by group, stop and wait;
- safetensors: written to a memory file system by the trainer's process, read and loaded by vLLM's;
- vLLM's ipc, on a GPU alone: its weight transfer of that name, without packing.

The sender copies every byte once more, and verification reads every byte twice, on processors that
vLLM's own threads use as well: where the own load keeps them all busy, whatever a refit needs
beside it is time. vLLM makes each layer anew, so that much of every load is the kernel handing out
pages; how much depends on what ran before, and a way is compared with own loads right before it.

The floor is the ratio that a way would have if all processors were busy with it all the time; what
vLLM's own load leaves idle, a way can use, and no more.

Needs vLLM: `nox -s bench-vllm`.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from report import Row, report
from rl_refit import RefitSender, TensorSource
from rl_refit.compat.handles import HandleOwner, group_keys, rebuild
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import reduce_tensor
from transformers import LlamaConfig, LlamaForCausalLM

GROUP_BYTES = 1 << 28
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR = "cuda_ipc" if DEVICE.type == "cuda" else "shm"
SENDERS = {
    "near": (NEAR, "none"),
    "near, verified": (NEAR, "digest"),
    "golden": ("golden", "digest"),
}


def build(directory: str, megabytes: int) -> None:
    """Write a Llama of about that size in float32."""
    layer = 4 * 1024 * 1024 + 3 * 1024 * 4096
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=max(1, round(megabytes * 1e6 / 4 / layer)),
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def tensors_of(directory: str) -> dict[str, torch.Tensor]:
    """Return the weights, layer by layer."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return {name: parameter.detach().to(DEVICE) for name, parameter in model.named_parameters()}


def trainer(pipe: Connection, directory: str) -> None:
    """Hold the weights, and send them on request, until the pipe closes."""
    torch.set_num_threads(1)
    tensors = tensors_of(directory)
    source = TensorSource(tensors)
    senders = {
        name: RefitSender(source, transport, 1, verify=verify, device=DEVICE)
        for name, (transport, verify) in SENDERS.items()
    }
    groups = group_keys([(name, t.nbytes) for name, t in tensors.items()], GROUP_BYTES)
    pipe.send({name: sender.address for name, sender in senders.items()})
    owner = HandleOwner()
    try:
        while True:
            kind, value = pipe.recv()
            if kind in senders:
                senders[kind].send(value)
                senders[kind].commit(value)
                pipe.send(None)
            elif kind == "vLLM's ipc":
                handles = {name: reduce_tensor(tensor)[1] for name, tensor in tensors.items()}
                pipe.send((handles, {name: list(t.shape) for name, t in tensors.items()}))
            elif kind == "handles":
                owner.close()
                more = value < len(groups)
                pipe.send(owner.export({n: tensors[n] for n in groups[value]}) if more else None)
            else:
                save_file({name: t.cpu().clone() for name, t in tensors.items()}, value)
                pipe.send(None)
    except EOFError:
        return
    finally:
        owner.close()
        for sender in senders.values():
            sender.close()


class Engine:
    """A real vLLM beside a trainer's process."""

    def __init__(self, directory: str) -> None:
        import vllm

        self.llm: Any = vllm.LLM(
            directory,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=4,
            kv_cache_memory_bytes=256 << 20,
            distributed_executor_backend="uni",
            skip_tokenizer_init=True,
            weight_transfer_config={"backend": "rl_refit"},
        )
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=trainer, args=(theirs, directory), daemon=True)
        self.process.start()
        theirs.close()
        self.addresses: dict[str, Any] = self.pipe.recv()
        self.version = 0
        self.current = ""

    def load(self, tensors: Callable[[], Any]) -> None:
        """Let vLLM load `tensors` as it loads its own."""

        def run(worker: Any) -> None:
            from vllm.model_executor.model_loader.reload import (
                finalize_layerwise_reload,
                initialize_layerwise_reload,
            )

            model = worker.model_runner.model
            initialize_layerwise_reload(model)
            for group in tensors():
                model.load_weights(iter(group.items()))
            finalize_layerwise_reload(model, worker.model_config)

        self.llm.collective_rpc(run)

    def connect(self, way: str) -> None:
        """Take a sender for the one that is used from now on."""
        from rl_refit.vllm import init_info

        self.llm.init_weight_transfer_engine(init_info(self.addresses[way]))
        self.version, self.current = 0, way

    def refit(self) -> None:
        """Receive and load all weights from the current sender."""
        self.version += 1
        self.pipe.send((self.current, self.version))
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"version": self.version}})
        self.llm.finish_weight_update(str(self.version))
        # A receiver that has gone to another sender would break the commit.
        self.pipe.recv()

    def by_handles(self) -> None:
        """Load group by group; the next is asked for when one is loaded."""

        def groups() -> Any:
            index = 0
            while True:
                self.pipe.send(("handles", index))
                handles = self.pipe.recv()
                if handles is None:
                    return
                # What the loader keeps must outlive the group's memory.
                yield {name: rebuild(handle, DEVICE).clone() for name, handle in handles.items()}
                index += 1

        self.load(groups)

    def by_vllm_ipc(self) -> None:
        """Receive all weights by vLLM's own transfer, whose trainer sends them in one message."""
        self.pipe.send(("vLLM's ipc", None))
        handles, shapes = self.pipe.recv()

        def run(worker: Any) -> None:
            from vllm.distributed.weight_transfer.ipc_engine import (
                IPCWeightTransferEngine,
                IPCWeightTransferInitInfo,
                IPCWeightTransferUpdateInfo,
            )

            model, config = worker.model_runner.model, worker.vllm_config
            receiver = IPCWeightTransferEngine(
                config.weight_transfer_config, config, worker.device, model
            )
            receiver.init_transfer_engine(IPCWeightTransferInitInfo())
            uuid = str(torch.cuda.get_device_properties(worker.device).uuid)
            receiver.start_weight_update()
            receiver.receive_weights(
                IPCWeightTransferUpdateInfo(
                    names=[*handles],
                    dtype_names=["float32"] * len(handles),
                    shapes=[shapes[name] for name in handles],
                    ipc_handles=[{uuid: handle} for handle in handles.values()],
                )
            )
            receiver.finish_weight_update()

        self.llm.collective_rpc(run)

    def by_files(self, path: str) -> None:
        """Let the trainer write a file, and load that."""
        self.pipe.send(("safetensors", path))
        self.pipe.recv()
        self.load(lambda: [load_file(path)])

    def close(self) -> None:
        """End the trainer's process."""
        self.pipe.close()
        self.process.join(30)


class Clock:
    """What each way takes: seconds, and seconds of processors in both processes.

    With two processors, no way can take less than half of the latter.
    """

    def __init__(self, trainer_pid: int) -> None:
        self._trainer = Path(f"/proc/{trainer_pid}/schedstat")
        self.seconds: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def run(self, name: str, way: Callable[[], None], *, counts: bool = True) -> None:
        """Run `way` once."""
        start, busy = time.perf_counter(), self._busy()
        way()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        if counts:
            self.seconds.setdefault(name, []).append(time.perf_counter() - start)
            self.cpu.setdefault(name, []).append(self._busy() - busy)

    def _busy(self) -> float:
        # The trainer computes on one thread.
        return time.process_time() + int(self._trainer.read_text().split()[0]) / 1e9


def measure(directory: str, rounds: int) -> Clock:
    """Return what each way takes, of which the first round does not count."""
    engine = Engine(directory)
    own = tensors_of(directory)
    assert engine.process.pid is not None
    clock = Clock(engine.process.pid)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        ways: dict[str, Callable[[], None]] = {
            "own load": lambda: engine.load(lambda: [own]),
            "handles": engine.by_handles,
            "safetensors": lambda: engine.by_files(f"{memory}/weights.safetensors"),
        }
        if DEVICE.type == "cuda":
            ways["vLLM's ipc"] = engine.by_vllm_ipc
        try:
            for name in SENDERS:
                engine.connect(name)
                engine.refit()
                for _ in range(rounds):
                    clock.run(f"own load beside {name}", ways["own load"])
                    clock.run(name, engine.refit)
            for round_ in range(rounds + 1):
                for name, way in ways.items():
                    clock.run(name, way, counts=round_ > 0)
        finally:
            engine.close()
    return clock


def summarise(clock: Clock, num_bytes: int) -> list[Row]:
    """Return medians, and the median of the ratios to the own load just before."""
    rows: list[Row] = []
    for name, times in clock.seconds.items():
        if name.startswith("own load beside"):
            continue
        bases = clock.seconds.get(f"own load beside {name}", clock.seconds["own load"])
        seconds, cpu = statistics.median(times), statistics.median(clock.cpu[name])
        pairs = zip(times, bases, strict=True)
        rows.append(
            {
                "way": name,
                "seconds": seconds,
                "CPU s": cpu,
                "GB/s": num_bytes / seconds / 1e9,
                "seconds / own load": statistics.median(own / base for own, base in pairs),
                "floor": cpu / len(os.sched_getaffinity(0)) / statistics.median(bases),
            }
        )
    return rows


def run(
    name: str,
    kind: str,
    measured: Callable[[str, int, int], list[Row]],
    *,
    description: str | None,
) -> None:
    """Print and write the table that `measured` makes of a model, its rounds and its bytes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--mb", type=int, default=300, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        build(directory, options.mb)
        num_bytes = sum(t.nbytes for t in tensors_of(directory).values())
        rows = measured(directory, options.rounds, num_bytes)
    report(name, f"{num_bytes / 1e9:.2f} GB of float32 into {kind}", rows, options.out)


def main() -> None:
    """Print and write the table."""
    run(
        "into_vllm",
        "a real vLLM",
        lambda model, rounds, num_bytes: summarise(measure(model, rounds), num_bytes),
        description=__doc__,
    )


if __name__ == "__main__":
    main()
