"""Models out of a run: the one that it starts from, and those of its checkpoints and adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rl_interfaces.backend.checkpoint.hf_files import (
    SafetensorsFiles,
    auto_class,
    cannot_be_loaded,
    read_kept_files,
    save_weights,
    saved_dtype,
    write_config,
)
from transformers import AutoConfig

from rl_policy.config import parse_run_config, read_yaml
from rl_policy.run.directory import (
    Checkpoint,
    CheckpointManager,
    RunDirectory,
    require_new_directory,
    write_directory,
)
from rl_policy.run.inputs import RunInputs, load_encoder
from rl_policy.run.metrics import RunDisplay
from rl_policy.run.session import AnySession, Session, base_model, open_cluster, open_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTERS, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The head of each task of peft.
_HEADS = {"CAUSAL_LM": "language_model", "SEQ_CLS": "reward", "TOKEN_CLS": "value"}
_SCORE_LAYERS = (".score.weight", ".classifier.weight")


def initial_model(session: AnySession) -> str:
    """Return name or directory of the model that the recipe's own steps start from.

    After a warm-up, that is the model which it has left.
    """
    warmed_up = RunDirectory(session.directory.warm_up).final
    return str(warmed_up) if warmed_up.is_dir() else base_model(session)


def export_checkpoint(session: AnySession, out: Path, *, step: int | None = None) -> int:
    """Write the model of a checkpoint as a directory that `from_pretrained` loads.

    Adapters are merged into the model.

    Args:
        session: The run.
        out: The directory, which is replaced.
        step: Of the checkpoint. None: the newest.

    Returns:
        The step.

    Raises:
        ValueError: There is no such checkpoint; names those that there are.
    """
    checkpoint = _require_checkpoint(session.directory, step=step)
    with open_policy(
        session,
        session.config.policy,
        model=initial_model(session),
        has_reference=False,
        is_trained=False,
        checkpoint=checkpoint,
    ) as (policy, _):

        def write(path: Path) -> None:
            policy.save_hf_checkpoint(path)
            session.inputs.tokenizer.save_pretrained(path)

        out.parent.mkdir(parents=True, exist_ok=True)
        write_directory(out, write)
    return checkpoint.state.step


def _require_checkpoint(directory: RunDirectory, *, step: int | None) -> Checkpoint:
    """Return the checkpoint of a step, or the newest; raise `ValueError` if there is none."""
    found = CheckpointManager(directory.checkpoints).all()
    wanted = [each for each in found if step in (None, each.state.step)]
    if not wanted:
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ValueError(
            f"{directory.path} has {missing}: there are {[each.state.step for each in found]}"
        )
    return wanted[-1]


def merge(path: Path, out: Path, *, step: int | None = None, model: str | None = None) -> str:
    """Write a model as a directory that `from_pretrained` loads; return what it was made of.

    Args:
        path: The directory of a run, of which a checkpoint is written; or one of adapters, which
            are merged into their model.
        out: The directory, which must not exist.
        step: Of the run's checkpoint. None: the newest.
        model: The model of the adapters. None: the one that they name.

    Raises:
        ValueError: Something is missing, or `out` exists; names it.
    """
    require_new_directory(out, key="--out")
    if (path / _ADAPTERS).is_file():
        if step is not None:
            raise ValueError(f"--step {step} is of a run, and {path} has adapters")
        return _merge_adapters(path, out, model=model)
    if model is not None:
        raise ValueError(f"--model {model} is for adapters, and {path} has no {_ADAPTERS}")
    directory = RunDirectory(path)
    if not directory.config.is_file():
        raise ValueError(
            f"DIR={path} holds no run, as there is no {directory.config}, and no adapters, as "
            f"there is no {path / _ADAPTERS}: give a directory that --out has named, one of runs/, "
            "or one of adapters"
        )
    _require_checkpoint(directory, step=step)
    content = read_yaml(directory.config)
    # Of no use to a model; what Python gave is not even there.
    for section in ("reward", "environment"):
        content.pop(section, None)
    config = parse_run_config(content)
    inputs = RunInputs(config=config, encoder=load_encoder(config))
    display = RunDisplay(Console(stderr=True))
    with open_cluster(config) as cluster:
        session = Session(inputs=inputs, directory=directory, cluster=cluster, display=display)
        return f"step {export_checkpoint(session, out, step=step)} of {path}"


def _merge_adapters(path: Path, out: Path, *, model: str | None) -> str:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ValueError(
            f'{path} has adapters, which peft merges: pip install "rl-policy[lora]"'
        ) from error
    from transformers import AutoTokenizer

    content = json.loads((path / _ADAPTERS).read_text(encoding="utf-8"))
    key = "--model" if model else f"{path / _ADAPTERS}: base_model_name_or_path"
    name = model or content.get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{path / _ADAPTERS} names no model: give --model")
    head = _head_of(path, content)
    try:
        base = _base_model(name, head=head, num_labels=_num_labels(path))
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(cannot_be_loaded(key, name, error)) from error
    text = base.config.get_text_config()
    if head != "language_model" and text.pad_token_id is None:
        # transformers finds the last token of a row by it.
        text.pad_token_id = tokenizer.pad_token_id
    merged: Any = PeftModel.from_pretrained(base, str(path)).merge_and_unload()  # pyright: ignore[reportCallIssue]

    def write(partial: Path) -> None:
        dtype = saved_dtype(name, base.config)
        save_weights(merged.to(dtype), partial)
        write_config(base.config, partial, dtype=dtype, model=merged)
        for file, text in read_kept_files(name).items():
            (partial / file).write_bytes(text)
        tokenizer.save_pretrained(partial)

    out.parent.mkdir(parents=True, exist_ok=True)
    write_directory(out, write)
    return f"{name} and the adapters of {path}"


def _head_of(path: Path, content: Mapping[str, object]) -> str:
    """Return the `policy.head` of adapters, by their task."""
    task = content.get("task_type") or "CAUSAL_LM"
    if task not in _HEADS:
        raise ValueError(
            f"{path / _ADAPTERS}: task_type={task!r} cannot be merged, only {sorted(_HEADS)} can"
        )
    return _HEADS[str(task)]


def _base_model(name: str, *, head: str, num_labels: int | None) -> PreTrainedModel:
    """Return the model that adapters belong to, in the dtype that it is saved in."""
    config = AutoConfig.from_pretrained(name)
    options: dict[str, Any] = {} if num_labels is None else {"num_labels": num_labels}
    return auto_class(head, config).from_pretrained(name, dtype="auto", **options)


def _num_labels(path: Path) -> int | None:
    """Return the outputs of the score layer that adapters come with; None without one."""
    if not (path / _WEIGHTS).is_file():
        return None
    with SafetensorsFiles([str(path / _WEIGHTS)]) as files:
        layers = [name for name in files.names if name.endswith(_SCORE_LAYERS)]
        return files.shape(layers[0])[0] if layers else None
