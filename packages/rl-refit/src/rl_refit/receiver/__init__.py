"""The engine's side of a refit: `receiver`, its `session` with a sender, the `stream`."""

from rl_refit.receiver.receiver import RefitReceiver

__all__ = ["RefitReceiver"]
