"""Recipes, found by entry point.

A recipe is one module: a section of the configuration, a trainer that takes steps, and a value
`Recipe` that names both. Registered in the entry-point group `rl_policy.recipes`, it is a command
of `rl-policy`; nothing else has to know it. `docs/pages/how-to/write-a-recipe.md` writes one.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from rl_policy.config import RunConfig, Section, Settings
    from rl_policy.data.batches import ProblemEncoder
    from rl_policy.run.inputs import RunInputs
    from rl_policy.run.metrics import StepMetrics
    from rl_policy.run.session import Session

ENTRY_POINT_GROUP = "rl_policy.recipes"

InputsT = TypeVar("InputsT", bound="RunInputs")


def _policy_alone(config: RunConfig) -> Mapping[str, Settings]:
    return {"policy": config.policy}


def _accept(config: RunConfig) -> None:
    """Accept every configuration."""


def _as_given(settings: Settings) -> Settings:
    return settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Generic[InputsT]):
    """What a recipe brings to a run.

    The docstring of the module that holds it is the help of its command.

    Attributes:
        name: The command, and the entry point's name.
        sections: Its sections of the configuration, `{key: type}`; the first bears its name. A key
            `steps` of any of them may change when a run is resumed.
        metrics: What it measures in a step: the columns of `metrics.jsonl`.
        prepare: Called before anything starts: loads the data that the recipe trains on, and raises
            `ValueError` if the run could not work with it.
        run: Called with the run and the name or directory of the model to start from: trains, and
            leaves the run's files. It is called again to resume an interrupted run.
        measure: Called like `run`: returns what is measured on held-out data of the newest
            checkpoint's model, or the one to start from. None: nothing is, apart from steps.
        expand: Returns the given nested settings with those that a key stands for, such as a
            preset; what is given takes precedence. It leaves wrong values to the sections' checks.
        check: Raises `ValueError` if keys of the configuration contradict each other.
        policies: Returns the complete sections `policy` that it opens policies with, by their paths
            in the configuration, for the training backend to validate. The first is what is
            trained.
        defaults: Values of `policy` for any model, over the command line's own.
        builtin: Values of its sections, and of `policy`, for the model that a run builds.
        num_policies: How many of them are open at a time, on the same devices.
        samples_with_engines: Whether the engines that `policy.generation.backend` names sample for
            it; if it trains too, it then has the section `refit`. Otherwise the training workers
            sample.
    """

    name: str
    sections: Mapping[str, type[Section]]
    metrics: type[StepMetrics]
    prepare: Callable[[RunConfig, ProblemEncoder], InputsT]
    run: Callable[[Session[InputsT], str], None]
    measure: Callable[[Session[InputsT], str], StepMetrics] | None = None
    expand: Callable[[Settings], Settings] = _as_given
    check: Callable[[RunConfig], None] = _accept
    policies: Callable[[RunConfig], Mapping[str, Settings]] = _policy_alone
    defaults: Settings = field(default_factory=dict)
    builtin: Mapping[str, Settings] = field(default_factory=dict)
    num_policies: int = 1
    samples_with_engines: bool = False

    @property
    def step_keys(self) -> list[str]:
        """The keys that say how many steps are taken, as `section.steps`."""
        return [
            f"{key}.steps" for key, kind in self.sections.items() if "steps" in kind.model_fields
        ]


def installed_recipes() -> list[str]:
    """Return the names of the recipes that installed packages register, sorted."""
    return sorted(_entries().names)


def find_recipe(name: str) -> Recipe[Any]:
    """Return the recipe that is registered under `name`.

    Raises:
        ValueError: No installed package registers it, or two do.
        TypeError: What is registered is no `Recipe` of that name.
        Exception: Whatever the import of a broken recipe raises.
    """
    entry = _find_entry(name)
    recipe = entry.load()
    if not isinstance(recipe, Recipe) or recipe.name != name:
        raise TypeError(
            f"the entry point {entry.value!r} of {ENTRY_POINT_GROUP} must be a Recipe with "
            f"name={name!r}, got {recipe!r}"
        )
    return recipe


def describe_recipe(name: str) -> str:
    """Return the docstring of a recipe's module, without an import of the module itself.

    A list of all commands is then there at once, and a recipe that cannot be imported does not
    take the other commands with it.
    """
    entry = _find_entry(name)
    try:
        spec = find_spec(entry.module)
    except ImportError as error:  # of a package around the module
        return f"Cannot be imported: {error}"
    if spec is None or spec.origin is None:
        return f"Cannot be imported: there is no module {entry.module}"
    source = Path(spec.origin).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def _entries() -> EntryPoints:
    return _entries_along(tuple((folder, _changed_at(folder)) for folder in sys.path))


# A look-up reads a file of every package, about 10 ms, and a command makes a dozen of them.
@lru_cache(maxsize=1)
def _entries_along(folders: tuple[tuple[str, int | None], ...]) -> EntryPoints:
    return entry_points(group=ENTRY_POINT_GROUP)


def _changed_at(folder: str) -> int | None:
    """Return when a package was last added to a folder or removed from it; None if it is none."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return None


def _find_entry(name: str) -> EntryPoint:
    entries = list(_entries().select(name=name))
    if not entries:
        raise ValueError(
            f"the recipe {name!r} is not installed (installed recipes: "
            f"{', '.join(installed_recipes())}): install the package that registers it in the "
            f"entry-point group {ENTRY_POINT_GROUP!r}"
        )
    if len({entry.value for entry in entries}) > 1:
        values = " and ".join(sorted(entry.value for entry in entries))
        raise ValueError(f"the recipe {name!r} is registered more than once: {values}")
    return entries[0]
