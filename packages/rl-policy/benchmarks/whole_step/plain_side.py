"""Compute what a GRPO step is made of with plain transformers, with a meter on the phases.

    python -m whole_step.plain_side SETTINGS-AS-JSON

Sampling, the log-probabilities of policy and reference, and the optimizer steps, on one process and
nothing around them: no rewards, no metrics, no other process. Rows are padded on the right, as wide
as their micro-batch, so that no mask is needed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import log_softmax
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer

from whole_step.clocks import PhaseMeter
from whole_step.work import IN_ORDER, SEED

# Of the reference in the loss.
_KL_COEF = 1e-3


class PlainStep:
    """A policy, its reference and an optimizer, which take steps.

    Args:
        settings: Those of TRL's side.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._model = str(Path(settings["inputs"]) / "model")
        self._gbs, self._mbs = settings["gbs"], settings["mbs"]
        self._max_new_tokens = settings["max_new_tokens"]
        self._tokenizer = AutoTokenizer.from_pretrained(self._model)
        self._policy, self._reference = (
            AutoModelForCausalLM.from_pretrained(self._model).eval() for _ in range(2)
        )
        self._optimizer = AdamW(self._policy.parameters(), lr=1e-6, betas=(0.9, 0.95))

    def run(self, prompts: Sequence[str], meter: PhaseMeter) -> None:
        """Take a step on the samples of these prompts, as many of each as they are repeated."""
        with meter.phase("generate"):
            rows = self._sample(prompts)
        spans = range(0, len(rows), self._mbs)
        batches = [pad_sequence(rows[at : at + self._mbs], batch_first=True) for at in spans]
        with meter.phase("score"), torch.no_grad():
            old, reference = (
                [_logprobs(model, batch) for batch in batches]
                for model in (self._policy, self._reference)
            )
        scored = list(zip(batches, old, reference, strict=True))
        with meter.phase("train"):
            per_step = self._gbs // self._mbs
            for at in range(0, len(scored), per_step):
                self._train(scored[at : at + per_step])

    def _sample(self, prompts: Sequence[str]) -> list[torch.Tensor]:
        """Return prompts with their completions, `[tokens]` int64 each."""
        given = self._tokenizer(
            list(prompts), padding=True, padding_side="left", return_tensors="pt"
        )
        with torch.no_grad():
            found = self._policy.generate(
                input_ids=given["input_ids"],
                attention_mask=given["attention_mask"],
                do_sample=True,
                top_k=0,
                max_new_tokens=self._max_new_tokens,
            )
        width = given["input_ids"].shape[1]
        completions = found[:, width:]
        # Up to the token that ends one, that included.
        ends = completions == self._tokenizer.eos_token_id
        sizes = (ends.int().cumsum(1) - ends.int() == 0).sum(1).tolist()
        starts = (width - given["attention_mask"].sum(1)).tolist()
        return [
            row[start : width + size] for row, start, size in zip(found, starts, sizes, strict=True)
        ]

    def _train(self, scored: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        for batch, old, reference in scored:
            logprobs = _logprobs(self._policy, batch)
            kl = (reference - logprobs).exp() - (reference - logprobs) - 1
            loss = (_KL_COEF * kl - (logprobs - old).exp()).mean() / len(scored)
            loss.backward()
        clip_grad_norm_(self._policy.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _logprobs(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token but the first, `[rows, width - 1]` float32."""
    logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
    return log_softmax(logits, dim=-1).gather(-1, batch[:, 1:, None]).squeeze(-1)


def main(settings: dict[str, Any]) -> None:
    """Take as many steps as the settings say."""
    inputs = Path(settings["inputs"])
    meter = PhaseMeter(inputs / "phases.jsonl", root=os.getpid())
    torch.manual_seed(SEED)
    step = PlainStep(settings)
    problems = [json.loads(line) for line in (inputs / IN_ORDER).read_text().splitlines()]
    meter.end_step(0)
    for number in range(settings["steps"]):
        first = number * settings["prompts"]
        # From the first one on again where they are used up.
        drawn = [problems[at % len(problems)] for at in range(first, first + settings["prompts"])]
        step.run([each["prompt"] for each in drawn for _ in range(settings["samples"])], meter)
        meter.end_step(number + 1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
