"""Adapters apart from their base, in a real vLLM engine, from a sender in this process."""

import pytest
import torch
from kept_clusters import kept_cluster
from patience import PATIENCE_S
from rl_policy.generation.vllm import VllmGeneration
from rl_refit import RefitError, RefitSender, TensorSource
from rl_refit.adapters import DOWN, UP
from transformers import AutoModelForCausalLM
from vllm_oracles import (
    TEXTS,
    TOLERANCE,
    ascii_tokenizer,
    expected_logprobs,
    generation_config,
    prompts_of,
    save_llama,
)

pytestmark = [pytest.mark.vllm, pytest.mark.needs("rl-policy[vllm]")]

RANK = 3  # vLLM has memory for ranks of 1, 8, 16 ...
WRONG = 1e-2
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def tokenizer():
    return ascii_tokenizer()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("llama")
    save_llama(path, tokenizer)
    return path


@pytest.fixture(scope="module")
def engines(model_path, tokenizer, shared_ray):
    cluster = kept_cluster([1])
    config = generation_config(model_path, adapter_rank=RANK)
    engines = VllmGeneration(cluster, config, tokenizer, timeout_s=PATIENCE_S)
    yield engines
    engines.shutdown()
    cluster.shutdown()


class Adapters:
    """Adapters of a model's projections."""

    def __init__(self, model):
        self.model = model
        self.factors = {}
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                layer, (outputs, inputs) = name.removesuffix(".weight"), weight.shape
                self.factors[layer + DOWN] = torch.zeros(RANK, inputs)
                self.factors[layer + UP] = torch.zeros(outputs, RANK)

    def draw(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.factors.values():
            tensor.normal_(std=0.1, generator=generator)

    def merged(self):
        model = AutoModelForCausalLM.from_config(self.model.config).float().eval()
        state = dict(self.model.state_dict())
        for name in list(state):
            layer = name.removesuffix(".weight")
            if layer + UP in self.factors:
                change = self.factors[layer + UP] @ self.factors[layer + DOWN]
                state[name] = state[name] + change
        model.load_state_dict(state)
        return model


def send(engines, sender, version, *, adapters_only, staging="off"):
    engines.begin_update(version, staging=staging)
    call = engines.update(version)
    report = sender.send(version, adapters_only=adapters_only)
    engines.wait_for_update(call)
    engines.commit_update(version)
    sender.commit(version)
    return report


def error_of(model, output):
    expected = expected_logprobs(model, output, temperature=TEMPERATURE)
    return (output["logprobs"] - expected).abs().max().item()


def test_engines_apply_adapters_to_the_base_that_they_hold(engines, model_path, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(model_path).float().eval()
    adapters = Adapters(model)
    prompts = prompts_of(tokenizer, TEXTS)
    # Before the first refit the adapter is zero.
    assert error_of(model, engines.generate(prompts)) < TOLERANCE
    # A base that is not that of the files.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    base = TensorSource(model.named_parameters())
    with RefitSender(base, adapters=TensorSource(adapters.factors), timeout_s=PATIENCE_S) as sender:
        engines.init_transfer(sender.address)
        assert not engines.holds_base()
        seen = {}
        for version in range(4):
            adapters.draw(version)
            report = send(
                engines,
                sender,
                version,
                adapters_only=version > 0,
                staging="host" if version > 1 else "off",
            )
            assert engines.holds_base()
            assert engines.update_metrics()["refit_staged"] == float(version > 1)
            is_less = report.bytes_sent < report.bytes / 3  # of a model of 64 dims
            assert is_less == (version > 0)
            output = engines.generate(prompts)
            assert output["weight_version"].unique().tolist() == [version]
            seen[version] = adapters.merged()
            assert error_of(seen[version], output) < TOLERANCE
            assert error_of(model, output) > WRONG
            assert all(error_of(seen[old], output) > WRONG for old in range(version))
        check_that_a_failure_keeps_the_old_ones(engines, sender, seen[3], prompts)
        adapters.draw(5)
        send(engines, sender, 5, adapters_only=True, staging="host")
        assert error_of(adapters.merged(), engines.generate(prompts)) < TOLERANCE


def check_that_a_failure_keeps_the_old_ones(engines, sender, model, prompts):
    source = sender._adapters

    class Breaking:
        def __iter__(self):
            yield from list(source)[:3]
            raise OSError("the trainer breaks off")

    sender._adapters = Breaking()
    engines.begin_update(4, staging="host")
    call = engines.update(4)
    with pytest.raises(OSError, match="breaks off"):
        sender.send(4, adapters_only=True)
    with pytest.raises(RefitError, match="breaks off"):
        engines.wait_for_update(call)
    sender._adapters = source
    output = engines.generate(prompts)
    assert output["weight_version"].unique().tolist() == [3]
    assert error_of(model, output) < TOLERANCE
    assert engines.holds_base()
