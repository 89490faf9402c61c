"""Run TRL's `GRPOTrainer` in this process, one of `ranks`, with a meter on the phases of the first.

python -m whole_step.trl_side SETTINGS-AS-JSON
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from whole_step.clocks import OTHER, PhaseMeter
from whole_step.work import IN_ORDER, SEED


class MeteredTrainer(GRPOTrainer):
    """The trainer, with its phases measured."""

    meter: PhaseMeter

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Count everything to the end of the optimizer step as `train`, if no other phase does."""
        self.meter.set_base("train")
        return super().training_step(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.meter.phase("score"):
            return super()._generate_and_score_completions(inputs)

    def _generate(self, prompts: Any) -> Any:
        with self.meter.phase("generate"):
            return super()._generate(prompts)


class StepEnds(TrainerCallback):
    """Ends a step of the meter where a batch of completions is used up.

    Args:
        meter: Measures.
        optimizer_steps: Of a batch of completions.
        is_shown: Whether this process writes what is measured.
    """

    def __init__(self, meter: PhaseMeter, *, optimizer_steps: int) -> None:
        self._meter = meter
        self._optimizer_steps = optimizer_steps

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """All before the first step is the start."""
        self._meter.end_step(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count an optimizer step."""
        self._meter.set_base(OTHER)
        if state.global_step % self._optimizer_steps == 0:
            self._meter.end_step(state.global_step // self._optimizer_steps)


def meter_of_rank(inputs: Path, *, ranks: int) -> PhaseMeter:
    """Return the meter of this process: the first writes what all of them use."""
    is_first = os.environ.get("RANK", "0") == "0"
    # torchrun is the parent of all ranks.
    root = os.getppid() if ranks > 1 and is_first else os.getpid()
    return PhaseMeter(inputs / "phases.jsonl" if is_first else Path(os.devnull), root=root)


def train(settings: dict[str, Any]) -> None:
    """Train as the settings say."""
    inputs = Path(settings["inputs"])
    meter = meter_of_rank(inputs, ranks=settings["ranks"])
    optimizer_steps = settings["rows"] // settings["gbs"]
    tokenizer = AutoTokenizer.from_pretrained(str(inputs / "model"))
    tokenizer.padding_side = "left"
    MeteredTrainer.meter = meter
    trainer = MeteredTrainer(
        model=str(inputs / "model"),
        reward_funcs=reward,
        args=arguments(settings, optimizer_steps=optimizer_steps),
        train_dataset=Dataset.from_json(str(inputs / IN_ORDER)),
        processing_class=tokenizer,
        callbacks=[StepEnds(meter, optimizer_steps=optimizer_steps)],
    )
    if settings["use_vllm"]:
        measure_sync(trainer.vllm_generation, meter)
    trainer.train()
    if dist.is_initialized():
        # gloo's threads abort the interpreter at its end now and then, or never join: everything
        # is measured and written by now.
        dist.barrier()
        os._exit(0)


def measure_sync(generation: Any, meter: PhaseMeter) -> None:
    """Count TRL's hand-over of weights to vLLM as `refit`."""
    sync = generation.sync_weights

    def metered() -> None:
        with meter.phase("refit"):
            sync()

    generation.sync_weights = metered


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for a completion that is the answer."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


def arguments(settings: dict[str, Any], *, optimizer_steps: int) -> GRPOConfig:
    """Return TRL's configuration for the same work."""
    local = min(settings["mbs"], settings["gbs"] // settings["ranks"])
    accumulation = settings["gbs"] // settings["ranks"] // local
    engine: dict[str, Any] = {}
    if settings["use_vllm"]:
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": settings["max_length"],
            "vllm_importance_sampling_mode": "token_truncate",
        }
    return GRPOConfig(
        output_dir=str(Path(settings["inputs"]) / "trl"),
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        seed=SEED,
        shuffle_dataset=False,
        per_device_train_batch_size=local,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * optimizer_steps,
        num_generations=settings["samples"],
        max_completion_length=settings["max_new_tokens"],
        max_steps=(settings["steps"] + 1) * optimizer_steps,
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
        **engine,
    )


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
