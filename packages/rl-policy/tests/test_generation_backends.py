"""Engines by name, and what is said where one is missing."""

import importlib.util
import subprocess
import sys

import pytest
from rl_interfaces import GenerationInterface, WeightReceiver
from rl_policy import RayVirtualCluster, backends
from rl_policy.backends import check_generation_backend
from rl_policy.generation.vllm import VllmGeneration

pytestmark = pytest.mark.promise


def test_vllm_is_found_by_name():
    assert backends.load_engine("vllm") is VllmGeneration
    assert "vllm" in backends.installed_engines()


def test_an_engine_is_a_source_of_completions_and_a_receiver_of_weights():
    assert issubclass(VllmGeneration, GenerationInterface)
    assert issubclass(VllmGeneration, WeightReceiver)


def test_an_unknown_engine_names_the_entry_point_group_and_what_there_is():
    with pytest.raises(ImportError, match=r'entry-point group "rl_policy\.generation".*vllm'):
        backends.load_engine("nowhere")


@pytest.mark.parametrize("name", ["hf", "vllm"])
def test_a_policy_accepts_what_is_installed(name):
    check_generation_backend({"generation": {"backend": name}})


def test_a_policy_refuses_what_is_not():
    with pytest.raises(ValueError, match=r"generation\.backend='sglang' is not installed"):
        check_generation_backend({"generation": {"backend": "sglang"}})


def test_without_vllm_nothing_starts_and_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    untouched = RayVirtualCluster([1], use_gpus=False)
    with pytest.raises(ImportError, match=r'pip install "rl-policy\[vllm\]"'):
        VllmGeneration(untouched, {"backend": "vllm", "model_name": "m"})
    assert untouched._placement_groups is None


def test_a_wrong_config_starts_nothing():
    untouched = RayVirtualCluster([1], use_gpus=False)
    with pytest.raises(ValueError, match="tensor_parallel_size=0"):
        VllmGeneration(untouched, {"model_name": "m", "vllm_cfg": {"tensor_parallel_size": 0}})
    assert untouched._placement_groups is None


def test_the_driver_never_imports_vllm():
    code = "import sys, rl_policy.generation.vllm; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
