"""Measure how much of the device's arithmetic `train` uses: model FLOPs utilisation (MFU).

The formula is torchtitan's (`get_num_flops_per_token`, after the PaLM paper, appendix B): a token
of a sequence of `T` costs `6 N + 12 L H Q T` operations, of `N` parameters without the embedding,
`L` layers and `H` heads of size `Q`; what is computed twice for activation checkpointing does not
count. It counts gradients of all weights, though LoRA's frozen ones have none, and attention to
all tokens, though a causal model sees half of them: the column `needed / formula` says what share
of it the work needs. The peak is the maker's for dense bfloat16 without sparsity; beside it is
what a large product of matrices reaches here.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from one_rank import NextTokenLoss, full_rows, start_worker
from report import Row, parse_options, report
from transformers import Qwen3Config, Qwen3ForCausalLM

# Dense bfloat16 operations a second, by the makers' data sheets.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
RUNS = 3
SMALL = Qwen3Config(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
)
# The shapes of Qwen3-4B and Qwen3-0.6B.
QWEN3_4B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    tie_word_embeddings=True,
)
QWEN3_600M = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    tie_word_embeddings=True,
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A training step: its model, the rows, and whether adapters alone are trained."""

    name: str
    config: Qwen3Config
    width: int
    num_rows: int
    is_lora: bool

    @property
    def flops_per_token(self) -> float:
        """Operations of a token by the formula."""
        return 6 * self._num_matmul_parameters + self._attention_flops

    @property
    def needed_flops_per_token(self) -> float:
        """Operations that the step cannot do without: no gradients of frozen weights, half of T."""
        passes = 4 if self.is_lora else 6
        return passes * self._num_matmul_parameters + self._attention_flops / 2

    @property
    def _attention_flops(self) -> float:
        heads, size = self.config.num_attention_heads, self.config.head_dim
        return 12 * self.config.num_hidden_layers * heads * size * self.width

    @property
    def _num_matmul_parameters(self) -> int:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(self.config)
        embedding = model.get_input_embeddings().weight.numel()
        total = sum(each.numel() for each in model.parameters())
        # A tied matrix is multiplied with once, as the head.
        return total if self.config.tie_word_embeddings else total - embedding


def works(*, is_small: bool) -> list[Work]:
    """Return what is measured on this device."""
    if is_small:
        names = {"small": False, "small, LoRA": True}
        return [
            Work(name=name, config=SMALL, width=256, num_rows=8, is_lora=is_lora)
            for name, is_lora in names.items()
        ]
    return [
        Work(name="Qwen3-0.6B, 4k", config=QWEN3_600M, width=4096, num_rows=8, is_lora=False),
        Work(name="Qwen3-4B LoRA, 16k", config=QWEN3_4B, width=16_384, num_rows=2, is_lora=True),
    ]


def matmul_flops(device: torch.device) -> float:
    """Return the operations a second that a large product of matrices reaches."""
    is_cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if is_cuda else (1024, torch.float32)
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)

    def product() -> float:
        begin = time.perf_counter()
        for _ in range(10):
            left @ right
        if is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    product()
    return 10 * 2 * size**3 / min(product() for _ in range(RUNS))


def seconds_of_step(work: Work) -> float:
    """Return the median seconds of a step of `train`, after one that does not count."""
    sections: dict[str, Any] = {"dtensor_cfg": {"enabled": True, "activation_checkpointing": True}}
    if work.is_lora:
        sections["dtensor_cfg"]["lora"] = {"enabled": True, "r": 16, "lora_alpha": 32}
    with tempfile.TemporaryDirectory() as path:
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Qwen3ForCausalLM(work.config).to(torch.bfloat16)
        model.save_pretrained(path)
        del model
        worker = start_worker(path, num_rows=work.num_rows, micro_batch_size=1, **sections)
    batch = full_rows(work.num_rows, work.width, work.config.vocab_size)
    loss_fn = NextTokenLoss()
    times: list[float] = []
    try:
        for _ in range(RUNS + 1):
            begin = time.perf_counter()
            worker.train(batch, loss_fn)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    finally:
        worker.shutdown()
    return median(times[1:])


def peak_flops() -> float | None:
    """Return the maker's figure for this device, or None where it is not in the list."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    # "NVIDIA H100 80GB HBM3" is the SXM one; the PCIe one says so.
    return next(
        (peak for key, peak in PEAK_FLOPS.items() if all(part in name for part in key.split())),
        None,
    )


def main() -> None:
    """Print and write the table."""
    options = parse_options(__doc__)
    is_cuda = torch.cuda.is_available()
    reached = matmul_flops(torch.device("cuda" if is_cuda else "cpu"))
    peak = peak_flops()
    rows: list[Row] = []
    for work in works(is_small=options.quick or not is_cuda):
        rate = work.flops_per_token * work.num_rows * work.width / seconds_of_step(work)
        rows.append(
            {
                "work": work.name,
                "TFLOP/s by the formula": rate / 1e12,
                "MFU %": None if peak is None else 100 * rate / peak,
                "of a matmul %": 100 * rate / reached,
                "needed / formula": work.needed_flops_per_token / work.flops_per_token,
            }
        )
    report("flops", "model FLOPs utilisation of train, one rank", rows, options.out)


if __name__ == "__main__":
    main()
