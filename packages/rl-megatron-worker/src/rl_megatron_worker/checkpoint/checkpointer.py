"""Checkpoints in Megatron-core's own format, which any layout of ranks reads.

The weights are one directory, the training state (optimizer, schedule, random state) another. Both
are written beside their places and take them together, see
`rl_interfaces.backend.checkpoint.directories`.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from rl_interfaces.backend.checkpoint import directories
from rl_interfaces.backend.checkpoint.saves import begin_save, check_one_save, taking_their_places
from rl_interfaces.backend.runtime.agreement import failing_together
from torch.distributed.checkpoint.api import CheckpointException

from rl_megatron_worker.compat.in_process_save import InProcessSave
from rl_megatron_worker.model.chunks import unwrapped

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import nn

    from rl_megatron_worker.optim import Trainer
    from rl_megatron_worker.runtime import Runtime

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
_FORMAT = ("torch_dist", 1)


class Checkpointer:
    """The saves and loads of one rank. Every method is collective, unless it says otherwise.

    Args:
        chunks: The model on this rank.
        runtime: The device.
        timeout_s: The most seconds that one rank waits for another.
        trainer: What is trained; None where nothing is.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        runtime: Runtime,
        *,
        timeout_s: float,
        trainer: Trainer | None,
    ) -> None:
        self._chunks = list(chunks)
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._trainer = trainer
        self._group: dist.ProcessGroup | None = None

    def save(
        self, weights_path: str, optimizer_path: str | None, random_state: Tensors | None = None
    ) -> None:
        """Write the weights, and the training state where a path is given.

        Args:
            weights_path: Directory of the weights.
            optimizer_path: Directory of the training state; not read where nothing is trained.
            random_state: What this rank draws from, beside Megatron-core's own states.

        Raises:
            ValueError: A path is taken by something else than a checkpoint.
            RuntimeError: It cannot be written.
        """
        targets = [Path(weights_path).absolute()]
        if optimizer_path is not None and self._trainer is not None:
            targets.append(Path(optimizer_path).absolute())
        with self.taking_their_places(targets), self._runtime.scope():
            self._write(self._model_state(), directories.partial_of(targets[0]))
            if len(targets) > 1:
                directory = directories.partial_of(targets[1])
                self._write(self._training_state(is_loading=False), directory)
                states = _megatron_random_states() | (random_state or {})
                with failing_together(self._group):
                    torch.save(states, directory / _random_file())

    def load(self, weights_path: str, optimizer_path: str | None) -> Tensors | None:
        """Read what `save` wrote, in this layout or another.

        Returns:
            The `random_state` that this rank had, where the layout is the same.

        Raises:
            ValueError: A directory is no complete checkpoint of this model, or the two are of
                different saves.
        """
        paths = [Path(weights_path).absolute()]
        if optimizer_path is not None and self._trainer is not None:
            paths.append(Path(optimizer_path).absolute())
        check_one_save(paths)
        if len(paths) > 1:
            self._check_experts(paths[1])
        with self._runtime.scope(), torch.no_grad():
            weights = _read(self._model_state(), paths[0])
            training = None
            if len(paths) > 1:
                training = _read(self._training_state(is_loading=True), paths[1])
                self._take_up_training(training, paths[1])
            for index, chunk in enumerate(self._chunks):
                load_weights(unwrapped(chunk), weights[f"model{index}"])
            if self._trainer is not None and training is None:
                self._trainer.reload_weights()
            return None if training is None else _load_random(paths[1] / _random_file())

    @contextmanager
    def taking_their_places(self, targets: list[Path]) -> Generator[None, None, None]:
        """Let what the body writes beside `targets` take their places, or throw it away.

        Raises:
            ValueError: A path is taken by something else than what a save wrote.
            RuntimeError: It cannot be written.
        """
        if self._group is None:
            # On the CPU, and with the limit of its own that a save has.
            timeout = timedelta(seconds=self._timeout_s)
            group: Any = dist.new_group(backend="gloo", timeout=timeout)
            self._group = group
        assert self._group is not None
        begin_save(targets, self._group)
        with taking_their_places(targets, self._group):
            yield

    def close(self) -> None:
        """Leave the group. Not collective; may be called again."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _write(self, state: dict[str, Any], directory: Path) -> None:
        strategy = InProcessSave(*_FORMAT, group=self._group)
        try:
            dist_checkpointing.save(state, str(directory), sharded_strategy=strategy)
        except CheckpointingException as error:
            raise RuntimeError(str(error)) from error

    def _model_state(self) -> dict[str, Any]:
        """Return the weights as Megatron-core's sharded tensors; a save uses them up."""
        return {
            f"model{index}": without_extra_states(
                unwrapped(chunk).sharded_state_dict(metadata=_metadata())
            )
            for index, chunk in enumerate(self._chunks)
        }

    def _take_up_training(self, state: dict[str, Any], path: Path) -> None:
        assert self._trainer is not None
        try:
            self._trainer.optimizer.load_state_dict(state["optimizer"])
        except KeyError as error:
            raise ValueError(
                f"optimizer_path={str(path)!r} was saved with another precision, or with another "
                f"policy.megatron_cfg.optimizer.use_distributed_optimizer: it lacks {error}"
            ) from error
        self._trainer.load_schedule(state["scheduler"])

    def _training_state(self, *, is_loading: bool) -> dict[str, Any]:
        assert self._trainer is not None
        self._trainer.init_state()
        state: dict[str, Any] = {
            "optimizer": self._trainer.optimizer.sharded_state_dict(
                self._model_state(), is_loading=is_loading, metadata=_metadata()
            )
        }
        if not is_loading:
            state["scheduler"] = self._trainer.scheduler.state_dict()
            state["num_optimizers"] = len(self._trainer.optimizer.chained_optimizers)
        return state

    def _check_experts(self, path: Path) -> None:
        """Raise `ValueError` unless experts have an optimizer of their own, or had none there.

        Megatron-core gives them one where they are dealt out over ranks, and only there.
        """
        assert self._trainer is not None
        saved = dist_checkpointing.load_common_state_dict(str(path))["num_optimizers"]
        own = len(self._trainer.optimizer.chained_optimizers)
        if saved != own:
            sizes = [">1" if num > 1 else "=1" for num in (saved, own)]
            raise ValueError(
                f"optimizer_path={str(path)!r} was saved with policy.megatron_cfg."
                f"expert_model_parallel_size{sizes[0]}, and cannot be loaded with "
                f"expert_model_parallel_size{sizes[1]}: load the weights alone"
            )


def without_extra_states(state: dict[str, Any]) -> dict[str, Any]:
    """Return a model's state without what Transformer Engine's modules add to it.

    They keep the scales of 8-bit training there, which is not offered here; a model of local
    layers has none of these entries, and reads what is saved without them.
    """
    return {name: value for name, value in state.items() if not _is_extra(name)}


def load_weights(model: nn.Module, state: dict[str, Any]) -> None:
    """Give a model what `without_extra_states` has left of a state.

    Raises:
        ValueError: It is the state of another model.
    """
    incompatible = model.load_state_dict(without_extra_states(state), strict=False)
    missing = [name for name in incompatible.missing_keys if not _is_extra(name)]
    if missing or incompatible.unexpected_keys:
        raise ValueError(
            f"the state is of another model: it lacks {missing}, and has "
            f"{incompatible.unexpected_keys} beside its own"
        )


def _is_extra(name: str) -> bool:
    return name.endswith("_extra_state")


def _metadata() -> dict[str, Any]:
    """Return how the distributed optimizer's state is saved: as that of whole parameters."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _read(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return what a directory holds in the place of `state`, whose tensors stay what they are."""
    for value in nested_values(state):
        # Megatron-core reads into the tensors that it is given, before it knows what is missing.
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data is not None:
            value.data = torch.empty_like(value.data)
    try:
        return cast("dict[str, Any]", dist_checkpointing.load(state, str(path)))
    except (CheckpointingException, CheckpointException, KeyError) as error:
        raise ValueError(f"{str(path)!r} is no checkpoint of this model: {error}") from error


def _random_file() -> str:
    """Return the name of this rank's random state, which says of which layout it is."""
    state = parallel_state
    sizes = {
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "cp": state.get_context_parallel_world_size(),
        "dp": state.get_data_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(),
    }
    layout = "_".join(f"{name}{size}" for name, size in sizes.items())
    return f"random_{layout}_rank{dist.get_rank()}.pt"


def _load_random(path: Path) -> Tensors | None:
    """Give Megatron-core its states, and return the others."""
    if not path.is_file():
        logger.warning("%s is not there: the random state of this rank starts anew", path)
        return None
    states: Tensors = torch.load(path, weights_only=True)
    tracker = _tracker()
    own = {name: states.pop(f"megatron/{name}") for name in tracker.get_states()}
    tracker.set_states(own)
    return states


def _megatron_random_states() -> Tensors:
    return {f"megatron/{name}": state for name, state in _tracker().get_states().items()}


def _tracker() -> Any:
    return get_cuda_rng_tracker()
