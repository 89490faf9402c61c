"""What TRL's PPO computes in an update on a tiny model, as JSON.

    python packages/rl-policy/benchmarks/trl_ppo.py packages/rl-policy/tests/trl_ppo.json

needs `pip install trl==1.12.0 pandas rich`, the last release with PPO, in an environment of its
own. `tests/test_losses_trl_ppo.py` holds ours against the numbers. TRL has no functions for them:
`PPOTrainer.train` is one body, whose variables are read where it calls others.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import numpy as np
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

NUM_ROWS, NUM_TOKENS, SEED = 8, 6, 1
VOCABULARY, EOS = 20, 1
SETTINGS: dict[str, Any] = {
    "kl_coef": 0.1,
    "kl_estimator": "k1",
    "gamma": 0.97,
    "lam": 0.9,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.7,
}
CASES: dict[str, dict[str, Any]] = {"full": {}, "ended": {"stop_token": "eos"}}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words."""
    words = {f"w{index}": index for index in range(2, VOCABULARY)}
    words |= {"<eos>": EOS, "<pad>": VOCABULARY}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


def make_model(kind: Any, seed: int) -> Any:
    """Return a model with distributions that are not flat."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ids = {"pad_token_id": VOCABULARY, "eos_token_id": EOS}
    labels = {} if kind is Qwen2ForCausalLM else {"num_labels": 1}
    config = Qwen2Config(
        vocab_size=VOCABULARY + 1, initializer_range=0.4, **sizes, **heads, **ids, **labels
    )
    return kind(config)


class Reader:
    """Reads the variables of `PPOTrainer.train` while it runs."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._whiten = ppo_trainer.masked_whiten

    def whiten(self, values: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
        """Keep what is whitened."""
        self.found["raw_advantages"] = values.clone()
        return self._whiten(values, mask, **options)

    def after_phase(self) -> None:
        """Keep the batch, once it is complete, and the numbers of the last epoch."""
        seen = sys._getframe(1).f_locals
        if (
            "padding_mask_p1" in seen
            and "raw_advantages" in self.found
            and "batch" not in self.found
        ):
            names = ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
            self.found["batch"] = {name: seen[name].clone() for name in (*names, "scores")}
            self.found["is_token"] = (~seen["padding_mask"]).int()
            self.found["is_value"] = (~seen["padding_mask_p1"]).int()
        if "vf_clipfrac_stats" in seen:
            stats = {
                "clip_fraction": "pg_clipfrac_stats",
                "value_clip_fraction": "vf_clipfrac_stats",
            }
            self.found |= {name: float(seen[key][1, 0, 0]) for name, key in stats.items()}

    def backward(self, loss: torch.Tensor) -> None:
        """Keep losses and gradients, of which the last epoch's stay."""
        seen = sys._getframe(1).f_locals
        leaves = [seen["new_logprobs"], seen["vpred"]]
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
        place = torch.tensor(seen["micro_batch_inds"]).argsort()
        columns = (*leaves, *gradients)
        names = ("new_logprobs", "new_values", "logprob_gradient", "value_gradient")
        self.found["update"] = {
            name: column.detach()[place] for name, column in zip(names, columns, strict=True)
        } | {"policy_loss": seen["pg_loss"].item(), "value_loss": seen["vf_loss"].item()}
        loss.backward()


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what an update of two epochs computes."""
    # Of the order of rows, which TRL leaves as it is.
    np.random.seed(SEED)
    torch.set_num_threads(1)
    reader = Reader()
    ppo_trainer.masked_whiten, ppo_trainer.empty_cache = reader.whiten, reader.after_phase
    tokenizer = make_tokenizer()
    prompts = [tokenizer([f"w{2 + row % 4} w{3 + row}"])["input_ids"][0] for row in range(NUM_ROWS)]
    with tempfile.TemporaryDirectory() as directory:
        arguments = PPOConfig(
            output_dir=directory,
            per_device_train_batch_size=NUM_ROWS,
            total_episodes=NUM_ROWS,
            num_ppo_epochs=2,
            num_mini_batches=1,
            response_length=NUM_TOKENS,
            num_sample_generations=0,
            learning_rate=0.02,
            seed=SEED,
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            gradient_checkpointing=False,
            **SETTINGS,
            **settings,
        )
        trainer = PPOTrainer(
            args=arguments,
            processing_class=tokenizer,
            model=make_model(Qwen2ForCausalLM, 0),
            ref_model=make_model(Qwen2ForCausalLM, 1),
            reward_model=make_model(Qwen2ForSequenceClassification, 2),
            value_model=make_model(Qwen2ForSequenceClassification, 3),
            train_dataset=Dataset.from_list([{"input_ids": each} for each in prompts]),
        )
        trainer.accelerator.backward = reader.backward
        trainer.train()
    found = reader.found
    return {
        "settings": settings,
        **{name: found[name].tolist() for name in ("is_token", "is_value", "raw_advantages")},
        "batch": {name: values.tolist() for name, values in found["batch"].items()},
        "update": {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in found["update"].items()
        },
        **{name: found[name] for name in ("clip_fraction", "value_clip_fraction")},
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
    results = {
        "origin": f"trl {trl.__version__}, trl.experimental.ppo.PPOTrainer.train, second epoch",
        "command": "python packages/rl-policy/benchmarks/trl_ppo.py "
        "packages/rl-policy/tests/trl_ppo.json",
        "settings": SETTINGS,
        "cases": {name: run(settings) for name, settings in CASES.items()},
    }
    Path(sys.argv[1]).write_text(json_lines(results) + "\n")


if __name__ == "__main__":
    main()
