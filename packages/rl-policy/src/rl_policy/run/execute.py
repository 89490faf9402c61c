"""A run from its inputs to its summary: the devices, the recipe, the last line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from rl_policy.recipes.grpo import run_grpo
from rl_policy.recipes.sft import run_sft
from rl_policy.run.directory import RunDirectory
from rl_policy.run.inputs import RunInputs
from rl_policy.run.metrics import read_metrics
from rl_policy.run.progress import RunDisplay
from rl_policy.run.session import Session, base_model, open_cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """What a run came to.

    Attributes:
        steps: Steps of the recipe.
        first_accuracy: Held-out accuracy before the first.
        last_accuracy: After the last.
        seconds: Of this call, which may have continued a run.
        final: The trained model.
    """

    steps: int
    first_accuracy: float
    last_accuracy: float
    seconds: float
    final: Path

    def __str__(self) -> str:
        """Return it as a sentence."""
        return (
            f"Held-out accuracy {self.first_accuracy:.3f} -> {self.last_accuracy:.3f} "
            f"in {self.steps} steps ({self.seconds:.0f} s); the model is in {self.final}"
        )


def execute(inputs: RunInputs, directory: RunDirectory, *, display: RunDisplay) -> RunSummary:
    """Carry out a run, or the rest of it, in a directory that holds its configuration.

    Args:
        inputs: Checked.
        directory: Created.
        display: Shows how far it is.
    """
    started = perf_counter()
    config = inputs.config
    with open_cluster(config) as cluster:
        session = Session(inputs=inputs, directory=directory, cluster=cluster, display=display)
        recipe = run_grpo if config.recipe == "grpo" else run_sft
        recipe(session, model=base_model(session))
    rows = read_metrics(directory.metrics)
    measured = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    return RunSummary(
        steps=rows[-1]["step"],
        first_accuracy=measured[0],
        last_accuracy=measured[-1],
        seconds=perf_counter() - started,
        final=directory.final,
    )
