"""What both sides do, its inputs, and the command of each."""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

CACHE_BYTES = 1 << 28
SEED = 0
IN_ORDER = "in-order.jsonl"


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
    steps: int
    """Steps that are measured, the first of which pays for what is done once."""
    is_ragged: bool = False
    """Prompts of log-normal lengths, the median 64 tokens; else problems of the built-in task."""

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.samples

    def __str__(self) -> str:
        """Return what a reader has to know of it."""
        prompts = "prompts of log-normal lengths, median 64" if self.is_ragged else "short prompts"
        return (
            f"Qwen2 of {self.num_layers} layers, hidden size {self.hidden_size}, float32; "
            f"{self.prompts} {prompts} x {self.samples} completions of at most "
            f"{self.max_new_tokens} tokens; {self.rows // self.gbs} optimizer steps, micro-batches "
            f"of {self.mbs} rows; reference model"
        )


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
    steps=8,
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
    steps=4,
)
RAGGED = replace(DEEP, name="12 layers, ragged", max_length=512, steps=3, is_ragged=True)
WORKS = {"toy": TOY, "deep": DEEP, "ragged": RAGGED}

BARE = "bare Ray"
"""The side that starts Ray and loads the model on all ranks, and no more."""
PLAIN = "plain transformers"
"""The side that computes a step in a process of its own, and no more."""
WORKERS, COLOCATED, APART = "workers", "vLLM, colocated", "vLLM, apart"
"""Who samples: the trainer's own model, or vLLM on the same devices or on further ones."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One side of the comparison on a number of ranks."""

    side: str
    """`rl-policy`, `TRL`, `BARE` or `PLAIN`."""
    work: Work
    ranks: int
    sampler: str = WORKERS
    variant: str = ""
    """What is switched on for it, of `packed`, `shared` and `reused`, with commas."""


def runs_of(
    work: Work, *, ranks: int, samplers: tuple[str, ...], with_trl: bool = True
) -> list[Run]:
    """Return the runs that take turns; TRL has the first of the samplers.

    On one rank plain transformers is beside the two where the trainer samples.
    """
    own = [Run(side="rl-policy", work=work, ranks=ranks, sampler=each) for each in samplers]
    variants = ["packed", "shared", "packed, shared"] if work.is_ragged else ["shared"]
    if samplers[0] == WORKERS:
        variants.append("shared, reused")
    own += [replace(run, variant=variant) for variant in variants for run in own]
    if with_trl and ranks == 1 and samplers[0] == WORKERS:
        own.append(Run(side=PLAIN, work=work, ranks=ranks))
    peers = [Run(side="TRL", work=work, ranks=ranks, sampler=samplers[0])] if with_trl else []
    return [*own, *peers]


def differences(sampler: str) -> list[str]:
    """Return what is not the same on the two sides."""
    found = [
        "Two ranks are DistributedDataParallel in TRL; rl-policy's default replicates a model of "
        "these sizes too, and sums gradients once a step. Larger ones are FSDP2.",
        "TRL's ranks have one thread each under torchrun and torch's default alone; rl-policy's "
        "share the processors.",
        "rl-policy's trainer is a Ray actor beside the driver, TRL's the process itself.",
        "rl-policy writes metrics.jsonl and a progress bar at each step, TRL "
        "logs nothing. Neither writes a checkpoint in the steps that are measured.",
        "TRL pads prompts on the left and computes logits of completions alone; rl-policy pads on "
        "the right.",
        "`train` of TRL is all between its scoring and the end of the optimizer step.",
        "`shared` is rl-policy with `policy.dtensor_cfg.share_prefixes`, which computes the prompt "
        "of a group once; `packed` is with `policy.sequence_packing`. TRL has neither on.",
    ]
    if sampler == WORKERS:
        found.append(
            "`reused` is with `grpo.old_logprobs=sampler`: the log-probabilities before the update "
            "are those of sampling, and are not computed again. TRL computes them again."
        )
        found.append(
            "`plain transformers`, on one process, is no trainer: it samples by `generate`, "
            "computes the log-probabilities of policy and reference, and takes the optimizer "
            "steps. It shows what the model's own passes cost."
        )
    else:
        found += [
            "TRL's engine lives in the trainer's process, rl-policy's in one of its own, to which "
            "the weights are sent and verified by a digest.",
        ]
    return found


def write_inputs(work: Work, directory: Path) -> None:
    """Write the model and the problems that both sides read."""
    from rl_policy.config import TinyModelSection
    from rl_policy.data.datasets import ShuffledStream, divide_problems, read_problems
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
    # TRL takes the problems in the order in which rl-policy draws them: of ragged lengths, a few
    # others would be other work.
    problems = read_problems(directory / "train.jsonl", key="train")
    sets = divide_problems(problems, heldout=(), num_heldout=0, num_validation=0, seed=SEED)
    drawn = ShuffledStream(sets.train, seed=SEED).take(len(problems))
    lines = [json.dumps({"prompt": each.prompt, "answer": each.answer}) for each in drawn]
    (directory / IN_ORDER).write_text("\n".join(lines) + "\n")


def _problem(work: Work, draw: random.Random, tag: str) -> dict[str, str]:
    number = draw.randrange(10_000)
    if not work.is_ragged:
        return {"prompt": f"{tag[0]}{tag[-3:]}:2*{number}=", "answer": str(2 * number)}
    # A byte is a token.
    most = work.max_length - work.max_new_tokens
    length = min(most, max(16, round(draw.lognormvariate(math.log(64), 0.8))))
    text = "".join(draw.choice("0123456789+-*") for _ in range(length))
    return {"prompt": f"{tag}:{text}"[:most], "answer": str(number % 10)}


def command(run: Run, inputs: Path) -> list[str]:
    """Return the command of a run, which leaves `phases.jsonl` beside its inputs."""
    wanted = asdict(run.work) | {"ranks": run.ranks, "rows": run.work.rows}
    wanted |= {"inputs": str(inputs), "use_vllm": run.sampler != WORKERS}
    if run.side == PLAIN:
        return [sys.executable, "-m", "whole_step.plain_side", json.dumps(wanted)]
    if run.side == "TRL":
        module = ["-m", "whole_step.trl_side", json.dumps(wanted)]
        if run.ranks == 1:
            return [sys.executable, *module]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        # Else it leaves an empty directory of logs in the temporary one.
        torchrun += ["--log-dir", str(inputs / "logs")]
        return [*torchrun, f"--nproc-per-node={run.ranks}", *module]
    if run.side == BARE:
        return [sys.executable, "-m", "whole_step.bare_side", str(inputs), str(run.ranks)]
    given = [f"{key}={value}" for key, value in settings(run, inputs).items()]
    module = ["-m", "whole_step.own_side", str(inputs / "phases.jsonl")]
    return [sys.executable, *module, "grpo", "--out", str(inputs / "run"), *given]


def settings(run: Run, inputs: Path) -> dict[str, object]:
    """Return the settings of our side."""
    work, local_rows = run.work, run.work.rows // run.ranks
    chosen: dict[str, object] = {
        "seed": SEED,
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
        # The last writes a checkpoint, and is not measured.
        "grpo.steps": work.steps + 1,
        "grpo.prompts_per_step": work.prompts,
        "grpo.samples_per_prompt": work.samples,
        "grpo.eval_every": 1000,
        # TRL measures nothing before its first step either.
        "grpo.eval_at_start": "false",
        "checkpoint.every": 1000,
        "loss.clip_high": 0.2,
        "loss.importance_cap": "null",
    }
    if "shared" in run.variant:
        chosen["policy.dtensor_cfg.share_prefixes"] = "true"
    if "reused" in run.variant:
        chosen["grpo.old_logprobs"] = "sampler"
    if "packed" in run.variant:
        tokens = work.mbs * (64 + work.max_new_tokens)
        chosen |= {
            "policy.sequence_packing.enabled": "true",
            "policy.sequence_packing.train_mb_tokens": tokens,
            "policy.sequence_packing.logprob_mb_tokens": tokens,
        }
    if run.sampler != WORKERS:
        chosen |= {
            "policy.generation.backend": "vllm",
            "policy.generation.vllm_cfg.precision": "float32",
            "policy.generation.vllm_cfg.max_num_seqs": local_rows,
            "policy.generation.vllm_cfg.kv_cache_memory_bytes": CACHE_BYTES,
            # All prompts in one forward: where one is prefilled in parts, vLLM 0.32 takes back a
            # draw of its seeded generator, which a generator on the CPU refuses.
            "policy.generation.vllm_cfg.engine_kwargs.max_num_batched_tokens": (
                local_rows * work.max_length
            ),
            # As TRL corrects for the sampler's log-probabilities.
            "loss.importance_cap": 3.0,
        }
    if run.sampler == APART:
        chosen |= {
            "policy.generation.colocated.enabled": "false",
            "policy.generation.colocated.resources.gpus_per_node": run.ranks,
        }
    return chosen
