"""Adapters, against plain peft and a plain loop over its model."""

import copy
import json
import re
import sys

import lora_ranks
import parity_models
import parity_ranks
import pytest
import torch
from family_models import EXPERTS, build_family
from oracle import (
    load,
    plain_logprobs,
    train_plainly,
)
from rank_pool import RankFailure
from rl_dtensor_worker import DTensorPolicyWorker
from rl_dtensor_worker.config import AdapterConfig
from rl_dtensor_worker.model.lora import inject_adapters
from safetensors.torch import load_file
from test_parity import (
    BATCHINGS,
    NUM_CALLS,
    assert_equal_parameters,
    joined,
)
from test_parity import LAYOUTS as PARITY_LAYOUTS
from tiny_model import make_batch, make_config
from tolerances import ELEMENTWISE, REPEATED, SUMS, assert_all_close, assert_close
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.needs("rl-dtensor-worker[lora]")

peft = pytest.importorskip("peft", reason="comes with the extra lora")

LAYOUTS = {"one": (1, {}), **PARITY_LAYOUTS}
# A scale of 5 / 3, which rounds where a power of two would not.
SETTINGS = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"}
# Linear in the gradients, for runs that are held against each other and not against an oracle.
SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}}
BATCH = make_batch(6)


def config_of(path, layout="dp2", *, batching="padded", **overrides):
    section = BATCHINGS[batching]
    budgets = {"train_mb_tokens": parity_ranks.BUDGET, "logprob_mb_tokens": parity_ranks.BUDGET}
    sections = {} if section is None else {section: {"enabled": True, **budgets}}
    lora = {"enabled": True, **SETTINGS, **overrides.pop("lora", {})}
    dtensor = {"enabled": True, **LAYOUTS[layout][1], "lora": lora, **overrides.pop("dtensor", {})}
    return make_config(path, dtensor_cfg=dtensor, **sections, **overrides)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return parity_models.build("qwen3", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """A directory that peft wrote, of adapters whose B is not zero."""
    torch.manual_seed(5)
    model = peft.get_peft_model(load(base), peft.LoraConfig(**SETTINGS, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    path = tmp_path_factory.mktemp("adapters")
    model.save_pretrained(path)
    return str(path)


def with_peft(base, adapters, *, trainable=False):
    return peft.PeftModel.from_pretrained(load(base), adapters, is_trainable=trainable)


def merged(model):
    """Return the parameters of a copy of a peft model into which it has merged its adapters."""
    return dict(copy.deepcopy(model).merge_and_unload().named_parameters())


def in_peft_names(parameters):
    return {f"base_model.model.{name}": tensor for name, tensor in parameters.items()}


@pytest.fixture(scope="module")
def plain(base, adapters):
    """What plain peft gives for the batch, before and after training."""
    model = with_peft(base, adapters, trainable=True)
    known = {
        "logprobs": plain_logprobs(model.eval(), BATCH),
        # The model starts with these adapters.
        "reference": plain_logprobs(model, BATCH),
        "merged": merged(model),
    }
    known["training"] = train_plainly(model, BATCH, global_batch_size=4, num_calls=NUM_CALLS)
    return known


# Every layout, and every way of batching with each kind of attention.
CASES = [
    ("one", "padded"),
    ("dp2", "packed"),
    ("cp2", "padded"),
    ("cp2", "packed"),
    ("hybrid", "dynamic"),
    ("tp2", "padded"),
    ("tp2_sp", "packed"),
    ("dp2_tp2", "dynamic"),
    ("tp2_cp2", "packed"),
]


@pytest.mark.slow_beyond(3, every=3)
@pytest.mark.parametrize(("layout", "batching"), CASES)
@pytest.mark.promise_first(2)
def test_every_layout_equals_plain_peft(pools, base, adapters, plain, layout, batching):
    num_ranks = LAYOUTS[layout][0]
    config = config_of(base, layout, batching=batching, lora={"adapter_path": adapters})
    results = pools(num_ranks).run(
        parity_ranks.run_case,
        config=config,
        batch=BATCH,
        section=BATCHINGS[batching],
        num_calls=NUM_CALLS,
    )
    for key in ("logprobs", "reference"):
        assert_close(joined(results, key), plain[key])
    expected, losses, norms = plain["training"]
    for result in results:
        assert_equal_parameters(result.sent, plain["merged"], 0.0)
        for found, values in ((result.losses, losses), (result.grad_norms, norms)):
            assert_close(found, values)
        found = in_peft_names(result.parameters)
        assert_all_close(found, expected)
        weights = {name: each for name, each in found.items() if "lora" not in name}
        assert all(
            torch.equal(each.double(), expected[name].exact) for name, each in weights.items()
        )


def test_adapters_alone_are_trained_and_start_as_nothing(pools, base):
    one, *_ = pools(1).run(lora_ranks.describe, config=config_of(base))
    two, *_ = pools(2).run(lora_ranks.describe, config=config_of(base))
    other, *_ = pools(1).run(lora_ranks.describe, config=config_of(base, seed=1))
    weights = dict(load(base).named_parameters())
    assert one.num_optimized == len(one.trained) == 2 * 7 * 2
    assert all(".lora_" in name for name in one.trained)
    assert_equal_parameters(one.sent, weights, 0.0)
    assert [*one.sent] == [*one.info] == [*weights]
    assert_equal_parameters(two.parameters, one.parameters, 0.0)
    for name, tensor in one.parameters.items():
        if "lora_A" in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < tensor.abs().max() <= bound
            assert not torch.equal(tensor, other.parameters[name])
        elif "lora_B" in name:
            assert not tensor.any()


def test_weights_that_stay_are_held_in_the_dtype_of_compute(pools, base):
    found, *_ = pools(2).run(lora_ranks.describe, config=config_of(base, precision="bfloat16"))
    for name, dtype in found.dtypes.items():
        assert dtype is (torch.float32 if ".lora_" in name else torch.bfloat16), name
    for name, weight in load(base).named_parameters():
        assert torch.equal(found.sent[name], weight.bfloat16())


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("layout", ["dp2", "cp2", "tp2_sp"])
def test_the_reference_is_the_model_with_the_adapters_that_it_starts_from(
    pools, base, adapters, layout
):
    config = config_of(base, layout, lora={"adapter_path": adapters})
    results = pools(2).run(lora_ranks.score_before_training, config=config, batch=BATCH)
    first = pools(2).run(lora_ranks.score_plainly, config=config, batch=BATCH)
    for result, policy in zip(results, first, strict=True):
        assert torch.equal(result.reference, policy)
        assert torch.equal(result.reference_after, policy)
        assert (result.policy_after - policy).abs().max() > 1e-4


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("layout", ["dp2", "cp2", "tp2_sp"])
def test_the_reference_is_the_model_without_new_adapters(pools, base, layout):
    config = config_of(base, layout)
    plain_config = make_config(base, dtensor_cfg={"enabled": True, **LAYOUTS[layout][1]})
    results = pools(2).run(lora_ranks.score_before_training, config=config, batch=BATCH)
    expected = pools(2).run(lora_ranks.score_plainly, config=plain_config, batch=BATCH)
    for result, reference in zip(results, expected, strict=True):
        assert torch.equal(result.reference, reference)
        assert torch.equal(result.reference_after, reference)
        assert (result.policy_after - reference).abs().max() > 1e-4
        assert (result.grad_norm > 0).all()


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("layout", "precision"), [("dp2", "float32"), ("hybrid", "bfloat16"), ("dp2_tp2", "float32")]
)
def test_what_is_saved_loads_everywhere(pools, base, tmp_path, layout, precision):
    num_ranks = LAYOUTS[layout][0]
    config = config_of(base, layout, precision=precision)
    saved, *_ = pools(num_ranks).run(
        lora_ranks.train_and_save, config=config, batch=BATCH, directory=str(tmp_path)
    )
    assert saved.is_untouched
    assert saved.num_slots == 2 * 7 * 2
    # The checkpoint holds adapters alone, and goes on bit for bit.
    stored = {
        name for file in (tmp_path / "weights").glob("*.safetensors") for name in load_file(file)
    }
    assert stored == {name for name in saved.saved if ".lora_" in name}
    resumed, *_ = pools(num_ranks).run(
        lora_ranks.load_and_train, config=config, batch=BATCH, directory=str(tmp_path)
    )
    assert_equal_parameters(resumed.loaded, saved.saved, 0.0)
    assert_equal_parameters(resumed.continued, saved.continued, 0.0)
    said = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (said["peft_type"], said["r"], said["lora_alpha"]) == ("LORA", 3, 5)
    assert said["base_model_name_or_path"] == base
    # peft reads its own format, and the merged model is the one it makes of it.
    model = with_peft(base, tmp_path / "adapters")
    parameters = dict(model.named_parameters())
    for name, tensor in in_peft_names(saved.saved).items():
        if ".lora_" in name:
            assert torch.equal(parameters[name], tensor)
    if precision == "float32":
        assert_equal_parameters(saved.sent, merged(model), 0.0)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, parameter in exported.named_parameters():
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter.to(saved.sent[name].dtype), saved.sent[name])


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("layout", "other"), [("tp2_sp", "dp2"), ("dp2", "tp2")])
def test_training_goes_on_in_another_layout(pools, base, tmp_path, layout, other):
    arguments = {"batch": BATCH, "directory": str(tmp_path)}
    configs = [config_of(base, each, optimizer=SGD) for each in (layout, other)]
    saved, *_ = pools(2).run(lora_ranks.train_and_save, config=configs[0], **arguments)
    resumed, *_ = pools(2).run(lora_ranks.load_and_train, config=configs[1], **arguments)
    assert_equal_parameters(resumed.loaded, saved.saved, 0.0)
    assert_equal_parameters_of_sgd(resumed.continued, saved.continued)


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_adapters_go_from_one_worker_to_another_through_peft(pools, base, tmp_path, layout):
    arguments = {"batch": BATCH, "directory": str(tmp_path)}
    saved, *_ = pools(2).run(lora_ranks.train_and_save, config=config_of(base, layout), **arguments)
    config = config_of(base, lora={"adapter_path": str(tmp_path / "adapters")})
    started, *_ = pools(1).run(lora_ranks.describe, config=config)
    assert_equal_parameters(started.parameters, saved.saved, 0.0)


@pytest.mark.parametrize("saving", ["activation_checkpointing", "cpu_offload"])
def test_what_saves_memory_changes_nothing(pools, base, adapters, saving):
    lora = {"adapter_path": adapters}
    outcomes = [
        pools(2).run(
            parity_ranks.run_case,
            config=config_of(base, lora=lora, dtensor=dtensor),
            batch=BATCH,
            section=None,
            num_calls=2,
        )[0]
        for dtensor in ({}, {saving: True})
    ]
    plain, saved = outcomes
    assert_equal_parameters(saved.parameters, plain.parameters, 0.0)
    assert_equal_parameters(saved.sent, plain.sent, 0.0)


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_some_layers_alone_on_tied_embeddings_and_a_mixture(pools, tmp_path, layout):
    lora = {"target_modules": ["q_proj", "layers.1.self_attn.v_proj"]}
    for name in ("llama_tied", "qwen3_moe"):
        path = parity_models.build(name, tmp_path / name)
        found, *_ = pools(2).run(lora_ranks.describe, config=config_of(path, layout, lora=lora))
        layers = {each.partition(".lora_")[0] for each in found.trained}
        assert layers == {
            *(f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)),
            "model.layers.1.self_attn.v_proj",
        }
        # Sent under the names of the checkpoint, which has a tensor for each expert.
        assert_equal_parameters(found.sent, load_file(f"{path}/model.safetensors"), 0.0)


ALL_LINEAR = {
    "gpt2": [r"transformer\.h\.\d\.(attn|mlp)\.c_\w+"],
    "mixtral": [r"model\.layers\.\d\.self_attn\.[qkvo]_proj"],
    "qwen3_moe": [r"model\.layers\.\d\.self_attn\.[qkvo]_proj"],
    "deepseek_v3": [
        r"model\.layers\.\d\.self_attn\.[qo]\w*_proj",
        r"model\.layers\.\d\.self_attn\.kv_(a_proj_with_mqa|b_proj)",
    ],
}
"""Patterns of all layers that `all-linear` stands for, by `model_type`."""


@pytest.fixture
def others(tmp_path, request):
    """A model of another family, and adapters of its linear layers that peft wrote."""
    path = build_family(
        tmp_path / "base",
        request.param,
        **EXPERTS.get(request.param, {"n_inner": 48}),
        tie_word_embeddings=False,
    )
    pattern = re.compile("|".join(ALL_LINEAR[request.param]))
    model = load(path)
    layers = [name for name, _ in model.named_modules() if pattern.fullmatch(name)]
    settings = SETTINGS | {"target_modules": layers}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapters")
    return path, str(tmp_path / "adapters"), layers


@pytest.mark.parametrize("others", [*ALL_LINEAR], indirect=True)
def test_all_linear_layers_of_other_families_equal_plain_peft(pools, tmp_path, others):
    path, adapters, layers = others
    config = config_of(path, lora={"adapter_path": adapters})
    arguments = {"batch": BATCH, "section": None, "num_calls": 2}
    results = pools(2).run(parity_ranks.run_case, config=config, **arguments)
    model = with_peft(path, adapters, trainable=True)
    expected = plain_logprobs(model.eval(), BATCH)
    assert_close(joined(results, "logprobs"), expected)
    assert (expected.exact - plain_logprobs(load(path), BATCH).exact).abs().max() > 0.01
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path / "merged")
    sent = load_file(tmp_path / "merged/model.safetensors")
    trained, *_ = train_plainly(model, BATCH, global_batch_size=4, num_calls=2)
    for result in results:
        assert_equal_parameters(result.sent, sent, 0.0)
        found = in_peft_names(result.parameters)
        assert {each.partition(".lora_")[0] for each in result.parameters if "lora_" in each} == {
            *layers
        }
        assert_all_close(found, trained)


@pytest.mark.parametrize("others", [*ALL_LINEAR], indirect=True)
def test_adapters_of_other_families_are_what_peft_reads(pools, tmp_path, others):
    path, _, _ = others
    arguments = {"batch": BATCH, "directory": str(tmp_path / "saved")}
    saved, *_ = pools(2).run(lora_ranks.train_and_save, config=config_of(path), **arguments)
    model = with_peft(path, tmp_path / "saved/adapters")
    model.merge_and_unload().save_pretrained(tmp_path / "plain")
    assert_equal_parameters(saved.sent, load_file(tmp_path / "plain/model.safetensors"), 0.0)


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("gpt2", None),
        (
            "phimoe",
            r"\['model.layers.\*.mlp.experts.down_proj', .*, 'model.layers.\*.mlp.router'\]",
        ),
        ("deepseek_v2", r"'model.layers.\*.mlp.experts.gate_up_proj', 'model.layers.\*.mlp.gate_"),
    ],
)
def test_what_all_linear_leaves_out_is_logged(tmp_path, caplog, model_type, told):
    path = build_family(tmp_path, model_type, **EXPERTS.get(model_type, {"n_inner": 48}))
    adapters = AdapterConfig(
        r=2, lora_alpha=2, lora_dropout=0.0, target_modules="all-linear", adapter_path=None
    )
    inject_adapters(load(path), adapters, model_name=path)
    assert len(caplog.records) == (told is not None)
    if told is not None:
        assert re.search(f"leaves out .*{told}", caplog.text)


@pytest.fixture
def sharing(tmp_path):
    """A model of two layers, the second of which has the first one's query projection."""
    model = load(build_family(tmp_path, "llama"))
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    names = [f"model.layers.{number}.self_attn.q_proj.weight" for number in (1, 0)]
    model.all_tied_weights_keys |= {names[0]: names[1]}
    return model


@pytest.mark.slow_beyond(3, every=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_base_and_factors_are_sent_apart(pools, layout, base, adapters):
    """The base is the model that was loaded, and with the factors it is what peft merges."""
    config = config_of(base, layout, lora={"adapter_path": adapters})
    plain = dict(load(base).named_parameters())
    with_adapters = with_peft(base, adapters)
    factors = {
        name.removeprefix("base_model.model.").replace(".default.", "."): tensor
        for name, tensor in with_adapters.named_parameters()
        if "lora_" in name
    }
    wanted = merged(with_adapters)
    for result in pools(LAYOUTS[layout][0]).run(lora_ranks.sources_of, config=config):
        sent_base, sent = result
        assert_equal_parameters(sent_base, plain, 0.0)
        assert sent.keys() == factors.keys()
        for name, tensor in sent.items():
            scale = 5 / 3 if "lora_B" in name else 1
            assert torch.equal(tensor, factors[name] * scale)
        for layer in {name.rpartition(".lora_")[0] for name in sent}:
            change = sent[f"{layer}.lora_B.weight"] @ sent[f"{layer}.lora_A.weight"]
            total = sent_base[f"{layer}.weight"] + change
            atol = ELEMENTWISE * float(total.abs().max())
            torch.testing.assert_close(total, wanted[f"{layer}.weight"], rtol=0, atol=atol)


def test_factors_are_scaled_before_they_are_rounded(pools, base, adapters):
    config = config_of(base, "one", lora={"adapter_path": adapters})
    (result,) = pools(1).run(lora_ranks.sources_of, config=config, dtype=torch.bfloat16)
    for name, parameter in with_peft(base, adapters).named_parameters():
        if "lora_B" in name:
            sent = result[1][name.removeprefix("base_model.model.").replace(".default.", ".")]
            assert torch.equal(sent, (parameter * (5 / 3)).bfloat16())


def adapters_of(targets):
    return AdapterConfig(
        r=2, lora_alpha=2, lora_dropout=0.0, target_modules=targets, adapter_path=None
    )


def test_layers_that_share_a_weight_get_no_adapters(sharing):
    inject_adapters(sharing, adapters_of("all-linear"), model_name="shared")
    adapted = {name for name, each in sharing.named_modules() if hasattr(each, "lora_A")}
    assert not any("q_proj" in name for name in adapted)
    assert "model.layers.1.self_attn.k_proj" in adapted


def test_a_layer_that_shares_its_weight_is_refused_by_name(sharing):
    told = r"target_modules=\['q_proj'\] matches model\.layers\.0\.self_attn\.q_proj, whose weight"
    with pytest.raises(ValueError, match=told):
        inject_adapters(sharing, adapters_of(["q_proj"]), model_name="shared")


def test_dropout_is_for_training_alone(pools, base, adapters):
    for dropout in (0.0, 0.5):
        lora = {"adapter_path": adapters, "lora_dropout": dropout}
        (outcome,) = pools(1).run(
            lora_ranks.train_twice_from_one_seed, config=config_of(base, lora=lora), batch=BATCH
        )
        assert torch.equal(outcome.trained[0], outcome.scored[0]) == (dropout == 0.0)


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A model with a bias in every linear layer of its blocks."""
    config = copy.deepcopy(parity_models.CONFIGS["llama"])
    config.attention_bias = config.mlp_bias = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    path = tmp_path_factory.mktemp("biased")
    model.save_pretrained(path)
    return str(path)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    "dtensor",
    [
        {},
        {"sequence_parallel": True},
        {"custom_parallel_plan": "plans_for_tests.NAMED"},
        {"custom_parallel_plan": "plans_for_tests.ATTENTION"},
    ],
    ids=["rows", "sequences", "styles", "attention"],
)
def test_ranks_that_share_layers_do_what_one_rank_does(pools, biased, dtensor):
    lora = {"lora_dropout": 0.3}
    # Full rows: dropout would also be drawn for padding to a width that the ranks divide.
    batch = make_batch(6, width=6)
    batch["input_lengths"][:] = 6
    batch["token_mask"][:, 1:] = 1.0
    one, shared = (
        pools(num_ranks).run(
            parity_ranks.run_case,
            config=config_of(biased, lora=lora, dtensor=sizes, optimizer=SGD),
            batch=batch,
            section=None,
            num_calls=NUM_CALLS,
        )[0]
        for num_ranks, sizes in ((1, {}), (2, {"tensor_parallel_size": 2, **dtensor}))
    )
    torch.testing.assert_close(shared.losses, one.losses, rtol=SUMS, atol=0)
    torch.testing.assert_close(shared.grad_norms, one.grad_norms, rtol=REPEATED, atol=0)
    assert_equal_parameters_of_sgd(shared.parameters, one.parameters)


def assert_equal_parameters_of_sgd(found, expected):
    largest = max(float(each.abs().max()) for each in expected.values())
    assert_equal_parameters(found, expected, REPEATED * largest)


# What is refused


def refusal(pools, config, **options):
    with pytest.raises(RankFailure) as failure:
        pools(1).run(lora_ranks.start, config=config, **options)
    assert failure.value.kind == "ValueError", failure.value
    return failure.value.text


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["q_proj", "k_porj"], ["'k_porj'", "matches no layer of Qwen3ForCausalLM"]),
        ("no.such.*", ["'no.such.*'", "does not fit Qwen3ForCausalLM"]),
        (["q_proj", "lm_head"], ["matches lm_head", "output layer"]),
        (["embed_tokens"], ["matches model.embed_tokens", "linear layers only"]),
    ],
)
def test_layers_that_cannot_be_meant_are_named(pools, base, targets, words):
    config = config_of(base, lora={"target_modules": targets})
    text = refusal(pools, config)
    assert text.startswith("policy.dtensor_cfg.lora.target_modules=")
    assert all(word in text for word in words), text
    # And before a process starts.
    with pytest.raises(ValueError, match="target_modules=") as failure:
        DTensorPolicyWorker.validate_config(config, world_size=1)
    assert str(failure.value) == text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 4}, ["has r=3", "the policy 4"]),
        ({"lora_alpha": 3}, ["has lora_alpha=5", "the policy 3"]),
        ({"target_modules": ["q_proj"]}, ["other layers", "24 tensors differ"]),
    ],
)
def test_a_directory_of_other_adapters_is_refused(pools, base, adapters, change, words):
    text = refusal(pools, config_of(base, lora={"adapter_path": adapters, **change}))
    assert text.startswith("policy.dtensor_cfg.lora.adapter_path=")
    assert all(word in text for word in words), text


def test_a_directory_without_adapters_is_refused(pools, base):
    text = refusal(pools, config_of(base, lora={"adapter_path": base}))
    assert "has no adapter_model.safetensors" in text


def test_a_checkpoint_of_another_scale_is_refused(pools, base, tmp_path):
    pools(1).run(
        lora_ranks.train_and_save, config=config_of(base), batch=BATCH, directory=str(tmp_path)
    )
    weights = str(tmp_path / "weights")
    text = refusal(pools, config_of(base, lora={"lora_alpha": 12}), weights_path=weights)
    assert f"weights_path={weights!r} has lora_alpha=5, and the policy 12" in text
    assert "has no adapter_config.json" in refusal(
        pools, config_of(base), weights_path=str(tmp_path / "merged")
    )


def test_a_checkpoint_in_another_format_is_refused(pools, base, tmp_path):
    model = load(base)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    text = refusal(pools, config_of(str(tmp_path)))
    assert "lora.enabled=True needs a checkpoint in safetensors" in text


def test_a_style_that_adapters_cannot_follow_is_named(pools, biased):
    plan = "plans_for_tests.torch_styles"
    config = config_of(
        biased, "tp2", dtensor={"tensor_parallel_size": 2, "custom_parallel_plan": plan}
    )
    with pytest.raises(
        RankFailure, match=r"has the style \w+Parallel for model.layers.0"
    ) as failure:
        pools(2).run(lora_ranks.start, config=config)
    assert "name it colwise or rowwise" in failure.value.text


def test_without_peft_the_extra_is_named_before_anything_is_built(monkeypatch, base):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r'pip install "rl-dtensor-worker\[lora\]"') as raised:
        DTensorPolicyWorker.validate_config(config_of(base, "dp2"), world_size=2)
    assert isinstance(raised.value, ImportError)


def test_saving_adapters_needs_some(pools, base, tmp_path):
    with pytest.raises(RankFailure) as failure:
        pools(1).run(
            lora_ranks.train_and_save,
            config=make_config(base),
            batch=BATCH,
            directory=str(tmp_path),
        )
    assert "save_adapters() needs policy.dtensor_cfg.lora.enabled=True" in failure.value.text
