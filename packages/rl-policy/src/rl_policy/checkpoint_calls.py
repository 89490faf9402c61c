"""The calls that write the state of every rank to disk and read it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_interfaces import AdapterSavingWorker

from rl_policy.policy_inputs import absolute, existing
from rl_policy.policy_parts import PolicyParts

if TYPE_CHECKING:
    from rl_policy.policy_inputs import PathLike


# A rank that gives up says why, which is worth the wait.
_MARGIN_S = 10.0


class CheckpointCalls(PolicyParts):
    """What may be saved and loaded in any state."""

    def save_checkpoint(
        self,
        weights_path: PathLike,
        optimizer_path: PathLike | None = None,
        tokenizer_path: PathLike | None = None,
    ) -> None:
        """Write the weights, and the optimizer and the tokenizer where a path is given.

        With `async_checkpoint` in the backend's section it is written in the background. The next
        save or load, `finish_checkpoint` or `shutdown` waits for it and raises what it failed with.

        Raises:
            ValueError: `optimizer_path` is given and there is no optimizer.
        """
        if optimizer_path is not None and not self._has_optimizer:
            raise ValueError(f"optimizer_path={optimizer_path!r}, and init_optimizer was False")
        self._group.run_all(
            "save_checkpoint",
            weights_path=absolute(weights_path),
            optimizer_path=absolute(optimizer_path),
            tokenizer_path=absolute(tokenizer_path),
        )
        section = self.config[f"{self._backend}_cfg"]
        self._may_be_saving = section.get("async_checkpoint", False)

    def load_checkpoint(
        self, weights_path: PathLike, optimizer_path: PathLike | None = None
    ) -> None:
        """Read what `save_checkpoint` wrote.

        Raises:
            ValueError: A path does not exist, or `optimizer_path` is given without an optimizer.
        """
        if optimizer_path is not None and not self._has_optimizer:
            raise ValueError(f"optimizer_path={optimizer_path!r}, and init_optimizer was False")
        self._group.run_all(
            "load_checkpoint",
            weights_path=existing("weights_path", weights_path),
            optimizer_path=existing("optimizer_path", optimizer_path),
        )

    def finish_checkpoint(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            RuntimeError: It could not be written.
            TimeoutError: It takes longer than `policy.timeout_s`.
        """
        if self._may_be_saving:
            call = self._group.submit_all("finish_checkpoint")
            self._group.wait(call, timeout_s=self.config["timeout_s"] + _MARGIN_S)
            self._may_be_saving = False

    def save_hf_checkpoint(self, path: PathLike) -> None:
        """Write a directory that `AutoModelForCausalLM.from_pretrained` loads."""
        self._group.run_all("save_hf_checkpoint", path=absolute(path))

    @property
    def has_adapters(self) -> bool:
        """Whether low-rank adapters are what is trained."""
        section = self.config.get("dtensor_cfg", {})
        return bool(section.get("enabled") and section["lora"]["enabled"])

    def save_adapters(self, path: PathLike) -> None:
        """Write a directory that `peft.PeftModel.from_pretrained` loads onto the model.

        Raises:
            NotImplementedError: The backend trains no adapters.
            ValueError: The policy trains none.
        """
        self._require(AdapterSavingWorker, lack="train adapters")
        if not self.has_adapters:
            raise ValueError("save_adapters() needs policy.dtensor_cfg.lora.enabled=True")
        self._group.run_all("save_adapters", path=absolute(path))
