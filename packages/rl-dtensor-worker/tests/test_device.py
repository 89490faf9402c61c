import json
import os

import state_ranks
from rank_pool import RankPool
from tiny_model import make_config


def test_information_and_profiling_traces(pools, tiny_model, tmp_path):
    config = make_config(tiny_model, profile_dir="traces")
    outcomes = pools(2).run(state_ranks.describe, config=config, directory=str(tmp_path))
    assert [outcome.text for outcome in outcomes] == [
        "DTensorPolicyWorker[rank=0]",
        "DTensorPolicyWorker[rank=1]",
    ]
    assert all(outcome.is_alive for outcome in outcomes)
    assert [outcome.info["rank"] for outcome in outcomes] == [0, 1]
    assert {outcome.info["world_size"] for outcome in outcomes} == {2}
    ids = {outcome.device_id for outcome in outcomes}
    assert len(ids) == 1  # one host
    assert ids == {outcome.info["global_device_id"] for outcome in outcomes}
    ((name, values),) = outcomes[0].info["parameter_sample"].items()
    assert name in outcomes[0].state_names
    assert len(values) == 4
    for rank in (0, 1):
        trace = json.loads((tmp_path / "traces" / f"rank_{rank}_0.json").read_text())
        assert any("ones" in event.get("name", "") for event in trace["traceEvents"])


def test_ranks_of_a_machine_with_gpus_are_no_forks():
    """CUDA refuses a process whose parent has asked for it: "Cannot re-initialize CUDA"."""
    pool = RankPool(1, num_gpus=1)
    try:
        assert pool.run(os.getppid) == [os.getpid()]
    finally:
        pool.close()
