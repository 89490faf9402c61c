"""The backend: every rank holds the full model, and gradients are summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from rl_interfaces import ParallelLayout, ResidencyState
from rl_interfaces.backend.checkpoint.checkpointer import TensorFormat
from rl_interfaces.backend.checkpoint.optimizer_state import TrainState
from rl_interfaces.backend.components import LogitsOutput, ReferenceCopy, ReplicatedOptimizer
from rl_interfaces.backend.engine import EngineInfo, HfExport, Scored, module_mode
from rl_interfaces.backend.generation import FullForwardDecoder
from rl_interfaces.backend.steps import MicroBatch, Step
from rl_interfaces.backend.worker import EngineWorker
from rl_refit.source import TensorSource
from torch.optim.lr_scheduler import LinearLR

from plain_backend.model import PairModel

CONSTANT = {"kwargs": {"start_factor": 1.0}}


class PlainEngine:
    """An engine in plain torch, on the CPU."""

    optimizer: ReplicatedOptimizer | None = None

    def __init__(
        self, config: dict[str, Any], *, environment: Any, tokenizer: Any, init_optimizer: bool
    ) -> None:
        torch.set_num_threads(1)
        self.model = PairModel.load(config["model_name"])
        parameters, training = list(self.model.parameters()), None
        if init_optimizer:
            optimizer = torch.optim.AdamW(parameters, **config["optimizer"]["kwargs"])
            schedule = LinearLR(optimizer, **config.get("scheduler", CONSTANT)["kwargs"])
            training = TrainState(optimizer=optimizer, scheduler=schedule)
            self.optimizer = ReplicatedOptimizer(
                parameters, training, max_grad_norm=config.get("max_grad_norm")
            )
        self.checkpoint = TensorFormat(
            model=self.model, training=training, weights=self.model.state_dict
        )
        vocab_size = self.model.config["vocab_size"]
        self.info = EngineInfo(device=torch.device("cpu"), vocab_size=vocab_size)

    @staticmethod
    def plan_layout(config: Any, *, world_size: int, init_optimizer: bool) -> ParallelLayout:
        return ParallelLayout(data_parallel=world_size)

    def outputs(self, step: Step) -> Iterator[tuple[MicroBatch, LogitsOutput]]:
        for batch in step.micro_batches(self.info.device):
            raw = self.model(batch.rows["input_ids"])
            yield batch, LogitsOutput(raw=raw, micro_batch=batch)

    def run(self, step: Step, score: Callable[..., Scored]) -> list[Scored]:
        return [score(batch, output) for batch, output in self.outputs(step)]

    def run_backward(
        self, step: Step, loss: Callable[..., Any], *, accumulate: bool = False
    ) -> list[Scored]:
        found = []
        for batch, output in self.outputs(step):
            value, scored = loss(batch, output)
            value.backward()
            found.append(scored)
        return found

    def mode(self, *, training: bool) -> AbstractContextManager[None]:
        return module_mode([self.model], training=training)

    def place(self, state: ResidencyState) -> None:
        """Leave everything on the CPU."""

    def local_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.model.named_parameters()

    def keep_reference(self) -> Callable[[], AbstractContextManager[None]]:
        return ReferenceCopy(lambda: list(self.model.parameters())).swapped_in

    def weight_source(self, dtype: torch.dtype) -> TensorSource:
        return TensorSource({name: t.to(dtype) for name, t in self.model.named_parameters()})

    def decoders(self) -> AbstractContextManager[Callable[..., FullForwardDecoder]]:
        return nullcontext(lambda _: FullForwardDecoder(self.model))

    def export(self) -> HfExport:
        source = self.weight_source(torch.float32)
        return HfExport(write_config=self.model.save_config, source=source)

    def close(self) -> None:
        """Release nothing, as nothing is held."""


class PlainWorker(EngineWorker):
    """The worker, which the entry point names."""

    engine_class = PlainEngine
