"""Losses, gradients and advantages of TRL's trainers on one random batch, as JSON.

    python packages/rl-policy/benchmarks/trl_losses.py packages/rl-policy/tests/trl_losses.json

needs the dependency group `bench`. `tests/test_losses_trl.py` holds ours against them. What a model
would compute, log-probabilities, is drawn at random: everything after that is TRL's own code,
`_generate_and_score_completions` and `_compute_loss` of `GRPOTrainer` and `RLOOTrainer`.
`DPOTrainer` and `RewardTrainer` run small random models on pairs that they tokenize and pad.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.experimental.gkd.gkd_trainer import GKDTrainer

LENGTHS = [5, 3, 7, 1, 6, 6, 2, 4]
GROUP_SIZE, MOST_TOKENS, SEED = 4, 10, 28
WEIGHTED = {"reward_weights": [1.0, 0.5]}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.05},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "unbiased_kl": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum", **WEIGHTED},
    **{
        mode: {
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_min": 0.8,
            "vllm_importance_sampling_clip_max": 1.25,
        }
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
}


def draw_inputs() -> dict[str, torch.Tensor]:
    """Return log-probabilities `[8, 7]` and rewards `[8, 2]`, float64."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(scale: float) -> torch.Tensor:
        shape = (len(LENGTHS), max(LENGTHS))
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    logprobs = -normal(1.0).abs()
    old = logprobs + normal(0.3)
    columns = {
        "logprobs": logprobs,
        "prev_logprobs": old,
        "generation_logprobs": old + normal(0.2),
        "reference_logprobs": logprobs + normal(0.5),
        "rewards": torch.stack([normal(1.0)[:, 0], normal(5.0)[:, 0]], dim=1),
    }
    # As they are written, so that a reader of the file has the same numbers.
    return {name: values.float().double() for name, values in columns.items()}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 62 words and two special tokens."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, 64)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def shape_of_model(**options: Any) -> Qwen2Config:
    """Return the configuration of a model of one layer."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen2Config(**sizes, **heads, pad_token_id=0, eos_token_id=1, **options)


def save_model(directory: str) -> PreTrainedTokenizerFast:
    """Save a model that no result depends on; return its tokenizer."""
    tokenizer = build_tokenizer()
    Qwen2ForCausalLM(shape_of_model()).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return tokenizer


def open_trainer(
    kind: type, config: type, inputs: dict[str, torch.Tensor], directory: str, **settings: Any
) -> Any:
    """Return a trainer whose generation and log-probabilities are those of the inputs."""
    tokenizer = save_model(directory)
    columns = inputs["rewards"].unbind(dim=1) if "reward_weights" in settings else [None]
    total = inputs["rewards"] @ torch.tensor([1.0, 0.5], dtype=torch.float64)

    def reward_of(column: torch.Tensor | None) -> Any:
        values = (total if column is None else column).tolist()
        return lambda completions, **_: values

    arguments = config(
        output_dir=directory,
        per_device_train_batch_size=len(LENGTHS),
        num_generations=GROUP_SIZE,
        max_completion_length=MOST_TOKENS,
        report_to=[],
        use_cpu=True,
        bf16=False,
        **settings,
    )
    trainer = kind(
        model=directory,
        args=arguments,
        reward_funcs=[reward_of(column) for column in columns],
        train_dataset=Dataset.from_list([{"prompt": "w2 w3"}] * len(LENGTHS)),
        processing_class=tokenizer,
    )
    completions = [list(range(2, 2 + length)) for length in LENGTHS]
    prompts = [[2, 3] for _ in LENGTHS]
    texts = ["w2"] * len(LENGTHS)
    sampled = [
        row[:length].tolist()
        for row, length in zip(inputs["generation_logprobs"], LENGTHS, strict=True)
    ]
    if kind is RLOOTrainer:
        trainer._generate = lambda _: (prompts, completions, texts)
    else:
        trainer._generate = lambda _: (prompts, completions, None, texts, sampled, {}, None, None)
    return trainer


def answer(trainer: Any, *columns: torch.Tensor) -> None:
    """Let the trainer's next calls for log-probabilities return these."""
    queue = [*columns]

    def per_token(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        values = queue.pop(0)
        return values, torch.zeros_like(values), None

    trainer._get_per_token_logps_and_entropies = per_token


def run_grpo(inputs: dict[str, torch.Tensor], settings: dict[str, Any]) -> dict[str, Any]:
    """Return advantages, loss and gradient of a GRPO trainer."""
    corrects = "vllm_importance_sampling_mode" in settings
    with tempfile.TemporaryDirectory() as directory:
        trainer = open_trainer(GRPOTrainer, GRPOConfig, inputs, directory, **settings)
        trainer.use_vllm = corrects
        rows = [{"prompt": "w2 w3"}] * len(LENGTHS)
        scored = [inputs["prev_logprobs"]] if corrects else []
        scored += [inputs["reference_logprobs"]] if settings.get("beta") else []
        answer(trainer, *scored)
        batch = trainer._generate_and_score_completions(rows)
        batch["old_per_token_logps"] = inputs["prev_logprobs"]
        logprobs = inputs["logprobs"].clone().requires_grad_()
        answer(trainer, logprobs)
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
    return {
        "settings": settings,
        "advantages": batch["advantages"].tolist(),
        "loss": loss.item(),
        "gradient": logprobs.grad.tolist(),
    }


def run_rloo(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the advantages of an RLOO trainer with a KL penalty in the reward."""
    settings = {"beta": 0.05, "normalize_advantages": False}
    with tempfile.TemporaryDirectory() as directory:
        trainer = open_trainer(RLOOTrainer, RLOOConfig, inputs, directory, **settings)
        answer(trainer, inputs["prev_logprobs"], inputs["reference_logprobs"])
        batch = trainer._generate_and_score_completions([{"prompt": "w2 w3"}] * len(LENGTHS))
    return {"settings": settings, "advantages": batch["advantages"].tolist()}


def run_gkd(beta: float) -> dict[str, Any]:
    """Return loss and gradient of a GKD trainer, `[2, 4, 6]` logits of student and teacher."""
    generator = torch.Generator().manual_seed(SEED)
    # As they are written, so that a reader of the file has the same numbers.
    student, teacher = (
        (2 * torch.randn((2, 4, 6), generator=generator)).double() for _ in range(2)
    )
    is_target = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0]]).bool()
    student.requires_grad_()
    labels = torch.where(is_target, 0, -100)
    loss = GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=beta)
    loss.backward()
    return {
        "beta": beta,
        "student": student.detach().flatten().tolist(),
        "teacher": teacher.flatten().tolist(),
        "is_target": is_target.int().tolist(),
        "loss": loss.item(),
        "gradient": student.grad.flatten().tolist(),
    }


PAIRS = [
    {"prompt": "w2 w3 ", "chosen": "w4 w5 w6", "rejected": "w7"},
    {"prompt": "w8 ", "chosen": "w9", "rejected": "w10 w11 w12 w13"},
    {"prompt": "w14 w15 w16 ", "chosen": "w17 w18", "rejected": "w19 w20"},
    {"prompt": "w21 w22 ", "chosen": "w23 w24 w25 w26", "rejected": "w27 w28 w29"},
]


class Recorder:
    """Calls a model and keeps a part of what it returns, with its gradient.

    Args:
        model: The model.
        name: Of the part.
    """

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        self._model, self._name = model, name
        self.part = torch.empty(0)

    def __call__(self, **inputs: Any) -> Any:
        """Return the outputs of the model."""
        outputs = self._model(**inputs)
        self.part = outputs[self._name]
        if self.part.requires_grad:
            self.part.retain_grad()
        return outputs


def open_pair_trainer(
    kind: type, config: type, settings: dict[str, Any], **models: torch.nn.Module
) -> Any:
    """Return a trainer on `PAIRS`, and a batch of all of them, chosen rows first."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = kind(
            args=config(
                output_dir=directory,
                per_device_train_batch_size=len(PAIRS),
                report_to=[],
                use_cpu=True,
                bf16=False,
                **settings,
            ),
            train_dataset=Dataset.from_list(PAIRS),
            processing_class=build_tokenizer(),
            **models,
        )
        return trainer, next(iter(trainer.get_train_dataloader()))


def run_dpo(beta: float) -> dict[str, Any]:
    """Return loss, gradient and rewards of a DPO trainer, and the log-probabilities before them."""
    torch.manual_seed(SEED)
    policy, reference = (Qwen2ForCausalLM(shape_of_model(initializer_range=0.5)) for _ in range(2))
    trainer, batch = open_pair_trainer(
        DPOTrainer, DPOConfig, {"beta": beta}, model=policy, ref_model=reference
    )
    policy_calls = Recorder(trainer.model, "log_probs")
    trainer.ref_model = reference_calls = Recorder(trainer.ref_model, "log_probs")
    loss = trainer._compute_loss(policy_calls, batch, return_outputs=False)
    loss.backward()
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    return {
        "beta": beta,
        "is_target": batch["completion_mask"][:, 1:].int().tolist(),
        "logprobs": policy_calls.part.tolist(),
        "reference_logprobs": reference_calls.part.tolist(),
        "loss": loss.item(),
        "gradient": policy_calls.part.grad.tolist(),
        "rewards": {
            name: metrics[f"rewards/{name}"][0]
            for name in ("chosen", "rejected", "margins", "accuracies")
        },
    }


def run_reward_model(center: float | None) -> dict[str, Any]:
    """Return loss and gradient of a trainer of reward models, and the scores before them."""
    torch.manual_seed(SEED)
    model = Qwen2ForSequenceClassification(shape_of_model(initializer_range=0.5, num_labels=1))
    settings = {"center_rewards_coefficient": center}
    trainer, batch = open_pair_trainer(RewardTrainer, RewardConfig, settings, model=model)
    calls = Recorder(model, "logits")
    loss = trainer.compute_loss(calls, batch)
    loss.backward()
    return {
        "center_rewards_coefficient": center,
        "scores": calls.part.squeeze(1).tolist(),
        "loss": loss.item(),
        "gradient": calls.part.grad.squeeze(1).tolist(),
    }


def json_lines(value: Any, indent: str = "") -> str:
    """Return JSON with a line per entry of a mapping and per row of numbers."""
    inner = indent + " "
    if isinstance(value, dict):
        parts = [
            f"{inner}{json.dumps(key)}: {json_lines(each, inner)}" for key, each in value.items()
        ]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(f"{inner}{json.dumps(row)}" for row in value) + f"\n{indent}]"
    return json.dumps(value)


def main() -> None:
    """Write the file that the first argument names."""
    inputs = draw_inputs()
    results = {
        "origin": f"trl {trl.__version__}, GRPOTrainer._compute_loss and "
        "_generate_and_score_completions, RLOOTrainer._generate_and_score_completions, "
        "GKDTrainer.generalized_jsd_loss, DPOTrainer._compute_loss, RewardTrainer.compute_loss",
        "command": "python packages/rl-policy/benchmarks/trl_losses.py "
        "packages/rl-policy/tests/trl_losses.json",
        "lengths": LENGTHS,
        "group_size": GROUP_SIZE,
        "max_completion_length": MOST_TOKENS,
        "inputs": {name: values.tolist() for name, values in inputs.items()},
        "grpo": {name: run_grpo(inputs, settings) for name, settings in CASES.items()},
        "rloo": run_rloo(inputs),
        "gkd": [run_gkd(beta) for beta in (0.0, 0.3, 1.0)],
        "dpo": {str(beta): run_dpo(beta) for beta in (0.1, 0.5)},
        "reward_model": {str(center): run_reward_model(center) for center in (None, 0.01)},
    }
    Path(sys.argv[1]).write_text(json_lines(results) + "\n")


if __name__ == "__main__":
    main()
