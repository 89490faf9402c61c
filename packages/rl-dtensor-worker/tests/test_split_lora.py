"""`forward_backward` and `optimizer_step` add up to `train` for adapters too."""

import pytest
import split_ranks
from tiny_model import make_batch, make_config
from tolerances import SUMS

pytestmark = pytest.mark.needs("rl-dtensor-worker[lora]")

LORA = {"enabled": True, "r": 3, "lora_alpha": 5, "target_modules": "all-linear"}
# Linear in the gradients, as in test_split_training.
OPTIMIZER = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}}


def test_adapters_too(pools, tiny_model):
    config = make_config(
        tiny_model, dtensor_cfg={"enabled": True, "lora": LORA}, optimizer=OPTIMIZER
    )
    for expected, found in pools(2).run(
        split_ranks.both, config=config, batch=make_batch(8), edges=(0, 1, 5, 8), loss="nll"
    ):
        assert all("lora" in name for name in found.parameters)
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=SUMS)
        for name, parameter in expected.parameters.items():
            assert (found.parameters[name] - parameter).abs().max() <= SUMS, name
