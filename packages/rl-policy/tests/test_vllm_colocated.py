"""A policy and a real vLLM engine on the same bundles, through refits that succeed and that fail.

On a machine with a GPU they share it, and what sleeps gives its memory away.
"""

import sys
from contextlib import ExitStack

import pytest
import ray
import torch
from patience import PATIENCE_S
from rl_batched_data import BatchedDataDict
from rl_policy import Policy, RayVirtualCluster
from rl_policy.generation.state import EngineStateError
from rl_policy.generation.vllm import VllmGeneration
from rl_policy.losses import NLLLoss
from rl_policy.refit import WeightLink, engines_on_device
from rl_refit import RefitError
from vllm_oracles import (
    TEXTS,
    TOLERANCE,
    ascii_tokenizer,
    generation_config,
    prompts_of,
    save_llama,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.needs("rl-policy[all]"),
]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

HAS_GPU = torch.cuda.is_available()
# Kernels of a GPU differ by more.
AGREED = 1e-3 if HAS_GPU else TOLERANCE
WRONG = 1e-2
CACHE_BYTES = 256 << 20 if HAS_GPU else 16 << 20


class Colocated:
    """A policy, the engine beside it, and the link between the two."""

    def __init__(self, path, tokenizer, *, sleep_level):
        self.tokenizer = tokenizer
        self.owned = ExitStack()
        self.cluster = RayVirtualCluster([1], max_colocated_worker_groups=2)
        self.owned.callback(self.cluster.shutdown)
        with ExitStack() as failed:
            failed.callback(self.close)
            self.open(path, sleep_level=sleep_level)
            failed.pop_all()

    def open(self, path, *, sleep_level):
        section = {
            "model_name": str(path),
            "precision": "float32",
            "dtensor_cfg": {"enabled": True},
            "train_global_batch_size": len(TEXTS),
            "train_micro_batch_size": 1,
            "logprob_batch_size": 2,
            "max_total_sequence_length": 48,
            "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}},
            "timeout_s": PATIENCE_S,
        }
        self.policy = Policy(self.cluster, section, self.tokenizer, init_reference_model=False)
        self.owned.callback(self.policy.shutdown)
        config = generation_config(
            path,
            sleep_level=sleep_level,
            kv_cache_memory_bytes=CACHE_BYTES,
        )
        self.engines = VllmGeneration(
            self.cluster, {**config, "temperature": 1.0}, self.tokenizer, timeout_s=PATIENCE_S
        )
        self.owned.callback(self.engines.shutdown)
        transport = "cuda_ipc" if HAS_GPU else "shm"
        self.link = WeightLink(self.policy, self.engines, is_paired=True, transport=transport)
        self.engines.finish_generation()

    def close(self):
        self.owned.close()

    def train(self, samples):
        self.policy.prepare_for_training()
        self.policy.train(samples, NLLLoss())

    def sample(self, version):
        """Return samples of the policy's weights, as the policy trains on them."""
        with engines_on_device(self.policy, self.engines, self.link, version=version) as report:
            assert (report is None) == (version is None)
            output = self.engines.generate(prompts_of(self.tokenizer, TEXTS))
        lengths = output["unpadded_sequence_lengths"]
        positions = torch.arange(output["output_ids"].shape[1])
        is_sampled = positions >= (lengths - output["generation_lengths"])[:, None]
        return BatchedDataDict(
            {
                "input_ids": output["output_ids"],
                "input_lengths": lengths,
                "token_mask": (is_sampled & (positions < lengths[:, None])).float(),
                "sample_mask": torch.ones(len(lengths)),
                "logprobs": output["logprobs"],
                "weight_version": output["weight_version"],
            }
        )

    def mismatch(self, samples):
        """Return how far the engine's log-probabilities are from those of the policy."""
        rows = BatchedDataDict({key: samples[key] for key in ("input_ids", "input_lengths")})
        scores = self.policy.get_logprobs(rows)["logprobs"]
        return ((scores - samples["logprobs"]) * samples["token_mask"]).abs().max().item()


# Without a GPU nothing is given away.
@pytest.fixture(scope="module", params=[1, 2] if HAS_GPU else [1])
def pair(request, tmp_path_factory):
    pytest.importorskip("vllm")
    path, tokenizer = tmp_path_factory.mktemp("llama"), ascii_tokenizer()
    save_llama(path, tokenizer)
    pair = Colocated(path, tokenizer, sleep_level=request.param)
    yield pair
    pair.close()


def test_samples_are_those_of_the_trained_weights(pair):
    version = pair.engines.weight_version + 1
    for step in range(2):
        samples = pair.sample(version + step)
        assert set(samples["weight_version"].tolist()) == {version + step}
        assert pair.mismatch(samples) < AGREED
        pair.train(samples)
        pair.policy.prepare_for_lp_inference()
        assert pair.mismatch(samples) > WRONG


def break_once(worker):
    """Let vLLM fail to process what it has loaded, the next time."""
    engine = worker.weight_transfer_engine

    def fail():
        del engine._complete
        raise RuntimeError("no room to process it")

    engine._complete = fail


def test_after_a_failed_refit_the_same_version_can_be_sent_again(pair):
    version = pair.engines.weight_version + 1
    (host,) = pair.engines._group._hosts
    ray.get(host.call.remote("_on_workers", True, break_once), timeout=PATIENCE_S)
    with pytest.raises(RefitError, match="no room to process it"):
        pair.sample(version)
    with pytest.raises(EngineStateError, match="weights and kv_cache sleep"):
        pair.engines.generate(prompts_of(pair.tokenizer, TEXTS))
    pair.engines.prepare_for_generation()
    with pytest.raises(EngineStateError, match=r"no room to process it|dropped the weights"):
        pair.engines.generate(prompts_of(pair.tokenizer, TEXTS))
    pair.engines.finish_generation()
    samples = pair.sample(version)
    assert set(samples["weight_version"].tolist()) == {version}
    assert pair.mismatch(samples) < AGREED


def test_a_policy_trains_on_after_a_failed_refit(pair):
    version = pair.engines.weight_version + 1
    samples = pair.sample(version)
    (host,) = pair.engines._group._hosts
    ray.get(host.call.remote("_on_workers", True, break_once), timeout=PATIENCE_S)
    with pytest.raises(RefitError, match="no room to process it"):
        pair.sample(version + 1)
    pair.train(samples)
    samples = pair.sample(version + 1)
    assert pair.mismatch(samples) < AGREED


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_an_engine_that_sleeps_gives_its_memory_away(pair):
    version = pair.engines.weight_version + 1
    asleep, _ = torch.cuda.mem_get_info()
    with engines_on_device(pair.policy, pair.engines, pair.link, version=version):
        awake, _ = torch.cuda.mem_get_info()
    again, _ = torch.cuda.mem_get_info()
    assert asleep - awake > CACHE_BYTES // 2
    assert again - awake > CACHE_BYTES // 2
