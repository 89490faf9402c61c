"""The worker keeps every rule of the conformance kit, on one rank and on two."""

import pytest
from megatron_case import megatron_case
from rl_interfaces.testing import WorkerConformance
from tiny_models import build_tiny

LAYOUTS = {"one": (1, {}), "dp2": (2, {}), "pp2": (2, {"pipeline_model_parallel_size": 2})}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("dp2", "pp2")]


@pytest.fixture(scope="module", params=["one", *SLOW])
def layout(request):
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def worker_case(layout, tmp_path_factory):
    """A model with a layer for each pipeline stage."""
    num_layers = layout[1].get("pipeline_model_parallel_size", 1)
    path = tmp_path_factory.mktemp("qwen3")
    model = build_tiny(path, "qwen3", num_hidden_layers=num_layers)
    return megatron_case(model, **layout[1])


@pytest.fixture(scope="module")
def run_ranks(layout, pools):
    return pools(layout[0]).run


@pytest.mark.promise
class TestMegatronWorker(WorkerConformance):
    pass
