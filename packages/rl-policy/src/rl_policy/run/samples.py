"""The completions that a run records: `samples.jsonl`, a line for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_policy.data.datasets import Problem
from rl_policy.run.metrics import keep_steps

if TYPE_CHECKING:
    # Who looks at a run imports neither.
    import torch

    from rl_policy.data.batches import ProblemEncoder

Kind = Literal["eval", "train"]
"""`eval`: greedy completions of held-out prompts after the step. `train`: those that the step was
trained on, sampled before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A completion with its tokens.

    Attributes:
        step: The step that it was recorded at.
        kind: See `Kind`.
        prompt: Its text, as the data has it.
        answer: The answer in the data.
        completion: Its text, without what ends it.
        reward: Its reward.
        advantage: Of each of its tokens; None for an evaluation.
        tokens: The text of each token, with the one that ends it.
        logprobs: Of each token, under the distribution it was sampled from, in nats.
        turns: Of an episode, the texts in their order: `role`, `policy` or `environment`, and
            `text`; the completion is all of them. Empty for a completion.
        sampled: Of an episode, which of the tokens the policy has sampled; the others have a
            log-probability of 0. Empty: all.
    """

    step: int
    kind: Kind
    prompt: str
    answer: str
    completion: str
    reward: float
    advantage: float | None
    tokens: Sequence[str]
    logprobs: Sequence[float]
    turns: Sequence[Mapping[str, str]] = ()
    sampled: Sequence[bool] = ()


class SampleLog:
    """Appends the first completions of each evaluation to the JSON lines.

    Args:
        path: The JSON lines.
        limit: Completions of each call.
        encoder: Turns tokens into texts.
    """

    def __init__(self, path: Path, *, limit: int, encoder: ProblemEncoder) -> None:
        self._path = path
        self._limit = limit
        self._encoder = encoder

    def record(
        self,
        step: int,
        kind: Kind,
        problems: Sequence[Problem],
        generated: Mapping[str, torch.Tensor],
        rewards: Sequence[float],
        *,
        advantages: torch.Tensor | None = None,
    ) -> None:
        """Record the first completions of a batch.

        Args:
            step: Of the run.
            kind: What they are.
            problems: Of each row.
            generated: A `GenerationOutputSpec`, `[batch, seq]`, or episodes, see
                `rl_policy.environments.rollouts`.
            rewards: Of each row.
            advantages: `[batch]`. None: there are none.
        """
        first = {name: rows[: self._limit] for name, rows in generated.items()}
        is_episode = "turns" in first
        episodes: Any = first  # whose columns of texts are lists
        if is_episode:
            starts = first["prompt_lengths"]
            texts = ["\n".join(text for _, text in turns) for turns in episodes["turns"]]
        else:
            starts = first["unpadded_sequence_lengths"] - first["generation_lengths"]
            texts = self._encoder.completion_texts(first)
        lines: list[str] = []
        for row, completion in enumerate(texts):
            start, end = int(starts[row]), int(first["unpadded_sequence_lengths"][row])
            sample = Sample(
                step=step,
                kind=kind,
                prompt=episodes["prompts"][row] if is_episode else problems[row].prompt,
                answer=problems[row].answer,
                completion=completion,
                reward=float(rewards[row]),
                advantage=None if advantages is None else float(advantages[row]),
                tokens=self._encoder.token_texts(first["output_ids"][row, start:end].tolist()),
                logprobs=[round(x, 4) for x in first["logprobs"][row, start:end].tolist()],
                turns=_turns(episodes["turns"][row]) if is_episode else (),
                sampled=first["is_sampled"][row, start:end].tolist() if is_episode else (),
            )
            lines.append(json.dumps(asdict(sample)) + "\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def keep_steps(self, step: int) -> None:
        """Drop the samples after `step`, which a resumed run records again."""
        if self._path.exists():
            keep_steps(self._path, step)


def _turns(turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "text": text} for role, text in turns]


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a `samples.jsonl`; none if there is no such file.

    A last line that a running process has not finished is left out.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Sample(**json.loads(line)) for line in lines if line.endswith("\n")]
