"""The curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_REWARD, _ACCURACY = "#4c72b0", "#c44e52"


def plot_reward(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write train reward and held-out accuracy over the steps as a PNG.

    Args:
        rows: The objects of `metrics.jsonl`.
        path: The picture.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    reward = _points(rows, "reward_mean")
    accuracy = _points(rows, "accuracy")
    axes.plot(*_columns(reward), color=_REWARD, linewidth=1.2)
    axes.plot(*_columns(accuracy), color=_ACCURACY, linewidth=2, marker="o", markersize=4)
    _label_ends(axes, reward, accuracy)
    axes.set_xlabel("GRPO step")
    axes.set_ylabel("share of answers that are right")
    axes.set_ylim(-0.02, 1.05)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    if accuracy:
        (_, first), (_, last) = accuracy[0], accuracy[-1]
        axes.set_title(f"Held-out accuracy {first:.2f} \u2192 {last:.2f}", loc="left")
    figure.savefig(path, dpi=150)


def _label_ends(
    axes: Axes, reward: list[tuple[int, float]], accuracy: list[tuple[int, float]]
) -> None:
    """Write the name of each curve beside its last point, one above the other."""
    reward_end, accuracy_end = (points[-1][1] if points else 0.0 for points in (reward, accuracy))
    is_reward_above = reward_end > accuracy_end
    for points, text, color, is_above in (
        (reward, "train reward\n(sampled)", _REWARD, is_reward_above),
        (accuracy, "held-out accuracy\n(greedy)", _ACCURACY, not is_reward_above),
    ):
        if points:
            axes.annotate(
                text,
                points[-1],
                xytext=(8, 2 if is_above else -2),
                textcoords="offset points",
                va="bottom" if is_above else "top",
                color=color,
                annotation_clip=False,
            )


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if row[name] is not None]


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
