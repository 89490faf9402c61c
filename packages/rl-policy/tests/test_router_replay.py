"""Router replay in whole steps: what scoring has recorded is what training takes."""

import sys

import pytest
import torch
from forked_python import rank_python
from recipe_runs import TWO_RANKS, write_workplace
from rl_policy import Policy
from rl_policy.cli import main
from rl_policy.config import load_run_config
from rl_policy.data.tiny_model import build_tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = pytest.mark.needs("rl-policy[megatron]")

REPLAY = ["policy.megatron_cfg.enabled=true", "policy.megatron_cfg.moe_router_replay=true"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    path = write_workplace(tmp_path_factory.mktemp("replay"))
    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        moe_intermediate_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(path / "experts")
    tokenizer.save_pretrained(path / "experts")
    return path


def arguments(*settings):
    run = ["grpo", "--config", "run.yaml", "data.path=problems.jsonl", *REPLAY, *settings]
    return ["rl-policy", *run, "policy.model_name=experts", "grpo.warm_up=false"]


@pytest.mark.slow
def test_training_takes_the_routes_of_the_pass_before(workplace, monkeypatch):
    """Whole steps on two ranks, with packed micro-batches that differ between the two calls."""
    batches = []

    class Watched(Policy):
        def train(self, data, *args, **kwargs):
            batches.append(data)
            return super().train(data, *args, **kwargs)

    budgets = {"train_mb_tokens": 64, "logprob_mb_tokens": 96}
    packing = [f"policy.sequence_packing.{key}={value}" for key, value in budgets.items()]
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(sys, "executable", rank_python())
    monkeypatch.setattr("rl_policy.run.session.Policy", Watched)
    monkeypatch.setattr(
        sys,
        "argv",
        arguments(
            "policy.sequence_packing.enabled=true",
            *packing,
            TWO_RANKS,
            "grpo.steps=2",
            "policy.max_total_sequence_length=64",
        ),
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert len(batches) == 2
    for batch in batches:
        routes = batch["routed_experts"]
        assert routes.shape == (*batch["input_ids"].shape, 2, 2)
        is_token = torch.arange(routes.shape[1]) < batch["input_lengths"][:, None]
        assert (routes[is_token] >= 0).all()
        assert routes[is_token].unique().tolist() == [0, 1, 2, 3]


def test_without_a_pass_that_records_it_is_refused(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    settings = ["grpo.old_logprobs=sampler", "loss.importance_cap=null"]
    monkeypatch.setattr(sys, "argv", arguments(*settings))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "grpo.old_logprobs='sampler' contradicts policy.megatron_cfg.moe_router_replay" in error


ROUTES = "policy.generation.vllm_cfg.return_routed_experts=true"
VLLM = "policy.generation.backend=vllm"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], "nothing reads the routes"),
        (
            [*REPLAY, "environment.function=rl_policy.environments.calculator:Calculator"],
            "the turns of an",
        ),
        (
            [*REPLAY, "policy.generation.colocated.enabled=false", "async.max_staleness=2"],
            "async.max_staleness=2 contradicts policy.generation.vllm_cfg.return_routed_experts",
        ),
    ],
    ids=["not read", "episodes", "asynchronous"],
)
def test_routes_of_engines_are_refused_where_they_are_not_whole_or_not_read(
    workplace, monkeypatch, settings, told
):
    monkeypatch.chdir(workplace)
    own = [VLLM, ROUTES, "policy.model_name=experts", "grpo.warm_up=false"]
    load_run_config("grpo", overrides=[*own, *REPLAY])
    with pytest.raises(ValueError, match=told):
        load_run_config("grpo", overrides=[*own, *settings])
