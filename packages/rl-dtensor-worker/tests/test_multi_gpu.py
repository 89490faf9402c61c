"""Layouts of two GPUs with NCCL, against plain transformers and a plain loop on the CPU."""

import checkpoint_ranks
import parity_models
import parity_ranks
import pytest
import torch
from oracle import load, plain_logprobs, plain_training
from test_gpu import GPU_TOLERANCE
from test_parity import LAYOUTS, assert_equal_parameters, joined
from tiny_model import make_batch, make_config

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_a_save_in_the_background_uses_no_other_gpu(pools, tiny_model, tmp_path):
    """A new thread starts on GPU 0, where every rank of the node would make a context."""
    section = {"enabled": True, "async_checkpoint": True}
    used = pools(2).run(
        checkpoint_ranks.contexts_after_a_save,
        config=make_config(tiny_model, dtensor_cfg=section),
        directory=str(tmp_path),
    )
    assert used == [[0], [1]]


@pytest.mark.parametrize("section", [None, "sequence_packing"])
@pytest.mark.parametrize("layout", ["dp2", "tp2", "tp2_sp", "cp2"])
def test_layouts_equal_plain_transformers(pools, tmp_path, layout, section):
    path, batch = parity_models.build("qwen3", tmp_path), make_batch(6)
    budgets = {"enabled": True, "train_mb_tokens": 24, "logprob_mb_tokens": 24}
    num_ranks, sizes = LAYOUTS[layout]
    results = pools(num_ranks).run(
        parity_ranks.run_case,
        config=make_config(
            path,
            dtensor_cfg={"enabled": True, **sizes},
            **({} if section is None else {section: budgets}),
        ),
        batch=batch,
        section=section,
        num_calls=3,
    )
    expected = plain_logprobs(load(path), batch)
    torch.testing.assert_close(joined(results, "logprobs"), expected, atol=GPU_TOLERANCE, rtol=0)
    parameters, losses, _ = plain_training(path, batch, global_batch_size=4, num_calls=3)
    for result in results:
        torch.testing.assert_close(result.losses, torch.tensor(losses), atol=1e-5, rtol=1e-5)
        assert_equal_parameters(result.parameters, parameters, GPU_TOLERANCE)
