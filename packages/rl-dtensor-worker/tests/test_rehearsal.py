"""What cannot be packed is refused before a process starts, by a stand-in of the model."""

import logging
import re

import pytest
import strange_models
import torch
from rl_dtensor_worker import DTensorPolicyWorker
from rl_dtensor_worker.config import EngineConfig
from rl_dtensor_worker.rehearsal import check_packing, stand_in
from tiny_model import build_tokenizer, make_config
from transformers import (
    BartConfig,
    DeepseekV3Config,
    GlmMoeDsaConfig,
    GPT2Config,
    LlamaConfig,
    OpenAIGPTConfig,
    Qwen3NextConfig,
    RobertaConfig,
)

PACKING = {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}}
CP2 = {"dtensor_cfg": {"enabled": True, "context_parallel_size": 2}}
LINEAR = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
# As released, without a file of weights.
LARGE = {
    "llama": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128_256,
        bos_token_id=128_000,
        eos_token_id=128_001,
    ),
    "deepseek_v3": DeepseekV3Config(),
}


def save(config, path, **changes):
    """Write a config without weights, and the tokenizer, and return a policy config for them."""
    config.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return make_config(str(path), **changes)


@pytest.mark.parametrize(
    ("config", "class_name"),
    [
        (BartConfig(is_decoder=True, d_model=64), "BartForCausalLM"),
        (RobertaConfig(is_decoder=True, hidden_size=48), "RobertaForCausalLM"),
        (OpenAIGPTConfig(n_embd=64, n_layer=2, n_head=4), "OpenAIGPTLMHeadModel"),
    ],
    ids=["bart", "roberta", "openai-gpt"],
)
@pytest.mark.parametrize(
    ("layout", "ranks", "key"),
    [
        (PACKING, 1, "policy.sequence_packing.enabled=True"),
        (CP2, 2, "policy.dtensor_cfg.context_parallel_size=2"),
    ],
    ids=["packing", "cp2"],
)
def test_what_loses_its_positions_is_refused(tmp_path, config, class_name, layout, ranks, key):
    given = save(config, tmp_path)
    DTensorPolicyWorker.validate_config(given, world_size=ranks)
    told = rf"{re.escape(key)}: with .*{class_name} leaks .* by \d.* of the largest"
    with pytest.raises(ValueError, match=told):
        DTensorPolicyWorker.validate_config(given | layout, world_size=ranks)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_embd=64, n_head=4),
        Qwen3NextConfig(hidden_size=64, num_attention_heads=4, num_experts=16, **LINEAR),
        *LARGE.values(),
    ],
    ids=["gpt2", "qwen3_next", *LARGE],
)
def test_what_packs_is_shown_to_pack(tmp_path, caplog, config):
    given = EngineConfig.from_policy_config(
        save(config, tmp_path, **PACKING), world_size=1, init_optimizer=True
    )
    with caplog.at_level(logging.INFO, logger="rl_dtensor_worker"):
        check_packing(given)
    assert not caplog.records, "it is left to the start, or something is said twice"


@pytest.mark.parametrize("head", ["reward", "value"])
def test_a_model_of_scores_is_rehearsed_by_its_scores(tmp_path, caplog, head):
    config = save(GPT2Config(n_embd=64, n_head=4), tmp_path, head=head, **PACKING)
    with caplog.at_level(logging.INFO, logger="rl_dtensor_worker"):
        DTensorPolicyWorker.validate_config(config, world_size=1)
    assert not caplog.records, "it is left to the start, or something is said twice"


@pytest.mark.parametrize("is_narrow", [True, False], ids=["narrow", "wide"])
@pytest.mark.parametrize("name", LARGE)
def test_a_stand_in_is_small(tmp_path, name, is_narrow):
    config = save(LARGE[name], tmp_path, **PACKING)
    given = EngineConfig.from_policy_config(config, world_size=1, init_optimizer=True)
    model = stand_in(given, is_narrow=is_narrow)
    shared = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    limit = 64 * 2**20 if is_narrow else 2**30
    assert sum(each.nbytes() for each in shared.values()) < limit
    assert len(model.model.layers) == {"llama": 1, "deepseek_v3": 4}[name]
    full = LARGE[name].hidden_size
    assert model.lm_head.weight.shape[0] == 512
    assert model.lm_head.weight.shape[1] == full if not is_narrow else full // 4 >= 512
    # Each of them is random, and none the same as another.
    for parameter in model.parameters():
        first = parameter.flatten(1)[:2] if parameter.ndim > 1 else parameter[:, None][:2]
        assert first.std() > 0
        assert not torch.equal(*first)


def test_what_a_class_does_that_is_new_is_seen(tmp_path):
    config = make_config(strange_models.build_strange(tmp_path), **PACKING)
    strange_models.load_as("OrderedLlama")
    told = r"policy\.sequence_packing\.enabled=True: OrderedLlama does not run so: RuntimeError"
    with pytest.raises(ValueError, match=told):
        DTensorPolicyWorker.validate_config(config, world_size=1)


def test_a_model_that_does_not_run_small_is_left_to_the_start(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("rl_dtensor_worker.rehearsal._LARGEST", 1000)
    config = save(BartConfig(is_decoder=True, d_model=64), tmp_path, **PACKING)
    with caplog.at_level(logging.INFO, logger="rl_dtensor_worker"):
        DTensorPolicyWorker.validate_config(config, world_size=1)
    assert "left to the start: its layers are too large for a rehearsal" in caplog.text


def test_a_token_that_chooses_among_more_tokens_than_a_probe_has_is_seen_to_choose(tmp_path):
    config = save(GlmMoeDsaConfig(), tmp_path, **PACKING)
    DTensorPolicyWorker.validate_config(config, world_size=1)
