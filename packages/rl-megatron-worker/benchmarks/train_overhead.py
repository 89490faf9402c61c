"""Measure `train` beside a bare Megatron-core loop, and beside the DTensor worker, in turns.

The bare loop is Megatron-core's schedule and optimizer over a copy of the model, with micro-batches
that were laid out before: what is over it is counting, laying out, checking, and metrics.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from report import Row, parse_options, report
from rl_batched_data import BatchedDataDict
from rl_batched_data.logprobs import target_scores
from rl_dtensor_worker import DTensorPolicyWorker
from rl_interfaces import LossInput, LossType
from rl_megatron_worker import MegatronPolicyWorker
from rl_megatron_worker.layout import PackedLayout
from rl_megatron_worker.model.build import build_model
from rl_megatron_worker.model.config import transformer_config
from rl_megatron_worker.model.heads import scoring_options
from rl_megatron_worker.parallel.schedule import run_chunk
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ADAM = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.0}


class NextTokenLoss:
    """Mean negative log-likelihood, from log-probabilities."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.LOGPROBS

    def __call__(
        self, logprobs: torch.Tensor, data: Any, valid_seqs: torch.Tensor, valid_toks: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return loss and metrics."""
        mask = data["token_mask"] * data["sample_mask"][:, None]
        return -(logprobs * mask).sum() / valid_toks, {"num_valid_samples": data.size}


def write_model(path: str, *, vocab_size: int, hidden_size: int) -> None:
    """Write a Qwen2 of this size, at random."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


def full_rows(num_rows: int, width: int, vocab_size: int) -> BatchedDataDict[Any]:
    """Return rows without padding, all of whose tokens but the first are targets."""
    generator = torch.Generator().manual_seed(0)
    token_mask = torch.ones(num_rows, width)
    token_mask[:, 0] = 0
    return BatchedDataDict(
        input_ids=torch.randint(1, vocab_size, (num_rows, width), generator=generator),
        input_lengths=torch.full((num_rows,), width),
        token_mask=token_mask,
        sample_mask=torch.ones(num_rows),
    )


def start(worker_class: type, model: str, section: str, *, num_rows: int, rows: int) -> Any:
    """Return a worker that is the only rank of its job."""
    config: dict[str, Any] = {
        "model_name": model,
        "precision": "bfloat16" if torch.cuda.is_available() else "float32",
        section: {"enabled": True},
        "train_global_batch_size": num_rows,
        "train_micro_batch_size": rows,
        "max_grad_norm": 1.0,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": ADAM},
    }
    vocabulary = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>")
    return worker_class(config, tokenizer, init_reference_model=False)


class BareLoop:
    """Megatron-core's own schedule and optimizer, over a copy of a worker's model."""

    def __init__(self, worker: Any, batch: BatchedDataDict[Any]) -> None:
        self._worker = worker
        config, architecture = worker._engine._config, worker._engine._architecture
        megatron_config = transformer_config(
            architecture, config.layout, config.model, worker._engine.runtime
        )
        megatron_config.finalize_model_grads_func = finalize_model_grads
        (self._chunk,) = build_model(
            architecture,
            megatron_config,
            config.layout,
            worker._engine.runtime,
            ddp=config.data_parallel,
        )
        self._chunk.load_state_dict(worker.model[0].state_dict())
        self._num_targets = float(batch["token_mask"].sum())
        (step,) = worker._steps(
            batch,
            local_batch_size=None,
            given=None,
            default=worker._settings.train_micro_batch_size,
        )
        device = worker._engine.runtime.device
        self._layouts = [PackedLayout.of(each) for each in step.micro_batches(device)]
        self._masks = [
            layout.packed.pack(layout.micro_batch.rows["token_mask"])[0].roll(-1)
            for layout in self._layouts
        ]
        settings = OptimizerConfig(
            optimizer="adam",
            lr=ADAM["lr"],
            adam_eps=ADAM["eps"],
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=torch.cuda.is_available(),
        )
        with worker._engine.runtime.scope():
            self._optimizer = get_megatron_optimizer(settings, [self._chunk])
        megatron_config.grad_scale_func = self._optimizer.scale_loss

    def step(self) -> None:
        """Take an optimizer step."""
        with self._worker._engine.runtime.scope():
            self._chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=iter(zip(self._layouts, self._masks, strict=True)),
                model=self._chunk,
                num_microbatches=len(self._layouts),
                seq_length=1,
                micro_batch_size=1,
                forward_only=False,
            )
            self._optimizer.step()

    def _forward(self, batches: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        layout, mask = next(batches)
        return run_chunk(chunk, layout.tokens, layout.rows), partial(self._loss, layout, mask)

    def _loss(self, layout: Any, mask: torch.Tensor, hidden: torch.Tensor) -> Any:
        scores = target_scores(hidden, layout.targets, **scoring_options(self._chunk))
        loss = -(scores.logprobs * mask).sum() / self._num_targets
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}


@contextmanager
def job() -> Generator[None, None, None]:
    """Be the only rank of a job inside."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def timed(step: Callable[[], Any]) -> float:
    """Return the seconds of a step, the device's work included."""
    begin = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(*, vocab_size: int, hidden_size: int, num_rows: int, width: int, runs: int) -> Row:
    """Return the fastest step of each way, and median ratios of steps that follow one another."""
    rows = 4
    batch = full_rows(num_rows, width, vocab_size)
    with tempfile.TemporaryDirectory() as path:
        write_model(path, vocab_size=vocab_size, hidden_size=hidden_size)
        ours = start(MegatronPolicyWorker, path, "megatron_cfg", num_rows=num_rows, rows=rows)
        other = start(DTensorPolicyWorker, path, "dtensor_cfg", num_rows=num_rows, rows=rows)
    bare, loss_fn = BareLoop(ours, batch), NextTokenLoss()
    turns: list[tuple[float, float, float]] = []
    for _ in range(runs + 1):  # the first turn warms up
        turns.append(
            (
                timed(lambda: ours.train(batch, loss_fn)),
                timed(bare.step),
                timed(lambda: other.train(batch, loss_fn)),
            )
        )
    first, second, third = zip(*turns[1:], strict=True)
    for worker in (other, ours):
        worker.shutdown()
    return {
        "vocabulary": vocab_size,
        "hidden": hidden_size,
        "rows x width": f"{num_rows} x {width}",
        "train s": min(first),
        "bare s": min(second),
        "dtensor s": min(third),
        "train / bare": median(a / b for a, b, _ in turns[1:]),
        "train / dtensor": median(a / c for a, _, c in turns[1:]),
    }


def main() -> None:
    """Print and write the table."""
    options = parse_options(__doc__)
    sizes = [1024] if options.quick else [1024, 8192]
    with job():
        rows = [
            measure(
                vocab_size=vocab_size,
                hidden_size=256,
                num_rows=16,
                width=256,
                runs=4 if options.quick else 10,
            )
            for vocab_size in sizes
        ]
    report("megatron_train", "train beside a bare Megatron-core loop, one rank", rows, options.out)


if __name__ == "__main__":
    main()
