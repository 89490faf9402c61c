import pytest
import torch
from rl_policy.config import TinyModelSection, load_run_config
from rl_policy.data.tiny_model import build_tiny_model, tiny_model_config
from rl_policy.run.flops import DeviceSpeed, ModelSize, peak_flops
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        LlamaConfig(**SMALL, tie_word_embeddings=True),
        MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=["untied", "tied", "experts"],
)
def test_a_forward_pass_has_as_many_flops_as_torch_counts(config):
    config._attn_implementation = "eager"
    if config.model_type == "mixtral":
        # One matrix product per expert, which the counter sees.
        config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    rows, length = 3, 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(96, (rows, length)), use_cache=False)
    expected = ModelSize.of_config(config).forward_flops(torch.full((rows,), length))
    # Norms and rotary positions are no matrix products: under 1 %.
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_the_example_of_the_built_in_model():
    config = tiny_model_config(TinyModelSection(), max_sequence_length=32)
    size = ModelSize.of_config(config)
    layer = 4 * 64**2 + 3 * 64 + 3 * 64 * 256 + 2 * 64
    assert size.num_parameters == 2 * layer + 64 + 258 * 64
    assert size.attention_width == 2 * 64


def test_a_peak_is_known_for_devices_of_the_table_in_16_bits_alone():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float16") == 312e12
    assert peak_flops("NVIDIA L40S", "bfloat16") == 362e12
    assert peak_flops("NVIDIA GH200 480GB", "bfloat16") == 989.4e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert peak_flops("a device of tomorrow", "bfloat16") is None


def test_speed_is_per_device_and_utilization_of_the_policy_s_time():
    size = ModelSize(num_parameters=1000, attention_width=10)
    speed = DeviceSpeed(size=size, passes=3.0, num_policy_devices=2, num_devices=4, peak=1e6)
    measured = speed.measure(torch.tensor([10, 30]), step_s=2.0, train_s=0.5, num_epochs=2)
    flops = 2 * 3 * (2 * 1000 * 40 + 4 * 10 * (100 + 900))
    assert measured == {
        "tokens_per_s": 20.0,
        "tokens_per_s_per_device": 5.0,
        "tflops_per_s_per_device": pytest.approx(flops / 0.5 / 2 / 1e12),
        "mfu": pytest.approx(flops / 0.5 / 2 / 1e6),
    }


def test_no_peak_and_no_size_are_not_measured():
    size = ModelSize(num_parameters=1000, attention_width=10)
    options = {"passes": 3.0, "num_policy_devices": 1, "num_devices": 1, "peak": None}
    steps = {"step_s": 2.0, "train_s": 0.5, "num_epochs": 1}
    measured = DeviceSpeed(size=size, **options).measure(torch.tensor([10]), **steps)
    assert measured["mfu"] is None
    assert measured["tflops_per_s_per_device"] > 0
    measured = DeviceSpeed(size=None, **options).measure(torch.tensor([10]), **steps)
    assert measured["tflops_per_s_per_device"] is None


def test_the_measure_of_a_run(tmp_path):
    config = tiny_model_config(TinyModelSection(), max_sequence_length=32)
    build_tiny_model(tmp_path, config=config, seed=0)
    overrides = ["cluster.bundle_ct_per_node_list=[2]", "cluster.use_gpus=false"]
    speed = DeviceSpeed.of_run(load_run_config("grpo", overrides=overrides), model=str(tmp_path))
    assert speed.size == ModelSize.of_config(config)
    assert (speed.passes, speed.num_policy_devices, speed.num_devices) == (3.0, 2, 2)
    assert speed.peak is None
    overrides.append("policy.dtensor_cfg.lora.enabled=true")
    adapted = load_run_config("grpo", overrides=overrides)
    assert DeviceSpeed.of_run(adapted, model=str(tmp_path)).passes == 2.0


def test_a_model_that_cannot_be_counted_is_said(tmp_path, caplog):
    (tmp_path / "config.json").write_text('{"model_type": "bert"')
    speed = DeviceSpeed.of_run(load_run_config("grpo"), model=str(tmp_path))
    assert speed.size is None
    assert "FLOPs and MFU are not measured" in caplog.text
