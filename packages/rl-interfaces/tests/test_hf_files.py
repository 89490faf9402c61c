import json

import pytest
from rl_interfaces.backend.checkpoint.hf_files import find_checkpoint
from transformers import PreTrainedConfig
from transformers.modeling_utils import _get_resolved_checkpoint_files

pytestmark = pytest.mark.needs("rl-interfaces[backend]")

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def write_files(directory, names):
    for name in names:
        suffix = name.removesuffix(".index.json").rpartition(".")[2]
        shards = {"b": f"2.{suffix}", "a": f"1.{suffix}", "c": f"1.{suffix}"}
        index = {"metadata": {}, "weight_map": shards}
        (directory / name).write_text(json.dumps(index) if name.endswith(".json") else "")


@pytest.mark.parametrize(
    "names",
    [
        [SAFE],
        [SAFE_INDEX],
        [TORCH],
        [TORCH_INDEX],
        [TORCH_INDEX, TORCH],
        [TORCH, SAFE_INDEX],
        [TORCH, TORCH_INDEX, SAFE_INDEX, SAFE],
        ["named.safetensors", SAFE],
    ],
    ids=" ".join,
)
def test_a_directorys_files_are_those_that_transformers_loads(tmp_path, names):
    write_files(tmp_path, names)
    named = {"transformers_weights": names[0]} if names[0].startswith("named") else {}
    loaded, _ = _get_resolved_checkpoint_files(
        str(tmp_path),
        variant=None,
        gguf_file=None,
        use_safetensors=None,
        user_agent=None,
        is_remote_code=False,
        transformers_explicit_filename=named.get("transformers_weights"),
    )
    assert loaded
    assert find_checkpoint(str(tmp_path), PreTrainedConfig(**named)) == loaded


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"policy\.model_name=.* has no weights: .*no file named"):
        find_checkpoint(str(tmp_path), PreTrainedConfig())
