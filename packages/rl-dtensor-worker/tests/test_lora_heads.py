"""Adapters of reward and value models, whose score layer is trained in full, against peft."""

import copy
from functools import partial

import lora_ranks
import parity_models
import pytest
import torch
from rank_pool import RankFailure
from safetensors.torch import load_file
from test_parity import assert_equal_parameters
from tiny_model import make_batch, make_config
from tolerances import LOGPROBS, assert_all_close, assert_close, expected_of, measured_training
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

pytestmark = pytest.mark.needs("rl-dtensor-worker[lora]")

peft = pytest.importorskip("peft", reason="comes with the extra lora")

CLASSES = {
    "reward": (AutoModelForSequenceClassification, "SEQ_CLS"),
    "value": (AutoModelForTokenClassification, "TOKEN_CLS"),
}
SETTINGS = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "o_proj", "down_proj"]}
SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}
BATCH = make_batch(4)


def load(path, head):
    return CLASSES[head][0].from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    """By head: a model, and adapters that peft wrote, with another layer of scores; on disk."""
    known = {}
    for head, (model_class, task) in CLASSES.items():
        config = copy.deepcopy(parity_models.CONFIGS["qwen3"])
        config.num_labels, config.classifier_dropout = 1, 0.0
        torch.manual_seed(1)
        base, adapters = (str(tmp_path_factory.mktemp(f"{head}-{each}")) for each in "ba")
        model_class.from_config(config).save_pretrained(base)
        model = peft.get_peft_model(load(base, head), peft.LoraConfig(**SETTINGS, task_type=task))
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(adapters)
        known[head] = base, adapters
    return known


def with_peft(base, adapters, head):
    return peft.PeftModel.from_pretrained(load(base, head), adapters, is_trainable=True)


def trained_of(model):
    """Return what a peft model trains, under the names that it has here."""
    return {
        in_our_names(name): tensor
        for name, tensor in model.named_parameters()
        if tensor.requires_grad
    }


def in_our_names(name):
    return name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")


def scores_of(model, head):
    inner = model.base_model.model
    values = inner.score(inner.model(BATCH["input_ids"]).last_hidden_state).squeeze(-1)
    if head == "reward":
        return values[torch.arange(4), BATCH["input_lengths"] - 1]
    return values * (torch.arange(12) < BATCH["input_lengths"][:, None])


def config_of(base, adapters, head, layout, **lora):
    lora = {"enabled": True, **SETTINGS, "adapter_path": adapters, **lora}
    dtensor = {"enabled": True, **layout, "lora": lora}
    return make_config(base, head=head, dtensor_cfg=dtensor, optimizer=SGD, generation=None)


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}], ids=["dp2", "tp2"])
@pytest.mark.parametrize("head", CLASSES)
def test_judges_with_adapters_equal_plain_peft(pools, judges, tmp_path, head, layout):
    base, adapters = judges[head]
    model = with_peft(base, adapters, head)
    before = expected_of(lambda each: scores_of(each, head), model, LOGPROBS)

    def loss_of(model, _):
        terms = (scores_of(model, head) - 1) ** 2
        return terms.sum() / 4, terms * (terms.numel() / 4)

    plain = measured_training(model, partial(torch.optim.SGD, lr=0.1), loss_of, [BATCH])
    expected = {in_our_names(name): each for name, each in plain.parameters.items()}
    config = config_of(base, adapters, head, layout)
    results = pools(2).run(lora_ranks.judge, config=config, batch=BATCH, directory=str(tmp_path))
    rows = [result.scores for result in results]
    scores = rows[0] if layout else torch.cat(rows)
    assert_close(scores, before)
    for result in results:
        assert_close(result.loss.reshape(1), plain.losses, "loss")
        assert "there is no reference model" in result.refusal
        found = {name: result.parameters[name] for name in trained_of(model)}
        assert "score.weight" in found
        assert_all_close(found, {name: expected[name] for name in found})
        assert torch.equal(result.sent["score.weight"], found["score.weight"])
        frozen = "model.layers.0.self_attn.q_proj"
        weight = load(base, head).get_parameter(f"{frozen}.weight")
        assert torch.equal(result.parameters[f"{frozen}.base_layer.weight"], weight)
        assert not torch.equal(result.sent[f"{frozen}.weight"], weight)
    check_files(pools, base, config, head, directory=tmp_path, found=found)


def check_files(pools, base, config, head, *, directory, found):
    """Hold what is saved against what is held."""
    files = (directory / "weights").glob("*.safetensors")
    assert {name for file in files for name in load_file(file)} == found.keys()
    model = with_peft(base, str(directory / "adapters"), head)
    assert model.active_peft_config.task_type == CLASSES[head][1]
    assert_equal_parameters(trained_of(model), found, 0.0)
    # In another layout, too.
    other = copy.deepcopy(config)
    other["dtensor_cfg"]["tensor_parallel_size"] = 3 - config["dtensor_cfg"].get(
        "tensor_parallel_size", 1
    )
    loaded, *_ = pools(2).run(lora_ranks.loaded_parameters, config=other, directory=str(directory))
    assert_equal_parameters({name: loaded[name] for name in found}, found, 0.0)


@pytest.mark.parametrize("head", CLASSES)
def test_all_linear_layers_are_not_that_of_the_scores(pools, judges, head):
    base, _ = judges[head]
    config = config_of(base, None, head, {}, target_modules="all-linear")
    del config["dtensor_cfg"]["lora"]["adapter_path"]
    found, *_ = pools(1).run(lora_ranks.describe, config=config)
    own = {name for name in found.trained if name.startswith("score.")}
    assert own == {f"score.{name}" for name, _ in load(base, head).score.named_parameters()}
    assert len(found.trained) == 2 * 7 * 2 + len(own)
    assert_equal_parameters(found.sent, dict(load(base, head).named_parameters()), 0.0)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (
            {"target_modules": ["q_proj", "score"]},
            "matches score: adapters are supported on linear layers only",
        ),
        ({"adapter_path": "of a language model"}, "has modules_to_save=[]"),
    ],
)
def test_adapters_that_do_not_fit_a_judge_are_named(pools, judges, tmp_path, lora, words):
    base, adapters = judges["reward"]
    if "adapter_path" in lora:
        model = load(base, "reward")
        plain = peft.LoraConfig(**SETTINGS)
        peft.get_peft_model(model, plain).save_pretrained(tmp_path)
        lora = {"adapter_path": str(tmp_path)}
    with pytest.raises(RankFailure) as failure:
        pools(1).run(lora_ranks.start, config=config_of(base, adapters, "reward", {}, **lora))
    assert failure.value.kind == "ValueError", failure.value
    assert words in failure.value.text
