"""`EngineWorker`: the `PolicyWorker` over any engine."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from rl_batched_data import BatchedDataDict

from rl_interfaces.backend.accumulation import CountProbe, PendingGradients
from rl_interfaces.backend.checkpoint.checkpointer import Checkpointer, RankRandomState
from rl_interfaces.backend.checkpoint.hf_files import read_kept_files, write_hf_directory
from rl_interfaces.backend.end_tokens import end_token_ids, num_token_ids
from rl_interfaces.backend.engine import Engine, ForwardOutput, OptimizerStep, Scored, Tensors
from rl_interfaces.backend.generation import (
    SamplingConfig,
    check_room,
    generate,
    scoring_temperature,
)
from rl_interfaces.backend.runtime import (
    Profiler,
    RandomState,
    RankEnvironment,
    describe_device,
    device_id,
    failing_together,
    init_process_group,
    leave_process_group,
    variables_set,
)
from rl_interfaces.backend.steps import (
    LossCounts,
    MicroBatch,
    RowScores,
    Step,
    TrainNumbers,
    TrainReport,
    check_scoring_batch,
    check_training_batch,
    planned_by,
    positive,
    steps_of,
    with_readable_padding,
)
from rl_interfaces.backend.transfer import GatheredSource, WeightTransfer
from rl_interfaces.config.resolve import resolve_policy_config
from rl_interfaces.config.types import PolicyConfig, ResolvedConfig
from rl_interfaces.generation import (
    GenerationDatumSpec,
    GenerationOutputSpec,
    SamplingOptions,
)
from rl_interfaces.loss import LossFunction, LossInput, LossType
from rl_interfaces.policy import (
    LogprobOutputSpec,
    ReferenceLogprobOutputSpec,
    TopkLogitsOutputSpec,
)
from rl_interfaces.residency import Residency, ResidencyState
from rl_interfaces.weights import DeviceHandles, RefitInfo
from rl_interfaces.worker import (
    GpuInfo,
    OptimizerStepOutputSpec,
    ParallelLayout,
    WorkerTrainOutputSpec,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_NOISE = 0.01
# Prefix of what a loss returns of each row, beside the numbers of a micro-batch.
_ROWS = "rows/"
_MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """The keys of a policy config that the worker reads itself; the engine reads the others."""

    train_global_batch_size: int
    train_micro_batch_size: int
    logprob_batch_size: int
    planned_by: str | None
    """See `rl_interfaces.backend.steps.planned_by`."""
    packed_multiple: int
    """Packed micro-batches are padded to a multiple of this many tokens."""
    max_total_sequence_length: int | None
    sampling: SamplingConfig | None
    timeout_s: float
    profile_dir: str
    seed: int
    env_vars: Mapping[str, str]
    """Of the process, from the section of the backend."""

    @classmethod
    def from_resolved(cls, resolved: ResolvedConfig) -> WorkerSettings:
        """Parse a resolved config.

        Raises:
            ValueError: `max_new_tokens` is more than a row may have.
        """
        packing = resolved["sequence_packing"]
        return cls(
            train_global_batch_size=resolved["train_global_batch_size"],
            train_micro_batch_size=resolved["train_micro_batch_size"],
            logprob_batch_size=resolved["logprob_batch_size"],
            planned_by=planned_by(resolved),
            packed_multiple=packing["sequence_length_round"] if packing["enabled"] else 1,
            max_total_sequence_length=resolved.get("max_total_sequence_length"),
            sampling=SamplingConfig.from_policy_config(resolved),
            timeout_s=resolved["timeout_s"],
            profile_dir=resolved["profile_dir"],
            seed=resolved["seed"],
            env_vars=_variables_of_backend(resolved),
        )

    def rows_per_rank(self, gbs: int | None, *, num_ranks: int) -> int:
        """Return the rows of an optimizer step on each data-parallel rank.

        Args:
            gbs: Samples per step over all ranks, from the caller; None: from the config.
            num_ranks: The data-parallel ranks.

        Raises:
            ValueError: The samples are not positive or not divisible by the ranks.
        """
        key = "policy.train_global_batch_size" if gbs is None else "gbs"
        size = self.train_global_batch_size if gbs is None else gbs
        positive(key, size)
        if size % num_ranks:
            raise ValueError(
                f"{key}={size} is not divisible by the {num_ranks} data-parallel ranks"
            )
        return size // num_ranks


def _variables_of_backend(resolved: ResolvedConfig) -> Mapping[str, str]:
    """Return `env_vars` of the section that is enabled; that of a third party may have none."""
    sections = [resolved[name] for name in ("dtensor_cfg", "megatron_cfg")]
    enabled = [section for section in sections if section["enabled"]]
    return enabled[0].get("env_vars", {}) if enabled else {}


class EngineWorker:
    """One rank of a policy over the engine of `engine_class`.

    A plain class: it runs wherever torchrun's environment variables are set, on its GPU with NCCL
    or on the CPU with gloo. Every method is called on every rank. A backend sets its engine:

        class MyWorker(EngineWorker):
            engine_class = MyEngine

    A driver needs the class alone, to check a config. A backend whose engine takes seconds to
    import leaves `engine_class` unset, and overrides `find_engine` and `plan_layout`.

    Args:
        config: A `PolicyConfig`.
        tokenizer: The model's tokenizer.
        weights_path: Initial weights, from `save_checkpoint`; None: those of `model_name`.
        optimizer_path: The training state of the same save.
        init_optimizer: Build an optimizer; without one the worker only scores and samples.
        init_reference_model: Keep a frozen copy for reference log-probabilities. It always has the
            weights of `model_name`, also with a `weights_path`.

    Raises:
        ValueError: The config is invalid for this backend or number of ranks.
    """

    contract_version = (1, 0)
    engine_class: ClassVar[type[Engine]]

    def __init__(
        self,
        config: PolicyConfig,
        tokenizer: PreTrainedTokenizerBase,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
    ) -> None:
        resolved = resolve_policy_config(cast("Mapping[str, object]", config))
        self._settings = WorkerSettings.from_resolved(resolved)
        self._tokenizer = tokenizer
        timeout_s = self._settings.timeout_s
        with ExitStack() as leaving:
            # Before anything asks for the device, whose libraries read them once.
            leaving.enter_context(variables_set(self._settings.env_vars))
            self._environment = RankEnvironment.from_environment()
            if init_process_group(self._environment, timeout_s=timeout_s):
                leaving.callback(leave_process_group)
            self._engine: Engine = self.find_engine()(
                resolved,
                environment=self._environment,
                tokenizer=tokenizer,
                init_optimizer=init_optimizer,
            )
            leaving.callback(self._engine.close)
            info = self._engine.info
            self._end_token_ids = end_token_ids(
                resolved["model_name"],
                tokenizer,
                trust_remote_code=resolved["trust_remote_code"],
            )
            self._num_token_ids = num_token_ids(tokenizer)
            # Now, as the model's files may be gone when an export is written.
            self._kept_files = read_kept_files(resolved["model_name"])
            # Raises if the config's batch does not divide; only the engine knows the group.
            self._rows_per_rank(None)
            self._data_rank = dist.get_rank(info.data_group)
            # The same seed for all ranks that hold the same rows: they must sample the same tokens.
            self._random = RandomState(self._settings.seed + self._data_rank, device=info.device)
            self._kept_random_state: dict[str, torch.Tensor] | None = None
            # Before `weights_path` is loaded: the reference has the weights of `model_name`.
            self._reference = self._engine.keep_reference() if init_reference_model else None
            self._residency = Residency(has_optimizer=self._engine.optimizer is not None)
            self._pending = PendingGradients()
            self._profiler = Profiler(self._environment, directory=self._settings.profile_dir)
            self._transfer = WeightTransfer(
                self.weight_source,
                rank=self._environment.rank,
                device=info.device,
                device_id=device_id(info.device),
                timeout_s=timeout_s,
            )
            leaving.callback(self._transfer.close)
            self._checkpointer = Checkpointer(
                self._engine.checkpoint,
                timeout_s=timeout_s,
                device=info.device,
                in_background=self.saves_in_background,
            )
            leaving.callback(self._checkpointer.close)
            self._writes_random_state = _is_first_of_its_rows(self._data_rank, info.device)
            if weights_path is not None:
                self.load_checkpoint(weights_path, optimizer_path)
            self._leaving = leaving.pop_all()

    def __repr__(self) -> str:
        return f"{type(self).__name__}[rank={self._environment.rank}]"

    @classmethod
    def validate_config(
        cls, config: Mapping[str, object], *, world_size: int, init_optimizer: bool = True
    ) -> ParallelLayout:
        """Return the layout of `world_size` ranks, before any of them starts.

        Raises:
            ValueError: The config cannot be run; the message names keys and numbers.
        """
        resolved = resolve_policy_config(config)
        settings = WorkerSettings.from_resolved(resolved)
        layout = cls.plan_layout(resolved, world_size=world_size, init_optimizer=init_optimizer)
        settings.rows_per_rank(None, num_ranks=layout.data_parallel)
        return layout

    @classmethod
    def find_engine(cls) -> type[Engine]:
        """Return the class of the engine, which a worker constructs."""
        return cls.engine_class

    @classmethod
    def plan_layout(
        cls, config: ResolvedConfig, *, world_size: int, init_optimizer: bool
    ) -> ParallelLayout:
        """Return the layout of `world_size` ranks, see `Engine.plan_layout`.

        Raises:
            ValueError: The config cannot be run; the message names keys and numbers.
        """
        return cls.find_engine().plan_layout(
            config, world_size=world_size, init_optimizer=init_optimizer
        )

    @property
    def model(self) -> Any:
        """The engine's module or modules on this rank."""
        return self._engine.model

    @property
    def saves_in_background(self) -> bool:
        """Whether a save returns once the state has been copied, and is written by a thread."""
        return False

    # Training

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> WorkerTrainOutputSpec:
        """Take an optimizer step per global batch; `data` is this rank's shard.

        See `rl_interfaces.PolicyWorker.train`.

        Raises:
            ValueError: The batch lacks a key, or sizes do not divide.
            ResidencyError: The worker is in another state than `training`.
        """
        self._require("train(eval_mode=True)" if eval_mode else "train")
        steps = self._training_steps(
            data, loss_fn, local_batch_size=self._rows_per_rank(gbs), mbs=mbs
        )
        rows = RowScores(data)
        with self._scoring() if eval_mode else self._engine.mode(training=True):
            found = self._run_steps(steps, loss_fn, rows, eval_mode=eval_mode)
        if not eval_mode:
            assert self._engine.optimizer is not None, "the residency state has an optimizer"
            self._engine.optimizer.advance_schedule()
        output: WorkerTrainOutputSpec = {
            "global_loss": found.losses,
            "grad_norm": None if eval_mode else found.grad_norms,
            "rank": self._environment.rank,
            "all_mb_metrics": dict(found.metrics),
        }
        return _with_rows(output, loss_fn, rows)

    def forward_backward(
        self, data: BatchedDataDict, loss_fn: LossFunction, mbs: int | None = None
    ) -> WorkerTrainOutputSpec:
        """Add the gradients of a loss to those that are pending; `data` is this rank's shard.

        See `rl_interfaces.SplitTrainingWorker`, and `rl_interfaces.backend.accumulation` for how
        the calls add up.

        Raises:
            ValueError: The batch lacks a key, sizes do not divide, or the loss cannot be added.
            ResidencyError: The worker is in another state than `training`.
        """
        self._require("forward_backward")
        self._pending.check(loss_fn)
        steps = self._training_steps(data, loss_fn, local_batch_size=None, mbs=mbs)
        rows = RowScores(data)
        with self._dropping_gradients_on_failure(), self._engine.mode(training=True):
            found = self._accumulate(steps, loss_fn, rows)
        output: WorkerTrainOutputSpec = {
            "global_loss": found.losses,
            "grad_norm": None,
            "rank": self._environment.rank,
            "all_mb_metrics": dict(found.metrics),
        }
        return _with_rows(output, loss_fn, rows)

    def optimizer_step(self) -> OptimizerStepOutputSpec:
        """Step with the pending gradients and clear them; the schedule advances once.

        Raises:
            ResidencyError: No gradients are pending.
        """
        self._residency.require("optimizer_step")
        return self._step_with_pending(self._pending.divisor)

    def _step_with_pending(self, divisor: float) -> OptimizerStepOutputSpec:
        optimizer, pending = self._engine.optimizer, self._pending
        assert optimizer is not None, "gradients are pending"
        learning_rate = optimizer.learning_rate
        with self._dropping_gradients_on_failure(), self._engine.mode(training=True):
            step = optimizer.step(discard=pending.is_empty, divisor=divisor)
            _warn_if_skipped(step, num_valid=pending.num_valid)
            optimizer.advance_schedule()
        self._forget_gradients()
        return {
            "grad_norm": float(step.grad_norm),
            "stepped": step.stepped,
            "lr": learning_rate,
        }

    def zero_grad(self) -> None:
        """Drop the pending gradients of `forward_backward`, if there are any."""
        if self._residency.has_gradients and self._engine.optimizer is not None:
            self._engine.optimizer.clear_gradients()
        self._forget_gradients()

    def _training_steps(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        local_batch_size: int | None,
        mbs: int | None,
    ) -> list[Step]:
        check_training_batch(
            data,
            needs_token_mask=loss_fn.loss_type is LossType.TOKEN_LEVEL,
            vocab_size=self._engine.info.vocab_size,
        )
        return self._steps(
            with_readable_padding(data, vocab_size=self._engine.info.vocab_size),
            local_batch_size=local_batch_size,
            given=positive("mbs", mbs),
            default=self._settings.train_micro_batch_size,
            rows_per_group=getattr(loss_fn, "rows_per_group", 1),
        )

    def _accumulate(
        self, steps: Sequence[Step], loss_fn: LossFunction, rows: RowScores
    ) -> TrainNumbers:
        """Run the backward passes of one `forward_backward` call."""
        engine, report = self._engine, TrainReport()
        info = engine.info
        counts = LossCounts.total(LossCounts.of(steps, group=info.data_group, device=info.device))
        self._residency.has_gradients = True
        weight = self._pending.add(counts, loss_fn)
        probe = CountProbe(loss_fn, counts)
        loss = self._loss_of(loss_fn, counts, is_step=False, weight=weight, probe=probe)
        found: list[Scored] = []
        for step in steps:
            of_step = engine.run_backward(step, loss, accumulate=True)
            _put_rows(rows, step, of_step)
            found += of_step
        total = torch.stack([each.tensors["loss"].float() for each in found]).sum()
        # Of the first micro-batch: the ranks read it with the loss, and raise together.
        totals = torch.stack([total, found[0].tensors["differs"]]).to(info.device)
        dist.all_reduce(totals, group=info.data_group)
        report.losses = list(totals)
        report.metrics = [each.metrics for each in found if each.metrics]
        numbers = report.read()
        if numbers.losses[1]:
            raise ValueError(probe.refusal)
        return replace(numbers, losses=numbers.losses[:1])

    @contextmanager
    def _dropping_gradients_on_failure(self) -> Generator[None, None, None]:
        """Run the body; if it raises, drop pending gradients, as an engine's `mode` may have."""
        try:
            yield
        except BaseException:
            if self._residency.has_gradients:
                logger.warning(
                    "The pending gradients of %d forward_backward calls are dropped",
                    self._pending.num_calls,
                )
                self.zero_grad()
            raise

    def _forget_gradients(self) -> None:
        self._residency.has_gradients = False
        self._pending.clear()

    def _run_steps(
        self, steps: Sequence[Step], loss_fn: LossFunction, rows: RowScores, *, eval_mode: bool
    ) -> TrainNumbers:
        engine, report, skipped = self._engine, TrainReport(), 0
        info = engine.info
        all_counts = LossCounts.of(steps, group=info.data_group, device=info.device)
        for step, counts in zip(steps, all_counts, strict=True):
            loss = self._loss_of(loss_fn, counts, is_step=not eval_mode)
            if eval_mode:
                found = engine.run(step, lambda batch, output: loss(batch, output)[1])  # noqa: B023
            else:
                found = engine.run_backward(step, loss)
            _put_rows(rows, step, found)
            total = torch.stack([each.tensors["loss"].float() for each in found]).sum()
            report.losses.append(total.to(info.device))
            report.metrics += [each.metrics for each in found if each.metrics]
            if not eval_mode:
                skipped += not self._optimizer_step(counts, report)
        # A sum, not a mean: each rank's loss is divided by the global count already.
        losses = torch.stack(report.losses)
        dist.all_reduce(losses, group=info.data_group)
        report.losses = list(losses)
        numbers = report.read()
        if not eval_mode and self._data_rank == 0:
            # From one data-parallel rank only, so that the sum over all ranks is the count.
            numbers.metrics["skipped_steps"].append(skipped)
        return numbers

    def _loss_of(
        self,
        loss_fn: LossFunction,
        counts: LossCounts,
        *,
        is_step: bool,
        weight: float = 1.0,
        probe: CountProbe | None = None,
    ) -> Callable[[MicroBatch, ForwardOutput], tuple[torch.Tensor, Scored]]:
        """Return the loss of a micro-batch for the engine, with the numbers that are reported.

        Args:
            loss_fn: The caller's loss.
            counts: The counts that it divides by.
            is_step: Whether an optimizer step follows, whose learning rate is reported.
            weight: Multiplies what is differentiated, and not what is reported.
            probe: Tries the first micro-batch, whose result then has `differs`.
        """
        takes_logprobs = getattr(loss_fn, "input_type", LossInput.LOGITS) is LossInput.LOGPROBS
        reason = self._engine.info.lacks.get("logprobs")
        if takes_logprobs and reason is not None:
            raise ValueError(f"{type(loss_fn).__name__} needs log-probabilities: {reason}")
        sharded = bool(getattr(loss_fn, "accepts_sharded_logits", False))
        is_of_samples = getattr(loss_fn, "uses_sampling_temperature", True)
        temperature = scoring_temperature(self._settings.sampling) if is_of_samples else 1.0
        reported = {
            "global_valid_seqs": counts.num_valid_seqs,
            "global_valid_toks": counts.num_valid_toks,
        }
        if is_step and self._engine.optimizer is not None:
            reported["lr"] = self._engine.optimizer.learning_rate

        def loss(batch: MicroBatch, output: ForwardOutput) -> tuple[torch.Tensor, Scored]:
            inputs = (
                output.logprobs(temperature=temperature)
                if takes_logprobs
                else output.logits(temperature=temperature, sharded=sharded)
            )
            # Before the loss itself, whose graph then is not in memory yet.
            half = None if probe is None else probe.half(inputs, batch.rows)
            found = loss_fn(inputs, batch.rows, *counts.divisors)
            value, metrics = found[0], found[1]
            numbers = {name: _metric(name, each) for name, each in metrics.items()}
            # A copy: Megatron's pipeline schedule scales the loss in place.
            tensors = {"loss": value.detach().clone()}
            if probe is not None and half is not None:
                tensors["differs"] = probe.differs(half, value)
            if len(found) == 3:
                tensors |= {f"{_ROWS}{name}": each.detach() for name, each in found[2].items()}
            scored = Scored(tensors=tensors, metrics={**numbers, **reported})
            return value if weight == 1.0 else value * weight, scored

        return loss

    def _optimizer_step(self, counts: LossCounts, report: TrainReport) -> bool:
        assert self._engine.optimizer is not None, "the residency state has an optimizer"
        # An empty batch has zero gradients, but weight decay and momentum would still move weights.
        step = self._engine.optimizer.step(discard=counts.is_empty)
        report.grad_norms.append(step.grad_norm)
        _warn_if_skipped(step, num_valid=(counts.num_valid_seqs, counts.num_valid_toks))
        return step.stepped

    # Scoring

    def get_logprobs(
        self,
        data: BatchedDataDict,
        micro_batch_size: int | None = None,
        *,
        temperature: float | None = None,
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return `logprobs`, `[batch, seq]` float32 on the CPU; position 0 and padding are 0.

        Args:
            data: This rank's rows.
            micro_batch_size: Rows per forward. None: `policy.logprob_batch_size`.
            temperature: Divides the logits. None: `policy.generation.temperature`, for tokens that
                were sampled. A supervised loss needs 1.

        Raises:
            ValueError: The batch lacks a key, or the temperature is not positive.
            ResidencyError: The model is offloaded.
        """
        self._require("get_logprobs")
        if temperature is None:
            temperature = scoring_temperature(self._settings.sampling)
        elif temperature <= 0:
            raise ValueError(f"temperature={temperature} must be positive")
        return self._score_rows(
            lambda output: {"logprobs": output.logprobs(temperature=temperature)},
            data,
            micro_batch_size,
        )

    def get_reference_policy_logprobs(
        self,
        data: BatchedDataDict,
        micro_batch_size: int | None = None,
        *,
        temperature: float | None = None,
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return `reference_logprobs`, like `get_logprobs` under the reference model.

        Raises:
            RuntimeError: There is no reference model.
        """
        self._require("get_reference_policy_logprobs")
        # The call is checked before the swap, which copies all of the rank's weights.
        with self.use_reference_model():
            scores = self.get_logprobs(data, micro_batch_size, temperature=temperature)
        return BatchedDataDict({"reference_logprobs": scores["logprobs"]})

    def get_topk_logits(
        self, data: BatchedDataDict, k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """Return the `k` largest logits of each position, see `TopkLogitsOutputSpec`.

        Raises:
            ValueError: `k` is not in 1..vocabulary size.
        """
        self._require("get_topk_logits")
        vocab_size = self._engine.info.vocab_size
        if not 1 <= k <= vocab_size:
            raise ValueError(f"k={k} is not within 1..{vocab_size}, the vocabulary")
        return self._score_rows(lambda output: output.topk_logits(k), data, micro_batch_size)

    @contextmanager
    def use_reference_model(self) -> Generator[None, None, None]:
        """Run the body with the reference weights; the policy's are restored bit for bit.

        Raises:
            RuntimeError: There is no reference model.
        """
        if self._reference is None:
            raise RuntimeError(
                "there is no reference model: init_reference_model was False, or the engine does "
                "not support one with this config"
            )
        with self._reference():
            yield

    def _score_rows(
        self,
        score: Callable[[ForwardOutput], Tensors],
        data: BatchedDataDict,
        micro_batch_size: int | None,
    ) -> BatchedDataDict:
        check_scoring_batch(data, vocab_size=self._engine.info.vocab_size)
        steps = self._steps(
            with_readable_padding(data, vocab_size=self._engine.info.vocab_size),
            local_batch_size=None,
            given=positive("micro_batch_size", micro_batch_size),
            default=self._settings.logprob_batch_size,
        )
        scores = RowScores(data)
        with self._scoring():
            for step in steps:
                found = self._engine.run(step, lambda _, output: Scored(tensors=score(output)))
                # A pipeline may append masked micro-batches to those of the step.
                for span, each in zip(step.row_spans, found, strict=False):
                    scores.put(span, each.tensors)
        return BatchedDataDict(scores.scores)

    # Generation

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a completion for each row, see `GenerationOutputSpec`.

        Raises:
            ValueError: `policy.generation` is not set, or a prompt fills the maximum length.
        """
        return self._generate(
            data, self._sampling(), greedy=greedy, generator=self._random.sampling
        )

    def sample(
        self, data: BatchedDataDict[GenerationDatumSpec], options: SamplingOptions
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Like `generate`, with the caller's sampling parameters.

        Raises:
            ValueError: `policy.generation` is not set, or a prompt fills the maximum length.
        """
        sampling, generator = self._sampling().changed(options), self._random.sampling
        if options["seed"] is not None:
            # As the policy's own seed: other rows are sampled on other data-parallel ranks.
            generator = torch.Generator(self._engine.info.device)
            generator.manual_seed(options["seed"] + self._data_rank)
        return self._generate(data, sampling, greedy=False, generator=generator)

    def _sampling(self) -> SamplingConfig:
        self._require("generate")
        if self._settings.sampling is None:
            raise ValueError("policy.generation is not set: the policy does not generate")
        return self._settings.sampling

    def _generate(
        self,
        data: BatchedDataDict,
        sampling: SamplingConfig,
        *,
        greedy: bool,
        generator: torch.Generator,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        check_scoring_batch(data, vocab_size=self._engine.info.vocab_size)
        longest = self._longest_sequence
        limit = f"{longest} tokens (policy.max_total_sequence_length, or the model's own)"
        check_room(data, longest=longest, limit=limit)
        with self._scoring(), self._engine.decoders() as open_decoder:
            return generate(
                open_decoder,
                with_readable_padding(data, vocab_size=self._engine.info.vocab_size),
                sampling=sampling,
                greedy=greedy,
                tokenizer=self._tokenizer,
                end_token_ids=self._end_token_ids,
                num_token_ids=self._num_token_ids,
                generator=generator,
                max_total_length=longest,
                device=self._engine.info.device,
            )

    # Residency

    def prepare_for_training(self, *args: object, **kwargs: object) -> None:
        """Move model and optimizer state onto the device and set train mode."""
        self._move(ResidencyState.TRAINING, "prepare_for_training")

    def prepare_for_lp_inference(self) -> None:
        """Move the model onto the device and optimizer state to the CPU; set eval mode."""
        self._move(ResidencyState.INFERENCE, "prepare_for_lp_inference")

    def offload_before_refit(self) -> None:
        """Move the model onto the device and the optimizer state to the CPU."""
        self._move(ResidencyState.REFITTING, "offload_before_refit")

    def offload_after_refit(self) -> None:
        """Move everything to the CPU and release exported handles."""
        self._residency.require("offload_after_refit")
        # Exported handles keep tensors on the device alive, and would outlast the offload.
        self._transfer.drop_handles()
        self._move(ResidencyState.OFFLOADED, "offload_after_refit")

    def _move(self, state: ResidencyState, call: str) -> None:
        self._residency.require(call)
        self._engine.place(state)
        self._residency.enter(call)

    # Checkpoints

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        """Write the weights, and training state and tokenizer if a path is given.

        The directories are written under temporary names and renamed together when all are
        complete. The tokenizer does not change and is written in place afterwards. The training
        state holds optimizer, schedule, loss scale and every rank's random state.

        Raises:
            ValueError: `optimizer_path` without an optimizer, a path exists that no save has
                written, or `tokenizer_path` is inside a directory that a background save replaces.
            RuntimeError: This save or the previous one could not be written; on every rank.
        """
        self._require_optimizer(optimizer_path, to="save")
        if tokenizer_path is not None and self.saves_in_background:
            _require_disjoint(tokenizer_path, {weights_path, optimizer_path})
        self._checkpointer.save(weights_path, optimizer_path, self._random_state_of_rank())
        with failing_together():
            if tokenizer_path is not None and self._environment.rank == 0:
                self._tokenizer.save_pretrained(tokenizer_path)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Load what `save_checkpoint` wrote, under any parallel layout.

        Not while gradients of `forward_backward` are pending. The saved learning rates and schedule
        replace those of the config, which must name the same optimizer and scheduler classes.

        Raises:
            ValueError: A directory is not a complete checkpoint of this model, the two are of
                different saves, there is no optimizer, or the classes differ.
        """
        self._residency.require("load_checkpoint")
        self._require_optimizer(optimizer_path, to="load")
        random_state = self._checkpointer.load(
            weights_path, optimizer_path, self._random_state_of_rank()
        )
        if random_state:
            self._random.load_state_dict(random_state)

    def finish_checkpoint(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            RuntimeError: It could not be written.
            TimeoutError: It took longer than `policy.timeout_s`.
        """
        self._checkpointer.finish()

    def save_hf_checkpoint(self, path: str, max_file_bytes: int = _MAX_FILE_BYTES) -> None:
        """Write a directory that `from_pretrained` loads like the model that was loaded.

        Its weights have the dtype of that model, and its generation config is the same.

        Args:
            path: The directory.
            max_file_bytes: A larger model is split into files of at most this size; rank 0 holds
                the tensors of one file at a time.

        Raises:
            ValueError: The path exists and no save has written it.
            RuntimeError: It could not be written; on every rank.
        """
        with self._checkpointer.replacing(path) as directory:
            write_hf_directory(
                self._engine.export(),
                self._tokenizer,
                directory,
                max_file_bytes=max_file_bytes,
                kept_files=self._kept_files,
            )

    def _require_optimizer(self, optimizer_path: str | None, *, to: str) -> None:
        if optimizer_path is not None and self._engine.optimizer is None:
            raise ValueError(f"optimizer_path={optimizer_path!r}: there is no optimizer to {to}")

    def keep_random_state(self) -> None:
        """Remember the random state for `restore_random_state`."""
        self._kept_random_state = self._random.state_dict()

    def restore_random_state(self) -> None:
        """Return to the random state that was kept last, or stay if none was."""
        if self._kept_random_state is not None:
            self._random.load_state_dict(self._kept_random_state)

    def _random_state_of_rank(self) -> RankRandomState:
        return RankRandomState(
            data_parallel_rank=self._data_rank,
            is_written_here=self._writes_random_state,
            state=self._random.state_dict(),
        )

    # Weights, see `rl_interfaces.WeightSendingWorker`

    @property
    def weight_source(self) -> GatheredSource:
        """The full weights in the wire dtype, see `rl_interfaces.WeightSource`."""
        return self._engine.weight_source(self._engine.info.wire_dtype)

    def prepare_refit_info(self) -> RefitInfo:
        """Return `{name: (shape, wire dtype)}` of every tensor that is sent, in order."""
        metadata = self.weight_source.metadata()
        return {name: (tuple(shape), dtype) for name, dtype, shape in metadata}

    def prepare_info_for_collective(self) -> RefitInfo:
        """Return what `prepare_refit_info` returns."""
        return self.prepare_refit_info()

    def open_refit(self, **options: Any) -> Mapping[str, str | int] | None:
        """Return the address that this rank's receivers connect to, see `WeightTransfer.open`."""
        return self._transfer.open(**options)

    def send_weights(
        self, version: int, *, receivers: Sequence[int] | None = None
    ) -> dict[str, float]:
        """Stream the weights to the receivers; return the seconds of each phase and the bytes.

        Args:
            version: Of the weights.
            receivers: The ranks of those that take part. None: all.

        Raises:
            RefitError: A receiver failed or did not answer in time.
            ResidencyError: The model is offloaded.
        """
        self._require("send_weights")
        return self._transfer.send(version, receivers=receivers)

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Return name and wire bytes of every tensor, and the device's free bytes."""
        self._require("send_weights")
        return self._transfer.sizes()

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> DeviceHandles:
        """Return `{device id: {name: handle}}`; invalidates the handles of the previous call.

        `rl_refit.compat.handles.rebuild` opens a handle in another process.

        Raises:
            ValueError: A key is not the name of a tensor.
        """
        self._require("send_weights")
        return self._transfer.export(keys)

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Join a group with `world_size - 1` inference ranks; only rank 0 joins."""
        self._transfer.join(ip, port, world_size)

    def broadcast_weights_for_collective(self) -> None:
        """Broadcast every tensor to the group of `init_collective`, in order. Collective."""
        self._require("send_weights")
        self._transfer.broadcast()

    @torch.no_grad()
    def _add_noise_to_weights(self) -> None:
        """Add N(0, 0.01^2) noise to every trainable parameter, to make a transfer visible."""
        generator = torch.Generator(self._engine.info.device)
        for key, parameter in self._engine.local_parameters():
            # The key is the seed: ranks that hold the same shard draw the same noise.
            generator.manual_seed(self._settings.seed + zlib.crc32(key.encode()))
            noise = torch.randn(parameter.shape, generator=generator, device=generator.device)
            parameter.add_(noise.to(parameter), alpha=_NOISE)

    # Information

    def is_alive(self) -> bool:
        """Return True."""
        return True

    def reset_peak_memory_stats(self) -> None:
        """Reset the peak memory figures of `get_gpu_info`."""
        if self._environment.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._environment.device)

    def get_gpu_info(self) -> GpuInfo:
        """Return rank, device, memory figures in MiB, and a few values of one parameter."""
        key, parameter = next(self._engine.local_parameters())
        name = key.partition("[")[0]
        # FSDP and Megatron release a parameter's storage while it is offloaded.
        has_values = parameter.untyped_storage().nbytes() > 0
        sample: list[float] = parameter.detach().flatten()[:4].tolist() if has_values else []
        return describe_device(self._environment, parameter_sample={name: sample})

    def report_device_id(self) -> str:
        """Return the GPU's UUID, or on the CPU an id of the host."""
        return device_id(self._environment.device)

    def start_gpu_profiling(self) -> None:
        """Open a profiling range: CUDA's profiler, or `torch.profiler` on the CPU."""
        self._profiler.start()

    def stop_gpu_profiling(self) -> None:
        """Close the range; on the CPU, write the trace to `policy.profile_dir`."""
        self._profiler.stop()

    def shutdown(self) -> None:
        """Release all resources, and destroy the process group if the worker created it.

        Idempotent.

        Raises:
            RuntimeError: The last save could not be written.
        """
        self._leaving.close()

    # Shared by the calls

    def _require(self, call: str) -> None:
        """Raise if the engine does not support a call or the residency state does not allow it.

        Raises:
            ValueError: Unsupported; the message has the engine's reason.
            ResidencyError: Not allowed; the message names the state and the call that leads out.
        """
        reason = self._engine.info.lacks.get(call.partition("(")[0])
        if reason is not None:
            raise ValueError(f"{call} is not available: {reason}")
        self._residency.require(call)

    @contextmanager
    def _scoring(self) -> Generator[None, None, None]:
        """Run the body in eval mode without gradients; restore mode and random state."""
        device = self._engine.info.device
        devices = [device] if device.type == "cuda" else []
        mode: AbstractContextManager[None] = self._engine.mode(training=False)
        dropping = self._dropping_gradients_on_failure()
        with dropping, mode, torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield

    def _steps(
        self,
        data: BatchedDataDict,
        *,
        local_batch_size: int | None,
        given: int | None,
        default: int,
        rows_per_group: int = 1,
    ) -> list[Step]:
        info = self._engine.info
        steps = steps_of(
            data,
            local_batch_size=local_batch_size,
            given=given,
            default=default,
            planned_by=self._settings.planned_by,
            concatenation=info.packing.rounded(self._settings.packed_multiple),
            group=info.data_group,
            device=info.device,
            rows_per_group=rows_per_group,
        )
        if info.check_steps is not None:
            info.check_steps(steps)
        return steps

    def _rows_per_rank(self, gbs: int | None) -> int:
        num_ranks = dist.get_world_size(self._engine.info.data_group)
        return self._settings.rows_per_rank(gbs, num_ranks=num_ranks)

    @property
    def _longest_sequence(self) -> int:
        limits = [self._settings.max_total_sequence_length, self._engine.info.max_sequence_length]
        return min((limit for limit in limits if limit is not None), default=2**31)


def _is_first_of_its_rows(data_rank: int, device: torch.device) -> bool:
    """Return whether this is the lowest rank of its data-parallel rank. Collective."""
    own = torch.tensor([data_rank], dtype=torch.int64).to(device, non_blocking=True)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return torch.cat(found).tolist().index(data_rank) == dist.get_rank()


def _require_disjoint(tokenizer_path: str, others: set[str | None]) -> None:
    """Raise `ValueError` if a background save would replace the tokenizer's directory."""
    place = Path(tokenizer_path).absolute()
    for other in others - {None}:
        if Path(str(other)).absolute() in (place, *place.parents):
            raise ValueError(
                f"tokenizer_path={tokenizer_path!r} is inside {other!r}, which the background save "
                "replaces when it is complete: use a separate directory"
            )


def _warn_if_skipped(step: OptimizerStep, *, num_valid: tuple[float, float]) -> None:
    """Log why a step was skipped.

    Args:
        step: The outcome.
        num_valid: The valid samples and tokens of its global batch.
    """
    if 0 in num_valid:
        logger.warning(
            "The global batch has %g valid samples and %g valid tokens: the step is skipped",
            *num_valid,
        )
    elif not step.stepped:
        logger.warning("The gradient norm is %s: the step is skipped", float(step.grad_norm))


def _put_rows(rows: RowScores, step: Step, found: Sequence[Scored]) -> None:
    """Store what a loss returns of each row, see `LossFunction`."""
    # A pipeline may append masked micro-batches to those of the step.
    for span, each in zip(step.row_spans, found, strict=False):
        named = {
            name.removeprefix(_ROWS): values
            for name, values in each.tensors.items()
            if name.startswith(_ROWS)
        }
        rows.put(span, named)


def _with_rows(
    output: WorkerTrainOutputSpec, loss_fn: LossFunction, rows: RowScores
) -> WorkerTrainOutputSpec:
    if getattr(loss_fn, "returns_rows", False):
        output["rows"] = BatchedDataDict(rows.scores)
    return output


def _metric(name: str, value: float | torch.Tensor) -> float | torch.Tensor:
    """Return a loss's metric as it is reported: a plain number, or a tensor that is read later.

    Raises:
        ValueError: A tensor has another number of elements than one.
    """
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):
            return value.item()  # a DTensor, which is not stacked with plain tensors
        if value.numel() != 1:
            raise ValueError(
                f"the loss's metric {name!r} has {value.numel()} elements, shape "
                f"{list(value.shape)}: a metric is one number"
            )
        # A copy: a view would keep all of its memory until the end of the call.
        return value.detach().clone()
    # A numpy scalar becomes a plain number too.
    return getattr(value, "item", lambda: value)()
