"""The calls that write a worker's state to disk and read it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rl_interfaces.backend.checkpoint import directories
from rl_interfaces.backend.runtime.agreement import failing_together

from rl_megatron_worker.checkpoint.hf_export import write_hf_directory
from rl_megatron_worker.residency_calls import ResidencyCalls


class CheckpointCalls(ResidencyCalls):
    """What may be saved and loaded in any state."""

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        """Write the weights; the training state and the tokenizer where a path is given.

        The directories are written beside their places and renamed together when all are complete;
        the tokenizer, which no training changes, is written into its place after that. The training
        state holds optimizer, schedule, loss scale and every rank's random state.

        Raises:
            ValueError: `optimizer_path` is given and there is no optimizer, or a path is taken by
                something that no save has written.
            RuntimeError: It cannot be written; on every rank.
        """
        self._require_optimizer(optimizer_path, to="save")
        with self._on_device():
            self._checkpointer.save(weights_path, optimizer_path, self._random.state_dict())
        with failing_together():
            if tokenizer_path is not None and self._environment.rank == 0:
                self._tokenizer.save_pretrained(tokenizer_path)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Read what `save_checkpoint` wrote, in this layout of ranks or another.

        Raises:
            ValueError: A directory is no complete checkpoint of this model, the two are of
                different saves, or there is no optimizer.
        """
        self._require_optimizer(optimizer_path, to="load")
        with self._on_device():
            random_state = self._checkpointer.load(weights_path, optimizer_path)
        if random_state:
            self._random.load_state_dict(random_state)

    def save_hf_checkpoint(self, path: str, max_file_bytes: int = 5 * 10**9) -> None:
        """Write a directory that `AutoModelForCausalLM.from_pretrained` loads, in float32.

        Args:
            path: The directory.
            max_file_bytes: A larger model is written as several files of at most this size, of
                which the first rank holds one at a time.

        Raises:
            ValueError: The path is taken by something that no save has written.
            RuntimeError: It cannot be written; on every rank.
        """
        target = Path(path).absolute()
        with self._on_device(), self._checkpointer.taking_their_places([target]):
            write_hf_directory(
                self._weights(torch.float32),
                self._hf_config,
                self._tokenizer,
                directories.partial_of(target),
                generation_config=self._generation_config,
                max_file_bytes=max_file_bytes,
            )

    def return_state_dict(self) -> dict[str, Any]:
        """Return the model's state, of which each rank holds its part, by chunk."""
        return {f"model{index}": chunk.state_dict() for index, chunk in enumerate(self.model)}

    def _require_optimizer(self, optimizer_path: str | None, *, to: str) -> None:
        if optimizer_path is not None and self._trainer is None:
            raise ValueError(f"optimizer_path={optimizer_path!r}: there is no optimizer to {to}")
