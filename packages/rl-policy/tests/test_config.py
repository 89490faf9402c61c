import re
from dataclasses import fields

import pytest
import torch
import yaml
from rl_interfaces import LossType
from rl_policy.config import (
    load_run_config,
    naming_section,
    override_resumed,
    parse_run_config,
    render_run_config,
)
from rl_policy.losses import ClippedPGLoss
from rl_policy.recipes.policy_gradient.config import has_warm_up
from rl_policy.recipes.sft import sft_policy
from rl_policy.run.inputs import engine_section
from rl_policy.run.machine import check_devices

pytestmark = pytest.mark.promise

OWN_MODEL = "policy.model_name=some/model"


def test_overrides_go_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("grpo: {steps: 7, eval_every: 3}\npolicy: {train_micro_batch_size: 2}\n")
    config = load_run_config("grpo", path=path, overrides=["grpo.steps=9", "loss.kl_coef=1e-2"])
    assert (config.grpo.steps, config.grpo.eval_every) == (9, 3)
    assert config.policy["train_micro_batch_size"] == 2
    assert config.loss.kl_coef == 0.01
    assert config.checkpoint.keep_last == 2


def test_the_built_in_model_has_settings_that_a_model_of_the_user_does_not_get():
    builtin = load_run_config("grpo")
    own = load_run_config("grpo", overrides=[OWN_MODEL])
    rates = [config.policy["optimizer"]["kwargs"]["lr"] for config in (builtin, own)]
    assert rates[0] > 100 * rates[1]
    assert (builtin.has_builtin_model, own.has_builtin_model) == (True, False)
    assert (has_warm_up(builtin), has_warm_up(own)) == (True, False)
    assert own.sft.policy == {}


def test_warm_up_can_be_asked_for_and_declined():
    assert has_warm_up(load_run_config("grpo", overrides=[OWN_MODEL, "grpo.warm_up=true"]))
    assert not has_warm_up(load_run_config("grpo", overrides=["grpo.warm_up=false"]))


def test_the_supervised_part_has_its_own_policy_keys():
    config = load_run_config(
        "grpo", overrides=["sft.policy.optimizer.kwargs.lr=0.5", "policy.max_grad_norm=3"]
    )
    assert sft_policy(config)["optimizer"]["kwargs"]["lr"] == 0.5
    assert config.policy["optimizer"]["kwargs"]["lr"] != 0.5
    assert sft_policy(config)["max_grad_norm"] == 3


def test_another_optimizer_does_not_inherit_keyword_arguments():
    config = load_run_config(
        "grpo",
        overrides=["policy.optimizer.name=torch.optim.SGD", "policy.optimizer.kwargs.lr=0.1"],
    )
    assert config.policy["optimizer"] == {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}


def test_a_backend_that_is_enabled_takes_the_place_of_the_default():
    config = load_run_config("grpo", overrides=["policy.megatron_cfg.enabled=true"])
    assert config.policy["megatron_cfg"]["enabled"]
    assert not config.policy["dtensor_cfg"]["enabled"]


def test_the_seed_is_the_workers_too_unless_they_have_their_own():
    assert load_run_config("grpo", overrides=["seed=5"]).policy["seed"] == 5
    assert load_run_config("grpo", overrides=["seed=5", "policy.seed=6"]).policy["seed"] == 6


@pytest.mark.parametrize("overrides", [[], [OWN_MODEL, "policy.scheduler=null"]])
def test_the_rendered_configuration_is_the_same_when_it_is_read(overrides):
    config = load_run_config("grpo", overrides=overrides)
    text = render_run_config(config)
    assert parse_run_config(yaml.safe_load(text)) == config


def test_the_rendered_configuration_says_what_each_key_means():
    lines = render_run_config(load_run_config("sft")).splitlines()
    at = lines.index("  keep_last: 2")
    assert lines[at - 1].strip().startswith("# Newest checkpoints that are kept")
    kind = type(load_run_config("grpo", overrides=["dpo.steps=3"]))
    sections = [kind, *(f.annotation for f in kind.model_fields.values())]
    assert len(sections) > 10
    for section in sections:
        for name, field in getattr(section, "model_fields", {}).items():
            assert field.description or hasattr(field.annotation, "model_fields"), name


def test_the_keys_of_the_loss_are_its_arguments():
    section = load_run_config("grpo").loss.model_dump(exclude={"preset", "kl_in"})
    assert {field.name for field in fields(ClippedPGLoss)} == set(section)
    section["loss_type"] = LossType(section["loss_type"])
    ClippedPGLoss(**section)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.stepz=3"], "grpo.stepz is not a known key, did you mean 'steps'?"),
        (["grpoo.steps=3"], "grpoo is not a known key, did you mean 'grpo'?"),
        (["policy.train_global_batchsize=3"], "policy.train_global_batchsize is not a known key"),
        (["grpo.steps=many"], "grpo.steps='many': input should be a valid integer"),
        (["grpo.steps=1.5"], "grpo.steps=1.5"),
        (["grpo=3"], "grpo=3"),
        (["policy=3"], "policy must be a mapping, got int 3"),
        (["policy.train_micro_batch_size=x"], "policy.train_micro_batch_size must be int"),
        (["loss.clip_low=1.0"], "loss.clip_low=1.0: input should be less than 1"),
        (["loss.dual_clip=1"], "loss.dual_clip=1"),
        (["loss.preset=gpo"], "loss.preset='gpo': input should be 'grpo', 'dapo'"),
        (["loss.preset=[grpo]"], "loss.preset='[grpo]': input should be 'grpo'"),
        (["loss.length_divisor=many"], "loss.length_divisor='many' must be a number of tokens"),
        (["loss.length_divisor=8"], "loss.length_divisor=8.0 contradicts loss_type='token_level'"),
        (["loss.ratio_level=sequence"], "loss.ratio_level='sequence' contradicts loss_type"),
        (["loss.importance_cap=null", "loss.importance_floor=0.5"], "loss.importance_floor=0.5"),
        (
            ["loss.preset=gspo", "loss.importance_mode=token_mask"],
            "loss.importance_mode='token_mask' contradicts ratio_level='sequence'",
        ),
        (["loss.preset=cispo", "loss.dual_clip=3"], "loss.dual_clip=3.0 contradicts clipping"),
        (["loss.kl_estimator=k1"], "loss.kl_estimator='k1' contradicts kl_coef=0.001"),
        (
            ["loss.kl_in=reward", "loss.kl_unbiased=true"],
            "loss.kl_unbiased=True contradicts loss.kl_in='reward'",
        ),
        (
            ["grpo.group_baseline=false"],
            "grpo.divide_by_std=True contradicts grpo.group_baseline=False",
        ),
        (
            ["loss.preset=reinforce_pp", "grpo.leave_one_out=true"],
            "grpo.leave_one_out=True contradicts grpo.group_baseline=False",
        ),
        (["loss.preset=gdpo"], "grpo.normalize_each_reward=True needs several functions in"),
        (
            ["loss.preset=gdpo", "reward.function=[a.py:x, b.py:y]", "loss.kl_in=reward"],
            "grpo.normalize_each_reward=True contradicts loss.kl_in='reward'",
        ),
        (
            ["loss.preset=reinforce_pp", "grpo.whiten=samples"],
            "grpo.whiten='samples' contradicts loss.kl_in='reward_to_go'",
        ),
        (["grpo.overlong_share=1.5"], "grpo.overlong_share=1.5: input should be less than"),
        (["grpo.dynamic_sampling=-1"], "grpo.dynamic_sampling=-1"),
        (["grpo.samples_per_prompt=1"], "grpo.samples_per_prompt=1"),
        (["tiny_model.hidden_size=48"], "tiny_model.head_size=32 does not divide"),
        (["tiny_model.head_size=16"], "tiny_model.head_size=16"),
        (
            ["cluster.bundle_ct_per_node_list=[0]"],
            "cluster.bundle_ct_per_node_list.0=0: input",
        ),
        (
            ["policy.train_global_batch_size=33", "grpo.prompts_per_step=4"],
            "policy.train_global_batch_size=33 does not divide the 32 samples of a step "
            "(grpo.prompts_per_step=4 * grpo.samples_per_prompt=8)",
        ),
        (["policy.generation=null"], "policy.generation is not set"),
        (["policy.generation.temperature=0"], "policy.generation.temperature=0"),
        (
            ["policy.generation.max_new_tokens=33"],
            "policy.generation.max_new_tokens=33 is more than policy.max_total_sequence_length=32",
        ),
        (
            ["policy.dtensor_cfg.async_checkpoint=true"],
            "policy.dtensor_cfg.async_checkpoint=True is not supported by a recipe's run",
        ),
        (
            [
                "policy.dtensor_cfg.lora.enabled=true",
                "policy.dtensor_cfg.lora.adapter_path=adapters",
            ],
            "policy.dtensor_cfg.lora.adapter_path='adapters' would be applied twice",
        ),
        (["policy.head=value"], "policy.head='value' gives scores"),
        (["sft.policy.head=reward"], "sft.policy.head='reward' gives scores"),
        (["sft.policy.precision=int8"], "sft.policy.precision='int8'"),
        (["grpo.old_logprobs=sampler"], "contradicts loss.importance_cap=2.0"),
        (
            ["grpo.old_logprobs=sampler", "loss.importance_cap=null", "policy.generation.top_k=5"],
            "grpo.old_logprobs='sampler' contradicts policy.generation.top_k=5",
        ),
        (["policy.tokenizer.name=other"], "policy.tokenizer.name='other' contradicts"),
        (["recipe=sft"], "recipe='sft' contradicts the command 'grpo'"),
        (["grpo.steps"], "cannot read 'grpo.steps': expected section.key=value"),
        (["logger=[1"], "cannot read logger=[1"),
    ],
)
def test_bad_input_is_one_line_that_names_the_key(overrides, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is checked below
        load_run_config("grpo", overrides=overrides)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_several_errors_are_all_named():
    with pytest.raises(ValueError, match=r"checkpoint.every='x'.*; grpo.steps=0"):
        load_run_config("grpo", overrides=["grpo.steps=0", "checkpoint.every=x"])


def test_a_file_computes_as_files_of_nemo_rl_do(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        """
policy:
  max_total_sequence_length: 64
  train_micro_batch_size: 4
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  dtensor_cfg: {tensor_parallel_size: 2}
  sequence_packing:
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  optimizer: {kwargs: {lr: 5e-6, eps: 1e-8}}
"""
    )
    policy = load_run_config("sft", path=path).policy
    assert policy["make_sequence_length_divisible_by"] == 2
    assert policy["sequence_packing"]["train_mb_tokens"] == 256
    kwargs = policy["optimizer"]["kwargs"]
    assert (kwargs["lr"], kwargs["eps"]) == (5e-6, 1e-8)


@pytest.mark.parametrize("content", ["a: [1", "- 1\n- 2\n", "a: ${missing}", "a: ${mul:x,2.5}"])
def test_a_broken_file_is_named(tmp_path, content):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"run\.yaml"):
        load_run_config("grpo", path=path)
    with pytest.raises(ValueError, match=r"absent\.yaml"):
        load_run_config("grpo", path=tmp_path / "absent.yaml")


def test_a_run_that_goes_on_may_change_its_length_and_its_checkpoints_alone():
    config = load_run_config("grpo")
    changed = override_resumed(config, ["grpo.steps=500", "checkpoint.keep_last=9"])
    assert (changed.grpo.steps, changed.checkpoint.keep_last) == (500, 9)
    assert changed.policy == config.policy
    with pytest.raises(ValueError, match="seed cannot change when a run is resumed"):
        override_resumed(config, ["seed=1"])


APART = ["policy.generation.backend=vllm", "policy.generation.colocated.enabled=false"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (APART[:1], r"contradicts policy\.generation\.colocated\.enabled=True.*refit\.delta out"),
        ([*APART, "cluster.use_gpus=true"], r"contradicts cluster\.use_gpus=True"),
        ([*APART, "refit.verify=none"], r"contradicts refit\.verify='none'.*use 'digest'"),
    ],
)
def test_deltas_that_cannot_be_are_refused(overrides, message):
    for allowed in ([], [*APART, "refit.staging=off"]):
        load_run_config("grpo", overrides=["refit.delta=true", *allowed])
    with pytest.raises(ValueError, match=r"refit\.delta=True " + message):
        load_run_config("grpo", overrides=["refit.delta=true", *overrides])


LORA = "policy.dtensor_cfg.lora.enabled=true"
DELTA_APART = ["policy.generation.colocated.enabled=false", "refit.delta=true"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (APART, r"contradicts policy\.dtensor_cfg\.lora\.enabled=False: there are none"),
        ([*APART, LORA, "refit.delta=true"], r"contradicts refit\.delta=True"),
        ([*APART, LORA, "refit.verify=none"], r"contradicts refit\.verify='none'.*use 'digest'"),
        (
            [APART[0], LORA, "policy.generation.vllm_cfg.sleep_level=2"],
            r"contradicts policy\.generation\.vllm_cfg\.sleep_level=2: .*set it to 1",
        ),
        (
            [*APART, LORA, "policy.generation.vllm_cfg.adapter_rank=64"],
            r"contradicts .*\.adapter_rank=64: it is policy\.dtensor_cfg\.lora\.r=16 then",
        ),
    ],
)
@pytest.mark.parametrize("recipe", ["grpo", "distill"])
def test_adapters_alone_that_cannot_be_are_refused(recipe, overrides, message):
    for allowed in ([], [*APART, LORA], [*APART[:1], LORA]):
        load_run_config(recipe, overrides=["refit.adapters=alone", *allowed])
    with pytest.raises(ValueError, match=r"refit\.adapters='alone' " + message):
        load_run_config(recipe, overrides=["refit.adapters=alone", *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([LORA], r"contradicts policy\.dtensor_cfg\.lora\.enabled=True: adapters are merged"),
        (["refit.transport=shm"], r"contradicts refit\.transport='shm': .* leave one of them out"),
        (["refit.bucket_mib=8"], r"contradicts refit\.bucket_mib=8"),
        (["refit.verify=none"], r"contradicts refit\.verify='none': .* use 'digest'"),
    ],
)
@pytest.mark.parametrize("recipe", ["grpo", "distill"])
def test_slices_that_cannot_be_are_refused(recipe, overrides, message):
    engines = "policy.generation.backend=vllm"
    for allowed in ([], [engines], APART, [engines, *DELTA_APART]):
        load_run_config(recipe, overrides=["refit.slices=true", *allowed])
    with pytest.raises(ValueError, match=r"refit\.slices=True " + message):
        load_run_config(recipe, overrides=["refit.slices=true", engines, *overrides])


def test_engines_take_the_rank_of_the_adapters_that_they_get():
    overrides = [*APART, LORA, "policy.dtensor_cfg.lora.r=5"]
    for way, rank in (("merged", None), ("alone", 5)):
        config = load_run_config("grpo", overrides=[*overrides, f"refit.adapters={way}"])
        section = engine_section(config, model="model")
        assert section["vllm_cfg"].get("adapter_rank") == rank


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"needs engines .* set policy\.generation\.backend=vllm and policy.*enabled=false$"),
        (APART[:1], r"contradicts policy\.generation\.colocated\.enabled=True"),
        ([*APART, "refit.staging=off"], r"contradicts refit\.staging='off': engines would wait"),
        (
            [*APART, "refit.verify=logprobs", "refit.max_mismatch=1"],
            r"contradicts refit\.verify='logprobs': completions of earlier weights",
        ),
        ([*APART, "grpo.dynamic_sampling=1"], r"contradicts grpo\.dynamic_sampling=1"),
        (
            [
                *APART,
                "async.too_old=rescore",
                "grpo.old_logprobs=sampler",
                "loss.importance_cap=null",
            ],
            r"async\.too_old='rescore' contradicts grpo\.old_logprobs='sampler'",
        ),
        ([*APART, "grpo.epochs_per_step=2"], r"max_staleness=2 is less than the 4 optimizer steps"),
        ([*APART, "async.refit_every=3"], r"refit_every=3 lets engines fall 4 optimizer steps"),
    ],
)
def test_asynchronous_rollouts_that_cannot_be_are_refused(overrides, message):
    # The built-in run takes two optimizer steps per step.
    load_run_config("grpo", overrides=[*APART, "async.max_staleness=2", "async.refit_every=2"])
    with pytest.raises(ValueError, match=message) as error:
        load_run_config("grpo", overrides=["async.max_staleness=2", *overrides])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("raised", "named"),
    [
        ("policy.precision='float7': of", "ppo.value_policy.precision='float7': of"),
        ("policy.a=1 and policy.b=2", "ppo.value_policy.a=1 and ppo.value_policy.b=2"),
        ("policy.model_name='m' is none", "ppo.value_model='m' is none"),
        ("sft.policy.a=1, a policy. No key", "sft.policy.a=1, a policy. No key"),
    ],
)
def test_errors_of_another_policy_name_its_section(raised, named):
    error = ValueError(raised)
    with (
        pytest.raises(ValueError, match=re.escape(named)) as found,
        naming_section("ppo.value_policy", model_key="ppo.value_model"),
    ):
        raise error
    assert (found.value, str(error)) == (error, named)


def test_errors_of_the_runs_own_policy_are_as_they_were():
    same = r"^policy\.model_name=1, policy\.a=2$"
    with pytest.raises(ValueError, match=same), naming_section("policy"):
        raise ValueError("policy.model_name=1, policy.a=2")


@pytest.mark.parametrize(("num_gpus", "workers"), [(0, 2), (1, 1), (2, 2), (8, 2)])
def test_a_machine_with_a_single_gpu_has_one_worker_by_default(monkeypatch, num_gpus, workers):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    config = load_run_config("grpo")
    assert config.cluster.bundle_ct_per_node_list == [workers]
    check_devices(config)
    given = load_run_config("grpo", overrides=["cluster.bundle_ct_per_node_list=[3]"])
    assert given.cluster.bundle_ct_per_node_list == [3]
