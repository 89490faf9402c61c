"""Checkpoints in Megatron-core's own format, which any parallel layout reads.

The weights are one directory, the training state (optimizer, schedule, random state) another. The
shared `rl_interfaces.backend.checkpoint.checkpointer` gives the directories and replaces both
together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from rl_interfaces.backend.runtime import failing_together
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from rl_megatron_worker.model.build import unwrapped

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from rl_interfaces.backend.checkpoint.checkpointer import RankRandomState
    from torch import nn

    from rl_megatron_worker.optim import Trainer
    from rl_megatron_worker.runtime import Runtime

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
OnDevice = Callable[[], AbstractContextManager[None]]
_FORMAT = ("torch_dist", 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronPart:
    """One directory of a save: a `rl_interfaces.backend.checkpoint.checkpointer.SavePart`.

    The state is collected when it is written, as its tensors have to be on the device then.
    """

    target: Path
    state: Callable[[], ShardedStateDict]
    """Returns Megatron-core's sharded state, which a save consumes."""
    on_device: OnDevice
    random_state: Tensors | None = None
    """Written into a file of this rank; None beside the weights."""

    def staged(self) -> MegatronPart:
        """Raise `RuntimeError`: the worker saves in the foreground."""
        raise RuntimeError("Megatron-core's checkpoints are not written in the background")

    def write(self, directory: Path, group: dist.ProcessGroup) -> None:
        """Write the state, and the random state of this rank. Collective.

        Raises:
            RuntimeError: It cannot be written.
        """
        # Megatron-core's state refers to the tensors themselves: they must not move while written.
        with self.on_device():
            strategy = InProcessSave(*_FORMAT, group=group)
            try:
                dist_checkpointing.save(self.state(), str(directory), sharded_strategy=strategy)
            except CheckpointingException as error:
                raise RuntimeError(str(error)) from error
        if self.random_state is not None:
            with failing_together(group):
                torch.save(self.random_state, directory / _random_file())


class MegatronFormat:
    """Megatron-core's `torch_dist` checkpoints: a `CheckpointFormat`. Every method is collective.

    Args:
        chunks: The model on this rank.
        runtime: Device and scope of this rank.
        trainer: The optimizer and its schedule; None without one.
        on_device: Returns the scope in which model and optimizer state are on the device.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        runtime: Runtime,
        *,
        trainer: Trainer | None,
        on_device: OnDevice = nullcontext,
    ) -> None:
        self._chunks = list(chunks)
        self._trainer = trainer
        self._runtime = runtime
        self._on_device = on_device

    @contextmanager
    def _scope(self) -> Generator[None, None, None]:
        """Have the tensors on the device, and Megatron-core patched where it needs it."""
        with self._on_device(), self._runtime.scope():
            yield

    def parts(
        self, weights: Path, training: Path | None, random_state: RankRandomState
    ) -> list[MegatronPart]:
        """See `CheckpointFormat.parts`; every rank writes its own random state.

        Megatron-core's random states differ between tensor- and expert-parallel ranks.
        """
        parts = [MegatronPart(target=weights, state=self._model_state, on_device=self._scope)]
        if training is not None and self._trainer is not None:
            parts.append(
                MegatronPart(
                    target=training,
                    state=lambda: self._training_state(is_loading=False),
                    on_device=self._scope,
                    random_state=_megatron_random_states() | random_state.state,
                )
            )
        return parts

    def load(
        self, weights: Path, training: Path | None, random_state: RankRandomState
    ) -> Tensors | None:
        """See `CheckpointFormat.load`; the random state is returned if the layout is the same."""
        is_trained = training is not None and self._trainer is not None
        if training is not None and is_trained:
            self._check_experts(training)
        with self._scope(), torch.no_grad():
            # Both are read before anything is changed: either may turn out to be another model's.
            loaded = _read(self._model_state(), weights)
            if training is not None and is_trained:
                self._load_training(
                    _read(self._training_state(is_loading=True), training), training
                )
            for index, chunk in enumerate(self._chunks):
                load_weights(unwrapped(chunk), loaded[f"model{index}"])
            if self._trainer is not None and not is_trained:
                self._trainer.reload_weights()
        return _load_random(training / _random_file()) if training and is_trained else None

    def _model_state(self) -> ShardedStateDict:
        """Return the weights as Megatron-core's sharded tensors; a save consumes them."""
        return {
            f"model{index}": without_extra_states(
                unwrapped(chunk).sharded_state_dict(metadata=_metadata())
            )
            for index, chunk in enumerate(self._chunks)
        }

    def _load_training(self, state: ShardedStateDict, path: Path) -> None:
        assert self._trainer is not None
        try:
            self._trainer.optimizer.load_state_dict(state["optimizer"])
        except KeyError as error:
            raise ValueError(
                f"optimizer_path={str(path)!r} was saved with another precision, or with another "
                f"policy.megatron_cfg.optimizer.use_distributed_optimizer: it lacks {error}"
            ) from error
        self._trainer.load_schedule(state["scheduler"])

    def _training_state(self, *, is_loading: bool) -> ShardedStateDict:
        assert self._trainer is not None
        # Before the first step there is no state, which neither save nor load could describe.
        self._trainer.init_state()
        state: ShardedStateDict = {
            "optimizer": self._trainer.optimizer.sharded_state_dict(
                self._model_state(), is_loading=is_loading, metadata=_metadata()
            )
        }
        if not is_loading:
            state["scheduler"] = self._trainer.scheduler.state_dict()
            state["num_optimizers"] = len(self._trainer.optimizer.chained_optimizers)
        return state

    def _check_experts(self, path: Path) -> None:
        """Raise `ValueError` if only one of save and trainer has a separate optimizer for experts.

        Megatron-core creates one if and only if there is expert parallelism.
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


class InProcessSave(TorchDistSaveShardedStrategy):
    """Writes the same format as Megatron-core's own strategy, in this process.

    Megatron-core forks writer processes and waits for them without a timeout: a killed writer hangs
    the job. Here an error on one rank is raised on all of them.

    Args:
        backend: Name of the format.
        version: Version of the format.
        group: A CPU process group of the ranks that save.
    """

    def __init__(self, backend: str, version: int, *, group: dist.ProcessGroup | None) -> None:
        super().__init__(backend, version)
        self._group = group

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write the tensors and objects; collective."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        save_tensors(
            mcore_to_pyt_state_dict(by_key, False),
            # With several threads, torch drops an exception raised in one of them.
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )


def without_extra_states(state: ShardedStateDict) -> ShardedStateDict:
    """Return a model's state without the extra states of Transformer Engine's modules.

    They hold the scales of FP8 training, which is not supported here. Local layers have no such
    entries; without them checkpoints are interchangeable between both kinds of layers.
    """
    return {name: value for name, value in state.items() if not _is_extra(name)}


def load_weights(model: nn.Module, state: ShardedStateDict) -> None:
    """Load a state into a model, ignoring extra states.

    Raises:
        ValueError: The state does not match the model.
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


def _metadata() -> dict[str, object]:
    """Return the save options: the distributed optimizer's state is saved per full parameter."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _read(state: ShardedStateDict, path: Path) -> ShardedStateDict:
    """Read a directory into the structure of `state`, whose own tensors stay unchanged."""
    for value in nested_values(state):
        # Megatron-core reads into the given tensors in place, before it detects missing keys.
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data is not None:
            value.data = torch.empty_like(value.data)
    try:
        loaded = dist_checkpointing.load(state, str(path))
    except (CheckpointingException, CheckpointException, KeyError) as error:
        raise ValueError(f"{str(path)!r} is no checkpoint of this model: {error}") from error
    assert isinstance(loaded, dict), "missing keys are raised, not returned"
    return loaded


def _random_file() -> str:
    """Return the name of this rank's random-state file, which contains the layout."""
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
    """Restore Megatron-core's RNG states, and return the others."""
    if not path.is_file():
        logger.warning("%s is not there: the random state of this rank is not restored", path)
        return None
    states: Tensors = torch.load(path, weights_only=True)
    tracker = _rng_tracker()
    own = {name: states.pop(f"megatron/{name}") for name in tracker.get_states()}
    tracker.set_states(own)
    return states


def _megatron_random_states() -> Tensors:
    return {f"megatron/{name}": state for name, state in _rng_tracker().get_states().items()}


def _rng_tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "the runtime has seeded it"
    return tracker
