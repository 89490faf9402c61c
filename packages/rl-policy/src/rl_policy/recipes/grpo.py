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
from typing import ClassVar, TypeVar, cast

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
from rl_policy.data.batches import Batch, ProblemEncoder, completion_batch
from rl_policy.data.datasets import Problem, open_stream
from rl_policy.data.rewards import RewardError, mean_parts
from rl_policy.environments.rollouts import episode_metrics
from rl_policy.generation.vllm.config import complete_section
from rl_policy.generation.vllm.requests import mean_staleness
from rl_policy.policy import Policy
from rl_policy.ray.worker_group import WorkerDiedError, death_behind
from rl_policy.recipes import Recipe
from rl_policy.recipes.async_rollouts import (
    AsyncRollouts,
    AsyncSection,
    TrainedLedger,
)
from rl_policy.recipes.groups import CompletionGroups, EpisodeGroups, GroupSampler
from rl_policy.recipes.grpo_config import (
    GrpoSection,
    LossSection,
    build_loss,
    check_grpo,
    expand_preset,
    has_warm_up,
    plan_rollouts,
)
from rl_policy.recipes.objectives import mean_advantages, step_advantages
from rl_policy.recipes.resampling import Rollout, resample
from rl_policy.recipes.sft import SFT, SftSection, fine_tune, prepare_sft, sft_policy
from rl_policy.run.directory import RunState
from rl_policy.run.evaluation import (
    check_mismatch,
    complete,
    greedy_accuracy,
    rewards_of,
    sample,
    sampler_mismatch,
)
from rl_policy.run.flops import DeviceSpeed
from rl_policy.run.inputs import (
    ProblemInputs,
    check_schedule,
    prepare_episodes,
    prepare_problems,
)
from rl_policy.run.metrics import StepMetrics, mean_metrics, plot_reward, read_metrics
from rl_policy.run.samplers import (
    EngineSampler,
    Sampler,
    counting_move,
    open_sampler,
    weight_version,
)
from rl_policy.run.session import Session, open_policy, run_loop
from rl_policy.run.timeline import Timeline, plot_timeline, read_timeline

_LOGGER = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

# In one step or evaluation: engines that die again and again have a cause of their own.
_MOST_REPLACEMENTS = 3
_PHASES = ("step_s", "move_s", "generate_s", "reward_s", "logprob_s", "train_s")
_DIAGNOSTICS = (
    "clip_fraction",
    "importance_outside",
    "policy_loss",
    "probs_ratio",
    "sampler_trainer_ratio",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoMetrics(StepMetrics):
    """The metrics of a GRPO step; None if not measured.

    With engines, `extra` has the report of the refit whose weights generated the samples
    (`refit_bytes`, `refit_bytes_sent`, `refit_load_s` ..., and with `refit.delta` `refit_changed`,
    the share of the weights that the step before has changed), its `weight_version`, and the
    mismatch of the engines' log-probabilities with the trainer's (`mismatch_mean_abs` ..., see
    `sampler_mismatch`). With dynamic sampling it has what `resample` measures, with penalties in
    the reward what `step_advantages` does, and with an environment what `episode_metrics` does.

    Attributes:
        reward_mean: Mean reward of the samples; at step 0, of one per held-out problem.
        reward_std: Standard deviation of the samples' rewards, of all groups together.
        zero_advantage_share: Share of the prompts whose completions all have one reward, and so no
            advantage.
        completion_length_mean: Mean number of tokens of the completions.
        completion_length_max: The most tokens of a completion.
        truncated_share: Share of the completions that `max_new_tokens` has ended; of episodes,
            those in which a limit of tokens has ended a turn or the episode.
        staleness: Optimizer steps that sampled tokens are behind the weights that are updated
            first, as a mean over tokens: 0 if each step samples anew, see the section `async`.
        accuracy: Fraction of the held-out problems that greedy decoding solves after the step.
        loss: Mean over the optimizer steps.
        grad_norm: Mean over the optimizer steps, before clipping.
        kl: KL against the reference per token, by `loss.kl_estimator`.
        entropy: Of the policy per token in nats, estimated from the sampled tokens.
        tokens_per_s: Tokens of prompts and completions per second of the step.
        tokens_per_s_per_device: The same for each device of policy and engines.
        tflops_per_s_per_device: Model TFLOPs of the optimizer steps per second of `train_s` and
            device of the policy, see `rl_policy.run.flops`.
        mfu: Model FLOPs utilization: these over the peak of the device; None if no peak is known.
        peak_memory_gib: The most memory that a rank of the policy has had allocated since the
            start: of its device, without one of its process.
        step_s: Seconds of the step, without evaluation.
        move_s: Seconds of moving state on and off the devices and of handing them over between
            policy and engines, without the refit.
        generate_s: Seconds of sampling.
        reward_s: Seconds of completions' texts, rewards and advantages, and of environments.
        logprob_s: Seconds of old and reference log-probabilities.
        train_s: Seconds of optimizer steps.
        refit_s: Seconds of sending weights to inference engines; 0.0 without engines.
    """

    reward_mean: float | None = None
    reward_std: float | None = None
    zero_advantage_share: float | None = None
    completion_length_mean: float | None = None
    completion_length_max: float | None = None
    truncated_share: float | None = None
    staleness: float | None = None
    accuracy: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    kl: float | None = None
    entropy: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    tflops_per_s_per_device: float | None = None
    mfu: float | None = None
    peak_memory_gib: float | None = None
    step_s: float | None = None
    move_s: float | None = None
    generate_s: float | None = None
    reward_s: float | None = None
    logprob_s: float | None = None
    train_s: float | None = None
    refit_s: float = 0.0
    score_column: ClassVar[str | None] = "accuracy"
    headline: ClassVar[Mapping[str, str]] = {"reward": "reward_mean", "accuracy": "accuracy"}


def prepare_grpo(config: RunConfig, encoder: ProblemEncoder) -> ProblemInputs:
    """Return the problems of the run, also checked for the warm-up if there is one."""
    grpo = config.section(GrpoSection)
    check_schedule(
        config.policy,
        num_steps=grpo.steps * grpo.epochs_per_step,
        key=f"grpo.steps={grpo.steps}, grpo.epochs_per_step={grpo.epochs_per_step}",
    )
    if has_warm_up(config):
        inputs = prepare_sft(config, encoder)
    else:
        has_environment = config.section(EnvironmentSection).function is not None
        inputs = prepare_problems(config, encoder, has_environment=has_environment)
    return prepare_episodes(config, inputs)


def run_grpo(session: Session[ProblemInputs], model: str) -> None:
    """Train a model with GRPO, or resume; write it to the run's directory."""
    config = session.config
    grpo = config.section(GrpoSection)
    warn_of_truncation(config.policy["generation"])
    if has_warm_up(config):
        model = fine_tune(session, session.directory.warm_up, model=model)
    has_reference = config.section(LossSection).kl_coef > 0
    with open_policy(session, config.policy, model=model, has_reference=has_reference) as opened:
        policy, start = opened
        with open_sampler(session, policy, model=model, start=start) as sampler:
            trainer = GrpoTrainer(session, policy, sampler, start=start, model=model)
            with closing(trainer):
                run_loop(
                    session,
                    trainer,
                    policy,
                    name="GRPO",
                    num_steps=grpo.steps,
                    eval_every=grpo.eval_every,
                    start=start,
                    save_also=trainer.save,
                )
    plot_reward(read_metrics(session.directory.metrics), session.directory.plot)
    if session.directory.timeline.exists():
        plot_timeline(read_timeline(session.directory.timeline), session.directory.timeline_plot)


def measure_grpo(session: Session[ProblemInputs], model: str) -> GrpoMetrics:
    """Return sampled reward and greedy accuracy of the run's model on the held-out problems."""
    with (
        open_policy(
            session, session.config.policy, model=model, has_reference=False, is_trained=False
        ) as (policy, start),
        open_sampler(session, policy, model=model, start=start) as sampler,
    ):
        metrics = GrpoTrainer(session, policy, sampler, model=model, start=start).measure_start()
    return replace(metrics, step=start.step)


def warn_of_truncation(generation: Settings) -> None:
    """Log a warning if `policy.generation` truncates the distribution that the trainer scores."""
    untruncated = {"top_k": None, "top_p": 1.0}
    truncations = [
        f"policy.generation.{key}={generation[key]}"
        for key, off in untruncated.items()
        if generation.get(key, off) != off
    ]
    if truncations:
        _LOGGER.warning(
            "%s: completions are sampled from a truncated distribution, whose log-probabilities "
            "differ from the trainer's; sampler_trainer_ratio in a tracker of logger measures by "
            "how much",
            " and ".join(truncations),
        )


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
        loss = session.config.section(LossSection)
        self._has_reference = loss.kl_coef > 0
        self._policy = policy
        self._sampler = sampler
        self._has_engines = session.config.has_engines
        self._max_mismatch = session.config.section(RefitSection).max_mismatch
        self._max_new_tokens = int(session.config.policy["generation"]["max_new_tokens"])
        self._loss = build_loss(loss, max_new_tokens=self._max_new_tokens)
        self._samples = session.samples
        self._speed = DeviceSpeed.of_run(session.config, model=model)
        self._stream = open_stream(
            session.inputs.problems.train,
            weights=session.config.data.weights,
            seed=session.config.seed,
            position=start.data_position,
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
        return self._replacing_engines(self._measure_start)

    def _measure_start(self) -> GrpoMetrics:
        heldout = self._inputs.problems.heldout
        with self._after_step(0) as source:
            rewards, generated = complete(source, heldout, inputs=self._inputs)
            accuracy = self._measure(source, step=0)
            refit = self._sampler.report()
        extra: dict[str, float] = {}
        if self._has_engines:
            # Before the first update, a difference is due to the engines or to the refit alone.
            self._policy.prepare_for_lp_inference()
            batch = completion_batch(generated)
            scores = self._policy.get_logprobs(batch)["logprobs"]
            extra = {**refit, **self._mismatch(batch, scores)}
        extra |= mean_parts(rewards)
        reward_mean = sum(rewards) / len(rewards)
        return GrpoMetrics(step=0, reward_mean=reward_mean, accuracy=accuracy, extra=extra)

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
                    extra |= self._score(batch, watch)
                with watch.phase("reward_s"):
                    extra |= self._add_advantages(batch, rewards)
                with self._timeline.span("train", step):
                    trained = self._train(batch, watch)
            if self._async is not None:
                self._async.finish(step)
                self._timeline.flush()
        accuracy = None
        if is_measured or needs_score:
            self._samples.record(
                step,
                "train",
                rollout.problems,
                generated,
                rewards,
                advantages=mean_advantages(batch["advantages"], batch["token_mask"]),
            )
            try:
                accuracy = self._accuracy(step)
            except RewardError as error:
                error.policy_has_changed = True
                raise
        return GrpoMetrics(
            step=step,
            accuracy=accuracy,
            staleness=staleness,
            peak_memory_gib=self._policy.peak_memory_gib(),
            **self._describe(rewards, generated),
            **self._speed.measure(
                batch["input_lengths"],
                step_s=watch.of("step_s"),
                train_s=watch.of("train_s"),
                num_epochs=self._config.epochs_per_step,
            ),
            loss=trained["loss"],
            grad_norm=trained["grad_norm"],
            kl=trained.get("kl"),
            entropy=trained["entropy"],
            extra=extra,
            diagnostics={name: trained[name] for name in _DIAGNOSTICS if name in trained},
            **{name: watch.of(name) for name in _PHASES},
        )

    def _describe(
        self, rewards: Sequence[float], generated: Mapping[str, torch.Tensor]
    ) -> dict[str, float]:
        """Return the columns that describe the completions of a step and their rewards."""
        values = torch.tensor(rewards, dtype=torch.float64)
        if "sample_mask" in generated:
            values = values[generated["sample_mask"].bool()]
        groups = values.view(-1, self._config.samples_per_prompt)
        lengths = generated["generation_lengths"].double()
        return {
            "reward_mean": float(values.mean()),
            "reward_std": float(values.std()),
            "zero_advantage_share": float((groups == groups[:, :1]).all(1).double().mean()),
            "completion_length_mean": float(lengths.mean()),
            "completion_length_max": float(lengths.max()),
            "truncated_share": self._inputs.encoder.truncated_share(
                generated, max_new_tokens=self._max_new_tokens
            ),
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

        All engines are replaced then, as a refit and an evaluation need all of them, and what they
        were sampling is sampled again.
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
        moved = self._after_step(self._weights_step(step))
        with counting_move(self._sampler, moved, watch) as source:
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
            replaced = {"engine_replacements": float(self._num_replacements)}
            rollout = self._rewarded(taken.problems, taken.generated, watch)
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
        group_size = self._config.samples_per_prompt
        drawn = self._stream.take(num_prompts)
        problems = [problem for problem in drawn for _ in range(group_size)]
        generated = sample(
            source, problems, inputs=self._inputs, group_size=group_size, watch=watch
        )
        return self._rewarded(problems, generated, watch)

    def _rewarded(self, problems: Sequence[Problem], generated: Batch, watch: Stopwatch) -> Rollout:
        with watch.phase("reward_s"):
            rewards = rewards_of(generated, problems, inputs=self._inputs)
        return Rollout(problems=problems, generated=generated, rewards=rewards)

    def _add_advantages(self, batch: Batch, rewards: Sequence[float]) -> dict[str, float]:
        """Add the advantage of each token to a scored batch; return what was put into them."""
        batch["advantages"], measured = step_advantages(batch, rewards, config=self._run_config)
        return measured

    def _score(self, batch: Batch, watch: Stopwatch) -> dict[str, float]:
        """Add the old log-probabilities and, if the loss needs them, the reference's to the batch.

        Returns:
            The mismatch of engines' and trainer's log-probabilities; empty without engines.
        """
        own = self._config.old_logprobs == "trainer"
        mismatch: dict[str, float] = {}
        if own or self._has_engines or self._has_reference:
            with watch.phase("move_s"):
                self._policy.prepare_for_lp_inference()
        with watch.phase("logprob_s"):
            if own or self._has_engines:
                scored = self._policy.get_logprobs(batch)
                scores = scored["logprobs"]
                if "routed_experts" in scored:
                    batch["routed_experts"] = scored["routed_experts"]
                batch["prev_logprobs"] = scores if own else batch["generation_logprobs"]
                if self._has_engines:
                    mismatch = self._mismatch(batch, scores)
            else:
                batch["prev_logprobs"] = batch["generation_logprobs"]
            if self._has_reference:
                reference = self._policy.get_reference_policy_logprobs(batch)
                batch["reference_logprobs"] = reference["reference_logprobs"]
        return mismatch

    def _mismatch(self, batch: Batch, trainer_logprobs: torch.Tensor) -> dict[str, float]:
        measured = sampler_mismatch(batch, trainer_logprobs)
        check_mismatch(measured, limit=self._max_mismatch)
        return measured

    def _train(self, batch: Batch, watch: Stopwatch) -> dict[str, float]:
        """Train on the batch; return the means of the metrics."""
        with watch.phase("move_s"):
            self._policy.prepare_for_training()
        # `prev_logprobs` is computed once per step: from the second update on, the ratio differs
        # from 1 and is clipped.
        with watch.phase("train_s"):
            epochs = [
                mean_metrics(self._policy.train(batch, self._loss))
                for _ in range(self._config.epochs_per_step)
            ]
        with watch.phase("move_s"):
            self._policy.finish_training()
        return {name: sum(each[name] for each in epochs) / len(epochs) for name in epochs[0]}

    def _accuracy(self, step: int) -> float:
        def measure() -> float:
            with self._after_step(step) as source:
                return self._measure(source, step=step)

        return self._replacing_engines(measure)

    def _measure(self, source: GenerationInterface, *, step: int) -> float:
        heldout = self._inputs.problems.heldout
        return greedy_accuracy(
            source, heldout, inputs=self._inputs, samples=self._samples, step=step
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
        open_stream=lambda position: open_stream(
            inputs.problems.train,
            weights=config.data.weights,
            seed=config.seed,
            position=position,
        ),
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


def _policies(config: RunConfig) -> list[Settings]:
    return [config.policy, *([sft_policy(config)] if has_warm_up(config) else [])]


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
    prepare=prepare_grpo,
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
