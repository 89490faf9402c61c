"""Architectures and mappings, on plain tensors in one process, against transformers' own."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rl_megatron_worker.attention import window_of
from rl_megatron_worker.convert import (
    Piece,
    converter_for,
    known_converters,
    register_converter,
    registry,
)
from rl_megatron_worker.convert.mappings import slice_pieces, total_length
from rl_megatron_worker.model.config import DecoderConfig
from safetensors.torch import load_file
from tiny_models import KINDS, build_tiny, tiny_config
from tolerances import ELEMENTWISE, FLOAT64
from transformers import AutoConfig, GPT2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(scope="module", params=[kind + tied for kind in KINDS for tied in ("", " tied")])
def checkpoint(request, tmp_path_factory):
    """The path of a tiny model."""
    kind, _, tied = request.param.partition(" ")
    return build_tiny(tmp_path_factory.mktemp(kind), kind, tied=bool(tied))


def mappings_of(path):
    config = AutoConfig.from_pretrained(path)
    converter = converter_for(config)
    architecture = converter.architecture(config)
    return architecture, converter.mappings(architecture)


def shard_length(mapping, size, vocab_size):
    if "embedding" in mapping.names[0] or "output" in mapping.names[0]:
        return -(-vocab_size // size)
    return mapping.shard_shape(size)[mapping.piece_dim]


def shard_of(mapping, tensors, *, rank, size, vocab_size=66):
    """Return the shard of a rank, as a model would hold it."""
    shape = list(mapping.shard_shape(size))
    shape[mapping.piece_dim] = shard_length(mapping, size, vocab_size)
    shard = torch.full(shape, torch.nan)

    def read(name, *, dim, start, stop):
        return tensors[name].narrow(dim, start, stop - start)

    mapping.fill(shard, read, rank=rank, size=size)
    return shard


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_of_all_ranks_join_bit_for_bit(checkpoint, size):
    # 4 ranks are more than there are groups of queries.
    _, mappings = mappings_of(checkpoint)
    tensors = load_file(f"{checkpoint}/model.safetensors")
    joined = {}
    for mapping in mappings:
        if mapping.is_copy:
            continue
        # Experts that one tensor stacks are filled in one by one.
        into = {
            name: joined.get(name, torch.full(shape, torch.nan))
            for name, shape in mapping.sources.items()
        }
        for rank in range(size):
            shard = shard_of(mapping, tensors, rank=rank, size=size)
            assert not shard.isnan().any()
            mapping.unshard(shard, into, rank=rank, size=size)
        if mapping.expert is None:
            assert not joined.keys() & into.keys()
        joined |= into
    assert joined.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(joined[name], tensor), name


def test_no_parameter_is_made_twice(checkpoint):
    _, mappings = mappings_of(checkpoint)
    names = [name for mapping in mappings for name in mapping.names]
    assert len(names) == len(set(names))


def test_fused_norms_have_the_names_that_megatron_core_gives_them():
    """Its local layers say what Transformer Engine calls their parameters, for checkpoints."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    renamed = get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map
    config = tiny_config("llama")
    converter = converter_for(config)
    pairs = [
        m.names for m in converter.mappings(converter.architecture(config)) if len(m.names) > 1
    ]
    assert len(pairs) == 4 * len(renamed)
    for local, fused in pairs:
        (found,) = {local.replace(*pair) for pair in renamed.items()} - {local}
        assert found == fused


@pytest.mark.parametrize("size", [1, 2])
def test_attention_of_a_shard_is_that_of_its_heads(checkpoint, size):
    """The rows of a shard, read as `[group, heads, key, value]`, are the heads of transformers."""
    architecture, mappings = mappings_of(checkpoint)
    if architecture.transformer.get("multi_latent_attention"):
        pytest.skip("latent attention has no fused projection")
    if architecture.transformer.get("attention_output_gate"):
        pytest.skip("gates are between its queries: test_gates_follow_the_queries_of_a_group")
    tensors = load_file(f"{checkpoint}/model.safetensors")
    (mapping,) = [
        m for m in mappings if m.names[0].endswith("layers.2.self_attention.linear_qkv.weight")
    ]
    q, k, v = (
        tensors[f"model.layers.2.self_attn.{name}_proj.weight"].unflatten(0, (heads, -1))
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    for rank in range(size):
        shard = shard_of(mapping, tensors, rank=rank, size=size)
        for group, rows in enumerate(shard.unflatten(0, (2 // size, 4, -1)), rank * 2 // size):
            expected = (q[2 * group], q[2 * group + 1], k[group], v[group])
            assert torch.equal(rows, torch.stack(expected))


@pytest.mark.parametrize("size", [1, 2])
def test_gates_follow_the_queries_of_a_group(tmp_path, size):
    path = build_tiny(tmp_path, "qwen3_next")
    _, mappings = mappings_of(path)
    tensors = load_file(f"{path}/model.safetensors")
    (mapping,) = [m for m in mappings if m.names[0].endswith("1.self_attention.linear_qkv.weight")]
    gated, key, value = (
        tensors[f"model.layers.1.self_attn.{name}_proj.weight"].unflatten(0, (-1, 16))
        for name in ("q", "k", "v")
    )
    q, gate = gated[::2], gated[1::2]
    expected = [(q[:2], gate[:2], key[:1], value[:1]), (q[2:], gate[2:], key[1:], value[1:])]
    for rank in range(size):
        shard = shard_of(mapping, tensors, rank=rank, size=size).unflatten(0, (2 // size, 6, 16))
        for group, rows in enumerate(shard, rank * 2 // size):
            assert torch.equal(rows, torch.cat(expected[group]))


@pytest.mark.parametrize("size", [1, 2])
def test_stacked_experts_are_transposed_and_have_gates_before_what_they_multiply(tmp_path, size):
    path = build_tiny(tmp_path, "gpt_oss")
    _, mappings = mappings_of(path)
    tensors = load_file(f"{path}/model.safetensors")
    of_expert = [m for m in mappings if "layers.1.mlp.experts.local_experts.2." in m.names[0]]
    first, bias, last, _ = of_expert
    stacked = tensors["model.layers.1.mlp.experts.gate_up_proj"][2]
    half = 48 // size
    for rank in range(size):
        units = slice(rank * half, (rank + 1) * half)
        gate, up = stacked.T[::2][units], stacked.T[1::2][units]
        own = shard_of(first, tensors, rank=rank, size=size)
        assert torch.equal(own, torch.cat([gate, up]))
        biases = tensors["model.layers.1.mlp.experts.gate_up_proj_bias"][2]
        own = shard_of(bias, tensors, rank=rank, size=size)
        assert torch.equal(own, torch.cat([biases[::2][units], biases[1::2][units]]))
        down = tensors["model.layers.1.mlp.experts.down_proj"][2]
        assert torch.equal(shard_of(last, tensors, rank=rank, size=size), down[units].T)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gated_mlp_over_shards_equals_the_full_one(size, tmp_path):
    path = build_tiny(tmp_path, "llama")
    _, mappings = mappings_of(path)
    tensors = load_file(f"{path}/model.safetensors")
    fc1, fc2 = [m for m in mappings if m.names[0].startswith("decoder.layers.1.mlp")]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = []
    for rank in range(size):
        first, second = (shard_of(m, tensors, rank=rank, size=size).double() for m in (fc1, fc2))
        gate, up = (x @ first.T).chunk(2, -1)
        parts.append((F.silu(gate) * up) @ second.T)
    gate, up, down = (
        tensors[f"model.layers.1.mlp.{name}_proj.weight"].double()
        for name in ("gate", "up", "down")
    )
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(sum(parts), expected, rtol=0, atol=FLOAT64)


def test_padding_of_the_vocabulary_is_zero(tmp_path):
    path = build_tiny(tmp_path, "llama")
    _, (embedding, *_) = mappings_of(path)
    tensors = load_file(f"{path}/model.safetensors")
    shards = [shard_of(embedding, tensors, rank=rank, size=4) for rank in range(4)]
    assert [len(shard) for shard in shards] == [17] * 4
    assert torch.equal(torch.cat(shards)[:66], tensors["model.embed_tokens.weight"])
    assert not torch.cat(shards)[66:].any()


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    bounds=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_slice_pieces_takes_the_rows_between(lengths, bounds):
    pieces, rows = [], []
    for index, length in enumerate(lengths):
        pieces.append(Piece(str(index), 3, 3 + length))
        rows += [(str(index), 3 + row) for row in range(length)]
    start, stop = sorted(bounds)
    taken = [
        (p.source, row) for p in slice_pieces(pieces, start, stop) for row in range(p.start, p.stop)
    ]
    assert taken == rows[start:stop]
    assert total_length(pieces) == len(rows)


def test_settings_become_fields(tmp_path):
    config = tiny_config("qwen3_moe", mlp_only_layers=[0], decoder_sparse_step=2)
    architecture = converter_for(config).architecture(config)
    assert [architecture.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    fields = architecture.transformer
    assert (fields["kv_channels"], fields["num_query_groups"]) == (16, 2)
    assert fields["qk_layernorm"]
    assert fields["moe_ffn_hidden_size"] == 24
    assert not fields["moe_router_pre_softmax"]
    plain = tiny_config("qwen3_moe", norm_topk_prob=False)
    assert converter_for(plain).architecture(plain).transformer["moe_router_pre_softmax"]
    assert (
        converter_for(tiny_config("qwen2"))
        .architecture(tiny_config("qwen2"))
        .transformer["add_qkv_bias"]
    )


def test_theta_and_scaling_are_those_of_transformers():
    """Llama 3's, whose other constants Megatron-core has built in, and linear interpolation."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    for parameters in (LLAMA3, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}):
        config = tiny_config("llama", rope_parameters=parameters, max_position_embeddings=131072)
        architecture = converter_for(config).architecture(config)
        # Only the frequencies are asked for: no group, no device.
        scaling = dict(architecture.rotary_scaling)
        embedding = RotaryEmbedding(
            8, 1.0, rotary_base=architecture.rotary_base, use_cpu_initialization=True, **scaling
        )
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
        frequencies = embedding.get_freqs_non_repeated(3)[1]
        torch.testing.assert_close(frequencies, expected, rtol=ELEMENTWISE, atol=0)
        assert factor == 1.0


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = DEFAULT_ROPE | {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 32,
}


def by_kind(*, full=DEFAULT_ROPE, window=DEFAULT_ROPE):
    """Return the parameters of rotary embeddings of each kind of layer."""
    return {"full_attention": full, "sliding_attention": window}


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
REFUSED = [
    ("llama", {"attention_bias": True}, "attention_bias=True"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor=2.0"),
    ("llama", {"rope_parameters": DEFAULT_ROPE | {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
    (
        "llama",
        {"rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5",
    ),
    ("qwen3", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias=True"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    ("deepseek_v2", {"attention_bias": True}, "attention_bias=True"),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
    ("deepseek_v3", {"rope_parameters": LLAMA3}, "rope_type='llama3'"),
    ("deepseek_v3", {"rope_parameters": YARN | {"attention_factor": 2.0}}, "attention_factor=2.0"),
    ("deepseek_v3", {"rope_parameters": YARN | {"truncate": False}}, "truncate=False"),
    ("gemma2", {"attention_bias": True}, "attention_bias=True"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("olmo2", {"attention_bias": True}, "attention_bias=True"),
    ("olmo3", {"rope_parameters": by_kind(window=YARN)}, "rope_type='yarn' in its windows"),
    (
        "olmo3",
        {"rope_parameters": by_kind(full=DEFAULT_ROPE | DYNAMIC)},
        "rope_type='dynamic'",
    ),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=False"),
    ("gpt_oss", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config="),
    ("gpt_oss", {"rope_parameters": DEFAULT_ROPE | DYNAMIC}, "rope_type='dynamic'"),
    ("glm4_moe", {"num_experts_per_tok": 1}, "norm_topk_prob=True"),
    ("glm4", {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention' among its"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "'sliding_attention' among its"),
    ("qwen2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
]


@pytest.mark.parametrize(("kind", "settings", "named"), REFUSED)
def test_what_megatron_core_computes_otherwise_is_refused(kind, settings, named):
    config = tiny_config(kind, **settings)
    with pytest.raises(ValueError, match=r"policy\.model_name=.*does not compute") as refused:
        converter_for(config).architecture(config)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "settings", "windows"),
    [
        ("mistral", {"sliding_window": 8}, [8] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("mixtral", {"sliding_window": 8}, [8] * 4),
        ("qwen2", WINDOW | {"max_window_layers": 3}, [None] * 3 + [8]),
        ("qwen2", WINDOW | {"max_window_layers": 4}, [None] * 4),
        ("qwen3", {"sliding_window": 8}, [None] * 4),  # not used without use_sliding_window
    ],
)
def test_the_windows_of_layers_are_those_of_the_config(kind, settings, windows):
    config = tiny_config(kind, **settings)
    fields = converter_for(config).architecture(config).transformer
    config = DecoderConfig(**fields)
    assert [window_of(config, number) for number in range(1, 5)] == windows


def test_a_family_without_a_converter_is_refused_with_a_list():
    with pytest.raises(
        ValueError,
        match=rf"'gpt2' model.*{', '.join(sorted(KINDS))}",
    ):
        converter_for(GPT2Config())
    with pytest.raises(ValueError, match=r"converter_type='lama'.*llama, mistral"):
        converter_for(tiny_config("llama"), "lama")


def test_converters_of_others(monkeypatch):
    class Theirs:
        def architecture(self, hf_config): ...
        def mappings(self, architecture): ...

    monkeypatch.setattr(registry, "_registered", {})
    theirs = Theirs()
    register_converter("gpt2", theirs)
    assert converter_for(GPT2Config()) is theirs
    assert converter_for(tiny_config("llama"), "gpt2") is theirs
    assert "gpt2" in known_converters()


def test_converters_of_installed_packages(monkeypatch, tmp_path):
    (tmp_path / "their_package.py").write_text("converter = object()\n")
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rl_megatron_worker.converters]\ngpt2 = their_package:converter\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import their_package

    assert converter_for(GPT2Config()) is their_package.converter


def test_a_converter_has_the_name_of_the_models_class_too():
    config = Qwen3Config(num_hidden_layers=1)
    by_type = converter_for(config)
    assert converter_for(config, "Qwen3ForCausalLM") is by_type
    # Another class is meant for models without a converter; the name of a converter is an order.
    assert converter_for(config, "LlamaForCausalLM") is by_type
    llama = converter_for(config, "llama")
    assert converter_for(GPT2Config(), "LlamaForCausalLM") is llama is not by_type
    with pytest.raises(
        ValueError, match="converter_type='Qwen9ForCausalLM', for which there is no"
    ):
        converter_for(config, "Qwen9ForCausalLM")
