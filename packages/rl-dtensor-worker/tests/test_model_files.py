"""What a model's own files say: its end tokens, its export, and weights that are broken."""

import json
import shutil

import pytest
import scoring_ranks
import torch
from oracle import load
from rank_pool import RankFailure
from safetensors.torch import load_file, save_file
from tiny_model import EOS, make_batch, make_config
from transformers import AutoModelForCausalLM

# transformers reads it, and would not write it.
GENERATION_CONFIG = '{"do_sample": false, "temperature": 0.6, "eos_token_id": [1, 7]}'


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def change_config(model, **values):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(model, change):
    path = model / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("declared", ["generation_config.json", "config.json"])
def test_completions_end_at_every_end_token_as_in_transformers(pools, model, declared):
    batch = make_batch(6)
    config = make_config(str(model), generation={"max_new_tokens": 8, "temperature": 1.0})
    plain = load(str(model))
    prompts = [
        row[:length][None]
        for row, length in zip(batch["input_ids"], batch["input_lengths"].tolist(), strict=True)
    ]
    # The token that each row would have gone on with becomes an end token.
    ends = {EOS, *(int(plain(prompt).logits[0, -1].argmax()) for prompt in prompts[:3])}
    if declared == "config.json":
        (model / "generation_config.json").unlink()
        change_config(model, eos_token_id=sorted(ends))
    else:
        (model / declared).write_text(json.dumps({"eos_token_id": sorted(ends)}))
    (result,) = pools(1).run(scoring_ranks.generate, config=config, batch=batch, greedy=True)
    output, reloaded = result.outputs[-1], load(str(model))
    for row, prompt in enumerate(prompts):
        expected = reloaded.generate(prompt, do_sample=False, max_new_tokens=8)[0]
        total = int(output["unpadded_sequence_lengths"][row])
        assert output["output_ids"][row, :total].tolist() == expected.tolist()
    assert output["generation_lengths"][:3].tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_export_loads_as_the_model_did(pools, model, tmp_path, dtype):
    load(str(model)).to(dtype).save_pretrained(model)
    # `save_pretrained` refuses the former in one file, and the latter in the other.
    change_config(model, pad_token_id=-1, temperature=0.9)
    (model / "generation_config.json").write_text(GENERATION_CONFIG)
    out = tmp_path / "exported"
    config = make_config(str(model), precision="float32")
    pools(1).run(
        scoring_ranks.score_then_export, config=config, batch=make_batch(4), directory=str(out)
    )
    assert (out / "generation_config.json").read_text() == GENERATION_CONFIG
    before, after = (json.loads((path / "config.json").read_text()) for path in (model, out))
    # What belongs into the other file, transformers leaves out.
    assert after | {"temperature": 0.9} == before
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path) for path in (out, model))
    assert ours.dtype is dtype
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_a_model_without_a_generation_config_exports_none(pools, model, tmp_path):
    (model / "generation_config.json").unlink()
    arguments = {"batch": make_batch(2), "directory": str(tmp_path / "exported")}
    pools(1).run(scoring_ranks.score_then_export, config=make_config(str(model)), **arguments)
    assert not (tmp_path / "exported/generation_config.json").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named(pools, model, value):
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(model, lambda tensors: tensors[name].view(-1)[5].fill_(value))
    with pytest.raises(RankFailure) as failure:
        pools(1).run(scoring_ranks.score, config=make_config(str(model)), batch=make_batch(2))
    assert failure.value.kind == "ValueError"
    assert "the weights are not finite" in failure.value.text
    assert repr(name) in failure.value.text
    assert str(value) in failure.value.text
