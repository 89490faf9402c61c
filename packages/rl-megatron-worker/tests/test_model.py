"""The model against transformers: log-probabilities and gradients of packed rows, per layout."""

import pytest
import torch
from megatron_ranks import whole_model_ranks
from rl_megatron_worker.model.config import fits_transformer_engine

TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
CP = "context_parallel_size"
EP = "expert_model_parallel_size"
ETP = "expert_tensor_parallel_size"
SP = "sequence_parallel"

# Beside the layouts of the parity table, which holds whole steps of training.
CASES = {
    "one": (1, "dense", {}),
    "pp2-virtual2": (2, "dense", {PP: 2, VPP: 2}),
    "tied-pp2": (2, "tied", {PP: 2}),
    "tied-tp2": (2, "tied", {TP: 2}),
    "tp2-cp2-sp": (4, "dense", {TP: 2, CP: 2, SP: True}),
    "moe": (1, "moe", {}),
    "moe-ep2": (2, "moe", {EP: 2}),
    "moe-tp2-ep2": (2, "moe", {TP: 2, EP: 2, ETP: 1, SP: True}),
    "moe-etp2": (2, "moe", {TP: 2, SP: True}),
    "moe-pp2": (2, "moe", {PP: 2}),
}


@pytest.mark.slow_beyond(3, every=4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.promise_first(2)
def test_log_probabilities_and_gradients_are_those_of_transformers(pools, case):
    num_ranks, kind, layout = CASES[case]
    results = pools(num_ranks).run(whole_model_ranks, kind=kind, **layout)
    assert any(each["logprobs"] for each in results)
    for each in results:
        assert max(each["logprobs"], default=0.0) <= 1
        assert max(each["gradients"]) <= 1


@pytest.mark.parametrize(
    ("dtype", "on_cuda", "fits"),
    [
        (torch.bfloat16, True, True),
        (torch.float16, True, True),
        (torch.float32, True, False),
        (torch.bfloat16, False, False),
    ],
)
def test_transformer_engine_is_taken_for_16_bits_on_a_gpu(dtype, on_cuda, fits):
    assert fits_transformer_engine(dtype, on_cuda=on_cuda) is fits
