"""What reaches the terminal of a user whose ranks use noisy libraries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("ray_apart")

CODE = """
import time, ray
from noisy_worker import NoisyWorker
from rl_policy.ray.cluster import RayVirtualCluster
from rl_policy.ray.sharding import NamedSharding
from rl_policy.ray.worker_group import RayWorkerGroup
cluster = RayVirtualCluster(bundle_ct_per_node_list=[1], use_gpus=False)
sharding = NamedSharding([0], ["data_parallel"])
group = RayWorkerGroup(cluster, NoisyWorker, (), {}, sharding=sharding, name="noisy")
group.run_all("make_noise")
(peak,) = group.peak_memory()
assert 2**20 < peak < 2**40, peak
time.sleep(2)  # Ray forwards lines once a second at the most
group.shutdown()
cluster.shutdown()
"""


def printed(**environment):
    """Return what a driver of the noisy worker prints."""
    beside = str(Path(__file__).parent)
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": beside, "RAY_ADDRESS": "local", **environment},
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.slow
def test_bars_and_future_warnings_of_ranks_do_not_reach_the_terminal():
    text = printed()
    assert "a line of the worker's own" in text, "the noise has to have come to show anything"
    assert "a loss is not finite" in text
    assert "Writing model shards" not in text
    assert "FutureWarning" not in text


@pytest.mark.slow
def test_who_sets_the_variables_sees_them():
    text = printed(HF_HUB_DISABLE_PROGRESS_BARS="0", PYTHONWARNINGS="always")
    assert "Writing model shards" in text
    assert "FutureWarning: the old name goes" in text
