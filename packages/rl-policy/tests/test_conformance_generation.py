"""The policy's own sampler, and vLLM's, prove themselves by the conformance kit."""

from dataclasses import replace

import pytest
import ray
import rl_refit
import torch
from kept_clusters import kept_cluster
from patience import PATIENCE_S
from rl_batched_data import BatchedDataDict
from rl_interfaces import ResidencyError
from rl_interfaces.testing.generation import (
    DecodesText,
    GenerationCase,
    GenerationConformance,
    RefitsMeanwhile,
    Streams,
)
from rl_policy import Policy
from rl_policy.generation.state import EngineStateError
from rl_policy.generation.stream import SampledAtCollect
from rl_policy.generation.vllm import VllmGeneration
from transformers import AutoModelForCausalLM
from vllm_oracles import MAX_MODEL_LEN, ascii_tokenizer, generation_config, refit, save_llama

WHOLE = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "stop_token_ids": (), "stop_strings": ()}


def sampling_of(keys, end_token_id):
    """Return the fields of a sampling config for keys of a `GenerationConfig`."""
    lists = {key: tuple(value) for key, value in keys.items() if isinstance(value, list)}
    fields = WHOLE | keys | lists
    return fields | {"stop_token_ids": (*fields["stop_token_ids"], end_token_id)}


class LlamaCase(GenerationCase, DecodesText):
    """A small Llama on plain transformers."""

    max_length = MAX_MODEL_LEN

    def __init__(self, model_path, tokenizer, running):
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.tokenizer = tokenizer
        self.running = running
        self.vocab_size = len(tokenizer)
        self.pad_token_id, self.end_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id

    def logits(self, tokens):
        with torch.no_grad():
            return self.model(tokens[None]).logits[0]

    def batch(self, **columns):
        return BatchedDataDict(columns)

    def decode(self, tokens):
        return self.tokenizer.decode(tokens)


class PolicyCase(LlamaCase, Streams):
    """The policy's own generation; it is its residency that sleeps.

    Its stream is the one over whatever samples batches.
    """

    state_error = ResidencyError
    is_chosen_by_name = False

    def backend(self, **sampling):
        fields = sampling_of(sampling, self.end_token_id)

        def change(host):
            worker = host._worker
            settings = worker._settings
            sampled = replace(settings.sampling, **fields)
            worker._settings = replace(settings, sampling=sampled)

        hosts = self.running.worker_group._hosts
        ray.get([host.__ray_call__.remote(change) for host in hosts], timeout=PATIENCE_S)
        self.fields = fields
        return self.running

    def stream(self, backend):
        return SampledAtCollect(
            backend,
            max_new_tokens=self.fields["max_new_tokens"],
            stop_token_ids=self.fields["stop_token_ids"],
            limit=32,
        )

    def sleep(self, backend):
        backend.offload_after_refit()


class VllmCase(LlamaCase, RefitsMeanwhile):
    """Engines of vLLM, and a sender of the plain model's weights."""

    state_error = EngineStateError

    def backend(self, **sampling):
        fields = sampling_of(sampling, self.end_token_id)
        self.running._sampling = replace(self.running._sampling, **fields)
        return self.running

    def change_weights(self):
        generator = torch.Generator().manual_seed(self.running.weight_version + 100)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)

    def stream(self, backend):
        return backend

    def refit(self, backend, version, **options):
        with self.sender(rl_refit.TensorSource(self.model.state_dict())) as sender:
            refit(backend, sender, version, **options)

    def refit_meanwhile(self, backend, version):
        self.refit(backend, version, staging="host", kv_cache="drop")

    def fail_refit(self, backend, version):
        source = BreaksHalfWay(rl_refit.TensorSource(self.model.state_dict()))
        with self.sender(source) as sender:
            backend.begin_update(version)
            call = backend.update(version)
            with pytest.raises(OSError, match="no such shard"):
                sender.send(version)
            with pytest.raises(rl_refit.RefitError, match="no such shard"):
                backend.wait_for_update(call)

    def sender(self, source):
        sender = rl_refit.RefitSender(
            source,
            num_receivers=self.running.num_receivers,
            timeout_s=PATIENCE_S,
            bucket_bytes=32 << 10,
        )
        self.running.init_transfer(sender.address)
        return sender


class BreaksHalfWay:
    """A source that fails when some layers have been sent."""

    def __init__(self, source):
        self.source = source
        self.metadata = source.metadata

    def __iter__(self):
        for count, pair in enumerate(self.source):
            if count == 14:
                raise OSError("no such shard")
            yield pair


@pytest.fixture(scope="module")
def tokenizer():
    return ascii_tokenizer()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("llama")
    save_llama(path, tokenizer)
    return path


@pytest.fixture(scope="module")
def cluster(shared_ray):
    cluster = kept_cluster([2], use_gpus=False, max_colocated_worker_groups=2)
    yield cluster
    cluster.shutdown()


@pytest.mark.needs("rl-policy[dtensor]")
class TestPolicy(GenerationConformance):
    """On two data-parallel ranks."""

    @pytest.fixture(scope="class")
    @classmethod
    def generation_case(cls, cluster, model_path, tokenizer):
        config = {
            "model_name": str(model_path),
            "precision": "float32",
            "dtensor_cfg": {"enabled": True},
            "train_global_batch_size": 2,
            "train_micro_batch_size": 1,
            "generation_batch_size": 512,
            "max_total_sequence_length": MAX_MODEL_LEN,
            "generation": {"max_new_tokens": 4},
            "timeout_s": PATIENCE_S,
        }
        policy = Policy(
            cluster, config, tokenizer, init_optimizer=False, init_reference_model=False
        )
        yield PolicyCase(model_path, tokenizer, policy)
        assert policy.shutdown() is True


@pytest.mark.needs("rl-policy[vllm]")
@pytest.mark.vllm
@pytest.mark.slow
class TestVllm(GenerationConformance):
    """One engine."""

    @pytest.fixture(scope="class")
    @classmethod
    def generation_case(cls, cluster, model_path, tokenizer):
        config = generation_config(model_path, max_num_seqs=64)
        engines = VllmGeneration(
            cluster, config, tokenizer, workers_per_node=1, timeout_s=PATIENCE_S
        )
        yield VllmCase(model_path, tokenizer, engines)
        engines.shutdown()
