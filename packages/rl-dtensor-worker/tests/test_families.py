"""Families that transformers runs in a way of their own: as transformers does, or refused."""

import json
import shutil

import parity_ranks
import pytest
import scoring_ranks
import torch
from family_models import EXPERTS, SIZES, build_family
from oracle import (
    assert_trained_like,
    plain_logprobs,
    plain_training,
)
from rank_pool import RankFailure
from rl_dtensor_worker import DTensorPolicyWorker
from rl_dtensor_worker.model.build import fsdp_units
from rl_dtensor_worker.model.quantized import quantized_files
from safetensors.torch import load_file, save_file
from tiny_model import make_batch, make_config
from tolerances import assert_close
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

PACKING = {
    "dynamic_batching": {"enabled": False},
    "sequence_packing": {
        "enabled": True,
        "train_mb_tokens": 24,
        "logprob_mb_tokens": 24,
        "algorithm": "first_fit_decreasing",
    },
}
DROPPING = {"gpt2": {"n_inner": 48}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}}
DROPOUT_NAMES = {"gpt2": "resid_pdrop", "opt": "dropout"}
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
    expected = plain_logprobs(load(path, attn_implementation="eager"), batch)
    uncapped = load(path, attn_implementation="eager", attn_logit_softcapping=None)
    without = plain_logprobs(uncapped, batch)
    assert (expected.exact - without.exact).abs().max() > 0.1
    config = make_config(path, **layout(**section), **(PACKING if batching else {}))
    results = pools(num_ranks).run(
        scoring_ranks.score_in_layout, config=config, batch=batch, section=batching
    )
    for result in results:
        assert_close(result, expected)


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


RECURRENT = {
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "rwkv": {"attention_hidden_size": 32},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "head_dim": 8},
}


@pytest.mark.parametrize("model_type", RECURRENT)
def test_recurrent_models_continue_each_ragged_prompt_as_alone(pools, tmp_path, model_type):
    path, batch = build_family(tmp_path, model_type, **RECURRENT[model_type]), make_batch(4)
    config = make_config(path, generation={"max_new_tokens": 4, "temperature": 1.0})
    (result,) = pools(1).run(scoring_ranks.generate, config=config, batch=batch)
    assert_continued(result.outputs[-1], batch, load(path))


def assert_continued(output, prompts, model):
    """Hold the log-probabilities of completions against the model's own whole forward of each."""
    for row, length in enumerate(prompts["input_lengths"].tolist()):
        total = int(output["unpadded_sequence_lengths"][row])
        tokens = output["output_ids"][row : row + 1, :total]
        rows = {"input_ids": tokens, "input_lengths": torch.tensor([total])}
        expected = plain_logprobs(model, rows)[0, length:total]
        assert_close(output["logprobs"][row, length:total], expected)


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
@pytest.mark.parametrize("asked_for", [False, True])
def test_dropout_of_the_config_is_off_in_train_unless_asked_for(
    pools, tmp_path, model_type, asked_for
):
    path = build_family(tmp_path / "model", model_type, **DROPPING[model_type])
    section = layout(model_dropout=True) if asked_for else {}
    (result,) = pools(1).run(
        scoring_ranks.score_in_both_modes,
        config=make_config(path, **section),
        batch=make_batch(4),
        directory=str(tmp_path / "exported"),
    )
    assert torch.equal(result.training, result.scoring) is not asked_for
    name = DROPOUT_NAMES[model_type]
    assert AutoConfig.from_pretrained(path).to_dict()[name] > 0
    assert AutoConfig.from_pretrained(result.exported).to_dict()[name] > 0


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("bert", "with is_decoder=False, .* has is_decoder=True in its config.json"),
        ("xlm", "with causal=False, .* has causal=True in its config.json"),
        ("cpmant", "whose tokens always see the tokens after them"),
    ],
)
def test_a_model_that_is_not_causal_is_refused_before_a_process_starts(tmp_path, model_type, told):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"is not causal.*'{model_type}' {told}"):
        DTensorPolicyWorker.validate_config(make_config(str(tmp_path)), world_size=1)


def test_a_model_that_sees_later_tokens_is_refused_at_the_start(pools, tmp_path):
    path = build_family(tmp_path, "gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(RankFailure) as error:
        pools(1).run(scoring_ranks.score, config=make_config(path), batch=make_batch(2))
    assert error.value.kind == "ValueError"
    assert "is not causal: another last token changes" in str(error.value)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_trained_activations_of_a_sharded_mlp_are_trained_alike_on_all_ranks(
    pools, tmp_path, sequence_parallel
):
    path, batch = build_family(tmp_path, "apertus", hidden_act="xielu"), make_batch(4, width=12)
    plain = plain_training(path, batch, global_batch_size=4, num_calls=2)
    section = {"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel}
    results = pools(2).run(
        parity_ranks.run_case,
        config=make_config(path, **layout(**section)),
        batch=batch,
        section=None,
        num_calls=2,
    )
    for result in results:
        assert_trained_like(plain, result)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def quantised(tmp_path_factory, request):
    """A checkpoint in block-FP8, and the same values in full precision."""
    root = tmp_path_factory.mktemp("quantised")
    build_family(root / "full", request.param, **EXPERTS.get(request.param, {"head_dim": 8}))
    shutil.copytree(root / "full", root / "fp8")
    full, stored = load_file(root / "full/model.safetensors"), {}
    for name in list(full):
        if not name.endswith("_proj.weight"):
            stored[name] = full[name]
            continue
        blocks = full[name].unfold(0, 16, 16).unfold(1, 8, 8)
        scales = blocks.abs().amax((-2, -1)) / 448
        grid = scales.repeat_interleave(16, 0).repeat_interleave(8, 1)
        stored[name] = (full[name] / grid).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        full[name] = stored[name].float() * grid
    save_file(full, root / "full/model.safetensors", metadata={"format": "pt"})
    save_file(stored, root / "fp8/model.safetensors", metadata={"format": "pt"})
    set_quantization(root / "fp8", {"quant_method": "fp8", "weight_block_size": [16, 8]})
    return root


def set_quantization(path, quantization):
    config = json.loads((path / "config.json").read_text())
    text = json.dumps(config | {"quantization_config": quantization})
    (path / "config.json").write_text(text)


@pytest.mark.parametrize(("num_ranks", "size"), [(1, 1), (2, 1), (2, 2)])
def test_block_fp8_is_dequantised_and_exported_in_full_precision(
    pools, quantised, tmp_path, num_ranks, size
):
    batch = make_batch(4)
    expected = plain_logprobs(load(str(quantised / "full")), batch)
    results = pools(num_ranks).run(
        scoring_ranks.score_then_export,
        config=make_config(str(quantised / "fp8"), **layout(tensor_parallel_size=size)),
        batch=batch,
        directory=str(tmp_path / "exported"),
    )
    for logprobs in results:
        assert_close(logprobs, expected)
    assert "quantization_config" not in json.loads((tmp_path / "exported/config.json").read_text())
    exported = plain_logprobs(load(str(tmp_path / "exported")), batch)
    assert_close(exported.exact, expected)


def test_another_quantisation_is_refused_before_a_process_starts(quantised, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(quantised / "full", path)
    set_quantization(path, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(ValueError, match="quant_method='bitsandbytes', which cannot be trained"):
        DTensorPolicyWorker.validate_config(make_config(str(path)), world_size=1)


# Blocks inside blocks, blocks that share weights, and blocks that no class attribute names.
UNITS = {
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "chunk_size": 8,
    },
    "minimax": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 8,
    },
    "biogpt": {},
    "openai-gpt": {"n_positions": 64},
}


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("mamba", ["MambaBlock", "MambaBlock"]),
        ("zamba2", ["Zamba2MambaDecoderLayer"] * 4),
        ("biogpt", ["BioGptDecoderLayer", "BioGptDecoderLayer"]),
        ("openai-gpt", ["Block", "Block"]),
    ],
)
def test_each_block_is_one_fsdp_unit(model_type, expected):
    config = AutoConfig.for_model(model_type, **SIZES | UNITS[model_type])
    with torch.device("meta"):
        units = fsdp_units(AutoModelForCausalLM.from_config(config))
    assert [type(unit).__name__ for unit in units] == expected


@pytest.mark.slow_beyond(6, every=2)
@pytest.mark.parametrize("model_type", UNITS)
@pytest.mark.parametrize(
    ("num_ranks", "precision"), [(2, "float32"), (2, "bfloat16"), (1, "bfloat16")]
)
def test_unusual_blocks_are_sharded_and_cast(pools, tmp_path, model_type, num_ranks, precision):
    path = build_family(tmp_path, model_type, **UNITS[model_type], initializer_range=0.1)
    batch = make_batch(4)
    dtype = getattr(torch, precision)
    expected = plain_logprobs(load(path), batch, dtype=dtype)
    results = pools(num_ranks).run(
        parity_ranks.run_case,
        config=make_config(path, precision=precision),
        batch=batch,
        section=None,
        num_calls=2,
    )
    exact = precision == "float32"
    found = torch.cat([each.columns["logprobs"] for each in results])
    assert_close(found, expected)
    stored = load_file(tmp_path / "model.safetensors")
    for result in results:
        assert result.sent.keys() == stored.keys()
        assert all(torch.equal(tensor, stored[n].to(dtype)) for n, tensor in result.sent.items())
        if exact:
            plain = plain_training(path, batch, global_batch_size=4, num_calls=2)
            assert_trained_like(plain, result)


def test_float8_without_scales_of_the_format_is_refused(pools, quantised, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(quantised / "fp8", path)
    stored = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    stored[f"{name}_scale"] = stored.pop(f"{name}_scale_inv")
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankFailure, match=rf"{name} is in float8.*no {name}_scale_inv"):
        pools(1).run(
            scoring_ranks.score_as_given, config=make_config(str(path)), batch=make_batch(4)
        )


LONG, SHORT = [4.0, 8.0, 16.0, 32.0], [1.0, 1.1, 1.2, 1.3]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": LONG,
    "short_factor": SHORT,
    "original_max_position_embeddings": 8,
}
# As `rope_theta` of a plain rotary embedding, by the published formula for 16 tokens.
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC_AT_16 = {"rope_type": "default", "rope_theta": 10000.0 * 3.0 ** (8 / 6)}


@pytest.mark.parametrize(
    ("model_type", "rope", "longest", "same"),
    [
        ("phi3", LONGROPE, 16, LONGROPE | {"short_factor": LONG}),
        ("phi3", LONGROPE, None, LONGROPE | {"short_factor": LONG}),
        ("phi3", LONGROPE, 8, LONGROPE | {"long_factor": SHORT}),
        ("llama", DYNAMIC, 16, DYNAMIC_AT_16),
    ],
)
@pytest.mark.parametrize("batching", ["padded", "packed", "context", "generate"])
def test_frequencies_that_depend_on_the_length_are_those_of_the_longest(
    pools, tmp_path, model_type, rope, longest, same, batching
):
    options = {"initializer_range": 0.2, "max_position_embeddings": 8}
    if model_type == "phi3":
        options |= {"max_position_embeddings": 64, "original_max_position_embeddings": 8}
    path, plain = (
        build_family(tmp_path / name, model_type, rope_parameters=parameters, **options)
        for name, parameters in (("model", rope), ("plain", same))
    )
    # Two tokens are added to those that are continued.
    width = 8 if longest == 8 else 12
    batch = make_batch(6, width=width - 2 if batching == "generate" else width)
    expected = plain_logprobs(load(plain), batch)
    if longest != 8:
        assert (plain_logprobs(load(path), batch).exact - expected.exact).abs().max() > 0.01
    size = 2 if batching == "context" else 1
    config = make_config(
        path,
        **layout(context_parallel_size=size),
        generation={"max_new_tokens": 2, "temperature": 1.0},
        **({} if longest is None else {"max_total_sequence_length": longest}),
        **(PACKING if batching in ("packed", "context") else {}),
    )
    if batching == "generate":
        (result,) = pools(1).run(scoring_ranks.generate, config=config, batch=batch)
        assert_continued(result.outputs[-1], batch, load(plain))
        return
    section = None if batching == "padded" else "sequence_packing"
    for found in pools(size).run(
        scoring_ranks.score_in_layout, config=config, batch=batch, section=section
    ):
        assert_close(found, expected)


def test_mxfp4_is_dequantised_as_transformers_does(tmp_path):
    generator = torch.Generator().manual_seed(0)
    bytes_of = {
        "experts.down_proj_blocks": torch.randint(0, 256, (3, 8, 2, 16), generator=generator),
        "experts.down_proj_scales": torch.randint(120, 132, (3, 8, 2), generator=generator),
    }
    stored = {name: tensor.to(torch.uint8) for name, tensor in bytes_of.items()}
    save_file(stored | {"bias": torch.ones(3)}, tmp_path / "model.safetensors")
    expected = convert_moe_packed_tensors(*stored.values(), dtype=torch.float32)
    files = quantized_files([str(tmp_path / "model.safetensors")], {"quant_method": "mxfp4"})
    assert sorted(files.names) == ["bias", "experts.down_proj"]
    assert files.shape("experts.down_proj") == expected.shape == (3, 64, 8)
    with files:
        assert torch.equal(files.read("experts.down_proj"), expected)
        part = files.read(
            "experts.down_proj", [torch.arange(1, 3), torch.arange(9), torch.arange(4)]
        )
    assert torch.equal(part, expected[1:3, :9, :4])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gpt_oss_in_mxfp4_scores_as_transformers(pools, tmp_path, num_ranks):
    options = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    build_family(tmp_path / "full", "gpt_oss", **options, intermediate_size=32)
    shutil.copytree(tmp_path / "full", tmp_path / "mxfp4")
    full = load_file(tmp_path / "full/model.safetensors")
    stored = dict(full)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in full if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, size, rows = stored.pop(name).shape
        shape = (experts, rows, size // 32)
        codes = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        exponents = torch.randint(120, 126, shape, generator=generator).to(torch.uint8)
        stored |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
        full[name] = convert_moe_packed_tensors(codes, exponents, dtype=torch.float32).contiguous()
    save_file(full, tmp_path / "full/model.safetensors", metadata={"format": "pt"})
    save_file(stored, tmp_path / "mxfp4/model.safetensors", metadata={"format": "pt"})
    set_quantization(tmp_path / "mxfp4", {"quant_method": "mxfp4"})
    batch = make_batch(4)
    expected = plain_logprobs(load(str(tmp_path / "full")), batch)
    config = make_config(str(tmp_path / "mxfp4"))
    for found in pools(num_ranks).run(scoring_ranks.score_as_given, config=config, batch=batch):
        assert_close(found, expected)
