"""A real vLLM engine over two ranks of the CPU."""

import os
import signal

import pytest
import torch
from rl_policy import RayVirtualCluster
from rl_policy.generation.vllm import VllmGeneration
from rl_policy.rank_calls import WorkerDiedError
from transformers import AutoModelForCausalLM
from vllm_oracles import (
    TEXTS,
    TOLERANCE,
    ascii_tokenizer,
    descendants,
    expected_logprobs,
    generation_config,
    prompts_of,
    save_llama,
)

rl_refit = pytest.importorskip("rl_refit", reason="comes with the extra vllm")
pytestmark = pytest.mark.vllm


def test_an_engine_over_two_ranks_samples_is_refitted_and_ends_whole(tmp_path, wait_until_gone):
    tokenizer = ascii_tokenizer()
    save_llama(tmp_path, tokenizer)
    cluster = RayVirtualCluster([2])
    config = generation_config(tmp_path, tensor_parallel_size=2)
    engines = VllmGeneration(cluster, config, tokenizer, timeout_s=240.0)
    try:
        assert (engines.num_engines, engines.num_receivers) == (1, 2)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        prompts = prompts_of(tokenizer, TEXTS)
        check(engines.generate(prompts), model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        source = rl_refit.TensorSource(model.state_dict())
        with rl_refit.RefitSender(source, num_receivers=2, timeout_s=60.0) as sender:
            engines.init_transfer(sender.address)
            engines.begin_update(0)
            call = engines.update(0)
            sender.send(0)
            assert len(engines.wait_for_update(call)) == 2
            engines.commit_update(0)
            sender.commit(0)
        check(engines.generate(prompts), model)
        engine = engines.facts[0].process_id
        processes = {engine, *descendants(engine)}
        assert len(processes) > 2
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="rank 0 of vllm died"):
            engines.generate(prompts)
        wait_until_gone(processes)
    finally:
        engines.shutdown()
        cluster.shutdown()


def check(output, model):
    expected = expected_logprobs(model, output, temperature=0.7)
    torch.testing.assert_close(output["logprobs"], expected, atol=TOLERANCE, rtol=0)
