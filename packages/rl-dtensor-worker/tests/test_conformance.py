"""The worker keeps every rule of the conformance kit, on one rank and on two."""

import pytest
import torch
from dtensor_case import dtensor_case
from rl_interfaces.testing import WorkerConformance
from tiny_model import build_tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

pytestmark = pytest.mark.needs("rl-dtensor-worker[lora]")

LAYOUTS = {"one": (1, {}), "dp2": (2, {}), "tp2": (2, {"tensor_parallel_size": 2})}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose every head two ranks can share."""
    path = build_tiny_model(tmp_path_factory.mktemp("model"), num_layers=1)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(path, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reward_model(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return str(path)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("dp2", "tp2")]


@pytest.fixture(scope="module", params=["one", *SLOW])
def layout(request):
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def worker_case(layout, model, reward_model):
    return dtensor_case(model, reward_model, **layout[1])


@pytest.fixture(scope="module")
def run_ranks(layout, pools):
    return pools(layout[0]).run


@pytest.mark.promise
class TestDTensorWorker(WorkerConformance):
    pass
