"""`fused_head`: scores and training are those of plain transformers, what cannot be is refused."""

from importlib.util import find_spec

import parity_models
import parity_ranks
import pytest
import training_ranks
from oracle import load, plain_logprobs, plain_training
from rl_dtensor_worker import DTensorPolicyWorker
from rl_dtensor_worker.forward import TokenHead
from test_parity import joined
from tiny_model import make_batch, make_config
from tolerances import assert_all_close, assert_close
from torch import nn

PLAIN = nn.Linear(4, 6, bias=False)
WITHOUT_LIGER = find_spec("liger_kernel") is None
pytestmark = [pytest.mark.slow, pytest.mark.needs("rl-dtensor-worker[liger]")]
needs_liger = pytest.mark.skipif(
    WITHOUT_LIGER, reason='needs liger-kernel: nox -s "apart(rl-dtensor-worker)"'
)


def config_of(path, **section):
    return make_config(path, dtensor_cfg={"enabled": True, "fused_head": True, **section})


@needs_liger
def test_scores_and_steps_equal_plain_transformers(pools, tmp_path):
    path, batch = parity_models.build("llama", tmp_path), make_batch(8)
    results = pools(2).run(
        parity_ranks.run_case, config=config_of(path), batch=batch, section=None, num_calls=3
    )
    assert_close(joined(results, "logprobs"), plain_logprobs(load(path), batch))
    expected, losses, _ = plain_training(path, batch, global_batch_size=4, num_calls=3)
    for result in results:
        assert_close(result.losses, losses, "losses")
        assert_all_close(result.parameters, expected)


@needs_liger
def test_tensor_parallelism_on_a_cpu_is_refused(pools, tmp_path):
    config = config_of(parity_models.build("llama", tmp_path), tensor_parallel_size=2)
    with pytest.raises(Exception, match=r"fused_head=True.*tensor_parallel_size=2 on a CPU"):
        pools(2).run(training_ranks.train, config=config, batch=make_batch(8), num_calls=1)


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (TokenHead(layer=None, vocab_size=6), "computes its logits itself"),
        (TokenHead(layer=nn.Linear(4, 6), vocab_size=6), "has a bias"),
        (TokenHead(layer=PLAIN, vocab_size=6, soft_cap=30.0), r"caps its logits at 30\.0"),
        (TokenHead(layer=PLAIN, vocab_size=6, logit_scale=-1.0), r"scales its logits by -1\.0"),
    ],
)
def test_a_head_that_liger_does_not_compute_is_refused(head, named):
    with pytest.raises(ValueError, match=rf"policy\.dtensor_cfg\.fused_head=True: .*{named}"):
        head.fused()
    assert TokenHead(layer=PLAIN, vocab_size=6).fused().is_fused


@pytest.mark.skipif(not WITHOUT_LIGER, reason="liger-kernel is installed")
def test_without_liger_it_says_what_to_install(tiny_model):
    with pytest.raises(ValueError, match=r"fused_head=True .*rl-dtensor-worker\[liger\]"):
        DTensorPolicyWorker.validate_config(config_of(tiny_model), world_size=1)
