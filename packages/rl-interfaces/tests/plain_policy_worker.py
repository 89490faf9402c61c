"""A correct worker of one rank in plain torch, over plain dicts, for the kit to be tried on."""

import logging
import os
import pickle
from contextlib import contextmanager
from pathlib import Path

import torch
from rl_interfaces import (
    CONTRACT_VERSION,
    LossInput,
    LossType,
    ParallelLayout,
    Residency,
    resolve_policy_config,
)
from torch import nn

VOCABULARY, PAD, END = 13, 0, 1
RATE = 1e-3
logger = logging.getLogger(__name__)


class Tokenizer:
    pad_token_id, eos_token_id = PAD, END

    def save_pretrained(self, path):
        Path(path).mkdir(parents=True)
        (Path(path) / "tokenizer.json").write_text("{}")


class PairModel(nn.Module):
    """The next token's logits are a function of the last two tokens."""

    def __init__(self):
        super().__init__()
        self.last = nn.Embedding(VOCABULARY, 6)
        self.one_before = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, input_ids):
        before = nn.functional.pad(input_ids[:, :-1], (1, 0), value=PAD)
        return self.head(torch.tanh(self.last(input_ids) + self.one_before(before)))


def write_model(path, seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = PairModel()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    torch.save(model.state_dict(), path)
    return str(path)


def load_model(path):
    model = PairModel()
    model.load_state_dict(torch.load(path))
    return model


def load_adapted(path, base):
    """Return the model at `base` with the adapters of `CapableWorker.save_adapters`."""
    model = load_model(base)
    model.load_state_dict(torch.load(path), strict=False)
    return model


def reward_of(model, tokens):
    """The score of one row's tokens: the first logit after the last one."""
    return model(tokens[None])[0, -1, 0]


class PlainWorker:
    contract_version = CONTRACT_VERSION

    def __init__(
        self,
        config,
        tokenizer,
        weights_path=None,
        optimizer_path=None,
        init_optimizer=True,
        init_reference_model=True,
    ):
        self.config, self.tokenizer = config, tokenizer
        self.rank = int(os.environ["RANK"])
        self.model = load_model(config["model_name"])
        self.reference = load_model(config["model_name"]) if init_reference_model else None
        if config["plain_cfg"].get("adapters"):
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name == "head.bias")
        self.optimizer = self.make_optimizer() if init_optimizer else None
        self.num_calls = 0
        self.residency = Residency(has_optimizer=init_optimizer)
        self.sampler = torch.Generator().manual_seed(3)
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    def make_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=RATE, eps=1e-6, weight_decay=0.0)

    @staticmethod
    def validate_config(config, *, world_size, init_optimizer=True):
        known = {key: value for key, value in config.items() if key != "plain_cfg"}
        resolve_policy_config(known)
        return ParallelLayout(data_parallel=world_size)

    # Scores

    def get_logprobs(self, data, micro_batch_size=None, *, temperature=None):
        self.residency.require("get_logprobs")
        with self.scoring_at(temperature):
            return {"logprobs": self.score_rows(self.model, data, micro_batch_size)}

    def get_reference_policy_logprobs(self, data, micro_batch_size=None, *, temperature=None):
        self.residency.require("get_reference_policy_logprobs")
        with self.scoring_at(temperature):
            return {"reference_logprobs": self.score_rows(self.reference, data, micro_batch_size)}

    @torch.no_grad()
    def score_rows(self, model, data, micro_batch_size):
        self.check(data)
        batches = self.micro_batches(data, micro_batch_size or 2)
        return torch.cat([self.logprobs(model, batch) for batch in batches])

    @contextmanager
    def scoring_at(self, temperature):
        own = self.config["generation"]["temperature"]
        self.config["generation"]["temperature"] = temperature or own
        try:
            yield
        finally:
            self.config["generation"]["temperature"] = own

    def check(self, data, *, keys=()):
        for key in ("input_ids", "input_lengths", *keys):
            if key not in data:
                raise ValueError(f"{key!r} is missing")
        inside = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]
        if "attention_mask" in data and (data["attention_mask"].bool() != inside).any():
            raise ValueError("'attention_mask' is not that of right padding")

    def micro_batches(self, data, size):
        for start in range(0, len(data["input_ids"]), size):
            yield {key: value[start : start + size] for key, value in data.items()}

    def temperature(self):
        return self.config["generation"]["temperature"]

    def logits(self, model, data):
        return model(data["input_ids"]) / self.temperature()

    def logprobs(self, model, data):
        ids, scores = data["input_ids"], self.logits(model, data)[:, :-1].log_softmax(-1)
        chosen = scores.gather(-1, ids[:, 1:, None]).squeeze(-1)
        inside = torch.arange(1, ids.shape[1]) < data["input_lengths"][:, None]
        return nn.functional.pad(chosen * inside, (1, 0))

    # Training

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        self.residency.require("train(eval_mode=True)" if eval_mode else "train")
        self.check(data, keys=("sample_mask", "token_mask"))
        for name, value in (("gbs", gbs), ("mbs", mbs)):
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive")
        if not eval_mode:
            self.follow_schedule()
        losses, norms, skipped, metrics = [], [], 0, {}
        for rows in self.micro_batches(data, gbs or self.config["train_global_batch_size"]):
            with torch.set_grad_enabled(not eval_mode):
                losses.append(self.step_loss(rows, loss_fn, mbs, eval_mode, metrics))
            if not eval_mode:
                norm, stepped = self.step()
                norms.append(norm)
                skipped += not stepped
        metrics |= {} if eval_mode else {"skipped_steps": [skipped]}
        return {
            "global_loss": torch.stack(losses),
            "grad_norm": None if eval_mode else torch.stack(norms),
            "rank": self.rank,
            "all_mb_metrics": metrics,
        }

    def follow_schedule(self):
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * self.config["plain_cfg"].get("decay", 1.0) ** self.num_calls
        self.num_calls += 1

    def step_loss(self, rows, loss_fn, mbs, eval_mode, metrics):
        counts, total = self.counts(rows), torch.zeros(())
        for batch in self.micro_batches(rows, mbs or 2):
            loss, seen = loss_fn(self.loss_input(batch, loss_fn), batch, *counts)
            if not eval_mode:
                loss.backward()
            total += loss.detach()
            for name, value in seen.items():
                metrics.setdefault(name, []).append(value)
        return total

    def counts(self, rows):
        tokens = (rows["token_mask"][:, 1:] * rows["sample_mask"][:, None]).sum()
        return rows["sample_mask"].sum(), tokens

    def loss_input(self, batch, loss_fn):
        is_sampled = getattr(loss_fn, "uses_sampling_temperature", True)
        with self.scoring_at(None if is_sampled else 1.0):
            if loss_fn.input_type is LossInput.LOGITS:
                return self.logits(self.model, batch)
            return self.logprobs(self.model, batch)

    def step(self):
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config["max_grad_norm"])
        stepped = bool(norm.isfinite())
        if stepped:
            self.optimizer.step()
        else:
            logger.warning("The gradient norm is %s: the step is skipped", float(norm))
        self.optimizer.zero_grad()
        return norm, stepped

    # Sampling

    @torch.no_grad()
    def generate(self, data, greedy=False):
        self.residency.require("generate")
        lengths = data["input_lengths"]
        rows = [
            self.complete(ids[:length], greedy)
            for ids, length in zip(data["input_ids"], lengths.tolist(), strict=True)
        ]
        width = max(len(ids) for ids, _ in rows)
        pad = nn.functional.pad
        totals = torch.tensor([len(ids) for ids, _ in rows])
        return {
            "output_ids": torch.stack(
                [pad(ids, (0, width - len(ids)), value=PAD) for ids, _ in rows]
            ),
            "generation_lengths": totals - lengths,
            "unpadded_sequence_lengths": totals,
            "logprobs": torch.stack([pad(each, (0, width - len(each))) for _, each in rows]),
        }

    def complete(self, ids, greedy):
        logprobs = torch.zeros(len(ids))
        for _ in range(self.config["generation"]["max_new_tokens"]):
            scores = self.next_scores(ids)
            chosen = scores.argmax() if greedy else self.draw(scores)
            ids = torch.cat([ids, chosen.reshape(1)])
            logprobs = torch.cat([logprobs, scores[chosen].reshape(1)])
            if int(chosen) == END:
                break
        return ids, logprobs

    def next_scores(self, ids):
        return (self.model(ids[None])[0, -1] / self.temperature()).log_softmax(-1)

    def draw(self, scores):
        # The token that fills rows up is in no row.
        weights = scores.exp().index_fill(0, torch.tensor([PAD]), 0.0)
        return torch.multinomial(weights, 1, generator=self.sampler)

    # States

    def prepare_for_training(self, *args, **kwargs):
        self.residency.enter("prepare_for_training")

    def prepare_for_lp_inference(self):
        self.residency.enter("prepare_for_lp_inference")

    def offload_before_refit(self):
        self.residency.enter("offload_before_refit")

    def offload_after_refit(self):
        self.residency.enter("offload_after_refit")

    # Saves

    def save_checkpoint(self, weights_path, optimizer_path=None, tokenizer_path=None):
        torch.save(self.model.state_dict(), weights_path)
        if optimizer_path is not None:
            state = {"optimizer": self.optimizer.state_dict(), "num_calls": self.num_calls}
            torch.save(state, optimizer_path)
        if tokenizer_path is not None:
            self.tokenizer.save_pretrained(tokenizer_path)

    def load_checkpoint(self, weights_path, optimizer_path=None):
        if not Path(weights_path).exists():
            raise ValueError(f"there is no checkpoint at {weights_path}")
        self.model.load_state_dict(torch.load(weights_path))
        if optimizer_path is not None:
            state = torch.load(optimizer_path)
            self.optimizer.load_state_dict(state["optimizer"])
            self.num_calls = state["num_calls"]

    def save_hf_checkpoint(self, path):
        torch.save(self.model.state_dict(), path)

    # Information

    def is_alive(self):
        return True

    def get_gpu_info(self):
        return {"rank": self.rank}

    def report_device_id(self):
        return "cpu-of-the-test"

    def start_gpu_profiling(self):
        pass

    def stop_gpu_profiling(self):
        pass

    def shutdown(self):
        pass


class CapableWorker(PlainWorker):
    """The same with every optional capability."""

    # Apart from `train`, so that a worker that breaks the one keeps the rules of the other.

    sums = None
    """The sum of the gradients, the loss type and the counts of sequences and tokens."""

    def forward_backward(self, data, loss_fn, mbs=None):
        self.residency.require("forward_backward")
        self.check(data, keys=("sample_mask", "token_mask"))
        if self.sums is not None and self.sums[1] is not loss_fn.loss_type:
            raise ValueError(f"{type(loss_fn).__name__} has another loss_type")
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum().clamp(min=1)
        sequences = data["sample_mask"].sum().clamp(min=1)
        count = tokens if loss_fn.loss_type is LossType.TOKEN_LEVEL else sequences
        loss, metrics = loss_fn(self.logprobs(self.model, data), data, sequences, tokens)
        gradients = torch.autograd.grad(loss * count, self.trained())
        if self.sums is not None:
            gradients = [one + two for one, two in zip(gradients, self.sums[0], strict=True)]
            count = count + self.sums[2]
        self.sums = (gradients, loss_fn.loss_type, count)
        self.residency.has_gradients = True
        return {
            "global_loss": loss.detach()[None],
            "grad_norm": None,
            "rank": self.rank,
            "all_mb_metrics": {name: [value] for name, value in metrics.items()},
        }

    def optimizer_step(self):
        self.residency.require("optimizer_step")
        self.follow_schedule()
        for parameter, gradient in zip(self.trained(), self.sums[0], strict=True):
            parameter.grad = gradient / self.sums[2]
        norm = nn.utils.clip_grad_norm_(self.trained(), self.config["max_grad_norm"])
        stepped = bool(norm.isfinite())
        if stepped:
            self.optimizer.step()
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.zero_grad()
        self.zero_grad()
        return {"grad_norm": float(norm), "stepped": stepped, "lr": lr}

    def zero_grad(self):
        self.sums, self.residency.has_gradients = None, False

    def trained(self):
        return [each for each in self.model.parameters() if each.requires_grad]

    def prepare_for_lp_inference(self):
        self.residency.require("prepare_for_lp_inference")
        super().prepare_for_lp_inference()

    def offload_before_refit(self):
        self.residency.require("offload_before_refit")
        super().offload_before_refit()

    def offload_after_refit(self):
        self.residency.require("offload_after_refit")
        super().offload_after_refit()

    def load_checkpoint(self, weights_path, optimizer_path=None):
        self.residency.require("load_checkpoint")
        super().load_checkpoint(weights_path, optimizer_path)

    @torch.no_grad()
    def get_topk_logits(self, data, k, micro_batch_size=None):
        self.residency.require("get_topk_logits")
        self.check(data)
        top = self.model(data["input_ids"]).topk(k)
        inside = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]
        return {
            "topk_logits": top.values * inside[..., None],
            "topk_indices": top.indices * inside[..., None],
        }

    @torch.no_grad()
    def score(self, data, micro_batch_size=None):
        self.residency.require("score")
        rows = zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
        return {
            "scores": torch.stack([reward_of(self.model, ids[:length]) for ids, length in rows])
        }

    def save_adapters(self, path):
        trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        torch.save(trained, path)

    def prepare_refit_info(self):
        return {name: (tuple(each.shape), each.dtype) for name, each in self.weights()}

    def prepare_info_for_collective(self):
        return self.prepare_refit_info()

    def weights(self):
        return self.model.named_parameters()

    def prepare_weights_for_ipc(self):
        self.residency.require("send_weights")
        return [(name, each.numel() * each.itemsize) for name, each in self.weights()], 1.0

    def get_weights_ipc_handles(self, keys):
        self.residency.require("send_weights")
        held = dict(self.weights())
        missing = [key for key in keys if key not in held]
        if missing:
            raise ValueError(f"there is no tensor {missing[0]!r}")
        return {self.report_device_id(): {key: pickle.dumps(held[key].detach()) for key in keys}}

    def open_refit(self, **options):
        self.sent = {}
        return {}

    def send_weights(self, version, *, receivers=None):
        self.residency.require("send_weights")
        self.sent[version] = {name: each.detach().clone() for name, each in self.weights()}
        return {}

    def init_collective(self, ip, port, world_size):
        pass

    def broadcast_weights_for_collective(self):
        pass
