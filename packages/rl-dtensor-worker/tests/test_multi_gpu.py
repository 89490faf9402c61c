"""Layouts of two GPUs with NCCL, against plain transformers and a plain loop on the CPU."""

import checkpoint_ranks
import parity_models
import parity_ranks
import pytest
import torch
from oracle import load, plain_logprobs, plain_training
from test_parity import LAYOUTS, joined
from tiny_model import make_batch, make_config
from tolerances import assert_all_close, assert_close

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
    assert_close(joined(results, "logprobs"), expected)
    parameters, losses, _ = plain_training(path, batch, global_batch_size=4, num_calls=3)
    for result in results:
        assert_close(result.losses, losses, "losses")
        assert_all_close(result.parameters, parameters)
