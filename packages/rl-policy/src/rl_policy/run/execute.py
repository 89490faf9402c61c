"""A run from its inputs to its summary: the devices, the recipe, the last line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from rl_policy.recipes.registry import find_recipe
from rl_policy.run.directory import RunDirectory
from rl_policy.run.inputs import RunInputs
from rl_policy.run.metrics import read_metrics
from rl_policy.run.progress import RunDisplay
from rl_policy.run.session import Session, base_model, open_cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The result of a run.

    Attributes:
        steps: Steps of the recipe.
        score_name: The column of the score, for example `accuracy`; None if the recipe has none.
        first_score: The first score that was measured on held-out data; None if none was.
        last_score: The last.
        seconds: Of this call, which may have resumed a run.
        final: The trained model.
    """

    steps: int
    score_name: str | None
    first_score: float | None
    last_score: float | None
    seconds: float
    final: Path

    def __str__(self) -> str:
        """Return it as a sentence."""
        score = ""
        if self.first_score is not None and self.last_score is not None:
            score = (
                f"Held-out {self.score_name} {self.first_score:.3f} -> {self.last_score:.3f} in "
            )
        return f"{score}{self.steps} steps ({self.seconds:.0f} s); the model is in {self.final}"


def execute(inputs: RunInputs, directory: RunDirectory, *, display: RunDisplay) -> RunSummary:
    """Carry out a run, or the rest of it, in a directory that holds its configuration.

    Args:
        inputs: What `prepare_inputs` returned.
        directory: Created.
        display: Shows the progress.
    """
    started = perf_counter()
    config = inputs.config
    recipe = find_recipe(config.recipe)
    with open_cluster(config) as cluster:
        session = Session(inputs=inputs, directory=directory, cluster=cluster, display=display)
        recipe.run(session, base_model(session))
    rows = read_metrics(directory.metrics)
    column = recipe.metrics.score_column
    scores = [row[column] for row in rows if column is not None and row[column] is not None]
    return RunSummary(
        steps=int(rows[-1]["step"] or 0),
        score_name=column,
        first_score=scores[0] if scores else None,
        last_score=scores[-1] if scores else None,
        seconds=perf_counter() - started,
        final=directory.final,
    )
