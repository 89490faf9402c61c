"""Measure a GRPO run as a whole, in turns with TRL's `GRPOTrainer` on the same work.

Both get the same model, problems, reward, group size, completion length, optimizer and batch sizes,
and a reference model. Each run is a process of its own, started as a user starts it. What differs
is printed. Seconds are wall clock; processor seconds are those of the whole process tree, which
other work on the machine changes little. The first step, which pays for what is done once, stands
apart; the others are averaged.

A step is everything from the end of one step to the end of the next. What belongs to no phase is
the column `other`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from report import Row, parse_options, report

TIMEOUT_S = 900
NUM_STEPS = 6
PHASES = ("generate", "score", "train", "refit")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What both sides do in a step."""

    name: str
    num_layers: int
    hidden_size: int
    prompts: int
    samples: int
    gbs: int
    mbs: int
    max_new_tokens: int
    max_length: int
    is_ragged: bool = False
    """Prompts of log-normal lengths, the median 64 tokens; else problems of the built-in task."""

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.samples


TOY = Work(
    name="toy",
    num_layers=2,
    hidden_size=64,
    prompts=64,
    samples=8,
    gbs=256,
    mbs=128,
    max_new_tokens=6,
    max_length=32,
)
DEEP = Work(
    name="12 layers",
    num_layers=12,
    hidden_size=256,
    prompts=8,
    samples=8,
    gbs=32,
    mbs=16,
    max_new_tokens=64,
    max_length=96,
)
RAGGED = replace(DEEP, name="12 layers, ragged", max_length=512, is_ragged=True)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One side of the comparison on a number of ranks."""

    side: str
    work: Work
    ranks: int
    is_packed: bool = False

    @property
    def label(self) -> str:
        """How the table names it."""
        return f"{self.side}, packed" if self.is_packed else self.side


def write_inputs(work: Work, directory: Path) -> None:
    """Write the model and the problems that both sides read."""
    from rl_policy.config import TinyModelSection
    from rl_policy.data.tiny_model import build_tiny_model, tiny_model_config

    sizes = TinyModelSection(
        hidden_size=work.hidden_size,
        intermediate_size=4 * work.hidden_size,
        num_layers=work.num_layers,
        head_size=32,
    )
    config = tiny_model_config(sizes, max_sequence_length=work.max_length)
    build_tiny_model(directory / "model", config=config, seed=0)
    draw = random.Random(0)
    for name, count in (("train", 512), ("heldout", 8)):
        lines = [json.dumps(_problem(work, draw, f"{name}{index}")) for index in range(count)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def _problem(work: Work, draw: random.Random, tag: str) -> dict[str, str]:
    number = draw.randrange(10_000)
    if not work.is_ragged:
        return {"prompt": f"{tag[0]}{tag[-3:]}:2*{number}=", "answer": str(2 * number)}
    # A byte is a token.
    most = work.max_length - work.max_new_tokens
    length = min(most, max(16, round(draw.lognormvariate(math.log(64), 0.8))))
    text = "".join(draw.choice("0123456789+-*") for _ in range(length))
    return {"prompt": f"{tag}:{text}"[:most], "answer": str(number % 10)}


def command(run: Run, inputs: Path, out: Path) -> list[str]:
    """Return what a user types."""
    if run.side == "TRL":
        wanted = asdict(run.work) | {"ranks": run.ranks, "rows": run.work.rows}
        settings = json.dumps(wanted | {"inputs": str(inputs), "out": str(out)})
        script = [str(Path(__file__)), "--trl", settings]
        if run.ranks == 1:
            return [sys.executable, *script]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, f"--nproc-per-node={run.ranks}", *script]
    work, local_rows = run.work, run.work.rows // run.ranks
    settings = {
        "policy.model_name": inputs / "model",
        "policy.train_global_batch_size": work.gbs,
        "policy.train_micro_batch_size": work.mbs,
        "policy.logprob_batch_size": work.mbs,
        "policy.generation_batch_size": local_rows,
        "policy.max_total_sequence_length": work.max_length,
        "policy.optimizer.kwargs.lr": 1e-6,
        "policy.generation.max_new_tokens": work.max_new_tokens,
        "cluster.bundle_ct_per_node_list": [run.ranks],
        "data.path": inputs / "train.jsonl",
        "data.heldout_path": inputs / "heldout.jsonl",
        "grpo.steps": NUM_STEPS + 1,
        "grpo.prompts_per_step": work.prompts,
        "grpo.samples_per_prompt": work.samples,
        "grpo.eval_every": 1000,
        "checkpoint.every": 1000,
        "loss.clip_high": 0.2,
        "loss.importance_cap": "null",
    }
    if run.is_packed:
        tokens = work.mbs * (64 + work.max_new_tokens)
        settings |= {
            "policy.sequence_packing.enabled": "true",
            "policy.sequence_packing.train_mb_tokens": tokens,
            "policy.sequence_packing.logprob_mb_tokens": tokens,
        }
    program = str(Path(sys.executable).parent / "rl-policy")
    given = [f"{key}={value}" for key, value in settings.items()]
    return [program, "grpo", "--out", str(out), *given]


def differences(work: Work) -> str:
    """Return what is not the same on the two sides."""
    return (
        "differences: two ranks are FSDP2 here and DistributedDataParallel in TRL, where torchrun "
        "gives each one thread, and a single process torch's default; TRL writes no TensorBoard "
        "events and no checkpoints; here step 0 samples 8 held-out problems, within `start`. "
        f"{work.name}: the same model, rows, micro-batches, completions, rate, KL weight, clipping"
    )


def measure(run: Run) -> Row:
    """Run one side in processes of its own, and return a row of the table."""
    with tempfile.TemporaryDirectory(prefix="grpo-step-") as folder:
        inputs, out = Path(folder), Path(folder) / "run"
        write_inputs(run.work, inputs)
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        started = time.perf_counter()
        with (inputs / "log").open("w") as log:
            process = subprocess.Popen(
                command(run, inputs, out), env=environment, stdout=log, stderr=log
            )
            try:
                marks = list(follow(process, out / "metrics.jsonl"))
                process.wait(timeout=TIMEOUT_S)
            finally:
                stop(process)
        if process.returncode != 0 or len(marks) < NUM_STEPS:
            tail = (inputs / "log").read_text()[-4000:]
            raise RuntimeError(f"{run} ended with {process.returncode}:\n{tail}")
    steps = [mark for mark in marks if 1 <= mark["row"]["step"] <= NUM_STEPS]
    return summarize(run, steps, started=started)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a run that has not ended by itself, with what it has started."""
    if process.poll() is None:
        # Not at once by SIGKILL: torchrun would leave its ranks, and the driver its Ray.
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def follow(process: subprocess.Popen[bytes], metrics: Path) -> Iterator[dict[str, Any]]:
    """Yield time, processor seconds and the row whenever a step's metrics are written."""
    deadline, position = time.perf_counter() + TIMEOUT_S, 0
    while process.poll() is None:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"no end after {TIMEOUT_S} s")
        if metrics.exists() and metrics.stat().st_size > position:
            with metrics.open() as file:
                file.seek(position)
                text = file.read()
            complete, _, _ = text.rpartition("\n")
            position += len(complete) + 1 if complete else 0
            now, used = time.perf_counter(), tree_seconds(process.pid)
            for line in complete.splitlines():
                yield {"at": now, "used": used, "row": json.loads(line)}
        time.sleep(0.002)


def tree_seconds(root: int) -> float:
    """Return the processor seconds of a process and its descendants, with those that ended."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(entry.parent.name)
        parents[pid] = int(fields[1])
        used[pid] = sum(map(int, fields[11:15]))
    family = {root}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        grown = bool(more)
        family |= more
    return sum(used.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def summarize(run: Run, steps: Sequence[dict[str, Any]], *, started: float) -> Row:
    """Return start, first step, and the mean of the others by phase."""
    first, later = steps[0], steps[1:]
    seconds = [b["at"] - a["at"] for a, b in zip(steps, later, strict=False)]
    used = [b["used"] - a["used"] for a, b in zip(steps, later, strict=False)]
    names = {"generate": "generate_s", "score": "logprob_s", "train": "train_s", "refit": "refit_s"}
    phases = {
        phase: mean(float(each["row"].get(key) or 0.0) for each in later)
        for phase, key in names.items()
    }
    return {
        "work": run.work.name,
        "ranks": run.ranks,
        "side": run.label,
        "start_s": first["at"] - started - first["row"]["step_s"],
        "start_cpu_s": first["used"],
        "first_step_s": first["row"]["step_s"],
        "step_s": mean(seconds),
        "step_cpu_s": mean(used),
        **{f"{phase}_s": value for phase, value in phases.items()},
        "other_s": mean(seconds) - sum(phases.values()),
    }


def train_with_trl(settings: dict[str, Any]) -> None:
    """Run TRL's trainer in this process, one of `ranks`; the first writes `metrics.jsonl`."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    inputs, out = Path(settings["inputs"]), Path(settings["out"])
    out.mkdir(exist_ok=True)
    seconds: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin

    class Measured(GRPOTrainer):
        def _generate(self, prompts: Any) -> Any:
            with phase("generate_s"):
                return super()._generate(prompts)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            before = seconds.get("generate_s", 0.0)
            with phase("both_s"):
                result = super()._generate_and_score_completions(inputs)
            generated = seconds.get("generate_s", 0.0) - before
            both = seconds.pop("both_s")
            seconds["logprob_s"] = seconds.get("logprob_s", 0.0) + both - generated
            return result

    steps_per_sample = settings["rows"] // settings["gbs"]

    class Marks(TrainerCallback):
        began = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % steps_per_sample or not state.is_world_process_zero:
                return
            now = time.perf_counter()
            total, self.began = now - self.began, now
            train = total - seconds.get("generate_s", 0.0) - seconds.get("logprob_s", 0.0)
            row = {"step": state.global_step // steps_per_sample, "step_s": total, **seconds}
            with (out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row | {"train_s": train}) + "\n")
            seconds.clear()

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [
            float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)
        ]

    local = min(settings["mbs"], settings["gbs"] // settings["ranks"])
    accumulation = settings["gbs"] // settings["ranks"] // local
    arguments = GRPOConfig(
        output_dir=str(out / "trl"),
        use_cpu=True,
        bf16=False,
        seed=0,
        per_device_train_batch_size=local,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * steps_per_sample,
        num_generations=settings["samples"],
        max_completion_length=settings["max_new_tokens"],
        max_steps=(NUM_STEPS + 1) * steps_per_sample,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.001,
        epsilon=0.2,
        temperature=1.0,
        loss_type="dapo",
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
    )
    tokenizer = AutoTokenizer.from_pretrained(str(inputs / "model"))
    tokenizer.padding_side = "left"
    trainer = Measured(
        model=str(inputs / "model"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_json(str(inputs / "train.jsonl")),
        processing_class=tokenizer,
        callbacks=[Marks()],
    )
    trainer.train()


def with_ratios(rows: list[Row]) -> list[Row]:
    """Return the rows with the ratio of our step to TRL's on the same work and ranks."""
    peers = {(row["work"], row["ranks"]): row for row in rows if row["side"] == "TRL"}
    for row in rows:
        peer = peers.get((row["work"], row["ranks"]))
        if peer is not None and row is not peer:
            row["wall_ratio"] = row["step_s"] / peer["step_s"]
            row["cpu_ratio"] = row["step_cpu_s"] / peer["step_cpu_s"]
    return rows


def averaged(rounds: Sequence[Row]) -> Row:
    """Return the means of the same run's rounds."""
    return {
        key: mean(row[key] for row in rounds) if isinstance(value, float) else value
        for key, value in rounds[0].items()
    }


def main() -> None:
    """Compare at every size, on one rank and on two."""
    if "--trl" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--trl", type=json.loads)
        train_with_trl(parser.parse_args().trl)
        return
    options = parse_options(__doc__)
    works = [TOY] if options.quick else [TOY, DEEP, RAGGED]
    rows: list[Row] = []
    for work in works:
        print(differences(work), flush=True)
        for ranks in (1, 2):
            runs = [Run(side="rl-policy", work=work, ranks=ranks)]
            if work.is_ragged:
                runs.append(Run(side="rl-policy", work=work, ranks=ranks, is_packed=True))
            runs.append(Run(side="TRL", work=work, ranks=ranks))
            rounds = [[measure(run) for run in runs] for _ in range(1 if options.quick else 2)]
            rows += [averaged(same) for same in zip(*rounds, strict=True)]
    report("grpo_step", "A GRPO step, in seconds", with_ratios(rows), options.out)


if __name__ == "__main__":
    main()
