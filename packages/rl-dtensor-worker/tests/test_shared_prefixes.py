"""Rows that share prefixes against plain transformers, and a plain loop, on each row by itself."""

import parity_models
import parity_ranks
import pytest
import torch
from oracle import load, plain_logprobs, plain_training
from parity_layouts import LAYOUTS
from rl_dtensor_worker import DTensorPolicyWorker
from rl_dtensor_worker.layout import ParallelContext
from test_parity import BATCHINGS, joined
from tiny_model import make_batch, make_config
from tolerances import REPEATED, assert_all_close, assert_close

# Two prompts, of three rows each: a global batch of four ends within the second one.
PROMPTS, PROMPT_LENGTH = [0, 0, 0, 3, 3, 3], 5
ONE = (1, {})
# Model, layout, way of batching, what the loss takes.
CASES = {
    "one": ("llama", ONE, "padded", "nll"),
    "one_logits": ("llama", ONE, "padded", "logits"),
    "one_packed": ("gemma3", ONE, "packed", "nll"),
    "dp2": ("qwen3_moe", LAYOUTS["dp2"], "padded", "nll"),
    "tp2_sp": ("qwen3", LAYOUTS["tp2_sp"], "padded", "nll"),
}


def batch_of_groups():
    """Return rows that begin with the prompt of their group."""
    batch = make_batch(6)
    batch["input_ids"][:, :PROMPT_LENGTH] = batch["input_ids"][PROMPTS, :PROMPT_LENGTH]
    longer = batch["input_lengths"].clamp(min=PROMPT_LENGTH + 1)
    assert torch.equal(longer, batch["input_lengths"]), "rows have tokens of their own"
    return batch


def config_of(path, sizes, section):
    budgets = {"train_mb_tokens": parity_ranks.BUDGET, "logprob_mb_tokens": parity_ranks.BUDGET}
    return make_config(
        path,
        dtensor_cfg={"enabled": True, "share_prefixes": True, **sizes},
        **({} if section is None else {section: {"enabled": True, **budgets}}),
    )


@pytest.mark.parametrize("case", CASES)
def test_shared_rows_equal_rows_by_themselves(pools, tmp_path, case):
    model, (num_ranks, sizes), batching, loss = CASES[case]
    path, batch = parity_models.build(model, tmp_path), batch_of_groups()
    pool, section = pools(num_ranks), BATCHINGS[batching]
    arguments = {"config": config_of(path, sizes, section), "batch": batch, "section": section}
    results = pool.run(parity_ranks.run_case, num_calls=3, loss=loss, **arguments)
    for key in ("logprobs", "reference"):
        assert_close(joined(results, key), plain_logprobs(load(path), batch))
    expected, losses, norms = plain_training(path, batch, global_batch_size=4, num_calls=3)
    for result in results:
        for found, plain in ((result.losses, losses), (result.grad_norms, norms)):
            assert_close(found, plain)
        assert_all_close(result.parameters, expected)
    for count in pool.run(parity_ranks.count_tokens, **arguments):
        assert count.read < count.in_rows


def test_the_largest_logits_are_those_of_rows_by_themselves(pools, tiny_model):
    batch = batch_of_groups()
    found = [
        pools(1).run(
            parity_ranks.call_in_layout,
            config=make_config(
                tiny_model, dtensor_cfg={"enabled": True, "share_prefixes": is_shared}
            ),
            batch=batch,
            method="get_topk_logits",
            k=3,
        )[0]
        for is_shared in (False, True)
    ]
    for key, values in found[0].columns.items():
        atol = REPEATED * float(values.abs().max())
        torch.testing.assert_close(found[1].columns[key], values, atol=atol, rtol=0)


def test_the_layout_of_rows_that_share_nothing_is_checked_too():
    parallel = ParallelContext(shares_prefixes=True)
    assert parallel.features(packed=True) == [
        "dtensor_cfg.share_prefixes=True",
        "sequence_packing.enabled=True",
    ]


def test_context_parallelism_is_refused(tiny_model):
    section = {"enabled": True, "share_prefixes": True, "context_parallel_size": 2}
    with pytest.raises(ValueError, match=r"share_prefixes=True contradicts .*_parallel_size=2"):
        DTensorPolicyWorker.validate_config(
            make_config(tiny_model, dtensor_cfg=section), world_size=2, init_optimizer=True
        )
