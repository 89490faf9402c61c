"""The trainer's side of a refit: `sender`, the `receivers` it is connected to, the `stream`."""

from rl_refit.sender.sender import RefitSender

__all__ = ["RefitSender"]
