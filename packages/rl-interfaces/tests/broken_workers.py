"""For each rule about a worker, one that breaks it and keeps all the others."""

import copy
import os
import threading

import torch
import torch.distributed as dist
from plain_policy_worker import CapableWorker, PlainWorker, load_model, reward_of
from rl_interfaces import (
    LossInput,
    LossType,
    ParallelLayout,
    Residency,
    ResidencyError,
    ResidencyState,
)
from torch import nn

OFF = 1.01
"""What a wrong number is wrong by."""
LEFT_OPEN = []
"""File descriptors that workers opened, for their tests to close."""


def has_schedule(config):
    """Return whether the rule about schedules is at work, which breaks by much of the rest."""
    return "decay" in config["plain_cfg"]


class OfAnotherContract(CapableWorker):
    contract_version = (2, 0)


class WithoutProfiling(CapableWorker):
    start_gpu_profiling = None


class OfAnotherRank(CapableWorker):
    def get_gpu_info(self):
        return {"rank": self.rank + 1}


class OfTooManyRanks(CapableWorker):
    @staticmethod
    def validate_config(config, *, world_size, init_optimizer=True):
        CapableWorker.validate_config(config, world_size=world_size)
        return ParallelLayout(data_parallel=world_size, pipeline_parallel=2)


class LeavingTheGroupOfOthers(CapableWorker):
    def shutdown(self):
        if dist.is_initialized():
            dist.destroy_process_group()


class EndingOnce(CapableWorker):
    ended = False

    def shutdown(self):
        if self.ended:
            raise RuntimeError("there is nothing to end")
        self.ended = True


class LeavingAThread(CapableWorker):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        threading.Thread(target=threading.Event().wait, args=(600,), daemon=True).start()


class LeavingAFile(CapableWorker):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        LEFT_OPEN.append(os.open(os.devnull, os.O_RDONLY))


class GrowingAPool(LeavingAFile):
    """Is not broken: the third worker of a process uses what the first two have opened."""

    def __init__(self, *arguments, **options):
        if len(LEFT_OPEN) < 2:
            super().__init__(*arguments, **options)
        else:
            CapableWorker.__init__(self, *arguments, **options)


class TakingAnyKey(CapableWorker):
    @staticmethod
    def validate_config(config, *, world_size, init_optimizer=True):
        return ParallelLayout(data_parallel=world_size)


class TakingAnySize(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        sizes = (size if size is None or size > 0 else None for size in (gbs, mbs))
        return super().train(data, loss_fn, eval_mode, *sizes)


class TakingZeroAsUnset(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        return super().train(data, loss_fn, eval_mode, gbs or None, mbs or None)


class FillingInMasks(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        ones = torch.ones(data["input_ids"].shape)
        filled = {"token_mask": ones, "sample_mask": ones[:, 0], **data}
        return super().train(filled, loss_fn, eval_mode, gbs, mbs)


class TakingLeftPadding(CapableWorker):
    def check(self, data, *, keys=()):
        for key in ("input_ids", "input_lengths", *keys):
            if key not in data:
                raise ValueError(f"{key!r} is missing")


class MiscountingTokens(CapableWorker):
    def generate(self, data, greedy=False):
        output = super().generate(data, greedy)
        return output | {"generation_lengths": output["generation_lengths"] + 1}


class NeverGreedy(CapableWorker):
    def complete(self, ids, greedy):
        return super().complete(ids, greedy=False)


class SayingOtherLogprobs(CapableWorker):
    def complete(self, ids, greedy):
        ids, logprobs = super().complete(ids, greedy)
        return ids, logprobs * OFF


class MeasuringHalf(CapableWorker):
    def prepare_weights_for_ipc(self):
        sizes, free = super().prepare_weights_for_ipc()
        return [(name, size // 2) for name, size in sizes], free


class NamingAnotherDevice(CapableWorker):
    def get_weights_ipc_handles(self, keys):
        (handles,) = super().get_weights_ipc_handles(keys).values()
        return {"another device": handles}


class SendingEveryHandle(CapableWorker):
    def get_weights_ipc_handles(self, keys):
        super().get_weights_ipc_handles(keys)
        return super().get_weights_ipc_handles([name for name, _ in self.weights()])


class SendingOldWeights(CapableWorker):
    def send_weights(self, version, *, receivers=None):
        super().send_weights(version, receivers=receivers)
        self.sent[version] = self.sent[1]


class WrongInWideBatches(CapableWorker):
    def logprobs(self, model, data):
        is_wide = data["input_ids"].shape[1] > 12
        return super().logprobs(model, data) * (OFF if is_wide else 1)


class CuttingPadding(CapableWorker):
    def score_rows(self, model, data, micro_batch_size):
        scores = super().score_rows(model, data, micro_batch_size)
        return scores[:, : data["input_lengths"].max()]


class ScoringPadding(CapableWorker):
    def score_rows(self, model, data, micro_batch_size):
        scores = super().score_rows(model, data, micro_batch_size)
        outside = torch.arange(scores.shape[1]) >= data["input_lengths"][:, None]
        return scores - outside.float()


class ScoringPaddingForTheReference(CapableWorker):
    def get_reference_policy_logprobs(self, data, micro_batch_size=None):
        scores = self.score_rows(self.reference, data, micro_batch_size)
        outside = torch.arange(scores.shape[1]) >= data["input_lengths"][:, None]
        return {"reference_logprobs": scores - outside.float()}


class WrongInSmallMicroBatches(CapableWorker):
    def score_rows(self, model, data, micro_batch_size):
        scores = super().score_rows(model, data, micro_batch_size)
        return scores * (OFF if micro_batch_size == 1 else 1)


class NeverColderThanOne(CapableWorker):
    def temperature(self):
        return max(super().temperature(), 1.0)


class DividingEveryLoss(CapableWorker):
    def loss_input(self, batch, loss_fn):
        if loss_fn.input_type is LossInput.LOGITS:
            return self.logits(self.model, batch)
        return self.logprobs(self.model, batch)


class ReferringToLoadedWeights(CapableWorker):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        if self.reference is not None:
            self.reference = copy.deepcopy(self.model)


class LoadingIntoItsReference(CapableWorker):
    def load_checkpoint(self, weights_path, optimizer_path=None):
        super().load_checkpoint(weights_path, optimizer_path)
        if self.optimizer is not None and self.optimizer.state:
            self.reference = copy.deepcopy(self.model)


class SmallestFirst(CapableWorker):
    def get_topk_logits(self, data, k, micro_batch_size=None):
        top = super().get_topk_logits(data, k)
        return {key: value.flip(-1) for key, value in top.items()}


class WrongTopkInSmallMicroBatches(CapableWorker):
    def get_topk_logits(self, data, k, micro_batch_size=None):
        top = super().get_topk_logits(data, k)
        top["topk_logits"] *= OFF if micro_batch_size == 1 else 1
        return top


class WrongScoresInSmallMicroBatches(CapableWorker):
    def score(self, data, micro_batch_size=None):
        return {"scores": super().score(data)["scores"] * (OFF if micro_batch_size == 1 else 1)}


class HandingOutNothing(CapableWorker):
    def get_weights_ipc_handles(self, keys):
        (handles,) = super().get_weights_ipc_handles(keys).values()
        return {self.report_device_id(): dict.fromkeys(handles, b"")}


class ReferringInAnotherOrder(CapableWorker):
    def get_reference_policy_logprobs(self, data, micro_batch_size=None, **options):
        scores = super().get_reference_policy_logprobs(data, micro_batch_size, **options)
        is_reversed = "row_id" in data and data["row_id"][0] > data["row_id"][-1]
        return {key: value * (OFF if is_reversed else 1) for key, value in scores.items()}


class ScoringTheFirstToken(CapableWorker):
    @torch.no_grad()
    def score(self, data, micro_batch_size=None):
        return {
            "scores": torch.stack([reward_of(self.model, ids[:1]) for ids in data["input_ids"]])
        }


class _CountingSteps(CapableWorker):
    """Knows the optimizer steps that were taken, before it was saved too."""

    def num_steps(self):
        states = [] if self.optimizer is None else self.optimizer.state.values()
        return max((int(state["step"]) for state in states), default=0)

    def report(self, key, data, loss_fn, eval_mode, gbs, mbs):
        is_late = self.num_steps() > 2
        result = CapableWorker.train(self, data, loss_fn, eval_mode, gbs, mbs)
        if is_late and not eval_mode:
            result[key] = result[key] * OFF
        return result


class MisreportingLateLosses(_CountingSteps):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        return self.report("global_loss", data, loss_fn, eval_mode, gbs, mbs)


class MisreportingLateNorms(_CountingSteps):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        return self.report("grad_norm", data, loss_fn, eval_mode, gbs, mbs)


class Drifting(_CountingSteps):
    def step(self):
        outcome = super().step()
        if self.num_steps() == 6 and not has_schedule(self.config):
            with torch.no_grad():
                self.model.head.bias.add_(1e-3)
        return outcome


class ForgettingItsRank(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        return super().train(data, loss_fn, eval_mode, gbs, mbs) | {"rank": None}


class MisreportingItsSamples(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        result = super().train(data, loss_fn, eval_mode, gbs, mbs)
        counts = result["all_mb_metrics"]["num_valid_samples"]
        counts[:] = [1] * len(counts)
        return result


class KeepingItsLastSize(CapableWorker):
    last_size = None

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        self.last_size = gbs or self.last_size
        return super().train(data, loss_fn, eval_mode, self.last_size, mbs)


class IgnoringItsConfiguredSize(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        return super().train(data, loss_fn, eval_mode, 4 if gbs is None else gbs, mbs)


class TakingEvenSizesAlone(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        even = gbs - gbs % 2 if gbs is not None and gbs > 0 else gbs
        return super().train(data, loss_fn, eval_mode, even, mbs)


def uses_temperature(loss_fn):
    return getattr(loss_fn, "uses_sampling_temperature", True)


class AveragingMicroBatches(CapableWorker):
    def step_loss(self, rows, loss_fn, mbs, eval_mode, metrics):
        def scaled(*arguments):
            loss, seen = loss_fn(*arguments)
            return loss * (OFF if mbs == 1 else 1), seen

        scaled.input_type = loss_fn.input_type
        scaled.uses_sampling_temperature = uses_temperature(loss_fn)
        return super().step_loss(rows, scaled, mbs, eval_mode, metrics)


class WrongInAnotherOrder(CapableWorker):
    def score_rows(self, model, data, micro_batch_size):
        scores = super().score_rows(model, data, micro_batch_size)
        is_reversed = "row_id" in data and data["row_id"][0] > data["row_id"][-1]
        return scores * (OFF if is_reversed else 1)


class GivingFullLogitsUndivided(CapableWorker):
    def loss_input(self, batch, loss_fn):
        is_sharded = getattr(loss_fn, "accepts_sharded_logits", False)
        if loss_fn.input_type is LossInput.LOGITS and not is_sharded:
            return self.model(batch["input_ids"])
        return super().loss_input(batch, loss_fn)


class LabellingAShardAsFull(CapableWorker):
    def loss_input(self, batch, loss_fn):
        logits = super().loss_input(batch, loss_fn)
        is_sharded = getattr(loss_fn, "accepts_sharded_logits", False)
        return logits[..., :-1] if is_sharded else logits


class CountingSequencesOfMicroBatches(CapableWorker):
    def step_loss(self, rows, loss_fn, mbs, eval_mode, metrics):
        def counted(scores, batch, sequences, tokens):
            return loss_fn(scores, batch, batch["sample_mask"].sum().clamp(min=1), tokens)

        counted.input_type = loss_fn.input_type
        counted.uses_sampling_temperature = uses_temperature(loss_fn)
        return super().step_loss(rows, counted, mbs, eval_mode, metrics)


class CountingMaskedSequences(CapableWorker):
    def counts(self, rows):
        _, tokens = super().counts(rows)
        return torch.tensor(len(rows["sample_mask"])), tokens


class GuessingTheTokenMask(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        guess = {}
        if {"input_ids", "input_lengths", "token_mask"} <= data.keys():
            positions = torch.arange(data["input_ids"].shape[1])
            is_target = (positions >= 2) & (positions < data["input_lengths"][:, None])
            guess = {"token_mask": is_target.float()}
        return super().train({**data, **guess}, loss_fn, eval_mode, gbs, mbs)


class EvaluatingByItsOptimizer(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        if eval_mode:
            self.optimizer.zero_grad()
        return super().train(data, loss_fn, eval_mode, gbs, mbs)


class TakingEveryStep(CapableWorker):
    def step(self):
        norm, _ = super().step()
        if not norm.isfinite():
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(float("nan"))
        return norm, True


class HidingSkippedSteps(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        result = super().train(data, loss_fn, eval_mode, gbs, mbs)
        result["all_mb_metrics"].pop("skipped_steps", None)
        return result


class WeighingSequencesByTokens(CapableWorker):
    def forward_backward(self, data, loss_fn, mbs=None):
        result = super().forward_backward(data, loss_fn, mbs)
        if loss_fn.loss_type is LossType.SEQUENCE_LEVEL:
            tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
            gradients, loss_type, count = self.sums
            self.sums = ([each * tokens for each in gradients], loss_type, count * tokens)
        return result


class AveragingCalls(CapableWorker):
    calls = 0

    def forward_backward(self, data, loss_fn, mbs=None):
        earlier, self.sums = self.sums, None
        result = super().forward_backward(data, loss_fn, mbs)
        gradients, loss_type, count = self.sums
        gradients = [each / count for each in gradients]
        if earlier is not None:
            gradients = [one + two for one, two in zip(gradients, earlier[0], strict=True)]
        self.sums = (gradients, loss_type, 1 if earlier is None else earlier[2] + 1)
        return result


class ClippingBeforeTheDivision(CapableWorker):
    def optimizer_step(self):
        gradients, loss_type, count = self.sums
        for parameter, gradient in zip(self.trained(), gradients, strict=True):
            parameter.grad = gradient.clone()
        nn.utils.clip_grad_norm_(self.trained(), self.config["max_grad_norm"])
        self.sums = ([each.grad * count for each in self.trained()], loss_type, count)
        return super().optimizer_step()


class ReportingAnotherLoss(CapableWorker):
    def forward_backward(self, data, loss_fn, mbs=None):
        result = super().forward_backward(data, loss_fn, mbs)
        return result | {"global_loss": result["global_loss"] * OFF}


class SteppingInEveryCall(CapableWorker):
    def forward_backward(self, data, loss_fn, mbs=None):
        result = super().forward_backward(data, loss_fn, mbs)
        with torch.no_grad():
            self.model.head.bias.add_(1e-3)
        return result


class LosingGradientsInSaves(CapableWorker):
    def save_checkpoint(self, *paths, **options):
        super().save_checkpoint(*paths, **options)
        self.sums = None


class LosingGradientsInEvaluations(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        self.sums = None
        return super().train(data, loss_fn, eval_mode, gbs, mbs)


class LoadingOverGradients(CapableWorker):
    def load_checkpoint(self, weights_path, optimizer_path=None):
        PlainWorker.load_checkpoint(self, weights_path, optimizer_path)


class OffloadingGradients(CapableWorker):
    def offload_before_refit(self):
        PlainWorker.offload_before_refit(self)


class KeepingGradientsOfZeroGrad(CapableWorker):
    def zero_grad(self):
        kept = self.residency.has_gradients
        super().zero_grad()
        if kept and self.sums is None:
            self.model.head.bias.grad = torch.ones_like(self.model.head.bias)


class SteppingWithoutGradients(CapableWorker):
    def optimizer_step(self):
        if self.sums is None:
            return {"grad_norm": 0.0, "stepped": False, "lr": 0.0}
        return super().optimizer_step()


class IgnoringLossesOfAnotherType(CapableWorker):
    def forward_backward(self, data, loss_fn, mbs=None):
        if self.sums is not None and self.sums[1] is not loss_fn.loss_type:
            return None
        return super().forward_backward(data, loss_fn, mbs)


class SteppingWithInfinity(CapableWorker):
    def optimizer_step(self):
        result = super().optimizer_step()
        if not result["stepped"]:
            with torch.no_grad():
                self.model.head.bias.add_(float("nan"))
        return result


class SchedulingByCalls(CapableWorker):
    def forward_backward(self, data, loss_fn, mbs=None):
        self.num_calls += has_schedule(self.config)
        return super().forward_backward(data, loss_fn, mbs)


class MisreportingItsRate(CapableWorker):
    def optimizer_step(self):
        result = super().optimizer_step()
        return result | {"lr": result["lr"] * OFF}


class DrawingForTheReference(CapableWorker):
    def get_reference_policy_logprobs(self, data, micro_batch_size=None, **options):
        torch.rand(1)
        return super().get_reference_policy_logprobs(data, micro_batch_size, **options)


class DrawingForScores(CapableWorker):
    def score(self, data, micro_batch_size=None):
        torch.rand(1)
        return super().score(data)


class DrawingInEvaluation(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        if eval_mode:
            torch.rand(1)
        return super().train(data, loss_fn, eval_mode, gbs, mbs)


class WritingIntoItsBatch(CapableWorker):
    def get_topk_logits(self, data, k, micro_batch_size=None):
        data["sample_mask"].zero_()
        return super().get_topk_logits(data, k)


class ScoringIntoItsBatch(CapableWorker):
    def score(self, data, micro_batch_size=None):
        scores = super().score(data)
        data["sample_mask"].zero_()
        return scores


class RefusingTooMuch(CapableWorker):
    def get_topk_logits(self, data, k, micro_batch_size=None):
        if self.residency.state is ResidencyState.REFITTING:
            raise ResidencyError("call prepare_for_lp_inference() first")
        return super().get_topk_logits(data, k)


class SavingNothingWhenOffloaded(CapableWorker):
    def save_checkpoint(self, weights_path, optimizer_path=None, tokenizer_path=None):
        if self.residency.state is ResidencyState.OFFLOADED:
            torch.save(load_model(self.config["model_name"]).state_dict(), weights_path)
        else:
            super().save_checkpoint(weights_path, optimizer_path, tokenizer_path)


class RefusingToLoadWhenOffloaded(CapableWorker):
    def load_checkpoint(self, weights_path, optimizer_path=None):
        if self.residency.state is ResidencyState.OFFLOADED:
            raise ResidencyError("call prepare_for_lp_inference() first")
        super().load_checkpoint(weights_path, optimizer_path)


class LoadingNothingWhenRefitting(CapableWorker):
    def load_checkpoint(self, weights_path, optimizer_path=None):
        if self.residency.state is not ResidencyState.REFITTING:
            super().load_checkpoint(weights_path, optimizer_path)


class GeneratingFromNothing(CapableWorker):
    def generate(self, data, greedy=False):
        kept, self.residency = self.residency, Residency(has_optimizer=True)
        try:
            return super().generate(data, greedy)
        finally:
            self.residency = kept


class AlwaysInTraining(CapableWorker):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.residency = Residency(has_optimizer=True)

    def step(self):
        return super().step() if self.optimizer is not None else (torch.zeros(()), False)


class LosingItsMoments(CapableWorker):
    def offload_after_refit(self):
        super().offload_after_refit()
        if self.optimizer is not None:
            self.optimizer = self.make_optimizer()


class LosingItsMomentsStraightFromOffloaded(CapableWorker):
    lost_in = ResidencyState.OFFLOADED

    def prepare_for_training(self, *args, **kwargs):
        if self.residency.state is self.lost_in:
            self.optimizer = self.make_optimizer()
        super().prepare_for_training()


class LosingItsMomentsStraightFromRefitting(LosingItsMomentsStraightFromOffloaded):
    lost_in = ResidencyState.REFITTING


class StartingWithoutMoments(CapableWorker):
    def __init__(self, config, tokenizer, weights_path=None, optimizer_path=None, **options):
        kept = optimizer_path if has_schedule(config) else None
        super().__init__(config, tokenizer, weights_path, kept, **options)


class GoingHalfWayBack(CapableWorker):
    def load_checkpoint(self, weights_path, optimizer_path=None):
        is_running = self.optimizer is not None and self.optimizer.state
        super().load_checkpoint(weights_path, None if is_running else optimizer_path)


class ScoringWithItsFirstWeights(CapableWorker):
    def load_checkpoint(self, weights_path, optimizer_path=None):
        super().load_checkpoint(weights_path, optimizer_path)
        if self.optimizer is None:
            self.model = load_model(self.config["model_name"])


class SchedulingBySteps(CapableWorker):
    def step(self):
        outcome = super().step()
        if has_schedule(self.config):
            self.follow_schedule()
        return outcome


class SchedulingEvaluations(CapableWorker):
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        self.num_calls += eval_mode
        return super().train(data, loss_fn, eval_mode, gbs, mbs)


class ForgettingItsSchedule(CapableWorker):
    def load_checkpoint(self, weights_path, optimizer_path=None):
        super().load_checkpoint(weights_path, optimizer_path)
        self.num_calls = 0


class SavingInitialAdapters(CapableWorker):
    def save_adapters(self, path):
        initial = load_model(self.config["model_name"])
        torch.save({"head.bias": initial.head.bias * OFF}, path)


class ReferringToItsAdapters(CapableWorker):
    def get_reference_policy_logprobs(self, data, micro_batch_size=None, **options):
        if not self.config["plain_cfg"].get("adapters"):
            return super().get_reference_policy_logprobs(data, micro_batch_size, **options)
        return {"reference_logprobs": self.score_rows(self.model, data, micro_batch_size)}


class ExportingNothingWhenOffloaded(CapableWorker):
    def save_hf_checkpoint(self, path):
        if self.residency.state is ResidencyState.OFFLOADED:
            torch.save(load_model(self.config["model_name"]).state_dict(), path)
        else:
            super().save_hf_checkpoint(path)


class StartingAnewWithoutACheckpoint(CapableWorker):
    def load_checkpoint(self, weights_path, optimizer_path=None):
        try:
            super().load_checkpoint(weights_path, optimizer_path)
        except ValueError:
            self.model = load_model(self.config["model_name"])


BROKEN_WORKERS = {
    "unknown_keys_are_named": TakingAnyKey,
    "sizes_that_cannot_be_are_named": TakingAnySize,
    "missing_keys_are_named": FillingInMasks,
    "left_padding_is_refused": TakingLeftPadding,
    "the_contracts_version_is_declared": OfAnotherContract,
    "every_required_method_is_there": WithoutProfiling,
    "a_worker_says_where_it_is": OfAnotherRank,
    "a_layout_is_of_all_ranks": OfTooManyRanks,
    "a_process_group_is_left_by_whoever_joined_it": LeavingTheGroupOfOthers,
    "shutting_down_twice_is_fine": EndingOnce,
    "a_worker_takes_its_threads_with_it": LeavingAThread,
    "completions_follow_their_prompts": MiscountingTokens,
    "greedy_completions_are_the_oracles": NeverGreedy,
    "sampled_tokens_have_the_policys_logprobs": SayingOtherLogprobs,
    "logprobs_equal_the_oracle": WrongInWideBatches,
    "logprobs_have_the_batchs_shape": CuttingPadding,
    "logprobs_are_zero_where_no_token_is_scored": ScoringPadding,
    "micro_batches_do_not_change_logprobs": WrongInSmallMicroBatches,
    "temperature_divides_the_logits": NeverColderThanOne,
    "supervised_losses_have_no_temperature": DividingEveryLoss,
    "the_reference_stays_the_initial_model": ReferringToLoadedWeights,
    "topk_logits_equal_the_oracle": SmallestFirst,
    "scores_equal_the_oracle": ScoringTheFirstToken,
    "the_weights_sizes_are_told": MeasuringHalf,
    "handles_are_of_the_workers_device": NamingAnotherDevice,
    "a_receiver_gets_the_weights_of_each_version": SendingOldWeights,
    "a_resumed_run_equals_an_uninterrupted_one": StartingWithoutMoments,
    "a_running_worker_can_go_back_to_a_save": GoingHalfWayBack,
    "a_schedule_goes_on_by_calls": SchedulingBySteps,
    "weights_load_alone": ScoringWithItsFirstWeights,
    "the_exported_model_is_the_worker": ExportingNothingWhenOffloaded,
    "saved_adapters_are_the_worker": SavingInitialAdapters,
    "a_checkpoint_that_is_not_there_is_named": StartingAnewWithoutACheckpoint,
    "losses_equal_the_oracle": MisreportingLateLosses,
    "grad_norms_equal_the_oracle": MisreportingLateNorms,
    "parameters_equal_the_oracle": Drifting,
    "train_returns_what_it_documents": ForgettingItsRank,
    "every_global_batch_is_a_step": TakingEvenSizesAlone,
    "micro_batches_do_not_change_training": AveragingMicroBatches,
    "every_way_of_batching_gives_the_same_numbers": WrongInAnotherOrder,
    "a_loss_may_ask_for_logits": GivingFullLogitsUndivided,
    "a_loss_may_take_sharded_logits": LabellingAShardAsFull,
    "a_loss_may_be_of_sequences": CountingSequencesOfMicroBatches,
    "masked_tokens_do_not_count": GuessingTheTokenMask,
    "evaluating_needs_no_optimizer": EvaluatingByItsOptimizer,
    "a_step_that_is_not_finite_changes_nothing": TakingEveryStep,
    "split_calls_add_up_to_one_step": WeighingSequencesByTokens,
    "a_split_call_reports_its_own_rows": ReportingAnotherLoss,
    "pending_gradients_outlast_other_calls": LosingGradientsInSaves,
    "pending_gradients_are_not_lost_unseen": LoadingOverGradients,
    "a_split_step_needs_gradients": SteppingWithoutGradients,
    "losses_of_two_types_do_not_add_up": IgnoringLossesOfAnotherType,
    "a_split_step_that_is_not_finite_changes_nothing": SteppingWithInfinity,
    "a_schedule_goes_on_by_split_steps": SchedulingByCalls,
    "scoring_and_sampling_leave_no_trace": DrawingForTheReference,
    "evaluating_leaves_no_trace": DrawingInEvaluation,
    "batches_are_not_written_into": WritingIntoItsBatch,
    "a_state_allows_what_the_table_allows": RefusingTooMuch,
    "a_state_refuses_what_the_table_refuses": GeneratingFromNothing,
    "a_worker_without_an_optimizer_starts_in_inference": AlwaysInTraining,
    "offloading_and_reloading_change_nothing": LosingItsMoments,
}

BROKEN_IN_PART = [
    ("sizes_that_cannot_be_are_named", TakingZeroAsUnset),
    ("handles_are_of_the_workers_device", SendingEveryHandle),
    ("handles_are_of_the_workers_device", HandingOutNothing),
    ("topk_logits_equal_the_oracle", WrongTopkInSmallMicroBatches),
    ("scores_equal_the_oracle", WrongScoresInSmallMicroBatches),
    ("every_way_of_batching_gives_the_same_numbers", ReferringInAnotherOrder),
    ("scoring_and_sampling_leave_no_trace", DrawingForScores),
    ("logprobs_are_zero_where_no_token_is_scored", ScoringPaddingForTheReference),
    ("the_reference_stays_the_initial_model", LoadingIntoItsReference),
    ("train_returns_what_it_documents", MisreportingItsSamples),
    ("every_global_batch_is_a_step", KeepingItsLastSize),
    ("every_global_batch_is_a_step", IgnoringItsConfiguredSize),
    ("a_loss_may_be_of_sequences", CountingMaskedSequences),
    ("a_step_that_is_not_finite_changes_nothing", HidingSkippedSteps),
    ("split_calls_add_up_to_one_step", AveragingCalls),
    ("split_calls_add_up_to_one_step", ClippingBeforeTheDivision),
    ("a_split_call_reports_its_own_rows", SteppingInEveryCall),
    ("pending_gradients_outlast_other_calls", LosingGradientsInEvaluations),
    ("pending_gradients_are_not_lost_unseen", OffloadingGradients),
    ("pending_gradients_are_not_lost_unseen", KeepingGradientsOfZeroGrad),
    ("a_schedule_goes_on_by_split_steps", MisreportingItsRate),
    ("batches_are_not_written_into", ScoringIntoItsBatch),
    ("a_state_allows_what_the_table_allows", SavingNothingWhenOffloaded),
    ("a_state_allows_what_the_table_allows", RefusingToLoadWhenOffloaded),
    ("a_state_allows_what_the_table_allows", LoadingNothingWhenRefitting),
    ("a_schedule_goes_on_by_calls", SchedulingEvaluations),
    ("a_schedule_goes_on_by_calls", ForgettingItsSchedule),
    ("saved_adapters_are_the_worker", ReferringToItsAdapters),
    ("offloading_and_reloading_change_nothing", LosingItsMomentsStraightFromOffloaded),
    ("offloading_and_reloading_change_nothing", LosingItsMomentsStraightFromRefitting),
]
"""Rules with several parts, and for each further part a worker that breaks it."""
