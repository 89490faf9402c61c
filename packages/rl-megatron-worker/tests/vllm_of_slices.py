"""Refit a real vLLM engine with slices of Megatron ranks; run by `test_slices.py`.

Usage: python vllm_of_slices.py ENGINE_MODEL TRAINER_MODEL ADDRESS_FILE
"""

# ruff: noqa: T201

import json
import sys
import time
from pathlib import Path

import torch
import vllm
from patience import PATIENCE_S
from rl_refit import RefitError
from rl_refit.vllm import init_info, on_workers, refit, require_ready
from tolerances import ENGINE
from transformers import AutoModelForCausalLM

SAME = ENGINE
OTHER = 1e-2
PROMPTS = [[1, 5, 9, 30], [7, 8], [60, 3, 2, 1, 40, 41]]


def worst_difference(llm, model):
    """Return the largest |log-probability| difference over tokens that vLLM has sampled."""
    params = vllm.SamplingParams(temperature=1.0, max_tokens=12, logprobs=0, seed=1)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    worst = 0.0
    for prompt, request in zip(PROMPTS, llm.generate(prompts, params, use_tqdm=False), strict=True):
        sampled = request.outputs[0]
        tokens = torch.tensor([[*prompt, *sampled.token_ids]])
        with torch.no_grad():
            logprobs = model(tokens).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        for row, token, entry in zip(logprobs, sampled.token_ids, sampled.logprobs, strict=True):
            worst = max(worst, abs(entry[token].logprob - row[token].item()))
    return worst


def wait_until_ready(llm, version):
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert set(on_workers(llm, require_ready)) == {version}
            return
        except RefitError:  # the commit is under way
            assert time.monotonic() < end
            time.sleep(0.05)


def main():
    engine_model, trainer_model, address = sys.argv[1:]
    llm = vllm.LLM(
        engine_model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        weight_transfer_config={"backend": "rl_refit"},
    )
    model = AutoModelForCausalLM.from_pretrained(trainer_model, dtype=torch.float32).eval()
    assert worst_difference(llm, model) > OTHER
    llm.init_weight_transfer_engine(init_info(json.loads(Path(address).read_text())))
    nbytes = sum(each.nbytes for each in model.parameters())
    for version in (1, 2):
        (report,) = refit(llm, version)
        wait_until_ready(llm, version)
        worst = worst_difference(llm, model)
        print(version, "worst", worst, "bytes", report["refit_bytes"], "of", nbytes)
        assert worst < SAME, worst
        assert report["refit_bytes"] <= 1.1 * nbytes
        with torch.no_grad():
            for parameter in model.parameters():  # as the trainers do
                parameter.mul_(2)
    print("all refits are as they should be")


if __name__ == "__main__":
    main()
