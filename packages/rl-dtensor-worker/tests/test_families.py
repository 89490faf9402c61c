"""Families that transformers runs in a way of their own: as transformers does, or refused."""

import pytest
import scoring_ranks
import torch
from family_models import build_family
from oracle import LOGPROB_TOLERANCE, plain_logprobs
from rank_pool import RankFailure
from rl_dtensor_worker import DTensorPolicyWorker
from tiny_model import make_batch, make_config
from transformers import AutoModelForCausalLM

PACKING = {
    "dynamic_batching": {"enabled": False},
    "sequence_packing": {
        "enabled": True,
        "train_mb_tokens": 24,
        "logprob_mb_tokens": 24,
        "algorithm": "first_fit_decreasing",
    },
}
GEMMA2 = {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0}


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def layout(**section):
    return {"dtensor_cfg": {"enabled": True} | section}


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    """A Gemma 2 whose attention scores are well above their cap, by `model_type`."""
    kinds = ("gemma2", "vaultgemma")
    root = tmp_path_factory.mktemp("capped")
    return {kind: build_family(root / kind, kind, **GEMMA2) for kind in kinds}


@pytest.mark.parametrize(
    ("model_type", "num_ranks", "section", "batching"),
    [
        ("gemma2", 1, {}, None),
        ("gemma2", 1, {"attn_implementation": "sdpa"}, None),
        ("gemma2", 1, {"attn_implementation": "eager"}, None),
        ("gemma2", 1, {}, "sequence_packing"),
        ("gemma2", 2, {"context_parallel_size": 2}, "sequence_packing"),
        ("gemma2", 2, {"tensor_parallel_size": 2, "sequence_parallel": True}, None),
        ("vaultgemma", 1, {}, None),
    ],
)
def test_attention_scores_are_capped_as_in_eager_attention(
    pools, capped, model_type, num_ranks, section, batching
):
    path, batch = capped[model_type], make_batch(6)
    expected = plain_logprobs(load(path, attn_implementation="eager"), batch).detach()
    without = plain_logprobs(load(path, attn_implementation="sdpa"), batch).detach()
    assert (expected - without).abs().max() > 0.1
    config = make_config(path, **layout(**section), **(PACKING if batching else {}))
    results = pools(num_ranks).run(
        scoring_ranks.score_in_layout, config=config, batch=batch, section=batching
    )
    for result in results:
        torch.testing.assert_close(result, expected, atol=LOGPROB_TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"attn_implementation": "spda"}, r"attn_implementation='spda' is unknown.*'sdpa'"),
        (
            {"attn_implementation": "eager", "context_parallel_size": 2},
            "attn_implementation='eager' contradicts .*context_parallel_size=2, which needs 'sdpa'",
        ),
        (
            {"attn_implementation": "eager", "tensor_parallel_size": 2, "sequence_parallel": True},
            "attn_implementation='eager' contradicts .*sequence_parallel=True",
        ),
    ],
)
def test_an_attention_that_does_not_fit_is_refused_before_a_process_starts(
    capped, section, message
):
    size = 2 if len(section) > 1 else 1
    config = make_config(capped["gemma2"], **layout(**section))
    with pytest.raises(ValueError, match=message):
        DTensorPolicyWorker.validate_config(config, world_size=size)
