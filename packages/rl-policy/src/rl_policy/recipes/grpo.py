"""Train a model with GRPO on problems with verifiable answers.

Without arguments, a tiny model is built, warmed up by supervised fine-tuning, and trained to double
numbers. The run directory holds metrics.jsonl, samples.jsonl, checkpoints/, the trained model in
final/, which transformers loads, and with their extras reward.png and report.html.

The algorithm: group relative policy optimization (Shao et al. 2024).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from rl_interfaces import GenerationInterface, GenerationStream
from rl_refit.report import Stopwatch

from rl_policy.config import (
    EnvironmentSection,
    RefitSection,
    RewardSection,
    RunConfig,
    Settings,
)
from rl_policy.data.batches import Batch, completion_batch
from rl_policy.data.rewards import mean_parts
from rl_policy.environments.rollouts import episode_metrics
from rl_policy.generation.vllm.config import complete_section
from rl_policy.generation.vllm.requests import mean_staleness
from rl_policy.policy import Policy
from rl_policy.ray.failures import WorkerDiedError, death_behind
from rl_policy.recipes import Recipe
from rl_policy.recipes.grpo_config import (
    GrpoSection,
    LossSection,
    check_grpo,
    expand_preset,
    plan_rollouts,
)
from rl_policy.recipes.policy_gradient.async_rollouts import (
    AsyncRollouts,
    AsyncSection,
    TrainedLedger,
)
from rl_policy.recipes.policy_gradient.config import build_loss, warm_up_policies
from rl_policy.recipes.policy_gradient.groups import CompletionGroups, EpisodeGroups, GroupSampler
from rl_policy.recipes.policy_gradient.objectives import step_advantages
from rl_policy.recipes.policy_gradient.resampling import resample
from rl_policy.recipes.policy_gradient.step import (
    DIAGNOSTICS,
    BatchScorer,
    PolicyGradientMetrics,
    Rollout,
    describe_completions,
    draw_rollout,
    measure_start,
    open_sampled_policy,
    prepare_rollouts,
    record_rollout,
    reward_rollout,
    step_columns,
    train_epochs,
    valid_rewards,
    warm_up,
)
from rl_policy.recipes.sft import SFT, SftSection
from rl_policy.run.directory import RunState
from rl_policy.run.evaluation import heldout_reward, measuring_a_step, name_score
from rl_policy.run.flops import DeviceSpeed
from rl_policy.run.inputs import ProblemInputs
from rl_policy.run.metrics import plot_reward, read_metrics
from rl_policy.run.samplers import EngineSampler, Sampler, counting_move, weight_version
from rl_policy.run.session import Session, run_loop
from rl_policy.run.timeline import Timeline, plot_timeline, read_timeline

_LOGGER = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

# In one step or evaluation: engines that die again and again have a cause of their own.
_MOST_REPLACEMENTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoMetrics(PolicyGradientMetrics):
    """The metrics of a GRPO step; None if not measured.

    With dynamic sampling, `extra` has what `resample` measures, with penalties in the reward what
    `step_advantages` does.

    Attributes:
        zero_advantage_share: Share of the prompts whose completions all have one reward, and so no
            advantage.
        staleness: Optimizer steps that sampled tokens are behind the weights that are updated
            first, as a mean over tokens: 0 if each step samples anew, see the section `async`.
    """

    zero_advantage_share: float | None = None
    staleness: float | None = None


def run_grpo(session: Session[ProblemInputs], model: str) -> None:
    """Train a model with GRPO, or resume; write it to the run's directory."""
    grpo = session.config.section(GrpoSection)
    model = warm_up(session, model)
    with open_sampled_policy(session, model) as (policy, sampler, start):
        trainer = GrpoTrainer(session, policy, sampler, start=start, model=model)
        with closing(trainer):
            run_loop(
                session,
                trainer,
                policy,
                name="GRPO",
                num_steps=grpo.steps,
                eval_every=grpo.eval_every,
                eval_at_start=grpo.eval_at_start,
                start=start,
                save_also=trainer.save,
            )
    plot_reward(read_metrics(session.directory.metrics), session.directory.plot)
    if session.directory.timeline.exists():
        plot_timeline(read_timeline(session.directory.timeline), session.directory.timeline_plot)


def measure_grpo(session: Session[ProblemInputs], model: str) -> GrpoMetrics:
    """Return sampled reward and greedy accuracy of the run's model on the held-out problems."""
    with open_sampled_policy(session, model, is_trained=False) as (policy, sampler, start):
        metrics = GrpoTrainer(session, policy, sampler, model=model, start=start).measure_start()
    return replace(metrics, step=start.step)


class GrpoTrainer:
    """The training and evaluation steps of GRPO, see `rl_policy.run.session.Trainer`.

    Args:
        session: The run.
        policy: What is trained.
        sampler: What samples.
        start: The state that the run starts from.
        model: Name or directory of the model that `policy` started from.
    """

    def __init__(
        self,
        session: Session[ProblemInputs],
        policy: Policy,
        sampler: Sampler,
        *,
        start: RunState,
        model: str,
    ) -> None:
        self.is_done = False
        self._inputs = session.inputs
        self._run_config = session.config
        self._config = session.config.section(GrpoSection)
        self._policy = policy
        self._sampler = sampler
        self._scorer = BatchScorer(session.config, policy)
        self._max_new_tokens = int(session.config.policy["generation"]["max_new_tokens"])
        self._loss = build_loss(
            session.config.section(LossSection), max_new_tokens=self._max_new_tokens
        )
        self._samples = session.samples
        self._speed = DeviceSpeed.of_run(session.config, model=model)
        self._stream = session.open_stream(
            session.inputs.problems.train, position=start.data_position
        )
        is_asynchronous = plan_rollouts(session.config) is not None
        self._timeline = Timeline(session.directory.timeline if is_asynchronous else None)
        self._async = _open_rollouts(session, start, timeline=self._timeline)
        self._num_replacements = 0

    @property
    def data_position(self) -> int:
        """Problems consumed so far."""
        return self._stream.position if self._async is None else self._async.num_opened

    def save(self, checkpoint: Path) -> None:
        """Write what the directory of a checkpoint has of asynchronous rollouts."""
        if self._async is not None:
            self._async.save(checkpoint)

    def close(self) -> None:
        """End what is sampled beside the training. May be called again."""
        if self._async is not None:
            self._async.close()
            self._timeline.flush()

    @property
    def weight_version(self) -> int:
        """The last weight version that engines had; -1 without engines."""
        return weight_version(self._sampler)

    def measure_start(self) -> GrpoMetrics:
        """Evaluate before the first update: sampled reward and greedy accuracy, both held-out."""
        columns = self._replacing_engines(
            lambda: measure_start(
                self._after_step(0),
                self._sampler,
                self._scorer,
                inputs=self._inputs,
                samples=self._samples,
            )
        )
        return GrpoMetrics(step=0, **columns)

    def take_step(self, step: int, *, is_measured: bool, needs_score: bool) -> GrpoMetrics:
        """Sample completions, compute rewards and log-probabilities, and train."""
        watch = Stopwatch()
        with watch.phase("step_s"):
            rollout, extra = self._replacing_engines(lambda: self._sample_for(step, watch))
            rewards, generated = rollout.rewards, rollout.generated
            # Now, as measuring the accuracy may send the weights after this step.
            staleness = self._staleness(generated, step)
            extra |= mean_parts(rewards)
            extra |= episode_metrics(generated, group_size=self._config.samples_per_prompt)
            batch = completion_batch(generated)
            with self._policy.keeping_batches():
                with self._timeline.span("score", step):
                    extra |= self._scorer.score(batch, watch)
                with watch.phase("reward_s"):
                    extra |= self._add_advantages(batch, rewards)
                with self._timeline.span("train", step):
                    trained = train_epochs(
                        self._policy,
                        batch,
                        self._loss,
                        num_epochs=self._config.epochs_per_step,
                        watch=watch,
                    )
            if self._async is not None:
                self._async.finish(step)
                self._timeline.flush()
        greedy = None
        if is_measured or needs_score:
            record_rollout(self._samples, step, rollout, batch)
            with measuring_a_step():
                greedy = self._heldout_reward(step)
        accuracy, measured = name_score(greedy, inputs=self._inputs)
        return GrpoMetrics(
            step=step,
            accuracy=accuracy,
            staleness=staleness,
            **self._describe(rewards, generated),
            **step_columns(
                self._policy,
                batch,
                trained,
                speed=self._speed,
                num_epochs=self._config.epochs_per_step,
                watch=watch,
            ),
            extra=extra | measured,
            diagnostics={name: trained[name] for name in DIAGNOSTICS if name in trained},
        )

    def _describe(
        self, rewards: Sequence[float], generated: Mapping[str, torch.Tensor]
    ) -> dict[str, float]:
        """Return the columns that describe the completions of a step and their rewards."""
        groups = valid_rewards(rewards, generated).view(-1, self._config.samples_per_prompt)
        return {
            **describe_completions(
                rewards,
                generated,
                encoder=self._inputs.encoder,
                max_new_tokens=self._max_new_tokens,
            ),
            "zero_advantage_share": float((groups == groups[:, :1]).all(1).double().mean()),
        }

    @contextmanager
    def _after_step(self, step: int) -> Iterator[GenerationInterface]:
        """Yield what samples from the weights after `step`."""
        with ExitStack() as stack:
            with ExitStack() as refit:
                # Engines refuse turns of episodes while they pause for new weights.
                if self._async is not None and not self._sampler.report().get("refit_staged"):
                    refit.enter_context(self._async.holding_engines())
                version, begun_at = self.weight_version, time.monotonic()
                source = stack.enter_context(self._sampler.after_step(step))
                if self.weight_version != version:
                    self._timeline.record("refit", step, begun_at, time.monotonic())
            yield source

    def _replacing_engines(self, run: Callable[[], ResultT]) -> ResultT:
        """Return what `run` returns; where an engine of an asynchronous run dies, run it again.

        All engines are replaced then, and what they were sampling is sampled again: none was left,
        as `VllmGeneration` replaces one of several by itself.
        """
        for _ in range(_MOST_REPLACEMENTS):
            try:
                return run()
            except Exception as error:
                death = self._death_of_engine(error)
                if self._async is None or death is None:
                    raise
                _LOGGER.warning(
                    "%s: %s; all engines are replaced, and what they were sampling is sampled "
                    "again",
                    death.summary,
                    death.reason,
                )
            self._async.sample_anew()
            cast("EngineSampler", self._sampler).replace_engines()
            self._num_replacements += 1
        return run()

    def _death_of_engine(self, error: Exception) -> WorkerDiedError | None:
        is_lost = isinstance(self._sampler, EngineSampler) and self._sampler.has_lost_engine
        return death_behind(error) if is_lost else None

    def _weights_step(self, step: int) -> int:
        """Return after which step the weights are that samplers have before `step` is taken."""
        if self._async is None or self._async.plan.is_refit_due(
            step=step, weights_step=self.weight_version
        ):
            return step - 1
        return self.weight_version

    def _staleness(self, generated: Mapping[str, torch.Tensor], step: int) -> float:
        if self._async is None:
            return mean_staleness(generated, self.weight_version)
        # Of engines apart, a version is the number of a step.
        return mean_staleness(generated, step - 1) * self._async.plan.versions_per_step

    def _sample_for(self, step: int, watch: Stopwatch) -> tuple[Rollout, dict[str, float]]:
        """Return the completions of a step, and what was measured of refit and sampling."""
        weights_step = self._weights_step(step)
        moved = self._after_step(weights_step)
        with counting_move(self._sampler, moved, watch) as source:
            # Otherwise engines that were started anew wait for the next refit.
            if self._async is not None and weights_step == step - 1:
                cast("EngineSampler", self._sampler).catch_up()
            refit = self._sampler.report()
            rollout, sampled = self._sample(source, step, watch)
        return rollout, refit | sampled

    def _sample(
        self, source: GenerationInterface, step: int, watch: Stopwatch
    ) -> tuple[Rollout, dict[str, float]]:
        """Return the completions of a step with their rewards, and how they were chosen."""
        if self._async is not None:
            with watch.phase("generate_s"):
                taken = self._async.take(
                    cast("GenerationStream", source), step, weights_step=self.weight_version
                )
            one_by_one = cast("EngineSampler", self._sampler).num_replaced
            replaced = {"engine_replacements": float(self._num_replacements + one_by_one)}
            rollout = reward_rollout(
                taken.problems, taken.generated, inputs=self._inputs, watch=watch
            )
            return rollout, taken.metrics | replaced
        if not self._config.dynamic_sampling:
            return self._rollout(source, self._config.prompts_per_step, watch), {}
        return resample(
            lambda num_prompts: self._rollout(source, num_prompts, watch),
            num_groups=self._config.prompts_per_step,
            group_size=self._config.samples_per_prompt,
            max_rounds=self._config.dynamic_sampling,
            each_reward=self._config.normalize_each_reward,
            pad_id=self._inputs.encoder.pad_id,
        )

    def _rollout(self, source: GenerationInterface, num_prompts: int, watch: Stopwatch) -> Rollout:
        """Sample a group of completions of each of the next problems, and reward them."""
        return draw_rollout(
            source,
            self._stream.take(num_prompts),
            inputs=self._inputs,
            group_size=self._config.samples_per_prompt,
            watch=watch,
        )

    def _add_advantages(self, batch: Batch, rewards: Sequence[float]) -> dict[str, float]:
        """Add the advantage of each token to a scored batch; return what was put into them."""
        batch["advantages"], measured = step_advantages(batch, rewards, config=self._run_config)
        return measured

    def _heldout_reward(self, step: int) -> float:
        return self._replacing_engines(
            lambda: heldout_reward(
                self._after_step(step), inputs=self._inputs, samples=self._samples, step=step
            )
        )


def _open_rollouts(
    session: Session[ProblemInputs], start: RunState, *, timeline: Timeline
) -> AsyncRollouts | None:
    """Return the rollouts of an asynchronous run; None if each step samples anew."""
    config, inputs = session.config, session.inputs
    plan = plan_rollouts(config)
    if plan is None:
        return None
    rollouts = AsyncRollouts(
        plan,
        too_old=config.section(AsyncSection).too_old,
        open_stream=lambda position: session.open_stream(inputs.problems.train, position=position),
        sampler=_group_sampler(config, inputs, timeline=timeline),
        ledger=TrainedLedger(session.directory.trained, step=start.step),
        timeout_s=complete_section(config.policy["generation"])["generate_timeout_s"],
    )
    checkpoint = None if start.is_new else session.checkpoints().latest()
    if checkpoint is not None:
        rollouts.load(checkpoint.path)
    return rollouts


def _group_sampler(config: RunConfig, inputs: ProblemInputs, *, timeline: Timeline) -> GroupSampler:
    group_size = config.section(GrpoSection).samples_per_prompt
    if inputs.episodes is not None:
        limit_s = config.section(EnvironmentSection).timeout_s
        return EpisodeGroups(
            inputs.episodes, group_size=group_size, limit_s=limit_s, record=timeline.record
        )
    encoder = inputs.encoder
    return CompletionGroups(encoder.prompt_batch, group_size=group_size, pad_id=encoder.pad_id)


def _policies(config: RunConfig) -> dict[str, Settings]:
    return {"policy": config.policy} | warm_up_policies(config)


GRPO = Recipe(
    name="grpo",
    sections={
        "grpo": GrpoSection,
        "loss": LossSection,
        "reward": RewardSection,
        "environment": EnvironmentSection,
        "sft": SftSection,
        "refit": RefitSection,
        "async": AsyncSection,
    },
    metrics=GrpoMetrics,
    prepare=prepare_rollouts,
    run=run_grpo,
    measure=measure_grpo,
    check=check_grpo,
    expand=expand_preset,
    policies=_policies,
    builtin={
        **SFT.builtin,
        "grpo": {"steps": 60, "prompts_per_step": 64, "samples_per_prompt": 8},
    },
    samples_with_engines=True,
)
