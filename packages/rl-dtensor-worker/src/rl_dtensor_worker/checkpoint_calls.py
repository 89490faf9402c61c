"""The calls that write a worker's state to disk and read it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_interfaces.backend.runtime.agreement import failing_together

from rl_dtensor_worker.checkpoint.checkpointer import RankRandomState
from rl_dtensor_worker.worker_parts import WorkerParts


class CheckpointCalls(WorkerParts):
    """What may be saved and loaded in any state."""

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        """Write the weights; the training state and the tokenizer where a path is given.

        Of a model with adapters, those are the weights.

        The directories are written beside their places and renamed together when all are complete;
        the tokenizer, which no training changes, is written into its place after that. The training
        state holds optimizer, schedule, loss scale and every rank's random state.

        With `policy.dtensor_cfg.async_checkpoint` this copies the state to the CPU and returns; it
        is written while training goes on, and the tokenizer at once. The next save, load or
        `shutdown`, or `finish_checkpoint`, waits for it and raises what it failed with.

        Raises:
            ValueError: `optimizer_path` is given and there is no optimizer, a path is taken by
                something that no save has written, or the tokenizer is to lie in a directory that
                is written in the background.
            RuntimeError: This save, or the one before it, cannot be written; on every rank.
        """
        self._require_optimizer(optimizer_path, to="save")
        if tokenizer_path is not None and self._config.async_checkpoint:
            _require_apart(tokenizer_path, {weights_path, optimizer_path})
        self._checkpointer.save(
            weights_path, optimizer_path, self._training, self._random_state_of_rank()
        )
        with failing_together():
            if tokenizer_path is not None and self._environment.rank == 0:
                self._tokenizer.save_pretrained(tokenizer_path)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Read what `save_checkpoint` wrote, in this layout of ranks or another.

        The save's rates and schedule take the place of those in the config, which has to name the
        same optimizer and the same kind of schedule.

        Raises:
            ValueError: A directory is no complete checkpoint of this model, the two are of
                different saves, there is no optimizer, or the save is of another optimizer or kind
                of schedule.
        """
        self._require_optimizer(optimizer_path, to="load")
        random_state = self._checkpointer.load(
            weights_path, optimizer_path, self._training, self._random_state_of_rank()
        )
        if random_state is not None:
            self._random.load_state_dict(random_state)

    def finish_checkpoint(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            RuntimeError: It could not be written.
            TimeoutError: It takes longer than `policy.timeout_s`.
        """
        self._checkpointer.finish()

    def save_hf_checkpoint(self, path: str, max_file_bytes: int = 5 * 10**9) -> None:
        """Write a directory that `AutoModelForCausalLM.from_pretrained` loads, in float32.

        Adapters are merged into it.

        Args:
            path: The directory.
            max_file_bytes: A larger model is written as several files of at most this size, of
                which the first rank holds one at a time.

        Raises:
            ValueError: The path is taken by something that no save has written.
            RuntimeError: It cannot be written; on every rank.
        """
        self._checkpointer.export(self._tokenizer, path, max_file_bytes=max_file_bytes)

    def save_adapters(self, path: str) -> None:
        """Write a directory that `peft.PeftModel.from_pretrained` loads onto the model.

        Raises:
            ValueError: There are no adapters, or the path is taken by something that no save has
                written.
            RuntimeError: It cannot be written; on every rank.
        """
        if self._config.adapters is None:
            raise ValueError("save_adapters() needs policy.dtensor_cfg.lora.enabled=True")
        self._checkpointer.export_adapters(path)

    def return_state_dict(self) -> dict[str, Any]:
        """Return the model's state, of which each rank holds its shards."""
        return self.model.state_dict()

    def _require_optimizer(self, optimizer_path: str | None, *, to: str) -> None:
        if optimizer_path is not None and self._training is None:
            raise ValueError(f"optimizer_path={optimizer_path!r}: there is no optimizer to {to}")

    def _random_state_of_rank(self) -> RankRandomState:
        ranks_that_share_it = self._environment.world_size // self._config.layout.data_parallel
        return RankRandomState(
            data_parallel_rank=self._dp_rank,
            is_written_here=self._environment.rank % ranks_that_share_it == 0,
            state=self._random.state_dict(),
        )


def _require_apart(tokenizer_path: str, others: set[str | None]) -> None:
    """Raise `ValueError` where the tokenizer would be lost when a save takes its place."""
    place = Path(tokenizer_path).absolute()
    for other in others - {None}:
        if Path(str(other)).absolute() in (place, *place.parents):
            raise ValueError(
                f"tokenizer_path={tokenizer_path!r} lies in {other!r}, which is replaced when the "
                "save in the background is complete: give it a directory of its own"
            )
