"""Lives of the worker on a fake CUDA device; runs in the process of `run_on_fake_cuda`."""

import copy
import dataclasses
import tempfile
from unittest import mock

import parity_models
import torch
from parity_layouts import LAYOUTS
from parity_ranks import BUDGET, rows_of
from ranks import worker_for
from rl_dtensor_worker import forward, layout
from rl_interfaces import LossInput, LossType
from rl_interfaces.testing.fake_cuda import fake_cuda, measured_life, run_life
from tiny_model import build_tokenizer, make_batch, make_config
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

# It goes with the process.
_MODELS = tempfile.TemporaryDirectory()
# Rows of a step: two micro-batches on each of two data-parallel ranks.
ROWS_PER_RANK, MOST_ROWS = 4, 8
NUM_STEPS = 2
# Two layers, and how many more show what one of them costs.
NUM_LAYERS, MORE_LAYERS = 2, 1
# Of a planted bug: it takes as many bytes as all else.
_LOGITS_WIDTH = 4096
_PACKED, _DYNAMIC = "sequence_packing", "dynamic_batching"
_ADAPTERS = {"lora": {"enabled": True, "r": 4, "lora_alpha": 8}}
# Layout, precision, section that plans micro-batches, further keys of `dtensor_cfg`.
CASES = {
    "dp2": ("dp2", "bfloat16", None, {}),
    "dp2_fp32": ("dp2", "float32", None, {}),
    "dp2_fp16": ("dp2", "float16", None, {}),
    "dp2_packed": ("dp2", "bfloat16", _PACKED, {}),
    "dp2_dynamic": ("dp2", "bfloat16", _DYNAMIC, {}),
    "dp2_lora": ("dp2", "bfloat16", None, _ADAPTERS),
    "dp2_cpu_offload": ("dp2", "bfloat16", None, {"cpu_offload": True}),
    "dp2_checkpointing": ("dp2", "bfloat16", None, {"activation_checkpointing": True}),
    "tp2": ("tp2", "bfloat16", None, {}),
    "tp2_packed": ("tp2", "bfloat16", _PACKED, {}),
    "tp2_sp": ("tp2_sp", "bfloat16", None, {}),
    "tp2_sp_packed": ("tp2_sp", "float16", _PACKED, {}),
    "cp2": ("cp2", "bfloat16", None, {}),
    "cp2_packed": ("cp2", "bfloat16", _PACKED, {}),
    "dp2_tp2": ("dp2_tp2", "bfloat16", _DYNAMIC, {}),
    "dp2_cp2": ("dp2_cp2", "bfloat16", None, {}),
    "tp2_cp2": ("tp2_cp2", "bfloat16", _PACKED, {}),
    "hybrid": ("hybrid", "bfloat16", None, {}),
    "replicated": ("replicated", "bfloat16", None, {}),
    "replicated_cp2": ("replicated_cp2", "bfloat16", None, {}),
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
    shared = sizes.get("tensor_parallel_size", 1) * sizes.get("context_parallel_size", 1)
    return min(MOST_ROWS, ROWS_PER_RANK * num_ranks // shared)


def config_of(case, path):
    name, precision, section, keys = CASES[case]
    budgets = {"train_mb_tokens": BUDGET, "logprob_mb_tokens": BUDGET}
    return make_config(
        path,
        precision=precision,
        dtensor_cfg={"enabled": True, **LAYOUTS[name][1], **keys},
        train_global_batch_size=global_batch_of(case),
        **({} if section is None else {section: {"enabled": True, **budgets}}),
    )


def build(num_layers):
    """Write a tiny Llama with this many layers; return its folder."""
    config = copy.deepcopy(parity_models.CONFIGS["llama"])
    config.num_hidden_layers = num_layers
    path = tempfile.mkdtemp(dir=_MODELS.name)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def measure(cases):
    """Return the numbers of each case, and what planted bugs give."""
    shallow, deep = build(NUM_LAYERS), build(NUM_LAYERS + MORE_LAYERS)
    return {
        "numbers": {case: numbers_of_case(case, shallow, deep) for case in cases},
        "planted": with_planted_bugs(shallow, deep),
    }


def numbers_of_case(case, shallow, deep):
    num_ranks, section, size = LAYOUTS[CASES[case][0]][0], CASES[case][2], global_batch_of(case)
    with fake_cuda(world_size=num_ranks) as device, worker_for(config_of(case, shallow)) as worker:
        batch, step = (rows_for(worker, case, steps) for steps in (NUM_STEPS, 1))
        phases = run_life(
            device,
            worker,
            batch=batch,
            shorter=step,
            scored=rows_of(worker, make_batch(size), section, global_batch_size=None)[0],
            prompts=make_batch(4),
            loss=DeviceLoss(),
        )
    options = {"init_reference_model": False}
    with (
        fake_cuda(world_size=num_ranks) as device,
        worker_for(config_of(case, deep), **options) as worker,
        device.phase() as deeper,
    ):
        worker.train(rows_for(worker, case, 1), DeviceLoss())
    return measured_life(
        phases,
        deeper,
        added_layers=MORE_LAYERS * num_passes_of(step, 1),
        num_passes=num_passes_of(batch, NUM_STEPS),
    )


def rows_for(worker, case, num_steps):
    size = global_batch_of(case)
    rows = make_batch(NUM_STEPS * size).slice(0, num_steps * size)
    return rows_of(worker, rows, CASES[case][2], global_batch_size=size)[0]


def num_passes_of(batch, num_steps):
    """Return the micro-batches of one `train` call."""
    if getattr(batch, "micro_batch_indices", None) is not None:
        return sum(len(spans) for spans in batch.micro_batch_indices)
    rows_per_step = batch.size // num_steps
    return num_steps * -(-rows_per_step // 2)


def with_planted_bugs(shallow, deep):
    """Return the error of a device mixture, and the numbers of a life with all other bugs."""
    attention = _keeps_a_tensor(_reads_a_value(_loops_over_kernels(LlamaAttention.forward)))
    with (
        mock.patch.object(LlamaAttention, "forward", attention),
        mock.patch.object(forward.TokenHead, "target_scores", _scores_with_logits),
    ):
        numbers = numbers_of_case("dp2", shallow, deep)
    with (
        fake_cuda(world_size=2),
        worker_for(config_of("dp2", shallow), init_reference_model=False) as worker,
        mock.patch.object(layout.PaddedLayout, "of", classmethod(_of_host_lengths)),
    ):
        try:
            worker.get_logprobs(make_batch(4))
        except RuntimeError as error:
            return {"mixture": str(error), "numbers": numbers}
    raise AssertionError("a device mixture was not found")


_padded_layout_of = layout.PaddedLayout.of.__func__
_target_scores = forward.TokenHead.target_scores


def _of_host_lengths(cls, tokens, lengths, **options):
    return _padded_layout_of(cls, tokens, lengths.cpu(), **options)


def _keeps_a_tensor(attention):
    kept = []

    def keep(*args, **options):
        kept.append(torch.zeros(100, device="cuda"))
        return attention(*args, **options)

    return keep


def _reads_a_value(attention):
    def read(layer, hidden_states, **options):
        assert float(hidden_states.abs().max()) < 1e9
        return attention(layer, hidden_states, **options)

    return read


def _loops_over_kernels(attention):
    def loop(layer, hidden_states, **options):
        hidden_states = torch.stack([row * 1.0 for row in hidden_states.unbind(1)], dim=1)
        return attention(layer, hidden_states, **options)

    return loop


def _scores_with_logits(head, model, tokens, *args, **options):
    logits = torch.zeros(*tokens.shape, _LOGITS_WIDTH, device="cuda")
    found = _target_scores(head, model, tokens, *args, **options)
    return dataclasses.replace(found, logprobs=found.logprobs + logits.sum() * 0)
