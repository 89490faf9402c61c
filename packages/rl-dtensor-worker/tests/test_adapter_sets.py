"""Several sets of adapters on one model, against peft with a set of its own in each model."""

import adapter_set_ranks
import pytest
import torch
from oracle import load, plain_logprobs
from rl_dtensor_worker.model.adapter_sets import _step_device
from safetensors.torch import load_file
from tiny_model import make_batch, make_config
from tolerances import assert_close

pytestmark = pytest.mark.needs("rl-dtensor-worker[lora]")

peft = pytest.importorskip("peft", reason="comes with the extra lora")

LORA = {"enabled": True, "r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
SPECS = {
    "a": {"rank": 4, "seed": 1, "layers": ["attention", "mlp"]},
    "b": {"rank": 2, "seed": 2, "layers": ["attention"]},
}
BATCHES = {
    "a": [[make_batch(3, seed=1), make_batch(2, seed=2)], [make_batch(4, seed=3)] * 2],
    "b": [[make_batch(2, seed=4), make_batch(5, seed=5)], [make_batch(3, seed=6)] * 2],
}
CALLS = [make_batch(3, seed=1), make_batch(2, seed=2)]


def config_of(path, **dtensor):
    return make_config(path, dtensor_cfg={"enabled": True, "lora": LORA, **dtensor})


def with_peft(path, *, rank, layers):
    """Return the model with adapters of exactly a set's rank and layers, from plain peft."""
    names = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    names["mlp"] = ["gate_proj", "up_proj", "down_proj"]
    targets = [name for kind in layers for name in names[kind]]
    config = peft.LoraConfig(r=rank, lora_alpha=LORA["lora_alpha"], target_modules=targets)
    return peft.get_peft_model(load(path), config)


def fill(model, adapters, *, rank):
    """Give a peft model the leading `rank` dimensions of the adapters."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            full = adapters[name.removeprefix("base_model.model.")]
            own = full[:rank] if "lora_A" in name else full[:, :rank]
            parameter.data = own.clone()


def nll(model, batch):
    """Return the loss of `SummedNll` by plain transformers, one row at a time."""
    total, rows = 0.0, []
    for row, length, mask in zip(
        batch["input_ids"], batch["input_lengths"].tolist(), batch["token_mask"], strict=True
    ):
        logits = model(input_ids=row[None, :length]).logits[0].float()
        found = logits[:-1].log_softmax(-1).gather(-1, row[1:length, None])[:, 0]
        total = total - (found * mask[1:length]).sum()
        rows.append(found.detach())
    return total, rows


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_step_is_adam_on_peft(pools, tiny_model, name, num_ranks):
    spec = SPECS[name]
    options = adapter_set_ranks.ADAM
    model = with_peft(tiny_model, rank=spec["rank"], layers=spec["layers"])
    before, after, report, rows = pools(num_ranks).run(
        adapter_set_ranks.gradients_and_step, config=config_of(tiny_model), spec=spec, batches=CALLS
    )[0]
    fill(model, before, rank=spec["rank"])
    trained = [p for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    for batch in CALLS:
        nll(model, batch)[0].backward()
    # By hand, in float64: the first step of AdamW with decoupled weight decay.
    norm = torch.stack([p.grad.double().square().sum() for p in trained]).sum().sqrt()
    assert report["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert report["stepped"]
    assert report["lr"] == options["lr"]
    factor = min(1.0, options["max_grad_norm"] / (float(norm) + 1e-6))
    for parameter in trained:
        gradient = parameter.grad.double() * factor
        # The means divided by their bias corrections are the gradient and its square.
        change = gradient / (gradient.abs() + options["eps"])
        kept = parameter.data.double() * (1 - options["lr"] * options["weight_decay"])
        parameter.data = (kept - options["lr"] * change).float()
    expected = {key.removeprefix("base_model.model."): p for key, p in model.named_parameters()}
    for key, found in after.items():
        own = expected.get(key)
        if own is None:  # a layer that the set does not train
            assert not found.any(), key
            continue
        kept = found[: spec["rank"]] if "lora_A" in key else found[:, : spec["rank"]]
        assert (kept - own.data).abs().max() <= 1e-5, key
        padding = found[spec["rank"] :] if "lora_A" in key else found[:, spec["rank"] :]
        assert not padding.any(), key
    if num_ranks == 1:
        plain = load(tiny_model)
        for batch, found in zip(CALLS, rows, strict=True):
            for row, own in zip(found, nll(plain, batch)[1], strict=True):
                assert (row[1 : len(own) + 1] - own).abs().max() <= 1e-5


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sets_that_alternate_are_as_each_alone(pools, tiny_model, num_ranks):
    options = {"config": config_of(tiny_model), "specs": SPECS, "batches": BATCHES}
    for expected, found in zip(
        pools(num_ranks).run(adapter_set_ranks.alone, **options),
        pools(num_ranks).run(adapter_set_ranks.interleaved, **options),
        strict=True,
    ):
        for name, adapters in expected.items():
            assert any(each.any() for each in adapters.values())
            for key, value in adapters.items():
                assert torch.equal(found[name][key], value), (name, key)


def test_saved_sets_continue_bit_for_bit(pools, tiny_model, tmp_path):
    spec = SPECS["b"]
    bases = []
    for found in pools(2).run(
        adapter_set_ranks.saved_and_loaded,
        config=config_of(tiny_model),
        spec=spec,
        batches=CALLS,
        directory=str(tmp_path),
    ):
        kept, copied, loaded, continued, resumed, same, base = found
        for key in kept:
            assert torch.equal(copied[key], kept[key])
            assert torch.equal(loaded[key], kept[key])
            assert torch.equal(resumed[key], continued[key])
        assert any(not torch.equal(continued[key], kept[key]) for key in kept)
        assert same, "a seed gives the same tokens"
        bases.append(base)
    plain = plain_logprobs(load(tiny_model), CALLS[0])
    assert_close(torch.cat(bases), plain, "without adapters")
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert all(2 in value.shape for value in stored.values()), "at the set's own rank"
    model = peft.PeftModel.from_pretrained(load(tiny_model), tmp_path / "a")
    loaded_by_peft = dict(model.named_parameters())
    for name, value in stored.items():
        key = name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
        assert torch.equal(loaded_by_peft[key], value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")],
)
def test_the_number_of_steps_is_where_the_kernel_reads_it(options, expected):
    """As `torch.optim.AdamW` itself creates it, on a device that is not the CPU."""
    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))
    group = {"fused": None, "capturable": False} | options
    assert _step_device(parameter, group).type == expected
