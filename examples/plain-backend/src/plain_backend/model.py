"""The model: the next token is predicted from the last two."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


class PairModel(nn.Module):
    """A language model with a memory of two tokens, of `[vocab_size, width]` embeddings."""

    def __init__(self, vocab_size: int, width: int = 16) -> None:
        super().__init__()
        self.config = {"vocab_size": vocab_size, "width": width}
        self.last = nn.Embedding(vocab_size, width)
        self.one_before = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return `[batch, seq, vocab]` logits of the token after each of `[batch, seq]`."""
        before = nn.functional.pad(input_ids[:, :-1], (1, 0))
        return self.head(torch.tanh(self.last(input_ids) + self.one_before(before)))

    def save_config(self, directory: Path) -> None:
        """Write the sizes; the weights go beside them, as `model.safetensors`."""
        (directory / "config.json").write_text(json.dumps(self.config))

    def save(self, directory: str | Path) -> None:
        """Write a directory that `load` reads."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.save_config(Path(directory))
        save_file(self.state_dict(), Path(directory) / "model.safetensors")

    @classmethod
    def load(cls, directory: str | Path) -> PairModel:
        """Return the model that lies in a directory."""
        model = cls(**json.loads((Path(directory) / "config.json").read_text()))
        model.load_state_dict(load_file(Path(directory) / "model.safetensors"))
        return model
