import copy
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_interfaces import (
    GENERATION_DEFAULTS,
    POLICY_DEFAULTS,
    DTensorConfig,
    DynamicBatchingConfig,
    GenerationConfig,
    LoraConfig,
    MegatronConfig,
    PolicyConfig,
    SequencePackingConfig,
    check_typed_dict,
    resolve_policy_config,
)

pytestmark = pytest.mark.promise

RANKS = {"gpus_per_node": 0}
BUDGETS = {"train_mb_tokens": 512, "logprob_mb_tokens": 1024}
DTENSOR = {"enabled": True}


def resolve(**config):
    return resolve_policy_config({"model_name": "tiny", **config})


def refusal(config, path="policy"):
    with pytest.raises(ValueError, match=f"^{path}") as raised:
        resolve_policy_config(config, path=path)
    return str(raised.value)


# What is not set


def test_a_model_name_is_enough():
    assert resolve() == {
        **POLICY_DEFAULTS,
        "model_name": "tiny",
        "tokenizer": {"name": "tiny"},
    }


def test_a_given_value_stands_over_its_default():
    resolved = resolve(
        tokenizer={"name": "other"},
        precision="float32",
        dtensor_cfg={"enabled": True, "tensor_parallel_size": 2},
        generation={"temperature": 0.5},
    )
    assert resolved["tokenizer"] == {"name": "other"}
    assert resolved["precision"] == "float32"
    assert resolved["dtensor_cfg"] == {
        **POLICY_DEFAULTS["dtensor_cfg"],
        "enabled": True,
        "tensor_parallel_size": 2,
    }
    assert resolved["generation"] == {**GENERATION_DEFAULTS, "temperature": 0.5}


def test_without_a_section_there_is_no_generation():
    assert "generation" not in resolve()
    assert "generation" not in resolve(generation=None)
    assert resolve(generation={})["generation"] == GENERATION_DEFAULTS


def test_none_inside_a_list_of_schedulers_is_not_set():
    entries = [{"name": "a.B", "kwargs": None}, {"milestones": [3]}]
    assert resolve(scheduler=entries)["scheduler"] == [{"name": "a.B"}, {"milestones": [3]}]


def test_free_form_arguments_keep_their_none():
    resolved = resolve(
        optimizer={"name": "a.B", "kwargs": {"foreach": None}},
        generation={"backend": "vllm", "vllm_cfg": {"seed": None}},
    )
    assert resolved["optimizer"]["kwargs"] == {"foreach": None}
    assert resolved["generation"]["vllm_cfg"] == {"seed": None}


def test_the_defaults_have_documented_keys_and_types():
    check_typed_dict(POLICY_DEFAULTS, PolicyConfig, path="defaults")
    check_typed_dict(GENERATION_DEFAULTS, GenerationConfig, path="defaults")


def test_the_defaults_are_never_handed_out():
    before = copy.deepcopy(POLICY_DEFAULTS)
    resolved = resolve()
    resolved["dtensor_cfg"]["enabled"] = True
    resolved["tokenizer"]["name"] = "changed"
    assert before == POLICY_DEFAULTS


# Two keys for one matter

TWINS = [
    ("fsdp_offload_enabled", "dtensor_cfg", "cpu_offload"),
    ("activation_checkpointing_enabled", "dtensor_cfg", "activation_checkpointing"),
    ("activation_checkpointing_enabled", "megatron_cfg", "activation_checkpointing"),
]


@pytest.mark.parametrize(("key", "section", "inner"), TWINS)
@pytest.mark.parametrize("value", [True, False])
def test_either_of_two_twins_sets_both(key, section, inner, value):
    for config in (
        {key: value, section: {"enabled": True}},
        {section: {"enabled": True, inner: value}},
        {key: value, section: {"enabled": True, inner: value}},
    ):
        resolved = resolve(**config)
        assert resolved[key] is value
        assert resolved[section][inner] is value


@pytest.mark.parametrize(("key", "section", "inner"), TWINS)
def test_what_a_section_turns_off_is_not_turned_on_beside_it(key, section, inner):
    config = {"model_name": "tiny", key: True, section: {"enabled": True, inner: False}}
    assert refusal(config) == f"policy.{key}=True contradicts policy.{section}.{inner}=False"


@pytest.mark.parametrize(("key", "section", "inner"), TWINS)
def test_what_a_section_turns_on_is_on(key, section, inner):
    resolved = resolve(**{key: False, section: {"enabled": True, inner: True}})
    assert resolved[key] is resolved[section][inner] is True


@pytest.mark.parametrize(("key", "section", "inner"), TWINS)
def test_a_section_that_is_off_contradicts_nothing(key, section, inner):
    for enabled in ({"enabled": False}, {"enabled": None}, {}):
        resolved = resolve(**{key: True, section: {**enabled, inner: False}})
        assert resolved[key] is True
        assert resolved[section][inner] is False


@pytest.mark.parametrize("optimizer", [{"name": "a.B"}, {"name": "a.B", "kwargs": {"lr": None}}])
def test_the_optimizer_takes_the_learning_rate_where_it_has_none(optimizer):
    resolved = resolve(learning_rate=0.25, optimizer=optimizer)
    assert resolved["optimizer"]["kwargs"]["lr"] == 0.25


def test_the_optimizer_keeps_its_own_rate():
    optimizer = {"name": "a.B", "kwargs": {"lr": 0.5}}
    assert resolve(optimizer=optimizer)["optimizer"] == optimizer
    assert resolve(learning_rate=0.5, optimizer=optimizer)["optimizer"] == optimizer


def test_megatron_takes_the_learning_rate_too():
    section = {"enabled": True, "optimizer": {"optimizer": "adam"}}
    resolved = resolve(learning_rate=0.25, megatron_cfg=section)
    assert resolved["megatron_cfg"]["optimizer"]["lr"] == 0.25
    off = {"enabled": False, "optimizer": {"lr": 0.5}}
    assert resolve(learning_rate=0.25, megatron_cfg=off)["megatron_cfg"]["optimizer"]["lr"] == 0.5


# What is refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "policy.model_name is not set: the name or directory of the model"),
        (
            {"model_name": None},
            "policy.model_name is not set: the name or directory of the model",
        ),
        (
            {"learning_rate": 0.1, "optimizer": {"name": "a.B", "kwargs": {"lr": 0.2}}},
            "policy.learning_rate=0.1 contradicts policy.optimizer.kwargs.lr=0.2",
        ),
        (
            {"learning_rate": 0.1, "megatron_cfg": {"enabled": True, "optimizer": {"lr": 0.2}}},
            "policy.learning_rate=0.1 contradicts policy.megatron_cfg.optimizer.lr=0.2",
        ),
        ({"precision": "fp8"}, "policy.precision='fp8' must be one of "),
        ({"learning_rate": -0.1}, "policy.learning_rate=-0.1 must be at least 0"),
        ({"max_grad_norm": -1}, "policy.max_grad_norm=-1 must be above 0"),
        ({"max_grad_norm": 0}, "policy.max_grad_norm=0 must be above 0"),
        ({"max_grad_norm": float("nan")}, "policy.max_grad_norm=nan must be finite"),
        ({"max_grad_norm": "1"}, "policy.max_grad_norm must be float or None, got str '1'"),
        ({"timeout_s": 0}, "policy.timeout_s=0 must be at least 1"),
        ({"timeout_s": 1e-9}, "policy.timeout_s=1e-09 must be at least 1"),
        ({"timeout_s": 1e300}, "policy.timeout_s=1e+300 must be at most 31622400"),
        ({"timeout_s": float("inf")}, "policy.timeout_s=inf must be finite"),
        (
            {"dtensor_cfg": DTENSOR, "megatron_cfg": {"enabled": True}},
            "policy.dtensor_cfg.enabled=True and policy.megatron_cfg.enabled=True: "
            "enable one backend",
        ),
        (
            {"dtensor_cfg": DTENSOR, "acme_cfg": {"enabled": True}},
            "policy.dtensor_cfg.enabled=True and policy.acme_cfg.enabled=True: enable one backend",
        ),
        (
            {"dtensor_cfg": {**DTENSOR, "tensor_parallel_size": 0}},
            "policy.dtensor_cfg.tensor_parallel_size=0 must be at least 1",
        ),
        (
            {"megatron_cfg": {"enabled": True, "pipeline_model_parallel_size": -2}},
            "policy.megatron_cfg.pipeline_model_parallel_size=-2 must be at least 1",
        ),
        (
            {
                "dynamic_batching": {"enabled": True, **BUDGETS},
                "sequence_packing": {"enabled": True, **BUDGETS},
            },
            "policy.dynamic_batching.enabled=True contradicts "
            "policy.sequence_packing.enabled=True: a micro-batch is either padded or packed",
        ),
        (
            {"dynamic_batching": {"enabled": True, **BUDGETS, "sequence_length_round": 0}},
            "policy.dynamic_batching.sequence_length_round=0 must be at least 1",
        ),
        (
            {"dtensr_cfg": {"tensor_parallel_size": 2}},
            "policy.dtensr_cfg is not a known key, did you mean 'dtensor_cfg'?",
        ),
        (
            {"dtensor_cfg": {"cpu_ofload": True}},
            "policy.dtensor_cfg.cpu_ofload is not a known key, did you mean 'cpu_offload'?",
        ),
        (
            {"dtensor_cfg": {"enabled": False, "tensor_parallel_size": "2"}},
            "policy.dtensor_cfg.tensor_parallel_size must be int, got str '2'",
        ),
        (
            {"dtensor_cfg": {"lora": {"rank": 8}}},
            "policy.dtensor_cfg.lora.rank is not a known key, the keys are ['adapter_path', ",
        ),
        (
            {"dtensor_cfg": {**DTENSOR, "lora": {"enabled": True, "r": 0}}},
            "policy.dtensor_cfg.lora.r=0 must be at least 1",
        ),
        (
            {"dtensor_cfg": {**DTENSOR, "lora": {"enabled": True, "lora_alpha": 0}}},
            "policy.dtensor_cfg.lora.lora_alpha=0 must be above 0",
        ),
        (
            {"dtensor_cfg": {**DTENSOR, "lora": {"enabled": True, "lora_dropout": 1.0}}},
            "policy.dtensor_cfg.lora.lora_dropout=1.0 must be below 1",
        ),
        (
            {"dtensor_cfg": {**DTENSOR, "lora": {"enabled": True, "target_modules": []}}},
            "policy.dtensor_cfg.lora.target_modules=[] must not be empty",
        ),
        (
            {"scheduler": [{"name": "a.B", "kwargs": {}}, {"milestones": ["3"]}]},
            "policy.scheduler[1].milestones[0] must be int, got str '3'",
        ),
        (
            {"generation": {"temperature": -1.0}},
            "policy.generation.temperature=-1.0 must be at least 0.01, or 0",
        ),
        (
            {"generation": {"temperature": 1e-30}},
            "policy.generation.temperature=1e-30 must be at least 0.01, or 0",
        ),
        ({"generation": {"top_p": 0.0}}, "policy.generation.top_p=0.0 must be above 0"),
        ({"generation": {"top_p": 1.5}}, "policy.generation.top_p=1.5 must be at most 1"),
        (
            {"generation": {"stop_token_ids": [3, -1]}},
            "policy.generation.stop_token_ids[1]=-1 must",
        ),
        (
            {"generation": {"backend": "x", "colocated": {"enabled": False, "resources": RANKS}}},
            "policy.generation.colocated.resources.gpus_per_node=0 must be at least 1",
        ),
        ({"seed": 10**30}, f"policy.seed={10**30} must be below 4294967296"),
        ({"optimizer": {"name": ""}}, "policy.optimizer.name='' must not be empty"),
        (
            {"scheduler": [{"milestones": [0]}]},
            "policy.scheduler[0].milestones[0]=0 must be at least 1",
        ),
        (
            {"generation": {"stop_strings": ["a", ""]}},
            "policy.generation.stop_strings[1]='' must not be empty",
        ),
        ({"generation": {"top_k": 0}}, "policy.generation.top_k=0 must be at least 1"),
        (
            {"generation": {"max_new_tokens": 0}},
            "policy.generation.max_new_tokens=0 must be at least 1",
        ),
        (
            {"generation": {"colocated": {"enabled": False}}},
            "policy.generation.colocated.enabled=False contradicts "
            "policy.generation.backend='hf': the training workers sample there",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(config, message):
    assert refusal({"model_name": "tiny", **config} if config else {}).startswith(message)


COUNTS = [
    "train_global_batch_size",
    "train_micro_batch_size",
    "logprob_batch_size",
    "generation_batch_size",
    "make_sequence_length_divisible_by",
    "max_total_sequence_length",
]


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [0, -3])
def test_a_count_is_at_least_one(key, value):
    message = f"policy.{key}={value} must be at least 1"
    assert refusal({"model_name": "tiny", key: value}) == message
    assert resolve(**{key: 1})[key] == 1


@pytest.mark.parametrize("section", ["dynamic_batching", "sequence_packing"])
@pytest.mark.parametrize("key", list(BUDGETS))
def test_a_budget_is_given_and_positive(section, key):
    rest = {name: value for name, value in BUDGETS.items() if name != key}
    base = {"model_name": "tiny", section: {"enabled": True, **rest}}
    missing = f"policy.{section}.{key} is not set: the tokens of a micro-batch"
    assert refusal(base) == missing
    base[section][key] = 0
    assert refusal(base) == f"policy.{section}.{key}=0 must be at least 1"


@pytest.mark.parametrize("section", ["dtensor_cfg", "megatron_cfg"])
@pytest.mark.parametrize("size", ["context_parallel_size", "other"])
def test_values_of_a_section_that_is_off_are_not_judged(section, size):
    key = "activation_checkpointing" if size == "other" else size
    value = True if size == "other" else 0
    assert resolve(**{section: {"enabled": False, key: value}})[section][key] == value


def test_one_section_that_is_off_leaves_the_other_alone():
    resolved = resolve(
        dynamic_batching={"enabled": False, "train_mb_tokens": 0},
        sequence_packing={"enabled": True, **BUDGETS},
    )
    assert resolved["sequence_packing"]["enabled"] is True


def test_the_caller_names_the_config():
    assert refusal({"model_name": 3}, path="teacher") == "teacher.model_name must be str, got int 3"
    assert refusal([], path="teacher") == "teacher must be a mapping, got list []"


# A backend of somebody else


@pytest.mark.parametrize("enabled", [True, False])
def test_a_third_party_section_is_passed_on_as_it_is(enabled):
    section = {"enabled": enabled, "anything": {"goes": None}}
    resolved = resolve(acme_cfg=section)
    assert resolved["acme_cfg"] == section
    assert resolved["acme_cfg"]["anything"] is not section["anything"]


# Whatever is given


def section_of(typed_dict, **overrides):
    """Return a strategy of sections of a TypedDict: some of its plain keys, some of them None."""
    plain = {bool: st.booleans(), int: st.integers(1, 99), str: st.text(min_size=1)}
    hints = get_type_hints(typed_dict)
    values = {key: plain[hint] for key, hint in hints.items() if hint in plain} | overrides
    optional = {key: st.none() | value for key, value in values.items()}
    return st.fixed_dictionaries({}, optional=optional)


LORA = section_of(
    LoraConfig,
    lora_dropout=st.floats(0, 0.9),
    target_modules=st.just("all-linear") | st.lists(st.text(min_size=1), min_size=1),
)
RATE = st.floats(min_value=0, max_value=1)
SWITCHES = ["fsdp_offload_enabled", "activation_checkpointing_enabled"]
CONFIGS = st.fixed_dictionaries(
    {"model_name": st.text(min_size=1)},
    optional={
        "precision": st.none() | st.sampled_from(["float32", "bfloat16", "float16"]),
        "train_global_batch_size": st.none() | st.integers(1, 2**31 - 1),
        "max_grad_norm": st.none() | st.floats(min_value=1e-9, max_value=1),
        "learning_rate": st.none() | RATE,
        **{key: st.none() | st.booleans() for key in SWITCHES},
        "optimizer": st.fixed_dictionaries(
            {"name": st.just("a.B")}, optional={"kwargs": st.just({"eps": 1e-6, "fused": None})}
        ),
        "tokenizer": st.none() | st.fixed_dictionaries({}, optional={"name": st.text(min_size=1)}),
        "generation": st.none()
        | section_of(
            GenerationConfig,
            backend=st.sampled_from(["hf", "vllm"]),
            temperature=st.just(0) | st.floats(0.01, 10),
            stop_token_ids=st.lists(st.integers(0, 9)),
        ),
        "dtensor_cfg": st.none() | section_of(DTensorConfig, lora=LORA),
        "megatron_cfg": st.none() | section_of(MegatronConfig, enabled=st.just(False)),
        "sequence_packing": st.none() | section_of(SequencePackingConfig, enabled=st.just(False)),
        "dynamic_batching": st.none() | section_of(DynamicBatchingConfig, enabled=st.just(False)),
        "acme_cfg": st.just({"enabled": False, "key": None}),
    },
)


def without_contradiction(config):
    """Return whether the section that is on agrees with the switches of the policy."""
    section = config.get("dtensor_cfg") or {}
    if not section.get("enabled"):
        return True
    pairs = zip(SWITCHES, ["cpu_offload", "activation_checkpointing"], strict=True)
    # What the section turns on may be off in the policy.
    return not any(config.get(key) is True and section.get(inner) is False for key, inner in pairs)


VALID = CONFIGS.filter(without_contradiction)


@given(config=VALID)
def test_resolving_twice_changes_nothing(config):
    resolved = resolve_policy_config(config)
    assert resolve_policy_config(resolved) == resolved


@given(config=VALID)
def test_the_callers_config_is_left_alone(config):
    before = copy.deepcopy(config)
    resolve_policy_config(config)
    assert config == before


@given(config=VALID)
def test_none_means_not_set(config):
    bare = {key: value for key, value in config.items() if value is not None}
    full = {**dict.fromkeys(PolicyConfig.__annotations__), **config}
    assert resolve_policy_config(full) == resolve_policy_config(bare)


@given(config=VALID)
def test_what_is_resolved_is_complete(config):
    resolved = resolve_policy_config(config)
    assert POLICY_DEFAULTS.keys() <= resolved.keys()
    for key, default in POLICY_DEFAULTS.items():
        if isinstance(default, dict):
            assert default.keys() <= resolved[key].keys()
    assert None not in resolved.values()


@given(config=CONFIGS)
def test_exactly_the_contradictions_are_refused(config):
    if without_contradiction(config):
        resolve_policy_config(config)
    else:
        assert " contradicts policy.dtensor_cfg." in refusal(config)


@pytest.mark.parametrize("section", ["dtensor_cfg", "megatron_cfg"])
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, r"env_vars\.RANK='0': a rank's process has read it"),
        ({"OMP_NUM_THREADS": "2"}, r"env_vars\.OMP_NUM_THREADS='2'"),
        ({"A=B": "0"}, r"env_vars\.A=B='0' cannot be an environment variable"),
        ({"NCCL_DEBUG": 1}, r"env_vars\.NCCL_DEBUG must be str, got int 1"),
    ],
)
def test_variables_that_a_rank_cannot_be_given_are_refused(section, variables, message):
    given = {"model_name": "m", section: {"enabled": True, "env_vars": variables}}
    with pytest.raises(ValueError, match=rf"policy\.{section}\.{message}"):
        resolve_policy_config(given)


def test_variables_of_a_rank_are_kept():
    given = {"model_name": "m", "dtensor_cfg": {"enabled": True, "env_vars": {"NCCL_DEBUG": "1"}}}
    assert resolve_policy_config(given)["dtensor_cfg"]["env_vars"] == {"NCCL_DEBUG": "1"}
