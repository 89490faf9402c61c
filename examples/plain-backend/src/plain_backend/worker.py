"""The worker: one rank, behind the calls of `rl_interfaces.PolicyWorker`."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_batched_data import BatchedDataDict
from rl_interfaces import LossInput, ParallelLayout, Residency, resolve_policy_config
from rl_interfaces.backend.batch_checks import check_scoring_batch, check_training_batch, positive
from rl_interfaces.backend.generation.loop import SamplingConfig, generate
from rl_interfaces.backend.information_calls import InformationCalls
from rl_interfaces.backend.metrics import LossCounts
from rl_interfaces.backend.runtime.device import Profiler
from rl_interfaces.backend.runtime.ranks import RankEnvironment, init_process_group
from rl_interfaces.backend.steps import Concatenation, steps_of
from torch import nn

from plain_backend.model import PairModel

if TYPE_CHECKING:
    from collections.abc import Mapping

CPU = torch.device("cpu")
logger = logging.getLogger(__name__)


class PlainWorker(InformationCalls):
    """Every rank holds the whole model; the gradients are summed over the ranks."""

    contract_version = (1, 0)

    def __init__(
        self,
        config: Mapping[str, Any],
        tokenizer: Any,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
    ) -> None:
        torch.set_num_threads(1)
        self.config, self.tokenizer = resolve_policy_config(config), tokenizer
        self._environment = RankEnvironment.from_environment()
        self._profiler = Profiler(self._environment, directory=self.config["profile_dir"])
        timeout_s = self.config["timeout_s"]
        self.leaves_group = init_process_group(self._environment, timeout_s=timeout_s)
        self.model = PairModel.load(config["model_name"])
        self.reference = PairModel.load(config["model_name"]) if init_reference_model else None
        self.optimizer = None
        if init_optimizer:
            arguments = self.config["optimizer"]["kwargs"]
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **arguments)
        self.residency = Residency(has_optimizer=init_optimizer)
        self.sampling = SamplingConfig.from_policy_config(self.config)
        self.temperature = self.sampling.temperature if self.sampling else 1.0
        self.random = torch.Generator().manual_seed(self._environment.rank)
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    @staticmethod
    def validate_config(
        config: Mapping[str, Any], *, world_size: int, init_optimizer: bool = True
    ) -> ParallelLayout:
        resolve_policy_config(config)
        return ParallelLayout(data_parallel=world_size)

    # Scores

    def get_logprobs(self, data: Any, micro_batch_size: int | None = None) -> Any:
        self.residency.require("get_logprobs")
        return BatchedDataDict({"logprobs": self._score(self.model, data)})

    def get_reference_policy_logprobs(self, data: Any, micro_batch_size: int | None = None) -> Any:
        self.residency.require("get_reference_policy_logprobs")
        assert self.reference is not None, "built with init_reference_model=False"
        return BatchedDataDict({"reference_logprobs": self._score(self.reference, data)})

    @torch.no_grad()
    def _score(self, model: PairModel, data: Any) -> torch.Tensor:
        check_scoring_batch(data, pad_token_id=self.tokenizer.pad_token_id)
        return self._logprobs(model, data)

    def _logprobs(self, model: PairModel, data: Any) -> torch.Tensor:
        ids = data["input_ids"]
        scores = (model(ids[:, :-1]) / self.temperature).log_softmax(-1)
        chosen = scores.gather(-1, ids[:, 1:, None]).squeeze(-1)
        inside = torch.arange(1, ids.shape[1]) < data["input_lengths"][:, None]
        return nn.functional.pad(chosen * inside, (1, 0))

    # Training

    def train(
        self,
        data: Any,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        self.residency.require("train(eval_mode=True)" if eval_mode else "train")
        check_training_batch(data, pad_token_id=self.tokenizer.pad_token_id, needs_token_mask=True)
        steps = steps_of(
            data,
            local_batch_size=self._local_batch_size(gbs),
            given=positive("mbs", mbs),
            default=self.config["train_micro_batch_size"],
            planned_by=None,
            concatenation=Concatenation(),
            group=dist.group.WORLD,
            device=CPU,
        )
        losses, norms, metrics = [], [], defaultdict(list)
        with torch.set_grad_enabled(not eval_mode):
            for step in steps:
                losses.append(self._loss_of(step, loss_fn, metrics))
                if not eval_mode:
                    norms.append(self._step())
        if not eval_mode and self._environment.rank == 0:
            metrics["skipped_steps"].append(sum(not norm.isfinite() for norm in norms))
        return {
            "global_loss": torch.stack(losses),
            "grad_norm": None if eval_mode else torch.stack(norms),
            "rank": self._environment.rank,
            "all_mb_metrics": dict(metrics),
        }

    def _local_batch_size(self, gbs: int | None) -> int:
        size = positive("gbs", gbs) or self.config["train_global_batch_size"]
        ranks = dist.get_world_size()
        if size % ranks:
            raise ValueError(f"gbs={size} is not divisible by {ranks} ranks")
        return size // ranks

    def _loss_of(self, step: Any, loss_fn: Any, metrics: defaultdict[str, list]) -> torch.Tensor:
        """Return the loss of a global batch, and leave this rank's part of its gradients."""
        counts = LossCounts.of(step.rows, group=dist.group.WORLD, device=CPU)
        total = torch.zeros(())
        for batch in step.micro_batches(CPU):
            if getattr(loss_fn, "input_type", LossInput.LOGITS) is LossInput.LOGITS:
                scores = self.model(batch.rows["input_ids"]) / self.temperature
            else:
                scores = self._logprobs(self.model, batch.rows)
            loss, seen = loss_fn(scores, batch.rows, *counts.divisors)
            if torch.is_grad_enabled():
                loss.backward()
            total += loss.detach()
            if seen["num_valid_samples"] > 0:
                for name, value in seen.items():
                    metrics[name].append(value)
        dist.all_reduce(total)
        return total

    def _step(self) -> torch.Tensor:
        """Sum the gradients over the ranks, step where they are finite; return their norm."""
        parameters = list(self.model.parameters())
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
        limit = self.config.get("max_grad_norm")
        norm = nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
        if norm.isfinite():
            self.optimizer.step()
        else:
            logger.warning("The gradient norm is %s: the step is skipped", float(norm))
        self.optimizer.zero_grad()
        return norm

    # Sampling

    @torch.no_grad()
    def generate(self, data: Any, greedy: bool = False) -> Any:
        self.residency.require("generate")
        if self.sampling is None:
            raise ValueError("policy.generation is not set: the policy does not generate")
        check_scoring_batch(data, pad_token_id=self.tokenizer.pad_token_id)
        return generate(
            lambda _: _Decoder(self.model),
            data,
            sampling=self.sampling,
            greedy=greedy,
            tokenizer=self.tokenizer,
            generator=self.random,
            max_total_length=self.config.get("max_total_sequence_length") or 2**31,
            device=CPU,
        )

    # States: on the CPU nothing moves

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        self.residency.enter("prepare_for_training")

    def prepare_for_lp_inference(self) -> None:
        self.residency.enter("prepare_for_lp_inference")

    def offload_before_refit(self) -> None:
        self.residency.enter("offload_before_refit")

    def offload_after_refit(self) -> None:
        self.residency.enter("offload_after_refit")

    # Saves, which rank 0 writes

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        if self._environment.rank == 0:
            self.model.save(weights_path)
            if optimizer_path is not None:
                torch.save(self.optimizer.state_dict(), optimizer_path)
            if tokenizer_path is not None:
                self.tokenizer.save_pretrained(tokenizer_path)
        dist.barrier()

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        self.model.load_state_dict(PairModel.load(weights_path).state_dict())
        if optimizer_path is not None:
            self.optimizer.load_state_dict(torch.load(optimizer_path))

    def save_hf_checkpoint(self, path: str) -> None:
        self.save_checkpoint(path)

    def _sample_parameter(self) -> tuple[str, torch.Tensor]:
        return "head.bias", self.model.head.bias

    def shutdown(self) -> None:
        if self.leaves_group and dist.is_initialized():
            dist.destroy_process_group()


class _Decoder:
    """The logits of the token that follows the last two of each row."""

    def __init__(self, model: PairModel) -> None:
        self.model = model

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(prompts))
        self.last = prompts[rows, lengths - 1]
        return self.model(prompts)[rows, lengths - 1]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        pairs = torch.stack([self.last, tokens], dim=1)
        self.last = tokens
        return self.model(pairs)[:, -1]
