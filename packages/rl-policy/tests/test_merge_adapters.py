"""Adapters, merged into their model."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rl_policy.config import TinyModelSection
from rl_policy.data.tiny_model import build_tiny_model, tiny_model_config
from rl_policy.run.export import merge
from tolerances import REPEATED
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

pytestmark = pytest.mark.needs("rl-policy[lora]")


@pytest.fixture
def adapters(tmp_path):
    shape = tiny_model_config(TinyModelSection(), max_sequence_length=32)
    build_tiny_model(tmp_path / "model", config=shape, seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


def test_they_are_merged_into_the_model_that_they_name(adapters, tmp_path):
    made_of = merge(adapters, tmp_path / "merged")
    assert made_of == f"{tmp_path / 'model'} and the adapters of {adapters}"
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")("12+3=", return_tensors="pt")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    plain = base(**ids).logits
    adapted = PeftModel.from_pretrained(base, str(adapters))(**ids).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(**ids).logits
    assert not torch.allclose(plain, adapted, atol=1e-2)
    torch.testing.assert_close(merged, adapted, atol=REPEATED * float(adapted.abs().max()), rtol=0)


def test_a_model_that_is_missing_is_named(adapters, tmp_path):
    with pytest.raises(ValueError, match=r"--model='\./absent' is no directory, and no model"):
        merge(adapters, tmp_path / "merged", model="./absent")
    with pytest.raises(ValueError, match="--step 3 is of a run"):
        merge(adapters, tmp_path / "merged", step=3)
    path = adapters / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="names no model: give --model"):
        merge(adapters, tmp_path / "merged")


def test_adapters_of_a_reward_model_give_a_reward_model(tmp_path):
    shape = tiny_model_config(TinyModelSection(), max_sequence_length=32)
    build_tiny_model(tmp_path / "model", config=shape, seed=0)
    generation = '{"do_sample": false, "temperature": 0.6, "eos_token_id": [1, 7]}'
    (tmp_path / "model/generation_config.json").write_text(generation)
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    settings = LoraConfig(
        r=4, target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=["score"]
    )
    adapted = get_peft_model(base, settings)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "adapters")
    merge(tmp_path / "adapters", tmp_path / "merged")
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")("12+3=", return_tensors="pt")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.architectures == [type(base).__name__]
    assert merged.config.num_labels == 1
    with torch.no_grad():
        torch.testing.assert_close(
            merged(**ids).logits, adapted.eval()(**ids).logits, atol=1e-5, rtol=0
        )
    assert (tmp_path / "merged/generation_config.json").read_text() == generation


def test_adapters_of_another_task_are_refused(adapters, tmp_path):
    path = adapters / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task_type": "SEQ_2_SEQ_LM"}))
    with pytest.raises(ValueError, match="task_type='SEQ_2_SEQ_LM' cannot be merged"):
        merge(adapters, tmp_path / "merged")
