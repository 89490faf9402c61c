"""A third party's backend: the example's engine behind the calls that the contract requires."""

import os
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from plain_backend import PlainEngine
from rl_batched_data import BatchedDataDict, pad_right
from rl_interfaces import ParallelLayout, PolicyWorker
from rl_interfaces.backend.components import ReplicatedOptimizer
from rl_interfaces.backend.worker import EngineWorker


class StrangerEngine(PlainEngine):
    """Adds replicas of each data-parallel rank (`tp`) and slow saves (`save_s`, `save_fails`)."""

    def __init__(self, config, *, environment, **options):
        super().__init__(config, environment=environment, **options)
        self.section, tensor_parallel = config["stranger_cfg"], config["stranger_cfg"]["tp"]
        peers = [
            range(first, environment.world_size, tensor_parallel)
            for first in range(tensor_parallel)
        ]
        groups = [dist.new_group(list(ranks)) for ranks in peers]
        group = groups[environment.rank % tensor_parallel]
        self.info = replace(self.info, data_group=group)
        if self.optimizer is not None:
            self.optimizer = ReplicatedOptimizer(
                list(self.model.parameters()),
                self.optimizer.state,
                max_grad_norm=config.get("max_grad_norm"),
                group=group,
            )
        self.checkpoint.files = lambda: {"note.txt": self.write_slowly}

    @staticmethod
    def plan_layout(config, *, world_size, init_optimizer):
        tensor_parallel = config["stranger_cfg"]["tp"]
        if world_size % tensor_parallel:
            raise ValueError(f"stranger_cfg.tp={tensor_parallel} does not divide {world_size=}")
        return ParallelLayout(
            data_parallel=world_size // tensor_parallel, tensor_parallel=tensor_parallel
        )

    def write_slowly(self, path):
        time.sleep(self.section.get("save_s", 0))
        if self.section.get("save_fails"):
            raise OSError(f"no space left for {path.name}")
        path.touch()


class FullWorker(EngineWorker):
    engine_class = StrangerEngine

    @property
    def saves_in_background(self):
        return self._engine.section.get("async_checkpoint", False)


class StrangerWorker:
    """Has no optional capability: no logits, scores, adapters or weights for an engine."""

    contract_version = (1, 0)
    validate_config = FullWorker.validate_config

    def __init__(self, config, tokenizer, *arguments, **options):
        self.worker = FullWorker(config, tokenizer, *arguments, **options)
        self.pad = tokenizer.pad_token_id

    def get_gpu_info(self):
        return {**self.worker.get_gpu_info(), "pid": os.getpid()}

    def generate(self, data, greedy=False):
        """Repeat each prompt's last token, once on even ranks and twice on odd ones."""
        count = 1 + int(os.environ["RANK"]) % 2
        lengths = data["input_lengths"]
        output = pad_right(data["input_ids"], data["input_ids"].shape[1] + count, value=self.pad)
        for row, length in enumerate(lengths.tolist()):
            output[row, length : length + count] = output[row, length - 1]
        return BatchedDataDict(
            {
                "output_ids": output,
                "generation_lengths": torch.full_like(lengths, count),
                "unpadded_sequence_lengths": lengths + count,
                "logprobs": torch.full(output.shape, -1.0),
            }
        )


def forwarding(name):
    def call(self, *arguments, **options):
        return getattr(self.worker, name)(*arguments, **options)

    return call


REQUIRED = [name for name, each in vars(PolicyWorker).items() if callable(each) and name[0] != "_"]
for required in {*REQUIRED, "finish_checkpoint"} - vars(StrangerWorker).keys():
    setattr(StrangerWorker, required, forwarding(required))
