"""Hugging Face model directories: finding and reading their files, and writing an export."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    VIDEO_PROCESSOR_NAME,
)
from transformers.utils.hub import cached_file

from rl_interfaces.backend.runtime import failing_together

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rl_interfaces.backend.engine import HfExport


_KEPT_FILES = (
    GENERATION_CONFIG_NAME,
    PROCESSOR_NAME,
    IMAGE_PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
)


def load_model_config(
    model_name: str, *, trust_remote_code: bool, **options: object
) -> PreTrainedConfig:
    """Return the transformers config of a model, with `options` in place of its own values.

    Raises:
        ValueError: The model cannot be found or read.
    """
    try:
        return AutoConfig.from_pretrained(
            model_name, trust_remote_code=trust_remote_code, **options
        )
    # transformers raises many classes for a file with a wrong type, an unknown key, or no JSON.
    except Exception as error:
        raise ValueError(cannot_be_loaded("policy.model_name", model_name, error)) from error


def cannot_be_loaded(key: str, name: str, error: Exception, *, part: str = "") -> str:
    """Return the message of a model that transformers fails to load.

    Args:
        key: What names it, on the command line or in the configuration.
        name: Directory or name.
        error: Of transformers.
        part: What of it fails to load, as "a tokenizer"; empty: the model.
    """
    if not Path(name).is_dir():
        return (
            f"{key}={name!r} is no directory, and no model that loads by its name: give a "
            f"directory, or a name of the hub or its cache. {error}"
        )
    return f"{key}={name!r} {f'has {part} that ' if part else ''}cannot be loaded: {error}"


def model_file(model_name: str, file_name: str) -> Path | None:
    """Return the path of one of a model's files, downloaded if necessary; None if it has none."""
    try:
        found = cached_file(
            model_name,
            file_name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:  # neither a directory nor a name that the hub could have
        return None
    return None if found is None else Path(found)


def read_kept_files(model_name: str) -> dict[str, bytes]:
    """Return the files that an export has as the model has them, by name.

    They are the generation config and those of the processor of a model with media.
    """
    found = {name: model_file(model_name, name) for name in _KEPT_FILES}
    return {name: path.read_bytes() for name, path in found.items() if path is not None}


def saved_dtype(model_name: str, model_config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype that a model is saved in: what its config says, or else its weights.

    Quantised weights are of no dtype that an export has: float32 stands for them.
    """
    dtype = model_config.dtype or model_config.get_text_config().dtype
    if dtype is None:
        dtype = _dtype_of_weights(find_checkpoint(model_name, model_config))
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, torch.float32)
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def _dtype_of_weights(paths: Sequence[str]) -> torch.dtype:
    """Return the dtype of the first floating-point tensor; float32 without safetensors."""
    for path in paths:
        if not path.endswith(".safetensors"):
            break
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                part = file.get_slice(name)
                if not part.get_shape():
                    continue
                dtype = part[:0].dtype
                if dtype.is_floating_point:
                    return dtype
    return torch.float32


def write_config(
    config: PreTrainedConfig,
    directory: Path,
    *,
    dtype: torch.dtype,
    model: PreTrainedModel | None = None,
) -> None:
    """Write the config of an export.

    Args:
        config: The model's config.
        directory: Where it is written.
        dtype: The dtype of the exported weights.
        model: Names the architecture, and the code that comes with the model. None: those that the
            config names.
    """
    written = copy.deepcopy(config)
    parts = (getattr(written, name, None) for name in written.sub_configs)
    for each in (written, *parts):
        if isinstance(each, PreTrainedConfig):
            each.dtype = dtype
    # Says how the files of this model are named, which an export's are not.
    vars(written).pop("transformers_weights", None)
    if model is not None:
        written.architectures = [type(model).__name__.removeprefix("FSDP")]
        if model.is_remote_code():
            custom_object_save(model, directory, config=written)  # pyright: ignore[reportArgumentType]
    if written._auto_class is not None:  # pyright: ignore[reportPrivateUsage]
        custom_object_save(written, directory, config=written)  # pyright: ignore[reportArgumentType]
    # Not `save_pretrained`, which refuses values that `from_pretrained` has taken.
    written.to_json_file(directory / CONFIG_NAME)


def save_weights(model: PreTrainedModel, directory: Path) -> None:
    """Write a model's weights under the names of its checkpoint, with no config that counts.

    `save_pretrained` writes configs too, and refuses values that `from_pretrained` has taken.
    """
    config = model.config
    generation_config: Any = getattr(model, "generation_config", None)
    plain: Any = copy.deepcopy(config)
    for key in GenerationConfig().to_dict().keys() - type(config)().to_dict().keys():
        vars(plain).pop(key, None)
    model.config, model.generation_config = plain, GenerationConfig()
    try:
        model.save_pretrained(directory)
    finally:
        model.config, model.generation_config = config, generation_config
    for name in (CONFIG_NAME, GENERATION_CONFIG_NAME):
        (directory / name).unlink(missing_ok=True)


def auto_class(head: str, model_config: PreTrainedConfig) -> Any:
    """Return the `AutoModel...` class for a head and the architecture that a config names.

    Args:
        head: `policy.head`.
        model_config: The model's transformers config.
    """
    # Here, as it imports the code of models, which takes a second.
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if head != "language_model":
        is_reward = head == "reward"
        return AutoModelForSequenceClassification if is_reward else AutoModelForTokenClassification
    with_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_config.model_type)
    if with_images in (model_config.architectures or ()):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def find_checkpoint(model_name: str, model_config: PreTrainedConfig) -> list[str]:
    """Return the paths of a model's weight files, downloaded by transformers if necessary.

    Raises:
        ValueError: The model has no weights.
    """
    # Here, as it imports torch's compiler, which takes a second.
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    try:
        paths, _ = _get_resolved_checkpoint_files(
            pretrained_model_name_or_path=model_name,
            variant=None,
            gguf_file=None,
            use_safetensors=None,
            user_agent=None,
            is_remote_code=False,
            transformers_explicit_filename=getattr(model_config, "transformers_weights", None),
        )
    except OSError as error:
        raise ValueError(f"policy.model_name={model_name!r} has no weights: {error}") from error
    assert paths
    return paths


_BLOCK_BYTES = 64 * 2**20


class SafetensorsFiles:
    """The tensors of several safetensors files by name; a context manager that closes the files."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths: dict[str, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._open: dict[str, safe_open] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    self._paths[name] = path
                    self._shapes[name] = torch.Size(file.get_slice(name).get_shape())

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._paths)

    def shape(self, name: str) -> torch.Size:
        """Return the full shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str, indices: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Return a tensor in its stored dtype, or the elements at ascending `indices` per dim.

        Raises:
            ValueError: A value is not finite; names the tensor and its file.
        """
        tensor = self._read(name, indices)
        check_finite(name, tensor, where=self._paths[name])
        return tensor

    def _read(self, name: str, indices: Sequence[torch.Tensor] | None) -> torch.Tensor:
        file = self._file_of(name)
        if indices is None or not indices:
            return file.get_tensor(name)
        if not all(len(index) for index in indices):
            # safetensors rejects empty slices.
            dtype = file.get_slice(name)[(slice(1),) * len(indices)].dtype
            return torch.empty([len(index) for index in indices], dtype=dtype)
        # safetensors reads slices, no index lists: read the bounding box, then select from it.
        box = tuple(slice(int(index[0]), int(index[-1]) + 1) for index in indices)
        part = file.get_slice(name)[box]
        return take(part, [index - index[0] for index in indices])

    def equal(self, left: str, right: str) -> bool:
        """Return whether two tensors have the same shape and values, comparing blocks of rows."""
        if self.shape(left) != self.shape(right):
            return False
        rows, *others = self.shape(left)
        step = max(1, _BLOCK_BYTES // (4 * max(1, torch.Size(others).numel())))
        with self:
            for start in range(0, rows, step):
                block = slice(start, min(start + step, rows))
                one, other = (self._file_of(name).get_slice(name)[block] for name in (left, right))
                if not torch.equal(one, other):
                    return False
        return True

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def _file_of(self, name: str) -> safe_open:
        path = self._paths[name]
        if path not in self._open:
            # Kept open: each opening parses the header of the file again.
            self._open[path] = safe_open(path, framework="pt").__enter__()
        return self._open[path]


def check_finite(name: str, tensor: torch.Tensor, *, where: str) -> None:
    """Raise `ValueError` if a weight is NaN or infinite: every score of its model would be NaN.

    Args:
        name: The tensor's name.
        tensor: Its values. Those of 8-bit floats are not checked.
        where: Its file.
    """
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or not tensor.numel():
        return
    # Both are NaN if a value is; nothing of the tensor's size is allocated.
    lowest, highest = (float(each) for each in tensor.aminmax())
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        wrong = highest if math.isnan(highest) or math.isinf(highest) else lowest
        raise ValueError(
            f"the weights are not finite: {name!r} in {where} has the value {wrong}. The model was "
            "broken when it was saved: take another checkpoint of it"
        )


def take(tensor: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements at `indices` per dim; a view if all indices are contiguous."""
    for dim, index in enumerate(indices):
        length = len(index)
        if length == 0 or int(index[-1]) - int(index[0]) + 1 == length:
            start = int(index[0]) if length else 0
            tensor = tensor.narrow(dim, start, length)
        else:
            tensor = tensor.index_select(dim, index)
    return tensor


Tensors = dict[str, torch.Tensor]


def write_hf_directory(
    export: HfExport,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    max_file_bytes: int,
    kept_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write configs, tokenizer and weights, file by file. Collective; rank 0 writes.

    Rank 0 holds the full tensors of one file at a time, in addition to its own shards.

    Args:
        export: The weights and the writer of the config.
        tokenizer: The tokenizer to save.
        directory: An empty directory, the same path on all ranks.
        max_file_bytes: Maximum size of a file; larger only for a single group of `export`.
        kept_files: See `read_kept_files`.

    Raises:
        RuntimeError: Rank 0 could not write.
    """
    is_writer = dist.get_rank() == 0
    with failing_together():
        if is_writer:
            export.write_config(directory)
            for name, content in (kept_files or {}).items():
                (directory / name).write_bytes(content)
            tokenizer.save_pretrained(directory)
    num_bytes = {
        name: torch.Size(shape).numel() * dtype.itemsize
        for name, dtype, shape in export.source.metadata()
    }
    groups = export.groups if export.groups is not None else [[name] for name in num_bytes]
    files = plan_files(groups, num_bytes, max_file_bytes=max_file_bytes)
    file_of: dict[str, str] = {}
    for file_name, groups_of_file in files.items():
        # Every rank takes part in the gathers, and rank 0 alone holds the result.
        tensors = _gather(export, groups_of_file, keep=is_writer)
        file_of |= dict.fromkeys(tensors, file_name)
        with failing_together():
            if is_writer:
                save_file(tensors, directory / file_name, metadata={"format": "pt"})
    with failing_together():
        if is_writer and len(files) > 1:
            metadata = {"total_size": sum(num_bytes.values())}
            text = json.dumps({"metadata": metadata, "weight_map": file_of}, indent=2)
            (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(f"{text}\n")


def plan_files(
    groups: Sequence[Sequence[str]], num_bytes: Mapping[str, int], *, max_file_bytes: int
) -> dict[str, list[Sequence[str]]]:
    """Return the groups of tensors of each file, by the hub's file names.

    Example: groups of 3, 4 and 5 bytes, max_file_bytes=8 ->
        model-00001-of-00002.safetensors: [3, 4], model-00002-of-00002.safetensors: [5]
    """
    split = split_state_dict_into_shards_factory(
        # A group is one item of the split, so that no file boundary separates its tensors.
        {str(index): sum(num_bytes[n] for n in group) for index, group in enumerate(groups)},
        get_storage_size=int,
        get_storage_id=lambda _: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    return {
        name: [groups[int(index)] for index in indices]
        for name, indices in split.filename_to_tensors.items()
    }


def _gather(export: HfExport, groups: Sequence[Sequence[str]], *, keep: bool) -> Tensors:
    """Return the tensors of a file on the CPU if `keep`, else nothing. Collective."""
    gathered: Tensors = {}
    for group in groups:
        for name, tensor in export.source.gather(group):
            if keep:
                gathered[name] = tensor.cpu().contiguous()
    return gathered
