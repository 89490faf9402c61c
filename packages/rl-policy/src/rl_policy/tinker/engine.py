"""What the calls of tinker's clients do to a policy: one at a time, each on its set of adapters."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces.backend.end_tokens import end_token_ids

from rl_policy.tinker.losses import TARGETS, make_loss
from rl_policy.tinker.requests import AdamSettings, RequestError, SamplingSettings
from rl_policy.tinker.wire import ForwardBackwardCall, Sampled

if TYPE_CHECKING:
    from rl_interfaces import SamplingOptions
    from transformers import PreTrainedTokenizerBase

    from rl_policy.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What the base model can take."""

    vocab_size: int
    max_tokens: int
    """Of a sequence, prompt and completion."""
    max_rank: int


class ForwardBackwardResult(NamedTuple):
    """What a `forward_backward` or `forward` call returns."""

    logprobs: list[np.ndarray]
    """Of each datum's targets, `[n]` float32."""
    loss: float
    """The sum over all data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleJob:
    """Some samples of one prompt."""

    prompt: list[int]
    num_samples: int
    settings: SamplingSettings
    wants_prompt_logprobs: bool
    last_prompt_logprobs: int | None = None
    """How many prompt tokens to score, from the end; None: all."""

    def check(self, limits: ModelLimits) -> None:
        """Raise `RequestError` unless the model can take the prompt."""
        check_tokens(np.asarray(self.prompt), limits, "prompt")
        if len(self.prompt) >= limits.max_tokens:
            raise RequestError(
                f"prompt has {len(self.prompt)} tokens, which leave no room for a token in the "
                f"{limits.max_tokens} of the model"
            )

    def options(self, limits: ModelLimits) -> SamplingOptions:
        """Return the sampling parameters as a policy takes them."""
        settings, stop = self.settings, self.settings.stop
        stops = [stop] if isinstance(stop, str) else stop or []
        return {
            "max_new_tokens": settings.max_tokens or limits.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k if settings.top_k > 0 else None,
            "stop_token_ids": [each for each in stops if isinstance(each, int)],
            "stop_strings": [each for each in stops if isinstance(each, str)],
            # An empty list is the client's way to say that nothing stops, not even the end token.
            "stops_at_end": stop is None or bool(stops),
            "seed": settings.seed,
        }


class SampleResult(NamedTuple):
    """What a sampling call returns."""

    sequences: list[Sampled]
    prompt_logprobs: np.ndarray | None
    """`[prompt]` float32, NaN where there is none."""


def check_tokens(tokens: np.ndarray, limits: ModelLimits, name: str) -> None:
    """Raise `RequestError`, naming place and number, unless all are tokens of the model."""
    outside = (tokens < 0) | (tokens >= limits.vocab_size)
    if outside.any():
        place = int(outside.argmax())
        raise RequestError(
            f"{name}[{place}]={int(tokens[place])} is no token: the vocabulary has "
            f"{limits.vocab_size}"
        )


class TinkerEngine:
    """The sets of adapters of all training clients and samplers, on one policy.

    Not thread-safe: one thread makes all calls.

    Args:
        policy: With adapters and AdamW.
        limits: Of its model.
        tokenizer: Of its model.
    """

    def __init__(
        self, policy: Policy, *, limits: ModelLimits, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.limits = limits
        self._policy = policy
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids(
            policy.config["model_name"],
            tokenizer,
            trust_remote_code=policy.config["trust_remote_code"],
        )
        self._sets = policy.adapter_sets
        self._data_parallel = policy.data_parallel

    # Training

    def create(self, model: str, *, rank: int, seed: int | None, layers: Sequence[str]) -> None:
        """Add a set of initial adapters, of a random seed if none is given."""
        chosen = secrets.randbits(62) if seed is None else seed
        self._sets.add(model, rank=rank, seed=chosen, layers=layers)

    def forward_backward(self, call: ForwardBackwardCall) -> ForwardBackwardResult:
        """Return the targets' log-probabilities and the loss; add gradients if they are asked for.

        Raises:
            RequestError: The call cannot be carried out; nothing has changed.
        """
        for index, datum in enumerate(call.data):
            where = f"data[{index}]"
            check_tokens(datum.tokens, self.limits, f"{where}.model_input")
            if TARGETS in datum.inputs:
                name = f"{where}.loss_fn_inputs[{TARGETS!r}]"
                check_tokens(datum.inputs[TARGETS], self.limits, name)
            if len(datum.tokens) >= self.limits.max_tokens:
                raise RequestError(
                    f"{where} has {len(datum.tokens)} tokens and a target behind them: the model "
                    f"takes {self.limits.max_tokens}"
                )
        loss, rows = make_loss(call.loss_fn, call.loss_config, call.data)
        self._sets.use(call.model_id)
        if call.forward_only:
            # All rows are one global batch, of which every rank has as many.
            size = -(-rows.size // self._data_parallel) * self._data_parallel
            output = self._policy.train(rows, loss, eval_mode=True, gbs=size)
        else:
            output = self._policy.forward_backward(rows, loss)
        found = output.get("rows")
        assert found is not None, "the loss returns rows"
        logprobs: torch.Tensor = found["logprobs"]
        per_datum = [
            row[1 : len(datum.tokens) + 1].numpy()
            for row, datum in zip(logprobs, call.data, strict=True)
        ]
        return ForwardBackwardResult(per_datum, float(found["loss"].double().sum()))

    def step(self, model: str, settings: AdamSettings) -> dict[str, float]:
        """Take an optimizer step with the pending gradients, and return its metrics.

        Raises:
            RequestError: No gradients are pending.
        """
        self._sets.use(model)
        if not self._policy.has_gradients:
            raise RequestError("optim_step needs gradients: call forward_backward first")
        found = self._sets.step(
            {
                "lr": settings.learning_rate,
                "betas": (settings.beta1, settings.beta2),
                "eps": settings.eps,
                "weight_decay": settings.weight_decay,
                "max_grad_norm": settings.grad_clip_norm or None,
            }
        )
        return {"grad_norm": found["grad_norm"], "skipped": float(not found["stepped"])}

    # Sets of adapters

    def save(self, model: str, path: Path, *, with_optimizer: bool) -> None:
        """Write a set into a directory that does not exist."""
        self._sets.use(model)
        self._sets.save(path, with_optimizer=with_optimizer)

    def load(self, name: str, path: Path, *, with_optimizer: bool) -> None:
        """Add a saved set under a new name."""
        self._sets.load(name, path, with_optimizer=with_optimizer)

    def replace(self, name: str, path: Path, *, with_optimizer: bool) -> None:
        """Give a set the content of a saved one; its gradients are dropped."""
        # The new one first: what cannot be loaded leaves the old one as it is.
        spare = f"{name}/loaded"
        self.load(spare, path, with_optimizer=with_optimizer)
        self._sets.remove(spare)
        self._sets.remove(name)
        self.load(name, path, with_optimizer=with_optimizer)

    def snapshot(self, model: str, name: str) -> None:
        """Add a set with the adapters of a model as they are now, to sample with."""
        self._sets.use(model)
        self._sets.copy(name)

    def remove(self, name: str) -> None:
        """Drop a set."""
        self._sets.remove(name)

    # Sampling

    def sample(self, adapters: str | None, jobs: Sequence[SampleJob]) -> list[SampleResult]:
        """Return the samples of some prompts under one set of adapters.

        Args:
            adapters: The set; None: the base model.
            jobs: Of the same settings; more than one only without a seed.
        """
        self._sets.use(adapters)
        options = jobs[0].options(self.limits)
        prompts = [job.prompt for job in jobs for _ in range(job.num_samples)]
        found = self._sets.sample(_rows_of(prompts), options)
        results: list[SampleResult] = []
        start = 0
        for job, scores in zip(jobs, self._score_prompts(jobs), strict=True):
            rows = range(start, start + job.num_samples)
            sequences = [self._sequence(found, row, len(job.prompt), options) for row in rows]
            results.append(SampleResult(sequences, scores))
            start = rows.stop
        return results

    def _sequence(
        self, found: BatchedDataDict, row: int, prompt_length: int, options: SamplingOptions
    ) -> Sampled:
        length = int(found["generation_lengths"][row])
        place = slice(prompt_length, prompt_length + length)
        tokens = found["output_ids"][row, place]
        return Sampled(
            tokens=tokens.numpy().astype(np.int32),
            logprobs=found["logprobs"][row, place].numpy(),
            stop_reason="stop" if self._has_stopped(tokens.tolist(), options) else "length",
        )

    def _has_stopped(self, tokens: list[int], options: SamplingOptions) -> bool:
        ends = set(options["stop_token_ids"])
        if options["stops_at_end"]:
            ends.update(self._end_token_ids)
        if tokens[-1] in ends:
            return True
        strings = options["stop_strings"]
        if not strings:
            return False
        text = self._tokenizer.batch_decode([tokens], skip_special_tokens=False)[0]
        return any(string in text for string in strings)

    def _score_prompts(self, jobs: Sequence[SampleJob]) -> list[np.ndarray | None]:
        """Return the log-probabilities of the prompts that are to be scored."""
        scored = [index for index, job in enumerate(jobs) if job.wants_prompt_logprobs]
        scores: list[np.ndarray | None] = [None] * len(jobs)
        if not scored:
            return scores
        rows = self._policy.get_logprobs(_rows_of([jobs[index].prompt for index in scored]))
        for index, row in zip(scored, rows["logprobs"], strict=True):
            length, last = len(jobs[index].prompt), jobs[index].last_prompt_logprobs
            values = row[:length].numpy().copy()
            values[: 1 if last is None else length - last] = np.nan
            scores[index] = values
        return scores


def _rows_of(prompts: Sequence[Sequence[int]]) -> BatchedDataDict:
    lengths = [len(prompt) for prompt in prompts]
    input_ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, : len(prompt)] = torch.tensor(prompt)
    return BatchedDataDict({"input_ids": input_ids, "input_lengths": torch.tensor(lengths)})
