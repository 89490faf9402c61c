"""A real vLLM engine over two ranks: of the CPU, or on two GPUs."""

import os
import signal
from pathlib import Path

import pytest
import rl_refit
import torch
from msgspec.structs import replace
from patience import PATIENCE_S
from processes import descendants
from rl_policy import RayVirtualCluster
from rl_policy.generation.state import EngineStateError
from rl_policy.generation.vllm import VllmGeneration
from rl_policy.ray.failures import WorkerDiedError
from rl_refit.ends.outbound import Receivers
from rl_refit.protocol.channel import Filled
from transformers import AutoModelForCausalLM
from vllm_oracles import (
    TEXTS,
    TOLERANCE,
    ascii_tokenizer,
    expected_logprobs,
    fail_to_refit,
    generation_config,
    prompts_of,
    refit,
    save_llama,
)

# An engine's processes are told apart and killed, so that they start as a user's do: on a Ray of
# their own, which forks none.
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.needs("rl-policy[vllm]"),
    pytest.mark.usefixtures("ray_apart"),
]

# Kernels of a GPU differ by more.
AGREED = {False: TOLERANCE, True: 1e-3}


@pytest.fixture
def tokenizer():
    return ascii_tokenizer()


@pytest.fixture(
    params=[
        pytest.param(False, marks=pytest.mark.slow, id="cpu"),
        pytest.param(
            True,
            marks=[
                pytest.mark.multi_gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
            ],
            id="gpu",
        ),
    ]
)
def use_gpus(request):
    return request.param


@pytest.fixture
def engines(tmp_path, tokenizer, use_gpus):
    save_llama(tmp_path, tokenizer)
    cluster = RayVirtualCluster([2], use_gpus=use_gpus)
    cache = {"kv_cache_memory_bytes": 256 << 20} if use_gpus else {}
    config = generation_config(tmp_path, tensor_parallel_size=2, **cache)
    engines = VllmGeneration(cluster, config, tokenizer, timeout_s=PATIENCE_S)
    yield engines
    engines.shutdown()
    cluster.shutdown()


@pytest.fixture
def model(tmp_path, engines):
    return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()


@pytest.fixture
def prompts(tokenizer):
    return prompts_of(tokenizer, TEXTS)


def make_sender(engines, source):
    sender = rl_refit.RefitSender(
        source, num_receivers=2, timeout_s=PATIENCE_S, bucket_bytes=64 << 10
    )
    engines.init_transfer(sender.address)
    return sender


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)


def test_an_engine_is_refitted_also_after_a_rank_failed_and_ends_whole_after_one_is_lost(
    engines, model, prompts, use_gpus, monkeypatch, wait_until_gone
):
    assert (engines.num_engines, engines.num_receivers) == (1, 2)
    check(engines.generate(prompts), model, AGREED[use_gpus])
    source = rl_refit.TensorSource(model.state_dict())
    with make_sender(engines, source) as sender:
        for version in (0, 3):
            change(model)
            assert len(refit(engines, sender, version)) == 2
            check(engines.generate(prompts), model, AGREED[use_gpus])
            change(model)
            with monkeypatch.context() as patch:
                patch.setattr(Receivers, "send", send_rank_1_a_wrong_digest)
                told = "receiver 1, bucket 2.*its digest is"
                fail_to_refit(engines, sender, version + 1, told=told)
            with pytest.raises(EngineStateError, match="commit_update"):
                engines.commit_update(version + 1)
            with pytest.raises(EngineStateError, match="receiver 1, bucket 2"):
                engines.generate(prompts)
            refit(engines, sender, version + 2)
            check(engines.generate(prompts), model, AGREED[use_gpus])
    lose_a_rank(engines, source, prompts, wait_until_gone)


def lose_a_rank(engines, source, prompts, wait_until_gone):
    """Kill a rank in the middle of a refit: the engine samples no more, and ends whole."""
    processes = {engines.facts[0].process_id, *descendants(engines.facts[0].process_id)}
    titles = {pid: title_of(pid) for pid in processes}
    seconds = [pid for pid in processes if "Worker_TP1" in titles[pid]]
    assert len(seconds) == 1, titles
    with make_sender(engines, Deadly(source, *seconds)) as sender:
        engines.begin_update(6)
        call = engines.update(6)
        with pytest.raises(rl_refit.RefitError, match=r"receiver 1.*the receiver is gone"):
            sender.send(6)
        with pytest.raises(RuntimeError, match="not all of vLLM's workers are alive"):
            engines.wait_for_update(call)
        with pytest.raises(EngineStateError, match="the refit to version 6 failed"):
            engines.generate(prompts)
    engines.shutdown()
    wait_until_gone(processes)


def send_rank_1_a_wrong_digest(self, message):
    for rank, channel in self._channels.items():
        if rank == 1 and isinstance(message, Filled) and message.bucket == 2:
            channel.send(replace(message, digest=message.digest ^ 1), self._deadline)
        else:
            channel.send(message, self._deadline)


class Deadly:
    """A source that kills a process in the middle."""

    def __init__(self, source, pid):
        self._source = source
        self._pid = pid

    def metadata(self):
        return self._source.metadata()

    def __iter__(self):
        for count, pair in enumerate(self._source):
            if count == len(self.metadata()) // 2:
                os.kill(self._pid, signal.SIGKILL)
            yield pair


def test_an_engine_that_dies_takes_its_processes_along(engines, prompts, wait_until_gone):
    engine = engines.facts[0].process_id
    processes = {engine, *descendants(engine)}
    assert len(processes) > 2
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 0 of vllm died"):
        engines.generate(prompts)
    wait_until_gone(processes)


def title_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def check(output, model, tolerance):
    expected = expected_logprobs(model, output, temperature=0.7)
    torch.testing.assert_close(output["logprobs"], expected, atol=tolerance, rtol=0)
