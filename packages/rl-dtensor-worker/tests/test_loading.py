"""Every rank reads its own slices: bit for bit what `from_pretrained` gives."""

import loading_ranks
import pytest
import torch
from rank_pool import RankFailure
from safetensors.torch import load_file
from tiny_checkpoints import MODELS, edit_tensors, save_model
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Each architecture in a file of float32, and in small files of bfloat16."""
    root = tmp_path_factory.mktemp("checkpoints")
    paths = [save_model(root / name, name) for name in MODELS]
    paths += [
        save_model(root / f"{name}_files", name, dtype=torch.bfloat16, max_shard_size="8KB")
        for name in MODELS
    ]
    return paths


def expected_tensors(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_loaded(loaded, path):
    expected = expected_tensors(path)
    assert loaded.keys() == expected.keys(), path
    for name, tensor in expected.items():
        assert tensor.dtype == loaded[name].dtype, (path, name)
        assert torch.equal(tensor, loaded[name]), (path, name)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_shard_equals_from_pretrained(pools, checkpoints, num_ranks):
    # 66 and 3 rows over four ranks: the last shards are short, or empty.
    results = pools(num_ranks).run(loading_ranks.load_models, model_names=checkpoints)
    for path, loaded in zip(checkpoints, results[0], strict=True):
        assert_loaded(loaded, path)


def test_the_files_are_as_this_test_takes_them_to_be(checkpoints):
    by_name = {path.rsplit("/", 1)[1]: path for path in checkpoints}
    names = load_file(f"{by_name['qwen3_moe']}/model.safetensors").keys()
    assert "model.layers.0.mlp.experts.2.gate_proj.weight" in names
    assert "lm_head.weight" not in load_file(f"{by_name['qwen2_tied']}/model.safetensors")


def test_shards_over_two_axes(pools, checkpoints):
    names = [path for path in checkpoints if path.rsplit("/", 1)[1].startswith("qwen2")]
    results = pools(4).run(loading_ranks.load_over_two_axes, model_names=names)
    for path, loaded in zip(names, results[0], strict=True):
        assert_loaded(loaded.tensors, path)
        assert any("Shard(dim=1)" in each for each in loaded.placements)
        # Sharded along the same dim by both axes.
        assert any("_StridedShard(dim=0" in each for each in loaded.placements)


def test_names_that_are_not_the_models_own(pools, tmp_path):
    def without_prefix(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    def head_alone(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    def head_beside(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    def one_too_many(tensors):
        tensors["model.layers.0.extra.weight"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)

    edits = [without_prefix, head_alone, head_beside, other_head, one_too_many]
    paths = [
        edit_tensors(save_model(tmp_path / edit.__name__, "qwen2_tied"), edit) for edit in edits
    ]
    results = pools(2).run(loading_ranks.load_models, model_names=paths)
    for path, loaded in zip(paths, results[0], strict=True):
        assert_loaded(loaded, path)
    assert "lm_head.weight" in results[0][3]


def test_a_checkpoint_that_is_no_safetensors_file(pools, tmp_path):
    path = save_model(tmp_path / "model", "qwen2_tied")
    torch.save(load_file(f"{path}/model.safetensors"), f"{path}/pytorch_model.bin")
    (tmp_path / "model" / "model.safetensors").unlink()
    loaded, *_ = pools(2).run(loading_ranks.load_models, model_names=[path])
    assert_loaded(loaded[0], path)


def test_a_score_layer_that_a_language_model_lacks_is_initialised(pools, tmp_path):
    path = save_model(tmp_path / "model", "qwen2_tied")

    def load(num_ranks, **settings):
        results = pools(num_ranks).run(loading_ranks.load_models, model_names=[path], **settings)
        return results[0][0]

    alone, two = load(1, head="reward"), load(2, head="reward")
    score = alone["score.weight"]
    assert torch.equal(score, two["score.weight"])
    # As transformers does: normal, by the config's initializer_range of 0.02.
    assert 0.01 < float(score.std()) < 0.03
    assert not torch.equal(score, load(1, head="reward", seed=7)["score.weight"])
    values = load(1, head="value")
    assert any(name.startswith("score.") for name in values)
    # Whatever else is missing is still refused.
    edit_tensors(path, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(RankFailure, match=r"lacks 1 tensors .*model.norm.weight"):
        load(1, head="reward")


def _broken(tmp_path, kind):
    path = save_model(tmp_path / kind, "qwen3_moe")
    if kind == "nothing":
        (tmp_path / kind / "model.safetensors").unlink()
    if kind == "missing":
        return edit_tensors(path, lambda t: t.pop("model.layers.1.mlp.gate.weight"))
    if kind == "expert":
        return edit_tensors(path, lambda t: t.pop("model.layers.1.mlp.experts.1.up_proj.weight"))
    if kind == "shape":
        return edit_tensors(path, lambda t: t.update({"model.norm.weight": torch.zeros(8)}))
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nothing", ["nothing", "model.safetensors"]),
        ("missing", ["lacks 1 tensors", "model.layers.1.mlp.gate.weight"]),
        ("expert", ["model.layers.1.mlp.experts"]),
        ("shape", ["model.norm.weight", "(8,)", "(32,)"]),
    ],
)
def test_what_is_no_checkpoint_of_the_model_is_named(pools, tmp_path, kind, words):
    path = _broken(tmp_path, kind)
    with pytest.raises(RankFailure) as failure:
        pools(2).run(loading_ranks.load_models, model_names=[path])
    assert failure.value.kind == "ValueError"
    assert all(word in failure.value.text for word in ["policy.model_name", *words])


def test_what_one_rank_cannot_read_fails_on_all(pools, checkpoints):
    errors = pools(2).run(loading_ranks.load_with_a_broken_rank, model_name=checkpoints[0])
    assert errors == ["RuntimeError: rank 1 failed: OSError: planted", "OSError: planted"]
