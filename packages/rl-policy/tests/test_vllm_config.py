"""The section `generation` for vLLM: defaults, refusals, and what vLLM is told. No vLLM here."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S
from rl_interfaces import resolve_policy_config
from rl_policy.generation.vllm.config import (
    count_engines,
    engine_arguments,
    generation_of_policy,
    parse_engine_config,
    parse_sampling_config,
)
from rl_policy.generation.vllm.engine.environment import prepare_environment, temporary_files_apart

pytestmark = pytest.mark.promise


def engine(vllm_cfg=None, **changes):
    config = {"model_name": "m", "vllm_cfg": vllm_cfg or {}} | changes
    return parse_engine_config(config, seed=3)


def sampling(pad=0, end=1, **config):
    tokenizer = SimpleNamespace(pad_token_id=pad, eos_token_id=end)
    return parse_sampling_config(config, tokenizer, batch_size=8)


def test_an_empty_section_takes_every_default():
    config = engine()
    assert (config.tensor_parallel_size, config.precision, config.sleep_level) == (
        1,
        "bfloat16",
        1,
    )
    assert config.max_model_len is None
    assert config.weight_transfer
    assert config.is_colocated
    assert config.seed == 3


def test_none_means_not_set():
    assert engine({"max_num_seqs": None}).max_num_seqs == 256


@pytest.mark.parametrize(
    ("vllm_cfg", "message"),
    [
        ({"tensor_parallel": 2}, "generation.vllm_cfg.tensor_parallel is not a known key"),
        ({"tensor_parallel_size": 0}, "vllm_cfg.tensor_parallel_size=0 must be at least 1"),
        ({"tensor_parallel_size": 1.5}, "tensor_parallel_size must be int, got float 1.5"),
        ({"max_model_len": 0}, "vllm_cfg.max_model_len=0 must be at least 1"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes=-1 must be at least 1"),
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization=1.2 must lie in (0, 1]"),
        ({"precision": "int3"}, "vllm_cfg.precision='int3' must be one of"),
        ({"sleep_level": 3}, "vllm_cfg.sleep_level=3 must be 1 or 2"),
        ({"adapter_rank": 0}, "vllm_cfg.adapter_rank=0 must be at least 1"),
        ({"adapter_rank": 513}, "vllm_cfg.adapter_rank=513: vLLM takes at most 512"),
        (
            {"adapter_rank": 8, "weight_transfer": False},
            "adapter_rank=8 contradicts generation.vllm_cfg.weight_transfer=False",
        ),
        (
            {"adapter_rank": 8, "engine_kwargs": {"max_loras": 2}},
            "engine_kwargs.max_loras contradicts generation.vllm_cfg.adapter_rank=8",
        ),
        ({"generate_timeout_s": 0}, "generate_timeout_s=0 must be positive and finite"),
        (
            {"engine_kwargs": {"dtype": "float32"}},
            "engine_kwargs.dtype is already set by vllm_cfg.precision",
        ),
        (
            {"engine_kwargs": {"max_num_seqs": 4}},
            "engine_kwargs.max_num_seqs is already set by vllm_cfg.max_num_seqs",
        ),
    ],
)
def test_a_wrong_section_is_refused_by_key_and_value(vllm_cfg, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        engine(vllm_cfg)


def test_a_model_is_needed():
    with pytest.raises(ValueError, match=r"generation\.model_name is not set"):
        parse_engine_config({"vllm_cfg": {}}, seed=0)


def test_the_end_token_ends_rows_besides_the_configured_ones():
    assert sampling(stop_token_ids=[7, 5]).stop_token_ids == (1, 5, 7)
    assert sampling(end=None).stop_token_ids == ()


@pytest.mark.parametrize(
    ("configured", "pad", "end", "expected"), [(9, 0, 1, 9), (None, 0, 1, 0), (None, None, 1, 1)]
)
def test_the_padding_token_is_the_configured_one_first(configured, pad, end, expected):
    assert sampling(pad, end, pad_token_id=configured).pad_token_id == expected


def test_no_padding_token_at_all_is_refused():
    with pytest.raises(ValueError, match="pad_token_id is not set, and the tokenizer has neither"):
        sampling(pad=None, end=None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_new_tokens": 0}, "generation.max_new_tokens=0 must be at least 1"),
        ({"top_k": 0}, "generation.top_k=0 must be at least 1"),
        ({"top_p": 0.0}, "generation.top_p=0.0 must be above 0"),
        ({"temperature": -1.0}, "generation.temperature=-1.0 must be at least 0.01"),
        ({"temperature": 0.001}, "generation.temperature=0.001 must be at least 0.01, or 0"),
        ({"stop_strings": [""]}, "generation.stop_strings[0]='' must not be empty"),
        ({"stop_strings": "END"}, "generation.stop_strings must be"),
        ({"temprature": 1.0}, "did you mean 'temperature'?"),
    ],
)
def test_wrong_sampling_is_refused_by_key_and_value(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sampling(**config)


def test_engines_stay_within_a_node():
    assert count_engines({"a": 4, "b": 2}, tensor_parallel_size=2) == 3
    with pytest.raises(ValueError, match="tensor_parallel_size=2 does not divide the 3 bundles"):
        count_engines({"a": 3, "b": 1}, tensor_parallel_size=2)


def arguments(is_cpu=False, has_latent_attention=False, **vllm_cfg):
    return engine_arguments(
        engine(vllm_cfg),
        tokenizer="t",
        enable_sleep_mode=not is_cpu,
        is_cpu=is_cpu,
        has_latent_attention=has_latent_attention,
    )


def test_log_probabilities_are_those_of_the_sampled_distribution():
    assert arguments()["logprobs_mode"] == "processed_logprobs"


def test_routes_are_returned_on_a_gpu_only():
    assert arguments(return_routed_experts=True)["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in arguments()
    with pytest.raises(ValueError, match=r"vllm_cfg\.return_routed_experts=True: .* on a GPU only"):
        arguments(is_cpu=True, return_routed_experts=True)
    with pytest.raises(ValueError, match=r"already set by vllm_cfg\.return_routed_experts"):
        engine({"engine_kwargs": {"enable_return_routed_experts": True}})


def test_latent_attention_in_float32_takes_a_kernel_of_that_precision_on_the_cpu():
    chosen = {
        (precision, is_cpu): arguments(
            precision=precision, is_cpu=is_cpu, has_latent_attention=True
        ).get("attention_backend")
        for precision in ("float32", "bfloat16")
        for is_cpu in (True, False)
    }
    assert {key: name for key, name in chosen.items() if name} == {("float32", True): "CPU_MLA"}
    assert "attention_backend" not in arguments(precision="float32", is_cpu=True)


def test_the_cpu_gets_a_cache_of_its_own_size_unless_one_is_given():
    assert arguments()["kv_cache_memory_bytes"] is None
    assert arguments(is_cpu=True)["kv_cache_memory_bytes"] == 1 << 30
    assert arguments(is_cpu=True, kv_cache_memory_bytes=5)["kv_cache_memory_bytes"] == 5


def test_further_arguments_are_passed_on():
    assert arguments(engine_kwargs={"block_size": 32})["block_size"] == 32


@pytest.mark.parametrize("argument", sorted(arguments()))
def test_what_vllm_is_passed_cannot_be_passed_a_second_time(argument):
    with pytest.raises(ValueError, match=rf"engine_kwargs\.{argument} is already set by \w+"):
        engine({"engine_kwargs": {argument: None}})


def test_an_engine_with_adapters_has_room_for_one_of_that_rank():
    assert not {"enable_lora", "max_lora_rank"} & arguments().keys()
    for rank, room in ((1, 1), (2, 8), (8, 8), (65, 128), (512, 512)):
        found = arguments(adapter_rank=rank)
        assert (found["enable_lora"], found["max_lora_rank"], found["max_loras"]) == (True, room, 1)


def test_without_weight_transfer_vllm_is_told_nothing_of_it():
    assert arguments()["weight_transfer_config"] == {"backend": "rl_refit"}
    assert "weight_transfer_config" not in arguments(weight_transfer=False)


@pytest.mark.parametrize(
    ("local_rank", "size", "expected"), [("0", 1, "4"), ("2", 1, "6"), ("2", 2, "6,7")]
)
def test_an_engine_sees_its_own_gpus_and_not_the_ranks_of_its_group(
    monkeypatch, local_rank, size, expected
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("MASTER_PORT", "1")
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "theirs")
    prepare_environment(size, precision="bfloat16")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    assert not {"LOCAL_RANK", "MASTER_PORT"} & set(os.environ)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "theirs"


def test_an_engine_takes_from_the_policy_what_it_is_not_told():
    policy = {
        "model_name": "m",
        "precision": "float32",
        "max_total_sequence_length": 40,
        "generation": {"backend": "vllm", "vllm_cfg": {"max_model_len": 20}},
    }
    generation = generation_of_policy(resolve_policy_config(policy))
    config = parse_engine_config(generation, seed=0)
    assert (config.model_name, config.precision, config.max_model_len) == ("m", "float32", 20)
    policy["generation"] = {"backend": "vllm", "model_name": "other"}
    generation = generation_of_policy(resolve_policy_config(policy))
    config = parse_engine_config(generation, seed=0)
    assert (config.model_name, config.precision, config.max_model_len) == ("other", "float32", 40)


@pytest.mark.parametrize(
    ("precision", "given", "expected"),
    [("float32", None, "ieee"), ("float32", "tf32", "tf32"), ("bfloat16", None, None)],
)
def test_float32_is_not_multiplied_as_tf32(precision, given, expected, monkeypatch):
    """Triton's default on CUDA, and so vLLM's attention in float32; the user's own is kept."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {} if given is None else {"TRITON_F32_DEFAULT": given})
        prepare_environment(1, precision=precision)
        assert os.environ.get("TRITON_F32_DEFAULT") == expected


@pytest.mark.parametrize("is_set", [True, False])
def test_temporary_files_of_an_engine_go_with_it(tmp_path, monkeypatch, is_set):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Set first, so that it is restored in either case.
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    if not is_set:
        monkeypatch.delenv("TMPDIR")
    ask = [sys.executable, "-c", "import tempfile; print(tempfile.mkstemp()[1])"]
    with temporary_files_apart() as directory:
        assert directory.parent == tmp_path
        of_a_child = subprocess.run(
            ask, capture_output=True, text=True, check=True, timeout=PATIENCE_S
        )
        assert (
            Path(of_a_child.stdout.strip()).parent == Path(tempfile.mkdtemp()).parent == directory
        )
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == tmp_path
    assert tempfile.gettempdir() == str(tmp_path)
    assert os.environ.get("TMPDIR") == (str(tmp_path) if is_set else None)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("rl-policy")] == []


def test_a_directory_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    named = [
        parse_engine_config({"model_name": name, "vllm_cfg": {}}, seed=0).model_name
        for name in ("model", "Qwen/Qwen3-0.6B")
    ]
    assert named == [str(tmp_path / "model"), "Qwen/Qwen3-0.6B"]
