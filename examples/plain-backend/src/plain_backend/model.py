"""The model: the next token is guessed from the last two."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

_FILE = "model.pt"


class PairModel(nn.Module):
    """A language model with a memory of two tokens.

    Args:
        vocab_size: Tokens that there are.
        width: Numbers in between.
    """

    def __init__(self, vocab_size: int, width: int = 16) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.last = nn.Embedding(vocab_size, width)
        self.one_before = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return `[batch, seq, vocab]` logits of the token after each of `[batch, seq]`."""
        before = nn.functional.pad(input_ids[:, :-1], (1, 0))
        return self.head(torch.tanh(self.last(input_ids) + self.one_before(before)))

    def save(self, path: str | Path) -> None:
        """Write a directory that `load` reads."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path) / _FILE)

    @classmethod
    def load(cls, path: str | Path) -> PairModel:
        """Return the model that `save` wrote.

        Raises:
            ValueError: There is none.
        """
        if not (Path(path) / _FILE).exists():
            raise ValueError(f"there is no model at {path}")
        state = torch.load(Path(path) / _FILE)
        model = cls(*state["last.weight"].shape)
        model.load_state_dict(state)
        return model
