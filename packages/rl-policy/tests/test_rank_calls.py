import pytest
import torch.distributed as dist
from ray.exceptions import ActorDiedError, RayTaskError
from rl_policy.ray.failures import WorkerDiedError, root_failure, to_exception
from rl_policy.ray.hosts import Outcome

GLOO_ERROR = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] "
    "Connection closed by peer [127.0.0.1]:46731"
)


def raised(cause):
    return RayTaskError("call", f"Traceback of {cause!r}", cause, pid=1, ip="127.0.0.1")


@pytest.mark.parametrize(
    ("failures", "root"),
    [
        ({0: raised(RuntimeError(GLOO_ERROR)), 1: ActorDiedError()}, 1),
        ({0: raised(ValueError("bad")), 1: ActorDiedError()}, 1),
        ({0: raised(RuntimeError(GLOO_ERROR)), 1: raised(ValueError("bad"))}, 1),
        ({0: raised(dist.DistBackendError("watchdog")), 1: raised(KeyError("k"))}, 1),
        ({0: raised(RuntimeError("NCCL error: remote process exited")), 2: raised(OSError())}, 2),
        ({2: raised(ValueError("bad")), 1: raised(RuntimeError("out of memory"))}, 1),
        ({1: raised(RuntimeError(GLOO_ERROR)), 0: raised(RuntimeError(GLOO_ERROR))}, 0),
    ],
)
def test_the_failure_behind_the_others_is_found(failures, root):
    assert root_failure(failures) == root


def test_ranks_that_all_raised_are_idle():
    assert Outcome(failures={0: raised(ValueError("bad"))}, results={1: None}).is_idle
    assert not Outcome(failures={0: ActorDiedError()}).is_idle
    assert not Outcome(failures={0: raised(ValueError("bad"))}, unfinished=[1]).is_idle


def test_a_death_names_the_rank_and_the_call():
    error = to_exception(ActorDiedError(), rank=3, group="lm_policy", method="train")
    assert isinstance(error, WorkerDiedError)
    assert str(error).startswith("rank 3 of lm_policy died during train: ")
