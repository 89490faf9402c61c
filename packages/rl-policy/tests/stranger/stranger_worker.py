"""A stranger's backend: an embedding and a linear layer, trained in plain torch over gloo."""

import os
import threading
import time
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from rl_batched_data import BatchedDataDict, pad_right
from rl_interfaces import ParallelLayout
from torch import nn

VOCABULARY = 16


class StrangerWorker:
    contract_version = (1, 0)

    def __init__(
        self,
        config,
        tokenizer,
        weights_path=None,
        optimizer_path=None,
        init_optimizer=True,
        init_reference_model=True,
    ):
        torch.set_num_threads(1)
        self.rank, self.tensor_parallel = int(os.environ["RANK"]), config["stranger_cfg"]["tp"]
        dist.init_process_group("gloo", timeout=timedelta(seconds=config["timeout_s"]))
        torch.manual_seed(0)  # the same weights everywhere
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
        if weights_path is not None:
            self.load_checkpoint(weights_path)
        self.reference = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.config, self.pad = config, tokenizer.pad_token_id
        self.gbs = config["train_global_batch_size"]

    @staticmethod
    def validate_config(config, *, world_size, init_optimizer=True):
        tensor_parallel = config["stranger_cfg"]["tp"]
        if world_size % tensor_parallel:
            raise ValueError(f"stranger_cfg.tp={tensor_parallel} does not divide {world_size=}")
        return ParallelLayout(
            data_parallel=world_size // tensor_parallel, tensor_parallel=tensor_parallel
        )

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        """One step per global batch; every rank, with or without rows, takes part in each."""
        losses, norms, rows_seen = [], [], []
        for step in range(len(data.elem_counts_per_gb)):
            mine = data.get_batch(step)
            counts = torch.tensor([mine["sample_mask"].sum(), mine["token_mask"][:, 1:].sum()])
            self._sum_over_data_parallel(counts)
            loss = sum(parameter.sum() for parameter in self.model.parameters()) * 0.0
            if mine.size:
                loss = loss + loss_fn(self._logprobs(mine), mine, counts[0], counts[1])[0]
                rows_seen.append(mine["input_ids"][:, 0].tolist())
            self.optimizer.zero_grad()
            loss.backward()
            total = loss.detach().clone()
            self._sum_over_data_parallel(total)
            for parameter in self.model.parameters():
                self._sum_over_data_parallel(parameter.grad)
            norms.append(nn.utils.get_total_norm([p.grad for p in self.model.parameters()]))
            losses.append(total)
            if not eval_mode:
                self.optimizer.step()
        return {
            "global_loss": torch.stack(losses),
            "grad_norm": None if eval_mode else torch.stack(norms),
            "rank": self.rank,
            "all_mb_metrics": {"rows": rows_seen, "mbs": [mbs] * len(rows_seen)},
        }

    def get_logprobs(self, data, micro_batch_size=None):
        return BatchedDataDict({"logprobs": self._logprobs(data).detach()})

    def get_reference_policy_logprobs(self, data, micro_batch_size=None):
        kept = [parameter.detach().clone() for parameter in self.model.parameters()]
        self._load(self.reference)
        scores = self._logprobs(data).detach()
        self._load(kept)
        return BatchedDataDict({"reference_logprobs": scores})

    def generate(self, data, greedy=False):
        """Repeat each prompt's last token, once on even ranks and twice on odd ones."""
        count = 1 + self._data_rank() % 2
        lengths = data["input_lengths"]
        width = data["input_ids"].shape[1] + count
        output = pad_right(data["input_ids"], width, value=self.pad)
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

    def prepare_for_training(self):
        pass

    def prepare_for_lp_inference(self):
        pass

    def offload_before_refit(self):
        pass

    def offload_after_refit(self):
        pass

    def save_checkpoint(self, weights_path, optimizer_path=None, tokenizer_path=None):
        self.saving = Future()
        writing = threading.Thread(target=self._write, args=(weights_path,), daemon=True)
        writing.start()
        if not self.config["stranger_cfg"].get("async_checkpoint"):
            self.finish_checkpoint()
            dist.barrier()

    def finish_checkpoint(self):
        self.saving.result()

    def _write(self, path):
        try:
            time.sleep(self.config["stranger_cfg"].get("save_s", 0))
            if self.rank == 0:
                torch.save(self.model.state_dict(), path)
            self.saving.set_result(None)
        except RuntimeError as error:
            self.saving.set_exception(error)

    def load_checkpoint(self, weights_path, optimizer_path=None):
        self.model.load_state_dict(torch.load(weights_path))

    def save_hf_checkpoint(self, path):
        if self.rank == 0:
            os.makedirs(path)

    def is_alive(self):
        return True

    def get_gpu_info(self):
        return {"rank": self.rank, "pid": os.getpid()}

    def report_device_id(self):
        return "cpu"

    def start_gpu_profiling(self):
        pass

    def stop_gpu_profiling(self):
        pass

    def shutdown(self):
        dist.destroy_process_group()

    def _data_rank(self):
        return self.rank // self.tensor_parallel

    def _sum_over_data_parallel(self, tensor):
        # Ranks of one data-parallel coordinate hold the same rows, so the sum counts each often.
        dist.all_reduce(tensor)
        tensor /= self.tensor_parallel

    def _logprobs(self, data):
        ids = data["input_ids"]
        scores = self.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        inside = torch.arange(1, ids.shape[1]) < data["input_lengths"][:, None]
        return nn.functional.pad(scores * inside, (1, 0))

    def _load(self, values):
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), values, strict=True):
                parameter.copy_(value)
