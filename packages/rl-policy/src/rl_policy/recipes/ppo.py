"""Train a model with PPO and a value model on problems with verifiable answers.

Without arguments, a tiny model is built, warmed up by supervised fine-tuning, and trained to double
numbers. The run directory holds metrics.jsonl, samples.jsonl, checkpoints/, the trained model in
final/, which transformers loads, and with their extras reward.png and report.html.

The algorithm: proximal policy optimization (Schulman et al. 2017) with generalized advantage
estimation (Schulman et al. 2016) over the tokens of completions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import Field, model_validator
from rl_interfaces.config.resolve import merge_sections
from rl_interfaces.config.schema import MOST
from rl_refit.report import Stopwatch

from rl_policy.config import (
    EnvironmentSection,
    RefitSection,
    RewardSection,
    RunConfig,
    Settings,
    merge_policy,
    naming_section,
    resolve_policy,
)
from rl_policy.data.batches import Batch, ProblemEncoder, completion_batch
from rl_policy.data.rewards import mean_parts
from rl_policy.environments.rollouts import episode_metrics
from rl_policy.losses import (
    KLEstimator,
    ValueLoss,
    explained_variance,
    generalized_advantages,
    token_rewards,
    token_values,
    whiten,
)
from rl_policy.policy import Policy
from rl_policy.recipes import Recipe
from rl_policy.recipes.policy_gradient.async_rollouts import AsyncSection
from rl_policy.recipes.policy_gradient.config import (
    KLPlace,
    PolicyGradientSection,
    PolicyLossSection,
    build_loss,
    check_batch_size,
    check_rollouts,
    warm_up_policies,
)
from rl_policy.recipes.policy_gradient.objectives import kl_estimates
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
    schedule_length,
    step_columns,
    train_epochs,
    warm_up,
)
from rl_policy.recipes.sft import SFT, SftSection
from rl_policy.run.directory import RunState
from rl_policy.run.evaluation import heldout_reward, measuring_a_step, name_score
from rl_policy.run.flops import DeviceSpeed
from rl_policy.run.inputs import (
    ProblemInputs,
    check_schedule,
    check_vocabulary,
    is_missing_directory,
)
from rl_policy.run.machine import check_model_files
from rl_policy.run.metrics import plot_reward, read_metrics
from rl_policy.run.samplers import Sampler, counting_move, weight_version
from rl_policy.run.session import Session, open_policy, run_loop

_VALUE = "value"
_PATH = "ppo.value_policy"
_MODEL = "ppo.value_model"


class PpoSection(PolicyGradientSection):
    """Proximal policy optimization with a value model."""

    prompts_per_step: int = Field(default=128, ge=1, le=MOST)
    """Prompts per step."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Of generalized advantage estimation: 0 relies on the value of the next token alone, 1 sums
    all rewards of the completion."""
    whiten: bool = True
    """Subtract from advantages their mean over all target tokens of a step, and divide by the
    standard deviation."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Most that a value moves in a step before it has no gradient. null: any."""
    value_model: str | None = Field(default=None, min_length=1)
    """Name or directory of the model that the value model starts from, for example a reward model;
    it has the vocabulary of the policy. null: the one that the policy starts from, with a new
    layer."""
    value_policy: Settings = Field(default_factory=dict)
    """Overrides of `policy` for the value model."""


class PpoLossSection(PolicyLossSection):
    """The policy's loss. The keys but `kl_in` are arguments of `rl_policy.losses.ClippedPGLoss`."""

    clip_high: float | None = Field(default=0.2, ge=0)
    """Upper clipping range of the probability ratio, above 1. null: no bound."""
    kl_coef: float = Field(default=0.05, ge=0)
    """Coefficient of the KL penalty against the model that the warm-up leaves. 0 saves the
    reference model and its forward pass; `kl` is then null in the metrics."""
    kl_in: KLPlace = "reward"
    """Where the penalty is: in the loss, or in the reward of each token."""
    kl_estimator: KLEstimator = "k1"
    """The estimator of the KL of a token (Schulman 2020)."""

    @model_validator(mode="after")
    def _check_place(self) -> PpoLossSection:
        if self.kl_in == "reward_to_go":
            raise ValueError(
                "loss.kl_in='reward_to_go' is of recipes without a value model: with one, "
                "loss.kl_in=reward is a penalty of each token"
            )
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoMetrics(PolicyGradientMetrics):
    """The metrics of a PPO step; None if not measured.

    With a penalty in the reward, `extra` has `reward_kl`, in nats per completion.

    Attributes:
        clip_fraction: Share of the tokens whose gradient clipping sets to zero; like those below,
            a mean over the optimizer steps.
        value_loss: Of the value model, per token.
        value_grad_norm: Of the value model, before clipping.
        value_clip_fraction: Share of the tokens whose clipped value costs more.
        explained_variance: Share of the variance of returns that the values before the update
            explain: 1 at best, 0 or less if they say nothing.
        return_mean: Mean over the tokens of the returns that the value model learns.
        advantage_std: Standard deviation over the tokens of advantages, before they are whitened.
        value_s: Seconds of values and of the value model's optimizer steps.
    """

    clip_fraction: float | None = None
    value_loss: float | None = None
    value_grad_norm: float | None = None
    value_clip_fraction: float | None = None
    explained_variance: float | None = None
    return_mean: float | None = None
    advantage_std: float | None = None
    value_s: float | None = None


def value_policy(config: RunConfig) -> Settings:
    """Return the complete section `policy` of the value model.

    Raises:
        ValueError: An override in `ppo.value_policy` is invalid.
    """
    section = config.section(PpoSection)
    own = {
        "model_name": section.value_model or config.policy["model_name"],
        "head": _VALUE,
        "generation": None,
        # Of the policy: a value head needs unsharded sequences, and adapters are of one model.
        "dtensor_cfg": {"sequence_parallel": False, "lora": {"adapter_path": None}},
    }
    merged = merge_policy(config.policy, merge_sections(own, section.value_policy))
    return resolve_policy(merged, path=_PATH)


def check_ppo(config: RunConfig) -> None:
    """Raise `ValueError` if keys contradict each other."""
    check_rollouts(config)
    if config.policy["generation"]["temperature"] == 0:
        raise ValueError(
            "policy.generation.temperature=0 makes all completions of a prompt equal: PPO learns "
            "from those that differ"
        )
    # A section of another recipe, which a file of several may have.
    asynchronous = getattr(config, "async", None)
    if isinstance(asynchronous, AsyncSection) and asynchronous.max_staleness:
        raise ValueError(
            f"async.max_staleness={asynchronous.max_staleness}: PPO samples anew in each step, set "
            "it to 0"
        )
    value = value_policy(config)
    if value["head"] != _VALUE:
        raise ValueError(
            f"ppo.value_policy.head={value['head']!r} gives no value of each token: leave it out"
        )
    if value["megatron_cfg"]["enabled"]:
        raise ValueError(
            "ppo.value_policy.megatron_cfg.enabled=True, which is the policy's where it is not "
            "set: that backend has no value models, set ppo.value_policy.dtensor_cfg.enabled=true"
        )
    check_batch_size(config, value, path=_PATH)
    model = config.section(PpoSection).value_model
    if is_missing_directory(model or ""):
        raise ValueError(f"ppo.value_model={model!r} is no directory")


def prepare_ppo(config: RunConfig, encoder: ProblemEncoder) -> ProblemInputs:
    """Return the problems of the run, with a value model that has the policy's vocabulary.

    Raises:
        ValueError: A problem exceeds a limit, a schedule ends too early, or the value model cannot
            be read or does not fit.
    """
    value = value_policy(config)
    num_steps, key = schedule_length(config)
    check_schedule(value, num_steps=num_steps, key=key, path=_PATH)
    if config.section(PpoSection).value_model is not None:
        with naming_section(_PATH, model_key=_MODEL):
            check_model_files(value, key=_MODEL)
            check_vocabulary(value, encoder, key=_MODEL)
    return prepare_rollouts(config, encoder)


def run_ppo(session: Session[ProblemInputs], model: str) -> None:
    """Train a model with PPO, or resume; write it to the run's directory."""
    section = session.config.section(PpoSection)
    model = warm_up(session, model)
    # First, and off the devices: engines that share them start only where memory is free.
    with (
        _open_value_model(session, section.value_model or model) as values,
        open_sampled_policy(session, model) as (policy, sampler, start),
    ):
        run_loop(
            session,
            PpoTrainer(session, policy, sampler, values, start=start, model=model),
            policy,
            name="PPO",
            num_steps=section.steps,
            eval_every=section.eval_every,
            eval_at_start=section.eval_at_start,
            start=start,
            save_also=values.save,
        )
    plot_reward(read_metrics(session.directory.metrics), session.directory.plot)


def measure_ppo(session: Session[ProblemInputs], model: str) -> PpoMetrics:
    """Return sampled reward and greedy accuracy of the run's model on the held-out problems."""
    with open_sampled_policy(session, model, is_trained=False) as (policy, sampler, start):
        trainer = PpoTrainer(session, policy, sampler, None, start=start, model=model)
        return replace(trainer.measure_start(), step=start.step)


class ValueModel:
    """The value model beside a policy, on the same devices, which it is off unless it is called.

    Args:
        config: Of the run.
        policy: With a value head.
    """

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        section = config.section(PpoSection)
        self._num_epochs = section.epochs_per_step
        self._loss = ValueLoss(clip=section.value_clip)
        self._policy = policy
        policy.offload_after_refit()

    def add_values(self, batch: Batch, watch: Stopwatch) -> None:
        """Add `prev_values` `[batch, seq]`, of the state in which each token is sampled."""
        with watch.phase("move_s"):
            self._policy.prepare_for_lp_inference()
        with naming_section(_PATH), watch.phase("value_s"):
            batch["prev_values"] = token_values(self._policy.score(batch)["scores"])

    def train(self, batch: Batch, watch: Stopwatch) -> dict[str, float]:
        """Train on the `returns` of a batch, and leave the devices; return the mean metrics."""
        with naming_section(_PATH):
            means = train_epochs(
                self._policy,
                batch,
                self._loss,
                num_epochs=self._num_epochs,
                watch=watch,
                phase="value_s",
            )
        with watch.phase("move_s"):
            self._policy.offload_after_refit()
        return means

    def save(self, checkpoint: Path) -> None:
        """Write what the directory of a checkpoint has of the value model."""
        directory = checkpoint / _VALUE
        self._policy.save_checkpoint(directory / "weights", directory / "optimizer")


@contextmanager
def _open_value_model(session: Session[ProblemInputs], model: str) -> Iterator[ValueModel]:
    """Yield the value model, off the devices; end its processes afterwards."""
    latest = session.checkpoints().latest()
    with open_policy(
        session,
        value_policy(session.config),
        path=_PATH,
        model=model,
        has_reference=False,
        checkpoint=None if latest is None else latest.within(_VALUE),
    ) as (policy, _):
        yield ValueModel(session.config, policy)


class PpoTrainer:
    """The training and evaluation steps of PPO, see `rl_policy.run.session.Trainer`.

    Args:
        session: The run.
        policy: What is trained.
        sampler: What samples.
        values: The value model. None: nothing is trained.
        start: The state that the run starts from.
        model: Name or directory of the model that `policy` started from.
    """

    is_done = False

    def __init__(
        self,
        session: Session[ProblemInputs],
        policy: Policy,
        sampler: Sampler,
        values: ValueModel | None,
        *,
        start: RunState,
        model: str,
    ) -> None:
        self._inputs = session.inputs
        self._config = session.config.section(PpoSection)
        self._loss_config = session.config.section(PpoLossSection)
        self._max_new_tokens = int(session.config.policy["generation"]["max_new_tokens"])
        self._loss = build_loss(self._loss_config, max_new_tokens=self._max_new_tokens)
        self._policy = policy
        self._sampler = sampler
        self._values = values
        self._scorer = BatchScorer(session.config, policy)
        self._samples = session.samples
        self._speed = DeviceSpeed.of_run(session.config, model=model)
        self._stream = session.open_stream(
            session.inputs.problems.train, position=start.data_position
        )

    @property
    def data_position(self) -> int:
        """Problems consumed so far."""
        return self._stream.position

    @property
    def weight_version(self) -> int:
        """The last weight version that engines had; -1 without engines."""
        return weight_version(self._sampler)

    def measure_start(self) -> PpoMetrics:
        """Evaluate before the first update: sampled reward and greedy accuracy, both held-out."""
        columns = measure_start(
            self._sampler.after_step(0),
            self._sampler,
            self._scorer,
            inputs=self._inputs,
            samples=self._samples,
        )
        return PpoMetrics(step=0, **columns)

    def take_step(self, step: int, *, is_measured: bool, needs_score: bool) -> PpoMetrics:
        """Sample completions, score them, and train the value model and the policy."""
        watch = Stopwatch()
        with watch.phase("step_s"):
            rollout, extra = self._sample(step, watch)
            batch = completion_batch(rollout.generated)
            with self._policy.keeping_batches():
                extra |= self._scorer.score(batch, watch)
                estimated, learnt = self._learn_values(batch, rollout, watch)
                trained = train_epochs(
                    self._policy,
                    batch,
                    self._loss,
                    num_epochs=self._config.epochs_per_step,
                    watch=watch,
                )
            if "reward_kl" in estimated:
                extra["reward_kl"] = estimated.pop("reward_kl")
        greedy = None
        if is_measured or needs_score:
            record_rollout(self._samples, step, rollout, batch)
            with measuring_a_step():
                greedy = self._heldout_reward(step)
        accuracy, measured = name_score(greedy, inputs=self._inputs)
        return PpoMetrics(
            step=step,
            accuracy=accuracy,
            **describe_completions(
                rollout.rewards,
                rollout.generated,
                encoder=self._inputs.encoder,
                max_new_tokens=self._max_new_tokens,
            ),
            **step_columns(
                self._policy,
                batch,
                trained,
                speed=self._speed,
                num_epochs=self._config.epochs_per_step,
                watch=watch,
            ),
            clip_fraction=trained["clip_fraction"],
            value_loss=learnt["loss"],
            value_grad_norm=learnt["grad_norm"],
            value_clip_fraction=learnt["value_clip_fraction"],
            **estimated,
            value_s=watch.of("value_s"),
            extra=extra | measured,
            diagnostics={
                name: trained[name]
                for name in DIAGNOSTICS
                if name in trained and name != "clip_fraction"
            }
            | {"value_mean": learnt["value_mean"]},
        )

    def _sample(self, step: int, watch: Stopwatch) -> tuple[Rollout, dict[str, float]]:
        """Return completions of the next problems, and what was measured of them."""
        group_size = self._config.samples_per_prompt
        moved = self._sampler.after_step(step - 1)
        with counting_move(self._sampler, moved, watch) as source:
            extra = self._sampler.report()
            rollout = draw_rollout(
                source,
                self._stream.take(self._config.prompts_per_step),
                inputs=self._inputs,
                group_size=group_size,
                watch=watch,
            )
        extra |= mean_parts(rollout.rewards)
        return rollout, extra | episode_metrics(rollout.generated, group_size=group_size)

    def _learn_values(
        self, batch: Batch, rollout: Rollout, watch: Stopwatch
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Add advantages by the values before the update, and train these on their returns.

        Returns:
            What was estimated, and the metrics of the training.
        """
        assert self._values is not None
        with watch.phase("move_s"):
            self._policy.offload_after_refit()
        self._values.add_values(batch, watch)
        with watch.phase("reward_s"):
            rewards = torch.tensor(rollout.rewards, dtype=torch.float64)
            estimated = add_advantages(batch, rewards, ppo=self._config, loss=self._loss_config)
        return estimated, self._values.train(batch, watch)

    def _heldout_reward(self, step: int) -> float:
        moved = self._sampler.after_step(step)
        return heldout_reward(moved, inputs=self._inputs, samples=self._samples, step=step)


def add_advantages(
    batch: Batch, rewards: torch.Tensor, *, ppo: PpoSection, loss: PpoLossSection
) -> dict[str, float]:
    """Add `advantages` and `returns` `[batch, seq]` to a scored batch.

    Args:
        batch: `token_mask`, `prev_values` and, for a penalty in the reward, `prev_logprobs` and
            `reference_logprobs` `[batch, seq]`; `sample_mask` `[batch]`.
        rewards: `[batch]`.
        ppo: The section.
        loss: The section.

    Returns:
        `explained_variance`, `return_mean`, `advantage_std`, and `reward_kl` in nats per
        completion, if there is a penalty in the reward.
    """
    mask = batch["token_mask"] * (batch["sample_mask"] > 0)[:, None].long()
    measured: dict[str, float] = {}
    penalties = None
    if loss.kl_coef and loss.kl_in == "reward":
        kl = kl_estimates(batch, mask, loss)
        penalties = loss.kl_coef * kl
        measured["reward_kl"] = float(kl.sum(1).mean())
    advantages, returns = generalized_advantages(
        token_rewards(rewards, mask, penalties),
        batch["prev_values"],
        mask,
        gamma=ppo.gamma,
        lam=ppo.lam,
    )
    is_target = mask > 0
    measured["explained_variance"] = explained_variance(batch["prev_values"], returns, mask)
    measured["return_mean"] = float(returns[is_target].mean())
    measured["advantage_std"] = float(advantages[is_target].std(correction=0))
    tokens = whiten(advantages, mask, correction=1) if ppo.whiten else advantages
    batch["advantages"], batch["returns"] = tokens.float(), returns.float()
    return measured


def _policies(config: RunConfig) -> dict[str, Settings]:
    own = {"policy": config.policy, _PATH: value_policy(config)}
    return own | warm_up_policies(config)


PPO = Recipe(
    name="ppo",
    sections={
        "ppo": PpoSection,
        "loss": PpoLossSection,
        "reward": RewardSection,
        "environment": EnvironmentSection,
        "sft": SftSection,
        "refit": RefitSection,
    },
    metrics=PpoMetrics,
    prepare=prepare_ppo,
    run=run_ppo,
    measure=measure_ppo,
    check=check_ppo,
    policies=_policies,
    builtin={
        **SFT.builtin,
        # Half of GRPO's warm-up: a value model learns from the start, also where rewards are rare.
        "sft": {**SFT.builtin["sft"], "stop_pass_rate": 0.8, "eval_every": 50},
        "ppo": {
            "steps": 20,
            "prompts_per_step": 512,
            "epochs_per_step": 2,
            "value_policy": {"optimizer": {"kwargs": {"lr": 1.0e-3}}},
        },
        "loss": {"kl_coef": 0.001},
    },
    num_policies=2,
    samples_with_engines=True,
)
