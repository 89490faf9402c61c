"""Checkpoints: sharded safetensors that any layout of ranks reads, written while training goes on.

Weights are a directory of safetensors shards in the layout of `torch.distributed.checkpoint`; those
of a model with adapters are the adapters. The training state's directory holds the optimizer's
tensors in the same way, `state.pt` (groups, counters, schedule, loss scale) and `random_N.pt` (the
random state of data-parallel rank N). The `.pt` files hold plain values and are read with
`weights_only=True`.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_interfaces.backend.checkpoint import directories
from rl_interfaces.backend.checkpoint import optimizer_state as training_state
from rl_interfaces.backend.checkpoint import pending as saving
from rl_interfaces.backend.checkpoint.pending import Part, PendingSave
from rl_interfaces.backend.checkpoint.saves import (
    begin_save,
    check_one_save,
    reason_of,
    taking_their_places,
)
from rl_interfaces.backend.runtime.agreement import failing_together
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

from rl_dtensor_worker.checkpoint.hf_export import write_hf_directory
from rl_dtensor_worker.model.build import trained_state
from rl_dtensor_worker.model.lora import (
    adapted_weights,
    check_adapter_config,
    save_adapter_config,
    write_peft_directory,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from rl_dtensor_worker.train_step import TrainingParts

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRandomState:
    """The random state that a save holds for one data-parallel rank."""

    data_parallel_rank: int
    is_written_here: bool
    """By one of the ranks that share it."""
    state: dict[str, torch.Tensor]

    @property
    def file_name(self) -> str:
        """Name of its file."""
        return f"random_{self.data_parallel_rank}.pt"


class Checkpointer:
    """The saves and loads of one rank. Every method is collective, unless it says otherwise.

    Args:
        model: The sharded model.
        timeout_s: The most seconds that one rank waits for another.
        in_background: Whether a save copies the state to the CPU, and writes while the caller goes
            on. The next call then waits for it, and raises what it failed with.
    """

    def __init__(self, model: nn.Module, *, timeout_s: float, in_background: bool) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._in_background = in_background
        self._group: dist.ProcessGroup | None = None
        self._pending: PendingSave | None = None

    def save(
        self,
        weights_path: str,
        optimizer_path: str | None,
        training: TrainingParts | None,
        random_state: RankRandomState,
    ) -> None:
        """Write the weights, and the training state where a path is given.

        Raises:
            ValueError: A path is taken by something else than a checkpoint.
            RuntimeError: It cannot be written, or an earlier save could not.
        """
        parts = [Part(_absolute(weights_path), trained_state(self._model), {})]
        self._add_configs(parts[0])
        if optimizer_path is not None and training is not None:
            tensors, others = training_state.state_of(self._model, training)
            part = Part(_absolute(optimizer_path), tensors, {})
            if dist.get_rank() == 0:
                part.files["state.pt"] = lambda path: _save_values(others, path)
            if random_state.is_written_here:
                values = random_state.state
                part.files[random_state.file_name] = lambda path: _save_values(values, path)
            parts.append(part)
        self._write(parts)

    def load(
        self,
        weights_path: str,
        optimizer_path: str | None,
        training: TrainingParts | None,
        random_state: RankRandomState,
    ) -> dict[str, torch.Tensor] | None:
        """Read what `save` wrote, in this layout or another; return the random state, if any.

        Raises:
            ValueError: A directory is no complete checkpoint of this model, or the two are of
                different saves.
        """
        self.finish()
        paths = [_absolute(path) for path in (weights_path, optimizer_path) if path is not None]
        check_one_save(paths)
        weights, state = trained_state(self._model), None
        with failing_together():
            if self._has_adapters:
                check_adapter_config(self._model, paths[0], what="weights_path")
            _check_tensors(weights, paths[0], what="weights_path")
            if training is not None and len(paths) > 1:
                state = _read_training_state(self._model, training, paths[1])
        random: dict[str, torch.Tensor] | None = None
        if training is not None and state is not None:
            others, tensors = state
            if tensors:
                _load_tensors(tensors, paths[1], what="optimizer_path")
            training_state.restore(self._model, training, others, tensors)
            random = _load_random(paths[1] / random_state.file_name)
        _load_tensors(weights, paths[0], what="weights_path")
        return random

    def export(self, tokenizer: PreTrainedTokenizerBase, path: str, *, max_file_bytes: int) -> None:
        """Write a directory that transformers loads, see `write_hf_directory`.

        Raises:
            ValueError: The path is taken by something else than an export.
            RuntimeError: It cannot be written, or an earlier save could not.
        """
        with self._taking_its_place(path) as directory:
            write_hf_directory(
                self._model,  # type: ignore[arg-type]
                tokenizer,
                directory,
                max_file_bytes=max_file_bytes,
            )

    def export_adapters(self, path: str) -> None:
        """Write a directory that peft loads, see `write_peft_directory`.

        Raises:
            ValueError: The path is taken by something else than an export.
            RuntimeError: It cannot be written, or an earlier save could not.
        """
        with self._taking_its_place(path) as directory:
            write_peft_directory(self._model, directory, is_writer=dist.get_rank() == 0)

    def finish(self) -> None:
        """Wait until the last save is on the disk. Not collective.

        Raises:
            RuntimeError: It could not be written.
            TimeoutError: It takes longer than the limit.
        """
        if (pending := self._pending) is not None:
            pending.wait(self._timeout_s)
            self._pending = None
            pending.check()

    def close(self) -> None:
        """Wait for the last save and leave the group. May be called again.

        Raises:
            RuntimeError: The last save could not be written.
            TimeoutError: It takes longer than the limit; it goes on, until the process ends.
        """
        try:
            self.finish()
        finally:
            # A save that is late still uses the group.
            is_late = self._pending is not None
            if self._group is not None and dist.is_initialized() and not is_late:
                dist.destroy_process_group(self._group)
            self._group = None

    @contextmanager
    def _taking_its_place(self, path: str) -> Generator[Path, None, None]:
        self.finish()
        target = _absolute(path)
        with taking_their_places([target], self._begin([target])):
            yield directories.partial_of(target)

    def _write(self, parts: list[Part]) -> None:
        self.finish()
        group = self._begin([part.target for part in parts])
        if not self._in_background:
            saving.write_parts(parts, group)
            return
        staged = [part.staged() for part in parts]
        self._pending = PendingSave(lambda: saving.write_parts(staged, group), path=parts[0].target)

    def _begin(self, targets: list[Path]) -> dist.ProcessGroup:
        """Make room for some directories; return the group that writes them."""
        if self._group is None:
            # Of its own, so that a save in the background never meets a collective of training.
            timeout = timedelta(seconds=self._timeout_s)
            group: Any = dist.new_group(backend="gloo", timeout=timeout)
            self._group = group
        assert self._group is not None
        begin_save(targets, self._group)
        return self._group

    def _add_configs(self, part: Part) -> None:
        if dist.get_rank() > 0:
            return
        text = self._model.config.to_json_string()  # type: ignore[union-attr, operator]
        part.files["config.json"] = lambda path: path.write_text(text)
        if self._has_adapters:
            part.files["adapter_config.json"] = lambda path: save_adapter_config(
                self._model, path.parent
            )

    @property
    def _has_adapters(self) -> bool:
        return bool(adapted_weights(self._model))


def _load_tensors(tensors: Tensors, path: Path, *, what: str) -> None:
    try:
        with torch.no_grad():
            load_sharded(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
    except CheckpointException as error:
        raise RuntimeError(f"{what}={str(path)!r} was not loaded: {reason_of(error)}") from error


def _check_tensors(tensors: Tensors, path: Path, *, what: str) -> None:
    stored = _stored_tensors(path)
    missing = sorted(tensors.keys() - stored.keys())
    if missing:
        raise ValueError(f"{what}={str(path)!r} lacks {len(missing)} tensors, first {missing[:3]}")
    beyond = sorted(stored.keys() - tensors.keys())
    if beyond:
        raise ValueError(
            f"{what}={str(path)!r} is of another model: it has {len(beyond)} tensors beyond this "
            f"one's, first {beyond[:3]}"
        )
    for name, tensor in tensors.items():
        shape = tuple(stored[name].size)
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"{what}={str(path)!r}: {name} has shape {shape}, "
                f"the model's has {tuple(tensor.shape)}"
            )


def _stored_tensors(path: Path) -> dict[str, Any]:
    return HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata


def _read_training_state(
    model: nn.Module, training: TrainingParts, path: Path
) -> tuple[dict[str, Any], Tensors]:
    """Return what the directory holds besides its tensors, and those to read them into."""
    others = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
    stored = _stored_tensors(path)
    try:
        training_state.check_fits(model, training, others, stored)
        return others, training_state.tensors_to_fill(model, training, stored)
    except ValueError as error:
        raise ValueError(f"optimizer_path={str(path)!r}: {error}") from error


def _load_random(path: Path) -> dict[str, torch.Tensor] | None:
    if not path.is_file():
        logger.warning("%s is not there: the random state of this rank starts anew", path)
        return None
    return torch.load(path, weights_only=True)


def _save_values(value: Any, path: Path) -> None:
    torch.save(value, path)


def _absolute(path: str) -> Path:
    return Path(path).absolute()
