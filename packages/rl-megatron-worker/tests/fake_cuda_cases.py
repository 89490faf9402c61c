"""Lives of the worker on a fake CUDA device; runs in the process of `run_on_fake_cuda`."""

import math
import tempfile
from contextlib import contextmanager
from unittest import mock

import torch
from batches import make_batch, make_config
from parity_checks import LAYOUTS, PP, TP, num_layers_of
from rl_interfaces import LossInput, LossType
from rl_interfaces.testing.fake_cuda import fake_cuda, measured_life, run_life
from rl_megatron_worker.parallel.schedule import Schedule
from tiny_models import build_tiny
from worker_ranks import BUDGET, rows_of, worker_for

# It goes with the process.
_MODELS = tempfile.TemporaryDirectory()
HIDDEN_SIZE = 32
# Rows of a step: two micro-batches on each of two data-parallel ranks.
ROWS_PER_RANK, MOST_ROWS = 4, 8
NUM_STEPS = 2
_PACKED, _DYNAMIC = "sequence_packing", "dynamic_batching"
# Layout, precision, section that plans micro-batches, model.
CASES = {
    "dp2": ("dp2", "bfloat16", None, "llama"),
    "dp2_fp32": ("dp2", "float32", None, "llama"),
    "dp2_fp16": ("dp2", "float16", None, "qwen3"),
    "dp2_packed": ("dp2", "bfloat16", _PACKED, "llama"),
    "dp2_dynamic": ("dp2", "bfloat16", _DYNAMIC, "qwen2"),
    "dp2_experts": ("dp2", "bfloat16", None, "qwen3_moe"),
    "tp2": ("tp2", "bfloat16", None, "llama"),
    "tp2_sp": ("tp2_sp", "bfloat16", _PACKED, "llama"),
    "pp2": ("pp2", "bfloat16", None, "llama"),
    "pp2_unlike": ("pp2_unlike", "bfloat16", None, "llama"),
    "pp2_virtual": ("pp2_virtual", "bfloat16", None, "llama"),
    "cp2": ("cp2", "bfloat16", None, "llama"),
    "cp2_packed": ("cp2", "bfloat16", _PACKED, "llama"),
    "tp2_pp2": ("tp2_pp2", "bfloat16", None, "llama"),
    "dp2_tp2": ("dp2_tp2", "bfloat16", None, "llama"),
    "ep2": ("ep2", "bfloat16", None, "qwen3_moe"),
    # Sinks and biases of experts; linear attention over gathered sequences.
    "dp2_sinks": ("dp2", "bfloat16", None, "gpt_oss"),
    "cp2_linear": ("cp2", "bfloat16", _PACKED, "qwen3_next"),
}


class DeviceLoss:
    """Mean negative log-likelihood, whose metrics stay on the device."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.LOGPROBS

    def __call__(self, logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"][:, None]
        loss = -(logprobs * mask).sum() / global_valid_toks
        return loss, {"num_valid_samples": data["sample_mask"].sum(), "nll": loss.detach()}


def global_batch_of(case):
    num_ranks, sizes = LAYOUTS[CASES[case][0]]
    shared = math.prod(sizes.get(key, 1) for key in (TP, PP, "context_parallel_size"))
    return min(MOST_ROWS, ROWS_PER_RANK * num_ranks // shared)


def config_of(case, path):
    layout, precision, section, _ = CASES[case]
    budgets = {"train_mb_tokens": BUDGET, "logprob_mb_tokens": BUDGET}
    sections = {} if section is None else {section: {"enabled": True, **budgets}}
    config = make_config(path, sections=sections, **LAYOUTS[layout][1])
    return config | {"precision": precision, "train_global_batch_size": global_batch_of(case)}


def measure(cases):
    """Return the numbers of each case."""
    return {case: numbers_of_case(case) for case in cases}


def reduced_over_ranks(values):
    """Return what an all-reduce gives if the first pipeline stage has what this rank lacks."""
    if values.dtype is torch.uint8:  # whether any rank has a parameter
        return torch.ones_like(values)
    if values.ndim > 1:  # the rows of all ranks, of which each gives its own
        return values[values.any(1)][:1].expand_as(values).clone()
    return values.where(values != -1, 0)  # the stage of each parameter, -1 on the others


def numbers_of_case(case, *_):
    layout, _, section, kind = CASES[case]
    sizes = LAYOUTS[layout][1]
    layers, stages = num_layers_of(layout), sizes.get("pipeline_model_parallel_size", 1)
    # One more layer in every chunk of this rank, or all on this stage where the first has a number.
    more = stages * sizes.get("virtual_pipeline_model_parallel_size", 1)
    added = more if "num_layers_in_first_pipeline_stage" in sizes else more // stages
    shallow, deep = (
        build_tiny(tempfile.mkdtemp(dir=_MODELS.name), kind, num_hidden_layers=count)
        for count in (layers, layers + more)
    )
    with job(case) as device, worker_for(config_of(case, shallow)) as worker:
        batch, step = (rows_for(case, steps) for steps in (NUM_STEPS, 1))
        phases = run_life(
            device,
            worker,
            batch=batch,
            shorter=step,
            scored=rows_of(equal_rows(global_batch_of(case)), section)[0],
            prompts=equal_rows(4),
            loss=DeviceLoss(),
        )
    options = {"init_reference_model": False}
    with (
        job(case) as device,
        worker_for(config_of(case, deep), **options) as worker,
        device.phase() as deeper,
    ):
        worker.train(rows_for(case, 1), DeviceLoss())
    return measured_life(
        phases,
        deeper,
        added_layers=num_passes_of(step, 1) * added,
        num_passes=num_passes_of(batch, NUM_STEPS),
    )


@contextmanager
def job(case):
    """Be the first rank of the case's last pipeline stage."""
    num_ranks, sizes = LAYOUTS[CASES[case][0]]
    stages = sizes.get("pipeline_model_parallel_size", 1)
    with fake_cuda(rank=num_ranks - num_ranks // stages, world_size=num_ranks) as device:
        device.reduce = reduced_over_ranks
        if stages == 1:
            yield device
            return
        run_layouts = Schedule._run_layouts

        def run(schedule, layouts, *args, **options):
            # Stages send their shapes first. Rows are equally long, so all micro-batches are.
            (total,) = {layout.packed.total_length for layout in layouts}
            device.received = torch.tensor([total, 1, HIDDEN_SIZE])
            return run_layouts(schedule, layouts, *args, **options)

        with mock.patch.object(Schedule, "_run_layouts", run):
            yield device


def equal_rows(num_rows):
    """Return rows of one length."""
    batch = make_batch(num_rows)
    batch["input_lengths"] = torch.full_like(batch["input_lengths"], batch["input_ids"].shape[1])
    batch["input_ids"] = batch["input_ids"].clamp(min=2)
    return batch


def rows_for(case, num_steps):
    size = global_batch_of(case)
    return rows_of(equal_rows(num_steps * size), CASES[case][2], global_batch_size=size)[0]


def num_passes_of(batch, num_steps):
    """Return the micro-batches of one `train` call."""
    if getattr(batch, "micro_batch_indices", None) is not None:
        return sum(len(spans) for spans in batch.micro_batch_indices)
    rows_per_step = batch.size // num_steps
    return num_steps * -(-rows_per_step // 2)
