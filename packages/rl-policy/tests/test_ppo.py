"""The recipe `ppo`: a value model beside the policy, held against transformers and numpy."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from backend_runs import ADAMW, batch, config, make_tokenizer, save_model
from kept_clusters import kept_cluster
from ppo_runs import SETTINGS, run
from recipe_runs import CONFIG, TIMES, write_workplace
from rl_policy import Policy, PPOTrainer
from rl_policy.config import load_run_config
from rl_policy.losses import ValueLoss
from rl_policy.recipes.ppo import PpoLossSection, PpoSection, add_advantages, value_policy
from rl_policy.run.inputs import prepare_inputs
from rl_policy.run.metrics import read_metrics
from rl_policy.run.samples import read_samples
from tolerances import KL, LOGPROBS, assert_close, expected_of, in_float64, measured_training
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

pytestmark = [pytest.mark.needs("rl-policy[dtensor]")]

BUDGETS = {"enabled": True, "train_mb_tokens": 24, "logprob_mb_tokens": 24}
PACKED = {**BUDGETS, "algorithm": "modified_first_fit_decreasing"}
DYNAMIC = {**BUDGETS, "sequence_length_round": 4}


def measured(path):
    return [
        {name: value for name, value in row.items() if name not in {*TIMES, "value_s"}}
        for row in read_metrics(path / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_a_resumed_run_measures_what_an_uninterrupted_one_does(shared_ray, tmp_path, monkeypatch):
    monkeypatch.chdir(write_workplace(tmp_path))
    begin = ["--config", "run.yaml", "data.path=problems.jsonl", *SETTINGS]
    run("--out", "whole", *begin, "ppo.steps=4")
    rows = measured(tmp_path / "whole")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["value_loss"] > 0 and row["value_grad_norm"] > 0 for row in rows[1:])
    assert all(row["advantage_std"] > 0 and row["explained_variance"] < 1 for row in rows[1:])
    # The second epoch moves both, and the first step has the reference's weights.
    assert rows[1]["reward_kl"] == pytest.approx(0, abs=KL)
    assert all(row["reward_kl"] != 0 for row in rows[2:])
    assert len({row["value_loss"] for row in rows[1:]}) == 4

    run("--out", "parted", *begin, "ppo.steps=2")
    run("--resume", "parted", "ppo.steps=4")
    assert measured(tmp_path / "parted") == rows
    models = [AutoModelForCausalLM.from_pretrained(f"{name}/final") for name in ("whole", "parted")]
    weights = [model.state_dict() for model in models]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])

    resumed = PPOTrainer(resume="parted", progress=False)
    accuracy = resumed.evaluate()["accuracy"]
    assert accuracy == rows[-1]["accuracy"]


EPISODES = """
class Bytes:
    def reset(self, problem):
        self.fails = int(problem.prompt[:-1]) % 4 == 0
        self.turn = 0
        return problem.prompt

    def step(self, text):
        self.turn += 1
        if self.fails:
            raise RuntimeError("on purpose")
        return f"{self.turn}:", 1 - (text.encode() or b"0")[0] / 256, self.turn == 2
"""


@pytest.mark.slow
def test_episodes_train_both_models_and_those_that_fail_neither(shared_ray, tmp_path, monkeypatch):
    monkeypatch.chdir(write_workplace(tmp_path))
    Path("my_environment.py").write_text(EPISODES)
    given = ["environment.function=my_environment.py:Bytes", "policy.max_total_sequence_length=24"]
    begin = ["--config", "run.yaml", "data.path=problems.jsonl", *SETTINGS, *given]
    run("--out", "out", *begin, "ppo.steps=2")
    rows = measured(Path("out"))[1:]
    assert [row["turns_mean"] for row in rows] == [2.0, 2.0]
    assert all(row["environment_failures"] > 0 for row in rows)
    assert all(0 < row["return_mean"] < 2 and row["value_grad_norm"] > 0 for row in rows)
    trained = [each for each in read_samples(Path("out/samples.jsonl")) if each.kind == "train"]
    # The policy's turns, and what the environment says between them.
    failed = [each for each in trained if len(each.turns) < 3]
    assert 0 < len(failed) < len(trained)
    assert {(each.reward, each.advantage) for each in failed} == {(0, 0)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "model", make_tokenizer())


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"sequence_packing": PACKED, "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 2}},
        {"dynamic_batching": DYNAMIC, "dtensor_cfg": {"enabled": True, "context_parallel_size": 2}},
    ],
    ids=["tp2-packed", "cp2-dynamic"],
)
def test_values_and_their_training_equal_those_of_transformers(
    shared_ray, model, settings, tmp_path
):
    data = batch().slice(0, 4)
    generator = torch.Generator().manual_seed(6)
    data["returns"] = torch.randn(data["input_ids"].shape, generator=generator)
    sections = {**config(model, "dtensor", {}), **settings, "head": "value"}
    del sections["generation"]
    cluster = kept_cluster([2], use_gpus=False)
    try:
        policy = Policy(cluster, sections, make_tokenizer(), init_reference_model=False)
        # Its new layer is random: transformers has to start from the same one.
        policy.save_hf_checkpoint(tmp_path / "start")
        scores = policy.score(data)["scores"]
        data["prev_values"] = torch.randn(scores.shape, generator=generator)
        found = policy.train(data, ValueLoss(clip=0.5))
        after = policy.score(data)["scores"]
        policy.shutdown()
    finally:
        cluster.shutdown()

    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "start", num_labels=1)
    plain = plain.float().eval()
    values_of = partial(row_values, data=data)
    assert_close(scores, expected_of(values_of, plain, LOGPROBS), "scores")

    def loss_of(model, data):
        values, old = values_of(model)[:, :-1], data["prev_values"][:, 1:]
        returns = data["returns"][:, 1:]
        bounded = torch.maximum(torch.minimum(values, old + 0.5), old - 0.5)
        cost = 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)
        terms = cost * data["token_mask"][:, 1:]
        return terms.sum() / data["token_mask"].sum(), terms

    twin, adamw = in_float64(plain), partial(torch.optim.AdamW, **ADAMW)
    trained = measured_training(plain, adamw, loss_of, [data], twin=twin)
    assert_close(found["loss"], trained.losses, "loss")
    assert_close(found["grad_norm"].reshape(1), trained.norms, "grad_norm")
    assert_close(after, expected_of(values_of, plain, LOGPROBS, twin=twin), "after")


def row_values(plain, data):
    """Return the value after each token, row by row without any padding."""
    rows = []
    for tokens, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
        values = plain(tokens[None, :length]).logits[0, :, 0]
        rows.append(torch.nn.functional.pad(values, (0, len(tokens) - length)))
    return torch.stack(rows)


def scored_batch():
    generator = torch.Generator().manual_seed(8)
    columns = ("prev_values", "prev_logprobs", "reference_logprobs")
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 1]])
    return {
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        **{name: torch.randn(3, 6, generator=generator) for name in columns},
    }


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("whiten", [True, False])
def test_the_advantages_of_a_step_are_those_of_a_loop(kl_in, whiten):
    data, rewards = scored_batch(), [1.0, -0.5, 100.0]
    ppo = PpoSection(gamma=0.9, lam=0.8, whiten=whiten)
    estimator = "k1" if kl_in == "reward" else "k3"
    loss = PpoLossSection(kl_coef=0.3, kl_in=kl_in, kl_estimator=estimator)
    found = add_advantages(data, torch.tensor(rewards), ppo=ppo, loss=loss)

    values, old, reference = (
        data[name].double().numpy()
        for name in ("prev_values", "prev_logprobs", "reference_logprobs")
    )
    advantages, returns, kl = np.zeros((3, 6)), np.zeros((3, 6)), np.zeros(3)
    for row in range(2):  # the last one has failed
        at = np.flatnonzero(data["token_mask"][row].numpy())
        own = old[row, at] - reference[row, at]
        kl[row] = own.sum()
        reward = -0.3 * own * (kl_in == "reward")
        reward[-1] += rewards[row]
        state = np.append(values[row, at], 0)
        delta = reward + 0.9 * state[1:] - state[:-1]
        for step in range(len(at)):
            weights = 0.72 ** np.arange(len(at) - step)
            advantages[row, at[step]] = (weights * delta[step:]).sum()
        returns[row, at] = advantages[row, at] + state[:-1]
    targets = data["token_mask"].numpy() * np.array([[1], [1], [0]]) > 0
    np.testing.assert_allclose(data["returns"].numpy(), returns, atol=1e-6)
    raw = advantages[targets]
    expected = np.where(targets, advantages, 0)
    if whiten:
        expected = np.where(targets, (advantages - raw.mean()) / raw.std(ddof=1), 0)
    np.testing.assert_allclose(data["advantages"].numpy(), expected, atol=1e-5)
    assert found["advantage_std"] == pytest.approx(raw.std(), rel=1e-5)
    assert found["return_mean"] == pytest.approx(returns[targets].mean(), rel=1e-5)
    left = (returns - values)[targets].var() / returns[targets].var()
    assert found["explained_variance"] == pytest.approx(1 - left, rel=1e-5)
    assert found.get("reward_kl", math.nan) == pytest.approx(
        kl.mean() if kl_in == "reward" else math.nan, rel=1e-5, nan_ok=True
    )


def test_the_value_model_is_the_policy_with_a_value_head():
    given = [
        "policy.model_name=./m",
        "policy.max_total_sequence_length=512",
        "policy.dtensor_cfg.sequence_parallel=true",
        "policy.dtensor_cfg.tensor_parallel_size=2",
        "ppo.value_policy.train_micro_batch_size=2",
        "ppo.value_policy.optimizer.kwargs.lr=0.5",
    ]
    resolved = load_run_config("ppo", overrides=given)
    value = value_policy(resolved)
    assert (value["head"], value["model_name"]) == ("value", "./m")
    assert "generation" not in value
    # A value head needs unsharded sequences.
    assert value["dtensor_cfg"]["tensor_parallel_size"] == 2
    assert resolved.policy["dtensor_cfg"]["sequence_parallel"]
    assert not value["dtensor_cfg"]["sequence_parallel"]
    assert (value["train_micro_batch_size"], value["optimizer"]["kwargs"]["lr"]) == (2, 0.5)
    assert resolved.policy["optimizer"]["kwargs"]["lr"] == 1e-6


def test_a_policy_of_megatron_has_a_value_model_of_another_backend():
    megatron = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"]
    with pytest.raises(ValueError, match=r"^ppo\.value_policy\.megatron_cfg\.enabled=True, which"):
        load_run_config("ppo", overrides=megatron)
    own = "ppo.value_policy.dtensor_cfg.enabled=true"
    value = value_policy(load_run_config("ppo", overrides=[*megatron, own]))
    assert value["dtensor_cfg"]["enabled"]
    assert not value["megatron_cfg"]["enabled"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["ppo.lam=1.5"], "ppo.lam=1.5"),
        (["ppo.gamma=-1"], "ppo.gamma=-1"),
        (["ppo.value_clip=0"], "ppo.value_clip=0"),
        (["ppo.lamda=0.9"], "ppo.lamda is not a known key, did you mean 'lam'"),
        (["loss.preset=dapo"], "loss.preset is not a known key"),
        (["loss.kl_in=reward_to_go"], "loss.kl_in='reward_to_go' is of recipes without a value"),
        (["loss.kl_in=loss"], "loss.kl_estimator='k1' contradicts kl_coef"),
        (["async.max_staleness=1"], "async.max_staleness=1"),
        (["ppo.value_model=./nowhere"], "ppo.value_model='./nowhere' is no directory"),
        (["ppo.value_policy.head=reward"], "ppo.value_policy.head='reward' gives no value"),
        (["ppo.value_policy.precision=float7"], "ppo.value_policy.precision"),
        (
            ["ppo.prompts_per_step=100"],
            r"policy\.train_global_batch_size=256 does not divide the 100 samples of a step "
            r"\(ppo\.prompts_per_step=100",
        ),
        (
            ["ppo.value_policy.train_global_batch_size=100"],
            "ppo.value_policy.train_global_batch_size=100 does not divide the 512 samples",
        ),
        (["policy.generation.temperature=0"], "policy.generation.temperature=0"),
        (["ppo.old_logprobs=sampler"], "ppo.old_logprobs='sampler' contradicts loss.importance"),
        (
            ["policy.dtensor_cfg.lora.enabled=true", "policy.dtensor_cfg.lora.adapter_path=./a"],
            "set ppo.warm_up=false",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        load_run_config("ppo", overrides=settings)


def test_a_schedule_of_the_value_model_that_ends_too_early_is_refused():
    given = [
        "ppo.value_policy.scheduler.name=torch.optim.lr_scheduler.OneCycleLR",
        "ppo.value_policy.scheduler.kwargs={max_lr: 1e-3, total_steps: 10}",
        "ppo.steps=6",
        "ppo.epochs_per_step=2",
    ]
    ends = r"ppo\.value_policy\.scheduler.* after 10 steps.* 12 \(ppo\.steps=6, ppo\.epochs"
    with pytest.raises(ValueError, match=ends):
        prepare_inputs(load_run_config("ppo", overrides=given))


def test_what_the_backend_refuses_of_the_value_model_is_named_as_the_user_has_written_it():
    given = ["ppo.value_policy.dtensor_cfg.tensor_parallel_size=3"]
    parallel = r"^ppo\.value_policy\.dtensor_cfg\.tensor_parallel_size=3 "
    with pytest.raises(ValueError, match=parallel) as raised:
        prepare_inputs(load_run_config("ppo", overrides=given))
    assert " policy." not in str(raised.value)


def test_a_value_model_without_a_config_is_named_by_its_key(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    given = [f"ppo.value_model={tmp_path}"]
    unread = r"^ppo\.value_policy\.model_name=.* cannot be loaded"
    with pytest.raises(ValueError, match=unread) as raised:
        prepare_inputs(load_run_config("ppo", overrides=given))
    assert " policy." not in str(raised.value)


def test_a_value_model_with_another_vocabulary_is_refused(model):
    given = load_run_config("ppo", overrides=[f"ppo.value_model={model}"])
    with pytest.raises(
        ValueError, match=r"ppo\.value_model=.* has another vocabulary than the mod"
    ):
        prepare_inputs(given)


def test_a_file_of_several_recipes_serves_this_one(tmp_path):
    (tmp_path / "run.yaml").write_text(json.dumps({**CONFIG, "ppo": {"prompts_per_step": 8}}))
    resolved = load_run_config("ppo", path=tmp_path / "run.yaml")
    assert resolved.section(PpoSection).prompts_per_step == 8
