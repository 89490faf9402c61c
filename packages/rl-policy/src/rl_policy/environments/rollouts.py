"""Episodes of several turns between a sampler and users' environments.

What was sampled is kept as tokens, and what environments answer is appended as tokens: no text is
ever encoded again, so what is trained is what was sampled.

    prompt | turn | observation | turn | observation | turn
             1 1    0 0 0         1 1    0 0 0         1       token_mask

`EpisodePlayer.play` lets all conversations of a batch advance together: each turn is one call of
the sampler and one of the environments, and those that have ended drop out. In
`rl_policy.environments.stream` each goes on by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces import NOT_SAMPLED, GenerationInterface
from rl_refit.report import Stopwatch

from rl_policy.data.batches import Batch, ProblemEncoder
from rl_policy.data.datasets import Problem
from rl_policy.data.messages import Message, conversation_text
from rl_policy.data.rewards import RewardError
from rl_policy.environments.exchange import Failure
from rl_policy.environments.host import Reply
from rl_policy.environments.pool import KEY, EnvironmentPool, Turn

_LOGGER = logging.getLogger(__name__)

# Enough to see what is wrong, in a step of which hundreds may fail alike.
_MOST_NAMED = 3


class EnvironmentFailure(RewardError):
    """No group of a batch has an episode. The message names the environment and the failures."""


@dataclass(slots=True)
class Episode:
    """A conversation, as far as it has come.

    Attributes:
        group: Its number in the batch.
        problem: From which it started, with the prompt that the environment gave.
        tokens: All of them.
        prompt_length: How many of them are the prompt's.
        is_sampled: Of each token.
        logprobs: Of each token, under the distribution it was sampled from; 0.0 for others.
        versions: Of the weights that sampled each token; `NOT_SAMPLED` for others. All are that
            where the sampler gives no versions.
        turns: The texts after the prompt, with who wrote them: `policy` or `environment`.
        reward: The sum so far.
        num_turns: Turns of the policy.
        has_ended: Whether nothing follows.
        is_done: Whether the environment has ended it.
        is_truncated: Whether a limit of tokens has ended a turn, or all of it.
    """

    group: int
    problem: Problem
    tokens: list[int] = field(default_factory=list)
    prompt_length: int = 0
    is_sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)
    reward: float = 0.0
    num_turns: int = 0
    has_ended: bool = False
    is_done: bool = False
    is_truncated: bool = False

    def append(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Append tokens: sampled ones with their log-probabilities and versions, or others."""
        self.tokens += tokens
        self.is_sampled += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.versions += [NOT_SAMPLED] * len(tokens) if versions is None else versions


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePlayer:
    """Plays episodes of a run.

    Attributes:
        pool: The environments.
        encoder: Of the run.
        max_turns: Most turns of the policy.
        max_length: Most tokens of an episode.
        max_new_tokens: Most tokens of a turn.
        role: Of an observation, where a chat template renders it.
    """

    pool: EnvironmentPool
    encoder: ProblemEncoder
    max_turns: int
    max_length: int
    max_new_tokens: int
    role: str

    def play(
        self,
        source: GenerationInterface,
        problems: Sequence[Problem],
        *,
        group_size: int,
        greedy: bool = False,
        watch: Stopwatch | None = None,
    ) -> Batch:
        """Return an episode of each problem.

        Args:
            source: Samples the turns.
            problems: Each as often as its group is large, one after the other.
            group_size: Episodes that a failure of one of them costs.
            greedy: Take the most likely token every time.
            watch: Counts `generate_s`, and as `reward_s` what environments take.

        Returns:
            The columns of a `GenerationOutputSpec`, with the sampled tokens of all turns as
            `generation_lengths`, and

            - `weight_versions` `[batch, seq]` int64, see `Episode.versions`;
            - `is_sampled` `[batch, seq]` bool, and `token_mask` int64, 1 for the sampled tokens
              of groups that have not failed;
            - `sample_mask` `[batch]` float32, 0 for the rows of groups that have failed;
            - `prompt_lengths`, `num_turns` `[batch]` int64;
            - `rewards` `[batch]` float64, 0 for the rows of groups that have failed;
            - `is_truncated` `[batch]` bool, see `Episode`, and `is_turn_limited`, where `max_turns`
              has ended it;
            - `prompts` and `turns`, lists of texts and of `Episode.turns`.

        Raises:
            EnvironmentFailure: All groups have failed.
        """
        watch = watch or Stopwatch()
        groups = [
            [Episode(group, each) for each in problems[start : start + group_size]]
            for group, start in enumerate(range(0, len(problems), group_size))
        ]
        failures: dict[int, Failure] = {}
        # More groups than there may be environments play one after the other.
        for first in range(0, len(groups), self.pool.max_groups):
            some = groups[first : first + self.pool.max_groups]
            failures |= self._play_together(source, some, greedy=greedy, watch=watch)
        self._report(groups, failures)
        return self.batch([each for group in groups for each in group], failures)

    def _play_together(
        self,
        source: GenerationInterface,
        groups: Sequence[Sequence[Episode]],
        *,
        greedy: bool,
        watch: Stopwatch,
    ) -> dict[int, Failure]:
        """Play the episodes of some groups to their ends; return the failures by group."""
        with watch.phase("reward_s"):
            failures = self._start(groups)
        while running := [
            (place, number, episode)
            for place, group in enumerate(groups)
            for number, episode in enumerate(group)
            if not episode.has_ended and episode.group not in failures
        ]:
            episodes = [episode for _, _, episode in running]
            with watch.phase("generate_s"):
                prompts = self.encoder.token_batch([each.tokens for each in episodes])
                texts = self.take_turns(episodes, source.generate(prompts, greedy=greedy))
            with watch.phase("reward_s"):
                turns: dict[int, dict[int, Problem | str]] = {}
                for (place, number, _), text in zip(running, texts, strict=True):
                    turns.setdefault(place, {})[number] = text
                failures |= self._answer(groups, turns)
        return failures

    def _start(self, groups: Sequence[Sequence[Episode]]) -> dict[int, Failure]:
        """Reset the environments, and take their prompts; return the failures by group."""
        failures: dict[int, Failure] = {}
        turns: dict[int, Turn] = {
            place: {number: each.problem for number, each in enumerate(group)}
            for place, group in enumerate(groups)
        }
        for place, outcome in self.pool.play(turns).items():
            for number, episode in enumerate(groups[place]):
                if isinstance(outcome, Failure):
                    failures[episode.group] = outcome
                else:
                    take_prompt(episode, outcome[number])
        return failures | self.begin([each for group in groups for each in group])

    def begin(self, episodes: Sequence[Episode]) -> dict[int, Failure]:
        """Append the tokens of the prompts; return the failures by group."""
        failures: dict[int, Failure] = {}
        rows = self.encoder.prompt_tokens([each.problem for each in episodes])
        for episode, tokens in zip(episodes, rows, strict=True):
            if not 0 < len(tokens) < self.max_length:
                failures[episode.group] = Failure(
                    f"its reset returned a prompt of {len(tokens)} tokens, of which there must be "
                    f"1 to {self.max_length - 1}, for a turn to follow"
                )
            # A row of a group that has failed only has to fit.
            episode.append(tokens[: self.max_length] or [self.encoder.pad_id])
            episode.prompt_length = len(episode.tokens)
        return failures

    def take_turns(
        self, episodes: Sequence[Episode], generated: Mapping[str, torch.Tensor]
    ) -> list[str]:
        """Append the sampled tokens to the episodes; return the texts of the turns."""
        texts = self.encoder.completion_texts(generated)
        ends = generated["unpadded_sequence_lengths"].tolist()
        lengths = generated["generation_lengths"].tolist()
        for row, (episode, end, length) in enumerate(zip(episodes, ends, lengths, strict=True)):
            turn = slice(end - length, end)
            tokens = generated["output_ids"][row, turn].tolist()
            versions = None
            if "weight_versions" in generated:
                versions = generated["weight_versions"][row, turn].tolist()
            episode.append(tokens, generated["logprobs"][row, turn].tolist(), versions)
            episode.turns.append(("policy", texts[row]))
            episode.num_turns += 1
            is_longest = length >= self.max_new_tokens or end >= self.max_length
            episode.is_truncated |= is_longest and not self.encoder.has_ended(tokens)
        return texts

    def _answer(
        self, groups: Sequence[Sequence[Episode]], turns: Mapping[int, Turn]
    ) -> dict[int, Failure]:
        """Let the environments answer; return the failures by group."""
        failures: dict[int, Failure] = {}
        answered: list[tuple[Episode, str | list[Message]]] = []
        for place, outcome in self.pool.play(turns).items():
            if isinstance(outcome, Failure):
                failures[groups[place][0].group] = outcome
                continue
            for number, reply in outcome.items():
                episode = groups[place][number]
                if (observation := self.take_reply(episode, reply)) is not None:
                    answered.append((episode, observation))
        self.append_observations(answered)
        return failures

    def take_reply(self, episode: Episode, reply: Reply) -> str | list[Message] | None:
        """Count the reply to a turn; return its observation unless it has ended the episode."""
        episode.reward += reply["reward"]
        episode.is_done = reply["done"]
        episode.has_ended = reply["done"] or episode.num_turns == self.max_turns
        return None if episode.has_ended else reply["observation"]

    def append_observations(self, answered: Sequence[tuple[Episode, str | list[Message]]]) -> None:
        """Append observations to their episodes; one without room for them has ended."""
        rows = self.encoder.observation_tokens(
            [observation for _, observation in answered],
            problems=[episode.problem for episode, _ in answered],
            last_tokens=[episode.tokens[-1] for episode, _ in answered],
            role=self.role,
        )
        for (episode, observation), tokens in zip(answered, rows, strict=True):
            if len(episode.tokens) + len(tokens) >= self.max_length:
                episode.has_ended = episode.is_truncated = True
                continue
            episode.append(tokens)
            is_text = isinstance(observation, str)
            text = observation if is_text else conversation_text(observation)
            episode.turns.append(("environment", text))

    def _report(self, groups: Sequence[Sequence[Episode]], failures: Mapping[int, Failure]) -> None:
        """Log the failures, or raise if nothing else is left."""
        named = [
            describe_failure(failure, groups[group])
            for group, failure in list(failures.items())[:_MOST_NAMED]
        ]
        if len(failures) == len(groups):
            raise self.failure_of_all(len(groups), named)
        for text in named:
            self.warn(text)
        if len(failures) > len(named):
            _LOGGER.warning(
                "%s=%r: %d groups of %d are left out",
                *(KEY, self.pool.name, len(failures), len(groups)),
            )

    def failure_of_all(self, num_groups: int, named: Sequence[str]) -> EnvironmentFailure:
        """Return what to raise where no group is left.

        Args:
            num_groups: All of them.
            named: What `describe_failure` returns of some.
        """
        return EnvironmentFailure(
            f"{KEY}={self.pool.name!r} has failed in all {num_groups} groups of episodes: "
            f"{'; '.join(named)}"
        )

    def warn(self, failure: str) -> None:
        """Log that a group is left out."""
        _LOGGER.warning("%s=%r: %s: its group is left out", KEY, self.pool.name, failure)

    def batch(self, episodes: Sequence[Episode], failures: Mapping[int, Failure]) -> Batch:
        """Return episodes as `play` does.

        Args:
            episodes: In their order.
            failures: By `Episode.group`.
        """
        tokens = self.encoder.token_batch([each.tokens for each in episodes])
        shape = tokens["input_ids"].shape
        token_mask, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        versions = torch.full(shape, NOT_SAMPLED)
        for row, each in enumerate(episodes):
            token_mask[row, : len(each.tokens)] = torch.tensor(each.is_sampled).long()
            logprobs[row, : len(each.tokens)] = torch.tensor(each.logprobs)
            versions[row, : len(each.tokens)] = torch.tensor(each.versions)
        is_valid = torch.tensor([each.group not in failures for each in episodes])
        rewards = torch.tensor([each.reward for each in episodes], dtype=torch.float64)
        columns: dict[str, Any] = {
            "output_ids": tokens["input_ids"],
            "generation_lengths": token_mask.sum(1),
            "unpadded_sequence_lengths": tokens["input_lengths"],
            "logprobs": logprobs,
            "weight_versions": versions,
            "is_sampled": token_mask.bool(),
            "token_mask": token_mask * is_valid[:, None],
            "sample_mask": is_valid.float(),
            "rewards": rewards * is_valid,
            "prompt_lengths": torch.tensor([each.prompt_length for each in episodes]),
            "num_turns": torch.tensor([each.num_turns for each in episodes]),
            "is_truncated": torch.tensor([each.is_truncated for each in episodes]),
            "is_turn_limited": torch.tensor(
                [each.num_turns == self.max_turns and not each.is_done for each in episodes]
            ),
            "prompts": [each.problem.prompt for each in episodes],
            "turns": [each.turns for each in episodes],
        }
        return BatchedDataDict(columns)


def episode_metrics(episodes: Mapping[str, Any], *, group_size: int) -> dict[str, float]:
    """Return the columns of the metrics that describe episodes.

    Args:
        episodes: What `EpisodePlayer.play` returned, or a `GenerationOutputSpec`.
        group_size: As there.

    Returns:
        `turns_mean`: turns of the policy in an episode. `turn_limit_share`: of the episodes, those
        that `environment.max_turns` has ended. `environment_failures`: groups that were left out.
        Empty for completions.
    """
    if "num_turns" not in episodes:
        return {}
    valid = episodes["sample_mask"].bool()
    return {
        "turns_mean": float(episodes["num_turns"][valid].double().mean()),
        "turn_limit_share": float(episodes["is_turn_limited"][valid].double().mean()),
        "environment_failures": float((~valid).sum()) / group_size,
    }


def describe_failure(failure: Failure, group: Sequence[Episode]) -> str:
    """Return why the episodes of a group have failed, and where."""
    turn = max(each.num_turns for each in group)
    return f"{failure.reason}, for the prompt {group[0].problem.prompt!r:.80} in turn {turn}"


def take_prompt(episode: Episode, reply: Reply) -> None:
    """Let an episode start from the prompt that its reset has returned, if it has."""
    prompt: str | list[Message] | None = reply["prompt"]
    problem = episode.problem
    if isinstance(prompt, str):
        # In the chat template, if the problem's own is in it.
        messages = [{"role": "user", "content": prompt}] if problem.messages else ()
        episode.problem = replace(problem, prompt=prompt, messages=messages)
    elif prompt is not None:
        episode.problem = replace(problem, prompt=conversation_text(prompt), messages=prompt)
