"""The random state of one rank, to seed, to save and to restore."""

from __future__ import annotations

import torch


class RandomState:
    """The default generators of this process, and one of its own for sampling tokens.

    Args:
        seed: Ranks that must draw alike are given the same one.
        device: Where tokens are sampled.
    """

    def __init__(self, seed: int, *, device: torch.device) -> None:
        torch.manual_seed(seed)
        self._device = device
        self.sampling = torch.Generator(device=device).manual_seed(seed)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the states, uint8 tensors on the CPU."""
        state = {"cpu": torch.get_rng_state(), "sampling": self.sampling.get_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take up where `state_dict` left off."""
        torch.set_rng_state(state["cpu"])
        self.sampling.set_state(state["sampling"])
        if self._device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)
