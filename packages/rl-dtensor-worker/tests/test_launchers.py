"""The worker under torchrun; `pools` in every other test is torch.multiprocessing."""

import signal

import pytest
import scoring_ranks
import torch
from oracle import load, plain_logprobs
from rank_pool import rank_context
from rl_interfaces.backend.runtime import RankEnvironment
from tiny_model import make_batch, make_config
from tolerances import assert_close
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


@pytest.fixture
def kept_signal_handlers():
    """Put back the handlers that torchrun's agent replaces in this process."""
    known = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield
    for each, handler in known.items():
        signal.signal(each, handler)


@pytest.mark.slow
def test_under_torchrun(tiny_model, tmp_path, kept_signal_handlers):
    job = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
        # torchrun starts interpreters, which would import everything anew.
        start_method=rank_context().get_start_method(),
    )
    run = elastic_launch(job, scoring_ranks.score_under_torchrun)
    by_rank = run(make_config(tiny_model), make_batch(5))
    scores = torch.tensor([*by_rank[0], *by_rank[1]])
    expected = plain_logprobs(load(tiny_model), make_batch(5))
    assert_close(scores, expected)


def test_a_missing_variable_is_named(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(RuntimeError, match="MASTER_PORT"):
        RankEnvironment.from_environment()
