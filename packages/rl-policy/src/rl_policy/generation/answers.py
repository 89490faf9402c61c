"""Answers of `rl-policy serve` as rollouts to train on.

    client.chat.completions.create(...) --read_answers--> GenerationOutputSpec
                                        --completion_batch--> what a policy trains on

Each choice of an answer is a row: the tokens of its prompt, as the server has made them of the
conversation, and the tokens that were sampled. Text is never encoded again. The next turn of a
conversation is an answer with a prompt of its own, and a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from rl_policy.generation.vllm.requests import Completion, assemble_output

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict
    from rl_interfaces import GenerationOutputSpec


@runtime_checkable
class Dumped(Protocol):
    """An object of OpenAI's client."""

    def model_dump(self) -> dict[str, Any]:
        """Return what the server has sent."""
        ...


AnyAnswer = Mapping[str, Any] | Dumped
"""An answer of the server, as OpenAI's client returns it or as the JSON that it is."""


def read_answers(
    answers: Iterable[AnyAnswer], *, pad_token_id: int
) -> BatchedDataDict[GenerationOutputSpec]:
    """Return what `VllmGeneration.generate` would have returned, with a row per choice.

    Example, of a `policy` with the same model:
        generated = read_answers(answers, pad_token_id=tokenizer.pad_token_id)
        batch = completion_batch(generated, advantages=advantages)
        policy.train(batch, loss)

    Args:
        answers: Of chat completions or completions, all choices of each in its order. Those of a
            stream go through `join_stream` before.
        pad_token_id: Pads the rows on the right.

    Returns:
        A `GenerationOutputSpec` with `weight_version` `[rows]` and `weight_versions`
        `[rows, seq]`, see `VllmGeneration.generate`. `logprobs` are those of the distribution that
        was sampled from: at a temperature of 1 and without truncation, the model's own.

    Raises:
        ValueError: There is none, or one has no choices, token ids, log-probabilities or versions.
    """
    prompts: list[list[int]] = []
    completions: list[Completion] = []
    for index, each in enumerate(answers):
        answer = _plain(each)
        if not answer.get("choices"):
            raise ValueError(f"answers[{index}] has no choices: {dict(answer)!r:.200}")
        for choice in answer["choices"]:
            where = f"answers[{index}].choices[{choice['index']}]"
            prompts.append(_prompt_of(answer, choice, where))
            completions.append(_completion_of(choice, where))
    if not completions:
        raise ValueError("there are no answers to read")
    return assemble_output(prompts, completions, pad_token_id=pad_token_id)


def join_stream(chunks: Iterable[AnyAnswer]) -> dict[str, Any]:
    """Return the answer whose chunks a stream has delivered, for `read_answers`.

    It has tokens, log-probabilities and versions, and not the text.

    Raises:
        ValueError: A choice has not come to its end.
    """
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in map(_plain, chunks):
        answer.setdefault("prompt_token_ids", chunk.get("prompt_token_ids"))
        for part in chunk["choices"]:
            index = part["index"]
            choice = choices.setdefault(index, {"index": index, "token_ids": [], "logprobs": []})
            choice.setdefault("prompt_token_ids", part.get("prompt_token_ids"))
            choice["token_ids"] += part.get("token_ids") or []
            choice["logprobs"] += _logprobs_of(part)
            for key in ("finish_reason", "weight_versions"):
                choice[key] = part.get(key)
    for index, choice in choices.items():
        if choice["finish_reason"] is None:
            raise ValueError(f"choices[{index}] has no end: pass all chunks of the stream")
        values = [{"logprob": value} for value in choice["logprobs"]]
        choice["logprobs"] = {"content": values}
    return {**answer, "choices": [choices[index] for index in sorted(choices)]}


def _plain(answer: AnyAnswer) -> Mapping[str, Any]:
    return answer.model_dump() if isinstance(answer, Dumped) else answer


def _prompt_of(answer: Mapping[str, Any], choice: Mapping[str, Any], where: str) -> list[int]:
    # Completions may have several prompts, and have them in the choices.
    found = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    if not found:
        raise ValueError(f"{where} has no prompt_token_ids: rl-policy serve adds them")
    return list(found)


def _completion_of(choice: Mapping[str, Any], where: str) -> Completion:
    tokens, versions = choice.get("token_ids"), choice.get("weight_versions")
    if not tokens or not versions:
        raise ValueError(
            f"{where} has no token_ids or no weight_versions: rl-policy serve adds them to answers "
            "of at least one token"
        )
    logprobs = list(_logprobs_of(choice))
    if not len(tokens) == len(logprobs) == len(versions):
        raise ValueError(
            f"{where} has {len(tokens)} tokens, {len(logprobs)} log-probabilities and "
            f"{len(versions)} versions"
        )
    return Completion(
        token_ids=tokens,
        logprobs=logprobs,
        weight_versions=versions,
        finish_reason="length" if choice["finish_reason"] == "length" else "stop",
    )


def _logprobs_of(choice: Mapping[str, Any]) -> Iterator[float]:
    found = choice.get("logprobs") or {}
    content = cast("Sequence[Mapping[str, float]] | None", found.get("content"))
    if content is not None:
        yield from (each["logprob"] for each in content)
    else:
        yield from found.get("token_logprobs") or ()
