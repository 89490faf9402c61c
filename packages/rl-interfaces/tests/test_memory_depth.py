"""Which depths are traced, and what a line through them gives."""

import json
import struct

import pytest
import torch
from rl_interfaces.backend.memory import (
    TokenIds,
    extrapolate,
    plan_depths,
    shallow_config,
    write_stand_in,
)
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, LlamaConfig, Qwen2Config

pytestmark = pytest.mark.needs("rl-interfaces[backend]")


def layers_of(widths):
    with torch.device("meta"):
        return [nn.Linear(width, width) for width in widths]


def depths_of(config, layers, **options):
    arguments = {"num_other_parameters": 2**30, "tensor_parallel": 1} | options
    return plan_depths(config, layers, **arguments)


def test_a_line_through_two_depths():
    assert extrapolate({4: 10.0, 6: 14.0}, 80) == 162.0
    assert extrapolate({28: 7.0}, 28) == 7.0


def test_alike_layers_are_traced_at_two_depths():
    depths = depths_of(LlamaConfig(num_hidden_layers=80), layers_of([8] * 80))
    assert (depths.traced, depths.num_layers, depths.reason) == ((4, 6), 80, "")


@pytest.mark.parametrize(
    ("config", "widths", "options", "reason"),
    [
        (LlamaConfig(num_hidden_layers=8), [8] * 8, {}, "few layers"),
        (LlamaConfig(num_hidden_layers=20), [16] + [8] * 19, {}, "not alike"),
        (LlamaConfig(num_hidden_layers=20), [8] * 40, {}, "num_hidden_layers"),
        (LlamaConfig(num_hidden_layers=20), [8] * 20, {"num_other_parameters": 9}, "small"),
        (LlamaConfig(num_hidden_layers=20), [8] * 20, {"all_layers": True}, "asked for"),
        (
            Qwen2Config(num_hidden_layers=12, use_sliding_window=True, max_window_layers=6),
            [8] * 12,
            {},
            "not alike",
        ),
    ],
)
def test_other_models_are_traced_in_full(config, widths, options, reason):
    depths = depths_of(config, layers_of(widths), **options)
    assert depths.traced == (len(widths),)
    assert reason in depths.reason


def test_lists_of_layers_are_cut_with_them():
    config = Qwen2Config(num_hidden_layers=12, use_sliding_window=True, max_window_layers=6)
    shallow = shallow_config(config, 2)
    assert shallow.num_hidden_layers == len(shallow.layer_types) == 2
    assert config.num_hidden_layers == len(config.layer_types) == 12


def test_a_stand_in_has_names_and_shapes_and_takes_no_room(tmp_path):
    config = LlamaConfig(num_hidden_layers=2, hidden_size=1024, vocab_size=50_000)
    write_stand_in(config, tmp_path)
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size > 2 * 50_000 * 1024 * 2
    assert file.stat().st_blocks * 512 < 2**20
    (length,) = struct.unpack("<Q", file.open("rb").read(8))
    names = json.loads(file.open("rb").read(8 + length)[8:])
    assert len(names) == 2 + 1 + 2 * 9
    with safe_open(file, framework="pt") as opened:
        assert opened.get_slice("lm_head.weight").get_shape() == [50_000, 1024]
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 2
    assert TokenIds().pad_token_id == 0
